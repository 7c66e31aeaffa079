"""Hedged requests of a model: their settings, their budget, and their outcomes.

A hedge is a second attempt of a stream whose first token is late, on another engine (Dean and
Barroso, The Tail at Scale, 2013).
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from lmetric.config import HedgingConfig
from lmetric.server.fleet.notes import REMEMBERED, Remembered

# Hedges that an idle budget saves up, and hedges allowed at the start.
MOST_SAVED = 10.0
START_SAVED = 1.0
# One hedge, less what sums of shares lose to rounding: ten shares of 0.1 are less than 1.
WHOLE = 1.0 - 1e-9

# "won": the client got the second engine's answer. "lost": the first engine's. "failed": the second
# engine failed before a token. "ended": the request ended before a token.
Outcome = Literal["won", "lost", "failed", "ended"]
# Why a hedge was not sent. "budget": `budget_ratio`. "no_engine": no other engine can take it.
# "held": admission would hold or refuse it.
Unsent = Literal["budget", "no_engine", "held"]


class HedgeBudget:
    """Allows hedges for a share of the requests, and saves up to `MOST_SAVED` of them."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._saved = START_SAVED
        self._requests = 0

    def allows(self, requests: int) -> bool:
        """Returns whether a hedge is allowed now. `requests`: the model's requests so far."""
        earned = self.ratio * (requests - self._requests)
        self._requests = requests
        self._saved = min(self._saved + earned, MOST_SAVED)
        return self._saved >= WHOLE and self.ratio > 0

    def available(self, requests: int) -> float:
        """Returns the hedges that the budget allows now. `requests`: the model's so far."""
        return (
            min(self._saved + self.ratio * (requests - self._requests), MOST_SAVED) if self.ratio > 0 else 0.0
        )

    def spend(self) -> None:
        """Charges one hedge."""
        self._saved -= 1.0


class Hedging:
    """The hedges of a model."""

    def __init__(self, settings: HedgingConfig) -> None:
        self.after_seconds = settings.after_seconds  # None: requests of no class are not hedged
        self.budget = HedgeBudget(settings.budget_ratio)
        self.outcomes: Counter[Outcome] = Counter()
        self.unsent: Counter[Unsent] = Counter()
        # Metrics subtract these counts from the core router's: tries that no engine got. They are
        # hedges on the own engine or on none, and engines between a gateway's pick and choice.
        self.uncounted: Counter[str] = Counter()
        # By decision, the other decision of a hedged request.
        self.others: Remembered[int] = Remembered(2 * REMEMBERED)

    def configure(self, settings: HedgingConfig) -> None:
        """Replaces the settings. Running requests keep their time."""
        self.after_seconds = settings.after_seconds
        self.budget.ratio = settings.budget_ratio
