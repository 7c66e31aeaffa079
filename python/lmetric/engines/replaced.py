"""Whether another process has got the address of an engine, by the start time in its metrics."""

from __future__ import annotations

_METRIC = b"\nprocess_start_time_seconds "
_LONGEST = 32  # bytes of a time
_MOST = 1024  # remembered times: more processes than one load balancer has


def start_of(metrics: bytes) -> bytes | None:
    """Returns the start time of an engine's process as on its page; None: the page has none."""
    at = metrics.find(_METRIC) + len(_METRIC)
    return metrics[at : at + _LONGEST].partition(b"\n")[0] if at >= len(_METRIC) else None


class Starts:
    """The start times of the processes at one address.

    A new time tells that the cache of the process before is gone. If a known time comes back, a
    load balancer has the address: then times tell nothing until a connection is refused. Before
    that, each of its other processes counts once as a new one.
    """

    __slots__ = ("_balanced", "_known", "_latest")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets all times: a refused connection shows that the process has ended."""
        self._latest: bytes | None = None
        self._known: dict[bytes, None] = {}
        self._balanced = False

    def replaced(self, start: bytes | None) -> bool:
        """Adds the time of a page. Returns whether another process has replaced the last one."""
        if start is None or start == self._latest:
            return False
        is_first, self._latest = self._latest is None, start
        self._balanced |= start in self._known
        if len(self._known) < _MOST:
            self._known[start] = None
        return not (is_first or self._balanced)
