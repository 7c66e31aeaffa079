"""Whether another process has got the address of an engine, by the start time in its metrics."""

from __future__ import annotations

import math

_METRIC = b"\nprocess_start_time_seconds "
_LONGEST = 32  # bytes of a time
BALANCED = (
    "several processes answer at one address, so the router cannot follow their prefix caches; "
    "list each process as an engine, without a load balancer between them"
)


def start_of(metrics: bytes) -> float | None:
    """Returns the start time of an engine's process as on its page; None: the page has none."""
    at = metrics.find(_METRIC) + len(_METRIC)
    if at < len(_METRIC):
        return None
    try:
        start = float(metrics[at : at + _LONGEST].partition(b"\n")[0])
    except ValueError:
        return None
    return start if math.isfinite(start) else None


class Starts:
    """The start times of the processes at one address.

    Another time tells that the cache of the process before is gone. If times go back and forth, a
    load balancer has the address: then times tell nothing until a connection is refused.
    """

    __slots__ = ("_balanced", "_highest", "_latest", "_named")

    def __init__(self) -> None:
        self._named = False
        self.forget()

    def forget(self) -> None:
        """Forgets all times: a refused connection shows that the process has ended."""
        self._latest: float | None = None
        self._highest = -math.inf
        self._balanced = False

    def replaced(self, start: float | None) -> bool:
        """Adds the time of a page. Returns whether another process has replaced the last one."""
        if start is None or start == self._latest:
            return False
        latest, self._latest = self._latest, start
        # A failover may lead to an older process once.
        self._balanced |= latest is not None and latest < start <= self._highest
        self._highest = max(self._highest, start)
        return not (latest is None or self._balanced)

    def show_balanced(self) -> bool:
        """Returns once whether a load balancer has the address."""
        shown, self._named = self._named, self._named or self._balanced
        return self._named and not shown
