"""The names that requests may use: models, adapters and aliases, for each caller."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from lmetric.config import ServerConfig
from lmetric.server.api.caller import NOBODY, Caller
from lmetric.server.api.errors import ApiError, Unusable, no_engine_error
from lmetric.server.fleet.aliases import Aliases
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.problem import Problem

# Limits for the search of a similar name: characters of the unknown name, known names.
HINT_NAME_LENGTH = 200
HINT_NAMES = 500
# Names of a message that lists them.
NAMES_LISTED = 20
# Kept answers to GET /v1/models: tokens may name any number of lists.
MAX_PAGES = 256


class Served(NamedTuple):
    """The model of a name in requests. ``adapter``: the name, if it is an adapter's."""

    model: Model
    adapter: str | None


class Catalog:
    """The names that requests may use.

    A tenant with a list of models (`tenants.NAME.models`), or a token with one, sees and uses only
    names of its list: all others are unknown to it. ``names``, ``models``: the fleet's, which
    change. ``unusable``: returns the reasons why no engine gets new requests.
    """

    def __init__(
        self,
        config: ServerConfig,
        names: Mapping[str, Served],
        models: Sequence[Model],
        unusable: Callable[[], Unusable | None],
    ) -> None:
        self._names = names
        self._models = models
        self._unusable = unusable
        self._pages: dict[frozenset[str] | None, bytes] = {}  # answers to GET /v1/models, by list
        self.configure(config)

    def configure(self, config: ServerConfig) -> None:
        """Applies settings to new requests."""
        self.aliases = Aliases(config.aliases)
        self._fallbacks: Mapping[str, Sequence[str]] = config.fallbacks
        tenants = config.tenants.items()
        self._lists = {name: frozenset(each.models) for name, each in tenants if each.models is not None}
        self.changed()

    def changed(self) -> None:
        """Handles a change of the names or of their cards."""
        self._pages.clear()

    def _allowed(self, caller: Caller) -> frozenset[str] | None:
        """Returns the names that a caller may use: its tenant's and its token's. None: all."""
        own, models = self._lists.get(caller.tenant), caller.models
        if models is None:
            return own
        for alias in models & self.aliases.names:
            models = models.union(self.aliases.targets(alias))
        return models if own is None else models & own

    def allows(self, caller: Caller, name: str) -> bool:
        """Returns whether a caller may use a name."""
        if not self._lists and caller.models is None:
            return True  # as for most requests
        allowed = self._allowed(caller)
        return allowed is None or name in allowed

    def serves(self, name: str, caller: Caller) -> bool:
        """Returns whether a caller may use a name, and engines serve it or a model in its place."""
        return self.allows(caller, name) and (name in self._names or bool(self._in_place(name, caller)))

    def _in_place(self, name: str, caller: Caller) -> list[str]:
        """Returns the served models of an alias, or else the first served fallback of a name."""
        aliases = self.aliases
        if name in aliases.names and (served := aliases.served(name, self._names)):
            return served
        return [
            each
            for each in self._fallbacks.get(name, ())
            if each in self._names and self.allows(caller, each)
        ][:1]

    def fallbacks(self, name: str, alias: str | None, caller: Caller) -> list[str]:
        """Returns the models that may serve a caller's request for a model in its place, in order.

        Those of its alias, if the alias has some. Fallbacks of a fallback are not used.
        """
        found = self._fallbacks.get(alias or name) or self._fallbacks.get(name, ())
        return [each for each in found if each != name and self.allows(caller, each)]

    def listed(self, caller: Caller) -> Iterator[str]:
        """Yields the names that a caller sees: first the engines', then the others."""
        for name, served in self._names.items():
            if served.model.names.shown(name) and self.allows(caller, name):
                yield name
        for name in {**dict.fromkeys(self.aliases.names), **self._fallbacks}:
            if name not in self._names and self.serves(name, caller):
                yield name

    def find(self, name: str | None, caller: Caller = NOBODY) -> Served:
        """Returns the model of a name, and whether the name is an adapter's.

        Raises ApiError (400, 404, 503).
        """
        known = self._names.get(name) if name is not None else None
        if name is not None:
            if known is None or not self.allows(caller, name):
                raise self.unknown(name, caller)
            return known
        if not self._models:
            raise no_engine_error(None, None, self._unusable())
        if len(self._models) == 1 and self.allows(caller, self._models[0].name):
            return Served(self._models[0], None)
        raise ApiError(400, f"model is missing; {self._hint(None, caller)}", param="model")

    def unknown(self, name: str, caller: Caller) -> ApiError:
        """Returns the error for an unknown name.

        A name that the caller may not use gets the same error: otherwise it would reveal the name.
        """
        if not self._models:
            return no_engine_error(None, None, self._unusable())
        shown = repr(name if len(name) <= HINT_NAME_LENGTH else name[:HINT_NAME_LENGTH] + "…")
        what = "is unknown"
        if caller.models is not None:
            what = "is unknown, or this token may not use it"
        elif caller.tenant in self._lists:
            what = "is unknown, or this tenant may not use it"
        message = f"model {shown} {what}; {self._hint(name, caller)}"
        return ApiError(404, message, param="model", code="model_not_found")

    def _hint(self, name: str | None, caller: Caller) -> str:
        """Returns a similar name, or the names that the caller may use."""
        names = sorted(self.listed(caller))
        # The time of difflib grows with both: clients choose the length, and adapters may be many.
        comparable = name is not None and len(name) <= HINT_NAME_LENGTH and len(names) <= HINT_NAMES
        if comparable and (near := difflib.get_close_matches(name or "", names, n=1)):
            return f"did you mean {near[0]!r}?"
        more = ", …" if len(names) > NAMES_LISTED else ""
        return f"served here: {', '.join(names[:NAMES_LISTED]) or 'no model'}{more}"

    def card(self, name: str, caller: Caller = NOBODY) -> dict[str, Any]:
        """Returns the card of a name that `serves` a caller."""
        if name not in self._names:
            first, *others = (self.card(each) for each in self._in_place(name, caller))
            lengths = [card["max_model_len"] for card in (first, *others) if "max_model_len" in card]
            card = {**first, "id": name, "root": first["id"], "parent": None}
            return card | ({"max_model_len": min(lengths)} if lengths else {})
        names = self._names[name].model.names
        return names.card(name, self._names[name].model.created)

    def page(self, caller: Caller = NOBODY) -> bytes:
        """Returns the JSON answer to a caller's GET /v1/models."""
        allowed = self._allowed(caller)
        page = self._pages.get(allowed)
        if page is None:
            data = [self.card(name, caller) for name in self.listed(caller)]
            if len(self._pages) >= MAX_PAGES:
                self._pages.clear()
            page = self._pages[allowed] = orjson.dumps({"object": "list", "data": data})
        return page

    def problems(self) -> Iterator[Problem]:
        """Yields the settings with names that no engine serves."""
        if not self._names:
            return
        yield from self.aliases.problems(self._names)
        for name, models in self._fallbacks.items():
            missing = [each for each in models if each not in self._names]
            if name not in self._names and name not in self.aliases.names:
                missing.insert(0, name)
            if missing:
                cause = "fallbacks name a model that no engine serves"
                fix = "start an engine with that model, or correct the fallbacks"
                yield Problem("fallback", cause, f"{name}: no engine serves {', '.join(missing)}", fix)
        for tenant, allowed in self._lists.items():
            missing = sorted(name for name in allowed if not self.serves(name, Caller(tenant)))
            if missing:
                cause = "a tenant may use a model that no engine serves"
                fix = "start an engine with that model, or correct models of the tenant"
                reason = f"{tenant}: no engine serves {', '.join(missing)}"
                yield Problem("tenant", cause, reason, fix, is_bad=len(missing) == len(allowed))
