"""Deprecated names of the Python API and of files. They work for one release and warn.

The tables in this module are the only place with these names. Remove an entry to remove the name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from lmetric import _core, options

# Old keywords of `Router.route`, `score` and `cached_tokens`, now fields of `Request`.
REQUEST = {
    "tokens": "token_ids",
    "expected_output_tokens": "max_tokens",
    "think_tokens": "reasoning_tokens",
    "adapter": "lora_name",
    "salt": "cache_salt",
    "uncut": "split_reason",
    "unpulled": "fetch_reason",
}
# Old keywords of other calls.
KEYWORDS = {
    "Router": {"index": "kv_source", "drain": "decay_queued_prefill"},
    "Router.blocks_stored": {"tokens": "token_ids", "adapter": "lora_name", "salt": "cache_salt"},
}
_GUARD = ("window_seconds", "period_seconds", "classes", "min_requests", "phase2_factor", "release_factor")

# Old keys of the server's configuration and of study files, and old keywords of `simulate`. Each
# has its current key and field name ("": the value itself, "*": a mapping of fields).
SETTINGS: dict[str, tuple[str, str]] = {
    "split_settings": ("split", "*"),
    "split_force_at": ("split", "fraction"),
    "pull": ("prefix_fetch", ""),
    "pull_settings": ("prefix_fetch", "*"),
    "pull_seconds": ("prefix_fetch_timeout_seconds", ""),
    "priority_settings": ("priority", "*"),
    "reschedule": ("rebalance", ""),
    "reschedule_settings": ("rebalance", "*"),
    "reschedule_period_seconds": ("rebalance", "period_seconds"),
    "reschedule_by": ("migration_by", ""),
    "reschedule_leg_tokens": ("migration_segment_tokens", ""),
    "migration_leg_tokens": ("migration_segment_tokens", ""),
    "reschedule_max_gap_seconds": ("migration_max_gap_seconds", ""),
    "reschedule_at_once": ("migration_max_concurrent", ""),
    **{f"guard_{name}": ("guard", name) for name in _GUARD},
}
# Old values of these settings, by current key.
VALUES: dict[str, dict[str, str]] = {"migration_by": {"legs": "segments", "pull": "fetch"}}


def settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Settings with current keys and values, and the old keys and values in use by current key.

    A list stands for several values, as in study files.

    Raises:
        BadValueError: an option has an old and a current key, or settings in addition to an option
            object.
    """
    new = {key: value for key, value in given.items() if key not in SETTINGS}
    old: dict[str, list[str]] = {}
    for key, (present, name) in SETTINGS.items():
        if key not in given:
            continue
        value = given[key]
        old.setdefault(present, []).append(key)
        if not name:
            if present in new:
                raise _core.BadValueError(f"{key}: it is an old name of {present}; remove {key}")
            new[present] = value
        elif value is not None:
            base = new.get(present)
            each = [_with(present, name, value, one) for one in (base if isinstance(base, list) else [base])]
            new[present] = each if isinstance(base, list) else each[0]
    for key, names in VALUES.items():
        value = new.get(key)
        values = value if isinstance(value, list) else [value]
        used = [one for one in values if isinstance(one, str) and one in names]
        if used:
            current = [names.get(one, one) if isinstance(one, str) else one for one in values]
            new[key] = current if isinstance(value, list) else current[0]
            old.setdefault(key, [f"{key}: {one}" for one in used])
    return new, old


def _with(option: str, name: str, value: Any, base: Any) -> dict[str, Any]:
    """An option's value, extended by a setting or by all settings in a mapping or text."""
    if name == "fraction":
        return {"kind": "force", "fraction": value}
    mapping = options.as_mapping(option, base)
    if not isinstance(mapping, dict):
        raise _core.BadValueError(f"{option}: settings in addition to {base!r}; set them in the option")
    selector = options.SELECTORS[option]
    kind = mapping.get(selector)
    if kind is None:
        mapping.pop(selector, None)
    added = (
        {name: value} if name != "*" else options.parse_settings(value) if isinstance(value, str) else value
    )
    if not isinstance(added, Mapping):
        raise _core.BadValueError(f"{option}: settings {added!r} are not valid; expected a mapping")
    return mapping | options.own_names(option, kind if selector == "kind" else None, added)


