"""The present problems of a router, for its live page and `lmetric-router top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lmetric.server.api.error_codes import ERRORS
from lmetric.server.fleet.problem import Problem
from lmetric.server.observe.live import REFUSED

Level = Literal["bad", "warn", "note"]
NAMES = 3  # most engines named in a problem
PROBLEMS = 8  # most problems shown, the worst first
_FIX_FAILING = "restart or drain the engines that fail; the access log names them (engine)"
_FIX_NO_CONNECTION = "start the engines, or correct their URLs"
_FIX_FULL = "add engines: they refuse requests"
# By code of an error: what an operator can do about it, if it is always the same.
FIXES = {
    "deadline": "add engines, or raise admission.ttft_seconds",
    "queue_full": "add engines, or raise admission.max_waiting",
    "rate_limit_exceeded": "raise the tenant's budgets, if the fleet has room",
    "caches_full": "add engines: the running agent programs fill the KV caches",
    "too_many": "raise limits.max_concurrent_requests, or start another router",
    "too_many_bytes": "raise limits.max_body_bytes_total, or start another router",
    "too_many_connections": "raise limits.max_connections, or start another router",
    "timeout": "add engines, or raise timeouts.request",
    "no_engine": "start the engines that are down",
    "retry_budget": _FIX_FAILING,
    "reset": _FIX_FAILING,
    "engine_error": _FIX_FAILING,
    "refused": _FIX_NO_CONNECTION,
    "dns": _FIX_NO_CONNECTION,
    "tls": _FIX_NO_CONNECTION,
    "unreachable": _FIX_NO_CONNECTION,
    "failed_twice": "find the client in the access log (code=failed_twice): its requests break engines",
    "too_many_invalid_tokens": "find the client in the access log: its tokens have invalid signatures",
    "issuer_unreachable": "check that the router reaches the jwks address of auth.jwt",
    "replicas_unreachable": "check the other routers and the network; /debug/replicas names lost routers",
    "too_many_searches": "find the client in the access log: it asks for many unknown responses",
    "router_broken": "restart the router",
    "resources": "raise the limit of open files of the router, or start another router",
}
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


def first_of(names: Sequence[str]) -> str:
    """Returns the first `NAMES` names, and how many more there are."""
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {more} more" if more > 0 else "")


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


def meaning_of(code: str | None) -> str:
    """Returns the meaning of an error code; None: the error of an engine."""
    _, meaning = ERRORS.get(code or "", ("", "the engine's own error"))
    return meaning[0].lower() + meaning[1:].removesuffix(".").replace("`", "")


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
                "fix": FIXES.get(code or "", _FIX_FULL if refused else _FIX_FAILING),
                "count": count,
            }
        )
    return ordered(shown)


def ordered(problems: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the worst problems, the worst first."""
    return sorted(problems, key=lambda each: (_ORDER.index(each["level"]), -each["count"]))[:PROBLEMS]
