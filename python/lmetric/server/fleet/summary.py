"""Summary of the fleet: engines by state and mode, with the warnings about them.

The start-up log, /ready, and the page at / show it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lmetric.server.fleet.engine import Engine
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


def problems(fleet: Fleet) -> list[Problem]:
    """Returns the engines that are not usable or not in mode `exact`, grouped by reason."""
    found: dict[tuple[str, str, str | None], Problem] = {}
    for engine in fleet.engines():
        for what, cause, reason, fix in _problems_of(engine):
            group = found.setdefault((what, reason, fix), Problem(what, cause, reason, fix))
            group.engines.append(engine.name)
    return list(found.values())


def _problems_of(engine: Engine) -> list[tuple[str, str, str, str | None]]:
    if (why := engine.unusable) is not None:
        return [("not usable", *why)]
    mode = engine.mode
    return [] if mode.name == "exact" else [(mode.name, mode.cause, mode.reason, mode.fix)]


def _policy(setting: str | dict[str, Any]) -> str:
    return setting if isinstance(setting, str) else str(setting.get("score", setting))


def summary(fleet: Fleet, *, names: bool) -> dict[str, Any]:
    """Returns the fleet's state as a JSON object.

    Keys: `engines` and `usable` (counts), `modes` (usable engines by mode), `warnings`. ``names``:
    also `models` with their policies, and the names of engines in the warnings.
    """
    engines = list(fleet.engines())
    usable = [engine for engine in engines if engine.unusable is None]
    shown: dict[str, Any] = {
        "engines": len(engines),
        "usable": len(usable),
        "modes": dict(Counter(engine.mode.name for engine in usable)),
        "warnings": [problem.shown(names) for problem in problems(fleet)],
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
