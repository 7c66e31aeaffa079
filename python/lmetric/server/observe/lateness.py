"""How long the event loop was late recently: the sign that a router lacks CPU."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# A request takes several turns of the event loop, and each of them waits this long. The alert
# LmetricEventLoopLate has the same bound.
LATE_SECONDS = 0.05
WINDOW_SECONDS = 10.0
_KEPT = 100  # a window has fewer late timers


class Late(NamedTuple):
    """For how many of the last `WINDOW_SECONDS` the event loop was late.

    ``busy``: the share of this time in which its thread had a CPU. Below one half, other processes
    or threads had it.
    """

    seconds: float
    busy: float


class Lateness:
    """The time within the last seconds in which the event loop was late.

    Times: seconds on the monotonic clock.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def note(self, began: float, due: float, now: float, busy: float) -> None:
        """Adds a timer that was set at ``began`` for ``due``, and ran at ``now``.

        A late timer counts with its whole time, so a loop that stands still counts in full.
        ``busy``: the CPU time of the loop's thread meanwhile, s.
        """
        if now - due > LATE_SECONDS:
            self._late.append((began, now, busy))

    def recent(self, now: float) -> Late:
        """Returns for how many of the last `WINDOW_SECONDS` the loop was late."""
        since = now - WINDOW_SECONDS
        late = busy = 0.0
        for began, end, cpu in self._late:
            seconds = max(min(end, now) - max(began, since), 0.0)
            late += seconds
            busy += cpu * seconds / (end - began)
        return Late(late, busy / late if late else 0.0)
