"""Summary of the fleet: engines by state and mode, with the warnings about them.

The start-up log, /ready, and the page at / show it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lmetric.server.fleet.engine import NotUsable
from lmetric.server.fleet.fleet import Fleet


@dataclass(slots=True)
class Problem:
    """A problem that several engines share.

    what: the mode below `exact`, or "not usable". cause: the reason for any client. reason: the
    reason with addresses and names.
    """

    what: str
    cause: str
    reason: str
    fix: str | None
    engines: list[str] = field(default_factory=list)

    def shown(self, names: bool) -> dict[str, Any]:
        """Returns its JSON object, with ``names``: with the engines' names and the whole reason."""
        public = {"what": self.what, "cause": self.cause, "fix": self.fix, "engines": len(self.engines)}
        return {**public, "reason": self.reason, "names": self.engines} if names else public


def _policy(setting: str | dict[str, Any]) -> str:
    return setting if isinstance(setting, str) else str(setting.get("score", setting))


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
            if mode.name == "exact":
                continue
            what, why = mode.name, NotUsable(mode.cause, mode.reason, mode.fix)
        # Reasons have addresses: without them, engines with the same cause are one warning.
        key = (what, why.reason if names else why.cause, why.fix)
        group = found.get(key)
        if group is None:
            group = found[key] = Problem(what, *why)
        group.engines.append(engine.name)
    shown: dict[str, Any] = {
        "engines": fleet.size,
        "usable": usable,
        "modes": dict(modes),
        "warnings": [problem.shown(names) for problem in found.values()],
    }
    if names:
        shown["models"] = [
            {
                "model": pool.name,
                "engines": len(pool.engines),
                "policy": _policy(pool.policies.settings.policy),
                "decode_policy": _policy(pool.policies.settings.decode_policy) if pool.cuts else None,
                "guard": pool.guard,
                "guard_reason": pool.router.guard_reason,
                "tokenizer": str(pool.tokenizer.folder) if pool.tokenizer else None,
            }
            for pool in fleet.pools
        ]
    return shown
