"""Verdicts, and what each check is needed for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How well the router can know an engine, best first; each level needs all that those after it need."""

    EXACT = "exact"
    """It knows what the engine's cache holds: block events."""
    APPROXIMATE = "approximate"
    """It remembers what it sent there."""
    LOAD = "load"
    """It knows how busy the engine is."""

    def covers(self, other: Level) -> bool:
        """Whether what `other` needs, this needs too."""
        order = list(Level)
        return order.index(self) <= order.index(other)


class Outcome(StrEnum):
    """What came of a check."""

    PASS = "pass"
    FAIL = "fail"
    NOT_OFFERED = "not offered"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one check of one engine."""

    check: str
    outcome: Outcome
    seen: str
    """What was done and seen; of a failure, its cause."""
    remedy: str | None = None
    """What to set, and where, where there is something to set."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is proved."""

    name: str
    proves: str
    needed_for: Level | None
    """The lowest level that cannot do without it; None: nothing is lost but the thing itself."""


CHECKS = {
    check.name: check
    for check in (
        Check("reachable", "answers GET /health", Level.LOAD),
        Check("model", "serves the model, and answers a completion of one token", Level.LOAD),
        Check("role", "prefills and decodes as its role says", Level.LOAD),
        Check("load", "load reports are readable, and follow a request of ours", Level.LOAD),
        Check("cancel", "a request whose client leaves stops running", Level.LOAD),
        Check("prefix_cache", "a prompt's prefix sent before is not computed again", Level.APPROXIMATE),
        Check("cached_tokens", "usage tells how much of a prompt was cached, and truly", Level.EXACT),
        Check("kv_events", "block events arrive", Level.EXACT),
        Check("block_hashes", "the index they make predicts what the engine finds cached", Level.EXACT),
        Check("tokenizer", "the router's token ids are the engine's", Level.EXACT),
        Check("handover", "hands a request's KV cache to another engine, or takes it over", None),
        Check("priority", "takes a request with a priority; thorough: and its queue follows it", None),
        Check("clock", "its clock agrees with this machine's", None),
    )
}


def needed(check: str, level: Level) -> bool:
    """Whether `level` cannot do without this check."""
    lowest = CHECKS[check].needed_for
    return lowest is not None and level.covers(lowest)
