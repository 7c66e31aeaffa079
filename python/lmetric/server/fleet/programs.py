"""Agent programs of a model: the working set of the caches, and its log."""

from __future__ import annotations

import math
from typing import Any

import structlog

from lmetric._core import Router
from lmetric.options import ProgramAdmission, ProgramOption
from lmetric.server.fleet.admission import HeldRequests

LOG_SECONDS = 60.0  # time between two checks of the working set
CROWDED = 1.0  # working set over cache from which it is a warning

log = structlog.get_logger("lmetric.programs")


class ProgramWatch:
    """The agent programs of a model, as operators see them."""

    def __init__(self, model: str, router: Router, option: ProgramOption | None, held: HeldRequests) -> None:
        self._model = model
        self._router = router
        self._held = held
        self.follows = option is not None
        self._admits = isinstance(option, ProgramAdmission)
        self._checked_at = -math.inf
        self._held_before = False

    def snapshot(self) -> dict[str, Any] | None:
        """Counts of programs, the longest hold, and the expected tokens in each engine's cache."""
        counted = self._router.programs()
        return counted and counted | {"longest_hold_seconds": self._held.longest_hold_seconds}

    def warn(self, now: float) -> None:
        """Logs the fullest engine and wrong cache sizes, at most once per LOG_SECONDS."""
        if not self.follows or now < self._checked_at + LOG_SECONDS:
            return
        self._checked_at = now
        counted = self.snapshot() or {}
        self._log_holds(counted)
        instances = counted.get("instances", {})
        for name, each in instances.items():
            if (measured := each["measured_tokens"]) is not None:
                log.warning(
                    "an engine removes blocks although its KV cache should have room, or holds more than "
                    "it should; the measured size counts: correct `cache_blocks` if it is configured",
                    engine=name,
                    reported_tokens=each["reported_tokens"] and round(each["reported_tokens"]),
                    measured_tokens=round(measured),
                )
        if self._admits:
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

    def _log_holds(self, counted: dict[str, Any]) -> None:
        """Logs that programs begin or cease to be held."""
        held = counted["states"]["held"] if self._admits and counted else 0
        if (held > 0) != self._held_before:
            self._held_before = held > 0
            text = "requests wait until their agent program fits into a KV cache (docs/how-to/agents.md)"
            log.warning(
                text if held else "agent programs fit into the KV caches again",
                model=self._model or "any",
                held=held,
            )


def working_set_ratio(instance: dict[str, Any]) -> float | None:
    """Returns the expected tokens of an instance over its capacity; None if that is unknown."""
    capacity = instance["capacity_tokens"]
    return instance["expected_tokens"] / capacity if capacity else None
