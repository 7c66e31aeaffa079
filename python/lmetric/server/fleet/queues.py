"""Roles whose engines all have waiting requests: the sign of more requests than they serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lmetric._core import Router
from lmetric.roles import Role
from lmetric.server.fleet.engine import Engine

# A burst of prompts waits for a few seconds and needs no engine. Longer queues grow.
WAIT_SECONDS = 10.0
# An older report does not count. The alert LmetricLoadReportsStop has the same bound.
REPORT_SECONDS = 10.0


class Queue(NamedTuple):
    """The waiting requests of a role. ``since``: seconds on the monotonic clock."""

    role: Role
    engines: int
    waiting: int
    since: float


class Queues:
    """The queues of a model's engines, as the engines report them.

    A role has a queue while each of its usable engines reports waiting requests. Engines that
    report none, or no number, have room.
    """

    def __init__(self, router: Router, engines: Mapping[str, Engine]) -> None:
        self._router = router
        self._engines = engines
        self._since: dict[Role, float] = {}

    def look(self, now: float) -> None:
        """Reads the last reports. Called each second; ``now``: on the monotonic clock."""
        full = {role: self._since.get(role, now) for role, _ in self._usable(waits=True)}
        if full:
            for role, _ in self._usable(waits=False):
                full.pop(role, None)
                if not full:
                    break
        self._since = full

    def long(self, now: float) -> Iterator[Queue]:
        """Yields the queues of all engines of a role that have lasted for `WAIT_SECONDS`."""
        for role, since in self._since.items():
            if now - since >= WAIT_SECONDS:
                waiting = [count for each, count in self._usable(waits=True) if each == role]
                yield Queue(role, len(waiting), round(sum(waiting)), since)

    def _usable(self, *, waits: bool) -> Iterator[tuple[Role, float]]:
        """Yields the usable engines with, or without, waiting requests: role and their number."""
        columns = self._router.indicators(names=("reported_waiting", "report_age_seconds"))
        counts = columns["reported_waiting"]
        found = (counts > 0) & (columns["report_age_seconds"] <= REPORT_SECONDS)  # NaN: no report
        if not found.any() and waits:
            return
        names = self._router.instances()
        for at in (found if waits else ~found).nonzero()[0].tolist():
            engine = self._engines.get(names[at])
            if engine is not None and engine.unusable is None:
                yield engine.role, float(counts[at])
