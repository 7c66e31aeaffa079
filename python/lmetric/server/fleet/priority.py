"""Request priorities: converts the router's priority to the header or field of each engine."""

from __future__ import annotations

import time
from typing import Any

import orjson

from lmetric._core import edit_object, short_members
from lmetric.engines.handover import CHAT, COMPLETIONS, with_fields
from lmetric.engines.xargs_names import GAMMA, HANDICAP
from lmetric.options import UniBoost
from lmetric.server.api.paths import MESSAGES, RESPONSES
from lmetric.server.fleet.engine import Engine, ServedModel
from lmetric.server.fleet.parsing import GENERATE

# Fields whose values vLLM's scheduler gets, and the paths that take them.
_XARGS = "vllm_xargs"
_PATHS = (CHAT, f"{CHAT}/batch", COMPLETIONS, MESSAGES, RESPONSES)
_SAMPLING, _EXTRA = "sampling_params", "extra_args"  # of GENERATE, the second in the first
# Longer values are read with the whole body.
_SHORT_VALUE = 4096


class Priorities:
    """The priorities that the router of a model sets."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.follow()

    def follow(self) -> None:
        """Sets the offset from the router's clock to the wall clock, and reads the model's gamma.

        The router's clock has an arbitrary start, and all routers of a fleet must compute the same
        priorities; the settings may have the offset. Engines that compute boosts get the gamma.
        Call this repeatedly: the wall clock may be stepped.
        """
        model, order = self._model, self._model.settings.priority
        if isinstance(order, UniBoost) and order.clock_offset_seconds is None:
            model.router.set_clock_offset(time.time() - time.monotonic())
        follows = isinstance(order, UniBoost) and any(each.boosts for each in model.engines.values())
        model.gamma = model.router.learned()["gamma"] if follows else None

    @staticmethod
    def how(engine: Engine) -> str:
        """Describes how an engine gets a request's priority, and whether its queue uses it."""
        capability = engine.capabilities.priority
        if engine.boosts:
            if engine.model is not None and isinstance(engine.model.settings.priority, UniBoost):
                return "sent as the tenant's handicap and gamma; its scheduler computes the order"
            return "not sent: its scheduler computes the order"
        if capability is None:
            return "not sent: the engine is not known to accept a priority"
        if capability.honoured is False:
            return "not sent: its queue is not ordered by priority"
        heed = (
            "its queue is ordered by priority"
            if capability.honoured
            else "it does not report whether its queue is ordered by priority"
        )
        return f"sent as {'a header' if capability.header else 'a field'}; {heed}"


def prioritized(
    engine: Engine, sent: bytes, priority: int | None, *, path: str, handicap_seconds: float
) -> tuple[bytes, int | None]:
    """Returns body and priority header of a request; None: it gets no header.

    ``sent``: a body without the client's own `priority`. ``priority``: by the router; None: it sets
    none. ``path``: that of this body, which is not the client's for parts of an answer.
    """
    header, capability, boosts = None, engine.capabilities.priority, engine.boosts
    if priority is not None and capability is not None:
        value = capability.field(-priority)
        if not capability.header:
            sent = sent if value is None else with_fields(sent, {"priority": value})
        elif capability.honoured is not False and not boosts:
            header = value
    if boosts:
        sent = _with_boost(engine, sent, path=path, handicap_seconds=handicap_seconds)
    return sent, header


def _with_boost(engine: Engine, sent: bytes, *, path: str, handicap_seconds: float) -> bytes:
    """Returns the body for an engine that computes boosts: with the tenant's handicap and the
    model's gamma, or without both if the router sets no such order. Values of the client are
    dropped.

    ``path``: that of this body, which is not the client's for parts of an answer.
    """
    if path not in _PATHS and path != GENERATE:
        return sent
    fields: dict[str, float] = {}
    model = engine.model
    if model is not None and isinstance(model.settings.priority, UniBoost):
        fields = {HANDICAP: handicap_seconds} | ({GAMMA: model.gamma} if model.gamma else {})
    if path == GENERATE:
        sampling = _value(sent, _SAMPLING)
        if not isinstance(sampling, dict):
            return sent  # the engine refuses it
        extra = _own(sampling.get(_EXTRA), fields)
        return _with_value(sent, _SAMPLING, {**sampling, _EXTRA: extra})
    if _XARGS.encode() in sent:
        return _with_value(sent, _XARGS, _own(_value(sent, _XARGS), fields))
    # Behind all others: of two fields with one name, the engine reads the last, and the first name
    # may be written with escapes.
    end = sent.rindex(b"}")
    comma = b"" if sent[:end].rstrip().endswith(b"{") else b","
    return b"".join((memoryview(sent)[:end], comma, orjson.dumps({_XARGS: fields})[1:]))


def _own(given: Any, fields: dict[str, float]) -> Any:
    """Returns the client's values, with the router's in place of those that it sets."""
    if given is not None and not isinstance(given, dict):
        return given  # the engine refuses it
    return {name: value for name, value in (given or {}).items() if name not in (HANDICAP, GAMMA)} | fields


def _value(body: bytes, name: str) -> Any:
    """Returns the value of a field. A body may have a long prompt beside it."""
    short = orjson.loads(short_members(body, _SHORT_VALUE)).get(name)
    return short if isinstance(short, dict) else orjson.loads(body).get(name)


def _with_value(body: bytes, name: str, value: Any) -> bytes:
    return edit_object(body, (name,), orjson.dumps({name: value})[1:-1])
