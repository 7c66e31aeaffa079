"""Steers the headroom of a fleet by the error budget of its SLO."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.capacity.goals import MOST_HEADROOM
from lmetric_lab.slo import Goal
from lmetric_lab.whatif.recording import Recording

HEADROOM_PER_HOUR = 0.1  # for each hour of allowed misses that is overspent
MEMORY_SECONDS = 86_400.0  # misses this old count 1/e


@dataclass
class ErrorBudget:
    """The misses beyond those that an SLO allows.

    ``ttft_p95=2s`` allows 5% of the requests to miss. The unit is an hour of allowed misses at the
    mean rate of requests: 2 means that as many requests missed as are allowed in two more hours.
    More of them ask for more headroom, and fewer for less, so attainment tends to the target.
    """

    goal: Goal
    start: float  # headroom without a balance
    overspent: NDArray[np.float64] = field(init=False)  # requests' worth of allowed misses, by objective
    _requests: float = 0.0  # that were counted, as `MEMORY_SECONDS` weighs them
    _seconds: float = 0.0  # in which they ended, likewise
    _until: float | None = None

    def __post_init__(self) -> None:
        self.overspent = np.zeros(len(self.goal.objectives))

    @property
    def overspent_hours(self) -> NDArray[np.float64]:
        """Hours of allowed misses that are overspent, by objective; negative: that are left."""
        return self.overspent / max(self._hour, 1.0)

    @property
    def headroom(self) -> float:
        """The headroom as a share of the demand, from 0 to `MOST_HEADROOM`."""
        wanted = self.start + HEADROOM_PER_HOUR * float(self.overspent_hours.max())
        return min(max(wanted, 0.0), MOST_HEADROOM)

    @property
    def _hour(self) -> float:
        """Requests in an hour at the mean rate."""
        return 3600.0 * self._requests / max(self._seconds, 1.0)

    def count(self, recording: Recording, now_seconds: float, at: float, *, spare: bool) -> None:
        """Counts the requests that ended since the last call. The first call only starts.

        ``now_seconds`` on the recording's clock is the Unix time ``at``. ``spare``: the fleet was
        larger than advised, so a good result earns nothing.
        """
        last, self._until = self._until, at
        if last is None or at <= last:
            return
        ended = recording.all_arrivals() + recording.all_durations()
        new = (ended > now_seconds - (at - last)) & (ended <= now_seconds)
        count, kept = int(new.sum()), float(np.exp(-(at - last) / MEMORY_SECONDS))
        self._requests = kept * self._requests + count
        self._seconds = kept * self._seconds + at - last
        self.overspent *= kept
        if not count:
            return
        shares = self.goal.shares({name: each[new] for name, each in recording.all_times().items()})
        allowed = np.array([1 - each.share for each in self.goal.objectives])
        balance = ((1 - np.array(shares)) / allowed - 1) * count
        if spare:
            balance = np.maximum(balance, 0.0)
        # The headroom does not change beyond these ends, so a balance past them is forgotten.
        low, high = ((end - self.start) / HEADROOM_PER_HOUR * self._hour for end in (0.0, MOST_HEADROOM))
        self.overspent = np.clip(self.overspent + balance, low, high)
