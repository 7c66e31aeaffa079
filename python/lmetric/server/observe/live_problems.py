"""The present problems of a router, for its live page and `lmetric-router top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from lmetric.server.fleet.problem import Problem
from lmetric.server.observe.live import REFUSED
from lmetric.server.observe.problems import FIX_FAILING, FIX_FULL, FIXES, first_of, meaning_of

Level = Literal["bad", "warn", "note"]
PROBLEMS = 8  # most problems shown, the worst first
_ORDER: tuple[Level, ...] = ("bad", "warn", "note")
# By state of an engine that gets no requests.
LEVELS: dict[str, Level] = {"down": "bad", "ejected": "bad", "full": "warn"}


@dataclass(slots=True)
class EngineState:
    """Why an engine gets no requests, or why its mode is not exact.

    ``since``: Unix time in seconds; None: not known.
    """

    name: str
    state: str
    reason: str
    fix: str | None
    since: float | None
    level: Level


@dataclass(slots=True)
class _Group:
    first: EngineState
    since: float | None
    names: list[str] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        count, first = len(self.names), self.first
        return {
            "level": first.level,
            "what": f"{first_of(self.names)}: {first.state}",
            "since": self.since,
            "reason": "" if first.reason == first.state else first.reason,
            "fix": first.fix,
            "count": count,
        }


def of_engines(states: Iterable[EngineState]) -> list[dict[str, Any]]:
    """Returns the problems of engines: one for each state and reason, the worst first."""
    groups: dict[tuple[Level, str, str], _Group] = {}
    for each in states:
        group = groups.setdefault((each.level, each.state, each.reason), _Group(each, each.since))
        group.names.append(each.name)
        if each.since is not None:
            group.since = each.since if group.since is None else min(group.since, each.since)
    return ordered(group.shown() for group in groups.values())


def of_router(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Returns the problems of the router itself, and of engines that changed their model."""
    return [
        {
            "level": "bad" if each.is_bad else "warn",
            "what": f"{first_of(each.engines)}: {each.what}" if each.engines else each.cause,
            "since": each.since,
            "reason": each.reason,
            "fix": each.fix,
            "count": 1,
        }
        for each in problems
    ]


def of_requests(failed: Counter[tuple[int, str | None]], minutes: int) -> list[dict[str, Any]]:
    """Returns the refused and failed requests of the last minutes by cause.

    ``failed``: by status and error code.
    """
    shown = []
    for (status, code), count in failed.items():
        refused, meaning = status in REFUSED, meaning_of(code)
        verb = "refused" if refused else "failed"
        shown.append(
            {
                "level": "warn" if refused else "bad",
                "what": f"{count} request{'s' * (count != 1)} {verb} in the last {minutes} minutes",
                "since": None,
                "reason": f"{status} {code}: {meaning}" if code else f"{status}: {meaning}",
                "fix": FIXES.get(code or "", FIX_FULL if refused else FIX_FAILING),
                "count": count,
            }
        )
    return ordered(shown)


def ordered(problems: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the worst problems, the worst first."""
    return sorted(problems, key=lambda each: (_ORDER.index(each["level"]), -each["count"]))[:PROBLEMS]
