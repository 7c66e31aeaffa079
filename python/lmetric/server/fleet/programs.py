"""Agent programs of a model: held requests, the working set of the caches, and its log."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import structlog

from lmetric._core import Arrival, Request, Router
from lmetric.options import ProgramAdmission, ProgramOption, ThunderAgent

LOG_SECONDS = 60.0  # time between two checks of the working set
CROWDED = 1.0  # working set over cache from which it is a warning

log = structlog.get_logger("lmetric.programs")


class HeldPrograms:
    """Requests of agent programs that wait until their program fits into a cache."""

    def __init__(self, model: str, router: Router, option: ProgramOption | None) -> None:
        self._model = model
        self._router = router
        self.follows = option is not None
        self.admits = isinstance(option, ProgramAdmission | ThunderAgent)
        # Time between two comments to the client of a held stream; 0: none.
        self.keep_alive_seconds = option.keep_alive_seconds if isinstance(option, ProgramAdmission) else 0.0
        # By the number of the arrival: called once when the request may run; argument: monotonic
        # clock, s.
        self._waiting: dict[int, Callable[[float], None]] = {}
        self._checked_at = -math.inf
        self._longest_hold_seconds = 0.0

    def arrive(self, request: Request, now: float) -> Arrival | None:
        """Records the arrival of a request; None if programs are not followed."""
        return self._router.arrive(request, now=now)

    def wait(self, arrival: Arrival, then: Callable[[float], None]) -> None:
        """Calls ``then`` once when the held request may run."""
        self._waiting[arrival.id] = then

    def leave(self, arrival: Arrival) -> None:
        """Drops a held request that has ended."""
        if self._waiting.pop(arrival.id, None) is not None:
            arrival.drop()

    def release(self, now: float) -> None:
        """Runs the periodic work on programs and starts the requests that may run."""
        if not self.follows:
            return
        ready, _refused = self._router.release_held(now=now)
        for arrival, held_seconds in ready:
            self._longest_hold_seconds = max(self._longest_hold_seconds, held_seconds)
            if (then := self._waiting.pop(arrival, None)) is not None:
                then(now)
        self._warn(now)

    def snapshot(self) -> dict[str, Any] | None:
        """Counts of programs, the longest hold, and the expected tokens in each engine's cache."""
        counted = self._router.programs()
        return counted and counted | {"longest_hold_seconds": self._longest_hold_seconds}

    def _warn(self, now: float) -> None:
        """Logs the fullest engine and wrong cache sizes, at most once per LOG_SECONDS."""
        if now < self._checked_at + LOG_SECONDS:
            return
        self._checked_at = now
        instances = (self.snapshot() or {}).get("instances", {})
        for name, each in instances.items():
            if (measured := each["measured_tokens"]) is not None:
                log.warning(
                    "an engine removes blocks although its KV cache should have room, or holds more than "
                    "it should; the measured size counts: correct `cache_blocks` if it is configured",
                    engine=name,
                    reported_tokens=each["reported_tokens"] and round(each["reported_tokens"]),
                    measured_tokens=round(measured),
                )
        if self.admits:
            return
        ratios = {name: ratio for name, each in instances.items() if (ratio := working_set_ratio(each))}
        crowded = {name: ratio for name, ratio in ratios.items() if ratio > CROWDED}
        if crowded:
            worst = max(crowded, key=lambda name: crowded[name])
            log.warning(
                "agent programs need more than the KV caches hold; `programs: admit` would hold requests",
                model=self._model or "any",
                engines=len(crowded),
                fullest=worst,
                over_cache=f"{crowded[worst] - 1:.0%}",
            )


def working_set_ratio(instance: dict[str, Any]) -> float | None:
    """Returns the expected tokens of an instance over its capacity; None if that is unknown."""
    capacity = instance["capacity_tokens"]
    return instance["expected_tokens"] / capacity if capacity else None