def simulate_keywords(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `simulate` from deprecated keywords, merged with the current ones.

    Raises:
        TypeError: an unknown keyword.
        BadValueError: an option has an old and a current keyword.
    """
    for name in old:
        if SETTINGS.get(name, ("", ""))[0] not in options.OPTIONS:
            raise TypeError(f"simulate() got an unexpected keyword argument {name!r}")
    # Ignore defaults of keywords that have a deprecated form in the call.
    beside = {what: value for what, value in given.items() if value not in (None, "auto", "none")}
    new, keys = settings(beside | dict(old))
    for key, names in keys.items():
        shown = ", ".join(f"{name}=" for name in names)
        message = _message(f"simulate({shown})", f"simulate({key}={new.get(key)!r})")
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    return {**given, **new}


def settings_message(old: list[str], key: str, value: Any) -> str:
    """The warning about deprecated keys or values, with the current spelling."""
    import yaml

    text = yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=10_000)
    names = ", ".join(f"`{name}`" for name in old)
    verb = "are" if len(old) > 1 else "is"
    return f"{names} {verb} deprecated and will be removed in the next release; use `{text.strip()[1:-1]}`"


def _update(keyword: str) -> tuple[str, Callable[[Any], Any]]:
    def of(router: Any) -> Callable[..., None]:
        return lambda name, value=True: router.update_instance(name, **{keyword: value})

    return f"update_instance(name, {keyword}=...)", of


def _configure(keyword: str) -> tuple[str, Callable[[Any], Any]]:
    return f"configure({keyword}=...)", lambda router: lambda value: router.configure(**{keyword: value})


def _option(keyword: str, kinds: str) -> tuple[str, Callable[[Any], Any]]:
    def of(router: Any) -> Callable[..., None]:
        def configure(kind: str, **settings: Any) -> None:
            router.configure(**{keyword: options.from_settings(keyword, kind, settings)})

        return configure

    return f"configure({keyword}={kinds})", of


def _set_pull(router: Any) -> Callable[..., None]:
    def configure(on: bool = True, **settings: Any) -> None:
        kind = "on" if on else "none"
        router.configure(prefix_fetch=options.from_settings("prefix_fetch", kind, settings))

    return configure


def _cached_tokens(router: Any) -> Callable[..., Any]:
    return lambda **old: router.cached_tokens(_core.Request(**_renamed(old)))


def _gamma(router: Any) -> Callable[[], tuple[float, int] | None]:
    def learned() -> tuple[float, int] | None:
        known = router.learned()
        return None if known["gamma"] is None else (known["gamma"], known["gamma_estimates"])

    return learned


def _pull_cost(router: Any) -> Callable[[], tuple[float, float, int] | None]:
    def learned() -> tuple[float, float, int] | None:
        known = router.learned()
        if known["fetch_seconds_per_token"] is None:
            return None
        return known["fetch_seconds_per_token"], known["fetch_fixed_seconds"], known["fetches"]

    return learned


def _survival(router: Any) -> Callable[..., Any]:
    def learned(*, product_limit: bool = False) -> Any:
        return router.learned()["length_survival_product_limit" if product_limit else "length_survival"]

    return learned


# Attributes by class: the old name, its replacement, and the value of the old attribute if it
# differs from the new attribute.
ATTRIBUTES: dict[str, dict[str, str | tuple[str, Callable[[Any], Any]]]] = {
    "Router": {
        "engine_report": "report_load",
        "share": "export_load",
        "hear": "import_load",
        "forget_silent": "expire_peers",
        "receipt": "explain",
        "reschedule": "rebalance",
        "hit_tokens": ("cached_tokens(Request(...))", _cached_tokens),
        "set_health": _update("healthy"),
        "drain": _update("draining"),
        "set_role": _update("role"),
        "set_cuts": _update("handoff"),
        "set_step_time": _update("step_time"),
        "set_cache_blocks": _update("cache_blocks"),
        "set_index_feed": _update("kv_source"),
        "set_block_size": _configure("block_size"),
        "set_binding": _configure("binding"),
        "set_guard": _configure("guard"),
        "set_split": _option("split", "LibraSplit(...) or DecodePlacement(...)"),
        "set_priorities": _option("priority", "UniBoost(...) or FairShares()"),
        "set_rescheduling": _option("rebalance", "Star(...) or Llumnix(...)"),
        "set_pull": ("configure(prefix_fetch=PrefixFetch(...))", _set_pull),
        "gamma": ("learned()['gamma']", _gamma),
        "pull_cost": ("learned()['fetch_seconds_per_token']", _pull_cost),
        "survival": ("learned()['length_survival']", _survival),
    },
    "Ticket": {
        "finished": "segment_done",
        "ended": "done",
        "moved": "migrated",
        "begin_move": "begin_migration",
        "cancel_move": "cancel_migration",
        "elsewhere": "choose_failover",
        "follows": "has_next",
        "pull": "fetch",
        "pulled": "fetched",
    },
    "Decision": {"pull": "fetch", "index": "slot", "predicted_hit_tokens": "predicted_cached_tokens"},
}


class _Old:
    """A descriptor for a deprecated attribute name, which warns on access."""

    def __init__(self, cls: type, old: str, new: str, read: Callable[[Any], Any]) -> None:
        self._message = _message(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}")
        self._read = read
        self.__doc__ = self._message

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is None:
            return self
        warnings.warn(self._message, DeprecationWarning, stacklevel=2)
        return self._read(owner)


@cache
def install() -> None:
    """Adds the deprecated attributes to the classes of the core."""
    for owner, names in ATTRIBUTES.items():
        cls = getattr(_core, owner)
        for old, new in names.items():
            shown, read = new if isinstance(new, tuple) else (new, _reads(new))
            setattr(cls, old, _Old(cls, old, shown, read))


def _reads(name: str) -> Callable[[Any], Any]:
    return lambda owner: getattr(owner, name)


def _message(old: str, new: str) -> str:
    return f"lmetric: {old} is deprecated and will be removed in the next release; use {new}"


def _warn(old: str, new: str) -> None:
    # The core has no Python frame, so its caller is two levels up.
    warnings.warn(_message(old, new), DeprecationWarning, stacklevel=3)


def _renamed(old: Mapping[str, Any]) -> dict[str, Any]:
    new = {REQUEST.get(name, name): value for name, value in old.items()}
    for what in ("split", "fetch"):
        if new.get(f"{what}_reason") is not None:
            new[f"allow_{what}"] = False
    return new


def request(method: str, request: object, old: Mapping[str, Any] | None) -> _core.Request:
    """Creates a request from deprecated keywords. The core calls this function."""
    if old is None:
        raise TypeError(f"{method}() needs a request: lmetric.Request(token_ids)")
    if request is not None:
        name = next(iter(old))
        raise TypeError(f"{method}() accepts no {name!r} with a request; pass it to lmetric.Request")
    _warn(f"{method}({', '.join(f'{name}=' for name in old)})", f"{method}(lmetric.Request(...))")
    return _core.Request(**_renamed(old))


def requests(tokens: Any, offsets: Any) -> list[_core.Request]:
    """Creates requests from tokens and offsets of `Router.score_batch`. The core calls this
    function."""
    _warn("Router.score_batch(tokens, offsets)", "Router.score_batch([lmetric.Request(...), ...])")
    ids, bounds = np.asarray(tokens), np.asarray(offsets).tolist()
    if not bounds or bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > len(ids):
        raise _core.BadValueError(
            f"offsets: {bounds!r} is not valid; expected ascending positions within the {len(ids)} tokens, "
            "one more than the number of prompts"
        )
    return [_core.Request(ids[begin:end]) for begin, end in pairwise(bounds)]


def keyword(method: str, name: str) -> None:
    """Warns of a deprecated keyword. The core calls this function."""
    _warn(f"{method}({name}=)", f"{method}({KEYWORDS[method][name]}=)")


def router_keywords(old: Mapping[str, Any], guard: object) -> dict[str, Any]:
    """Converts deprecated keywords of `Router`. The core calls this function."""
    new: dict[str, Any] = {}
    settings = {}
    for name, value in old.items():
        if name in KEYWORDS["Router"]:
            _warn(f"Router({name}=)", f"Router({KEYWORDS['Router'][name]}=)")
            new[KEYWORDS["Router"][name]] = value
        elif name.startswith("guard_") and name.removeprefix("guard_") in _GUARD:
            _warn(f"Router({name}=)", f"Router(guard=lmetric.Guard({name.removeprefix('guard_')}=))")
            settings[name.removeprefix("guard_")] = value
        else:
            raise TypeError(f"Router() got an unexpected keyword argument {name!r}")
    if settings:
        new["guard"] = options.Guard(enabled=guard is not False, **settings)
    return new
