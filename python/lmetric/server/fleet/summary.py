"""Summary of the fleet: engines by state and mode, with the warnings about them.

The start-up log, /ready, and the page at / show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from lmetric.server.fleet.engine import NotUsable
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.problem import Problem, unix_of


def _policy(setting: str | dict[str, Any]) -> str:
    return setting if isinstance(setting, str) else str(setting.get("score", setting))


def _without_effect(model: Model) -> Iterator[Problem]:
    """Yields the settings of a model that have no effect on its engines."""
    usable = [engine for engine in model.engines.values() if engine.unusable is None]
    decodes = [engine.name for engine in usable if engine.role == "decode"]
    if decodes and model.policies.settings.decode_policy == "sibyl" and model.binds_late:
        cause = "sibyl cannot look ahead: with late binding, the decode engine is chosen after the prefill"
        fix = "set decode_policy: sibyl_plus (experimental) or least_requests"
        yield Problem("decode_policy", cause, cause, fix, decodes)
    if model.mover is not None and model.mover.rebalances and model.mover.by != "recompute":
        names = [engine.name for engine in usable if engine.connector is None and engine.role != "prefill"]
        if names:
            cause = "no KV transfer: rebalance moves no stream of these engines"
            yield Problem("rebalance", cause, cause, "start the engines with NixlConnector (kv_both)", names)


def summary(fleet: Fleet, *, names: bool) -> dict[str, Any]:
    """Returns the fleet's state as a JSON object.

    Keys: `engines` and `usable` (counts), `modes` (usable engines by mode), `warnings`. ``names``:
    also `models` with their policies, and the names of engines in the warnings. In a large fleet,
    it may be a second old (`Recent`).
    """
    return fleet.summaries[names].get(fleet.size, lambda: _summary(fleet, names))


def _summary(fleet: Fleet, names: bool) -> dict[str, Any]:
    usable, modes = 0, Counter[str]()
    found: dict[tuple[str, str, str | None], Problem] = {}
    for engine in fleet.engines():
        what, why = "not usable", engine.unusable
        if why is None:
            mode = engine.mode
            usable += 1
            modes[mode.name] += 1
            if not engine.inexact:
                continue
            what, why = mode.name, NotUsable(mode.cause, mode.reason, mode.fix)
        # Reasons have addresses: without them, engines with the same cause are one warning.
        key = (what, why.reason if names else why.cause, why.fix)
        group = found.get(key)
        if group is None:
            group = found[key] = Problem(what, *why)
        group.engines.append(engine.name)
        since = unix_of(engine.problem_since)
        if since is not None:
            group.since = since if group.since is None else min(group.since, since)
    problems = [*found.values(), *(problem for model in fleet.models for problem in _without_effect(model))]
    problems += fleet.own_problems()
    shown: dict[str, Any] = {
        "engines": fleet.size,
        "usable": usable,
        "modes": dict(modes),
        "warnings": [problem.shown(names) for problem in problems],
    }
    if names:
        shown["models"] = [
            {
                "model": model.name,
                "engines": len(model.engines),
                "policy": _policy(model.policies.settings.policy),
                "decode_policy": _policy(model.policies.settings.decode_policy) if model.cuts else None,
                "guard": model.guard,
                "guard_reason": model.router.guard_reason,
                "tokenizer": str(model.tokenizers.current.folder) if model.tokenizers.current else None,
            }
            for model in fleet.models
        ]
    return shown
