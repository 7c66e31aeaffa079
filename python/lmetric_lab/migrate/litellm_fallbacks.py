"""Fallbacks of a LiteLLM proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmetric_lab.migrate.draft import Draft


@dataclass
class Fallbacks:
    """Public names in place of others.

    Attributes:
        of: the fallbacks of each name.
        default: the fallbacks of names without a list of their own.
    """

    of: dict[str, list[str]] = field(default_factory=dict)
    default: list[str] = field(default_factory=list)


def take(draft: Draft, router: dict[str, Any], module: dict[str, Any]) -> Fallbacks:
    """Takes the fallbacks out of both sections; those of the router replace the module's."""

    def taken(key: str) -> list[Any]:
        given = [section.pop(key, None) for section in (router, module)]
        value: Any = next((each for each in given if each is not None), [])
        if not isinstance(value, list):
            raise draft.error(key, value, "a list")
        return value

    found = Fallbacks()
    for key in ("fallbacks", "context_window_fallbacks"):
        for entry in taken(key):
            if not isinstance(entry, Mapping):
                raise draft.error(key, entry, "a mapping of a model to a list of models")
            for name, others in entry.items():
                known = found.default if name == "*" else found.of.setdefault(str(name), [])
                _extend(draft, f"{key}.{name}", others, known=known)
    _extend(draft, "default_fallbacks", taken("default_fallbacks"), known=found.default)
    return found


def _extend(draft: Draft, key: str, given: Any, *, known: list[str]) -> None:
    """Adds new names to a list."""
    if not isinstance(given, list):
        raise draft.error(key, given, "a list of models")
    for each in given:
        if not isinstance(each, str):
            draft.remark(key, "a fallback is a model; the request stays as it is")
        elif each not in known:
            known.append(each)


def translate(
    draft: Draft,
    given: Fallbacks,
    pools: Mapping[str, object],
    aliases: Mapping[str, Mapping[str, float]],
) -> None:
    """Sets `fallbacks`, with the engines' names in place of public ones.

    ``pools``: the models of the engines. ``aliases``: weights by model, by alias.
    """

    def models_of(key: str, names: list[str]) -> list[str]:
        found = []
        for name in names:
            if name in aliases:
                found += sorted(aliases[name], key=aliases[name].__getitem__, reverse=True)
            elif name in pools:
                found.append(name)
            else:
                draft.remark(f"{key}: {name}", "no engine of yours serves it")
        return list(dict.fromkeys(found))

    every = (*pools, *aliases) if given.default else ()
    default = models_of("default_fallbacks", given.default)
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys([*given.of, *every]):
        others = models_of(f"fallbacks.{name}", given.of[name]) if name in given.of else default
        own = [name, *aliases.get(name, ())]
        # An alias of several models may fall back to one of them.
        models = [each for each in others if each != name and (len(own) != 2 or each != own[1])]
        if models:
            found[name] = models
    if found:
        draft.set("fallbacks", found, "LiteLLM's lists by reason are one list, for all reasons.")
