"""The retry budget of a model: retries may add only a share of load to its engines.

Pure logic: time is an argument. The defaults are those of Linkerd and Envoy: 20% of the requests,
and a minimum of 10 retries per second (https://linkerd.io/2/reference/service-profiles/).
"""

from __future__ import annotations

from collections import Counter, deque

from lmetric.config import Retries

WINDOW_SECONDS = 10  # as Linkerd's `ttl`
# An engine that broke this many requests within a second is lost: their failover is not charged.
LOST_REQUESTS = 3
LOST_SECONDS = 1.0


class RetryBudget:
    """Counts retries against requests, over a sliding window of `WINDOW_SECONDS`."""

    def __init__(self, settings: Retries) -> None:
        self.configure(settings)
        # One item per second of the window: the second, the requests before it, the retries in it.
        self._seconds: deque[list[int]] = deque()
        # Retries by outcome. Each counter starts at 0, so that alerts see its first increase.
        self.outcomes = Counter(dict.fromkeys(("charged", "free", "refused"), 0))

    def configure(self, settings: Retries) -> None:
        """Replaces the settings."""
        self._ratio = settings.budget_ratio
        self._min_per_second = settings.min_per_second

    def follow(self, requests: int, now: float) -> None:
        """Moves the window; called often. `requests`: the model's requests so far."""
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, requests, 0])
        while self._seconds[0][0] <= second - WINDOW_SECONDS:
            self._seconds.popleft()

    def allows(self, requests: int, lost: bool, now: float) -> bool:
        """Returns whether a failed request may be retried, and counts the retry.

        `requests`: the model's requests so far. `lost`: its engine is known to be lost.
        """
        if lost:
            self.outcomes["free"] += 1
            return True
        if self.available(requests, now) < 1:
            self.outcomes["refused"] += 1
            return False
        self._seconds[-1][2] += 1
        self.outcomes["charged"] += 1
        return True

    def available(self, requests: int, now: float) -> float:
        """Returns the retries that the budget allows now. `requests`: the model's so far."""
        self.follow(requests, now)
        recent = requests - self._seconds[0][1]
        retries = sum(each[2] for each in self._seconds)
        return max(self._ratio * recent + self._min_per_second * WINDOW_SECONDS - retries, 0.0)


class Breaks:
    """Recent broken requests of an engine: many at once mean that it is lost."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=LOST_REQUESTS)

    def add(self, now: float) -> bool:
        """Adds a broken request. Returns whether the engine seems lost."""
        self._times.append(now)
        return len(self._times) == LOST_REQUESTS and now - self._times[0] <= LOST_SECONDS
