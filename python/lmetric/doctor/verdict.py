"""Verdicts, and the level that needs each check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Quality of the router's information about an engine, best first. Each level includes the
    next."""

    EXACT = "exact"
    """The router knows the engine's cache from KV events."""
    APPROXIMATE = "approximate"
    """The router estimates the cache from the requests it sent."""
    LOAD = "load"
    """The router knows the engine's load."""

    def covers(self, other: Level) -> bool:
        """Whether this level includes `other`."""
        order = list(Level)
        return order.index(self) <= order.index(other)


class Outcome(StrEnum):
    """The result of a check."""

    PASS = "pass"
    FAIL = "fail"
    NOT_OFFERED = "not offered"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one check of one engine."""

    check: str
    outcome: Outcome
    seen: str
    """The test and its result, or the cause of a failure."""
    remedy: str | None = None
    """The setting to change, and its place; None: no setting helps."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one engine feature."""

    name: str
    proves: str
    needed_for: Level | None
    """The lowest level that needs the check; None: no level needs it."""


CHECKS = {
    check.name: check
    for check in (
        Check("reachable", "answers its health page", Level.LOAD),
        Check("model", "serves the model, and answers a completion of one token", Level.LOAD),
        Check("role", "prefills, decodes or encodes according to its role", Level.LOAD),
        Check("load", "load reports are readable, and show a test request", Level.LOAD),
        Check("cancel", "a request stops when its client disconnects", Level.LOAD),
        Check("prefix_cache", "the prefix of an earlier prompt is not computed again", Level.APPROXIMATE),
        Check("cached_tokens", "usage reports the correct number of cached tokens", Level.EXACT),
        Check("kv_events", "KV events arrive", Level.EXACT),
        Check("block_hashes", "the index of these events predicts the engine's cache hits", Level.EXACT),
        Check("tokenizer", "router and engine produce the same token IDs", Level.EXACT),
        Check("handover", "sends a request's KV cache to another engine, or receives it", None),
        Check("priority", "accepts a request with a priority; thorough: and its queue follows it", None),
        Check("token_gaps", "P99 of the time between tokens is within --token-slo-ms", None),
        Check("clock", "its clock agrees with this machine's clock", None),
    )
}


# The checks that an engine of role encode needs at any level: it gets no request of a client.
OF_ENCODERS = frozenset({"reachable", "model", "role"})


def needed(check: str, level: Level) -> bool:
    """Whether `level` needs this check."""
    lowest = CHECKS[check].needed_for
    return lowest is not None and level.covers(lowest)
