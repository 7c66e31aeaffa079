"""Whether an engine is in service: its state, and the recent outcomes of its requests.

Pure logic: time is an argument, in seconds on the monotonic clock. `Engine` reports health checks,
and `Outliers` ejects engines.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

# The states of an engine (`MEANINGS`) and the events that change them.
# UP: health checks passed. LOST: a connection was refused, checks failed repeatedly, or it stopped
# generating. OUTLIER: a rule of `health.ejection` found it to be an outlier. PROBE_PASSED: after
# its ejection, a health check and the router's own small request succeeded. PROBE_FAILED: that
# request failed. SERVED: a client's request succeeded, or none came for `base_seconds`.
State = Literal["HEALTHY", "DOWN", "EJECTED", "PROBING"]
Event = Literal["UP", "LOST", "OUTLIER", "PROBE_PASSED", "PROBE_FAILED", "SERVED"]

MEANINGS: Mapping[State, str] = {
    "HEALTHY": "gets requests",
    "DOWN": "not reachable, not healthy by its own report, or it stopped generating; gets no requests",
    "EJECTED": "its requests failed where others succeeded; gets no requests until its ejection is over",
    "PROBING": "gets requests on trial: the next proven failure ejects it again, for longer",
}
# For each state and event, the states that may follow.
TRANSITIONS: Mapping[tuple[State, Event], tuple[State, ...]] = {
    ("DOWN", "UP"): ("HEALTHY", "EJECTED"),  # EJECTED: its ejection is not over yet
    ("HEALTHY", "LOST"): ("DOWN",),
    ("EJECTED", "LOST"): ("DOWN",),
    ("PROBING", "LOST"): ("DOWN",),
    ("HEALTHY", "OUTLIER"): ("EJECTED",),
    ("PROBING", "OUTLIER"): ("EJECTED",),
    ("EJECTED", "PROBE_PASSED"): ("PROBING",),
    ("EJECTED", "PROBE_FAILED"): ("EJECTED",),
    ("PROBING", "SERVED"): ("HEALTHY",),
}

# Of one client's failures without proof, one counts per engine in this time. So one client can
# neither eject an engine by itself nor hide the failures of others.
CLIENT_SECONDS = 10.0
MAX_CLIENTS = 1024  # clients remembered per engine for that


class Tally(NamedTuple):
    """Counted outcomes of an engine's requests."""

    successes: int
    failures: int


class ServiceRecord:
    """The state of one engine, and the recent outcomes of its requests."""

    __slots__ = (
        "_buckets",
        "_clients",
        "ejections",
        "failures",
        "in_service",
        "reason",
        "saturated_until",
        "since",
        "state",
        "streak",
        "successes",
        "until",
    )

    def __init__(self) -> None:
        self.state: State = "DOWN"
        self.since = -math.inf  # of the state, or of the last change of `ejections`
        self.in_service = False  # whether it gets new requests, as far as this module decides
        self.ejections = 0  # the factor of the next ejection's duration, minus 1
        self.until = -math.inf  # end of the last ejection
        self.reason: str | None = None  # of the last ejection
        self.saturated_until = -math.inf
        self.streak = 0  # counted failures since the last success
        self.successes = 0  # in the present bucket
        self.failures = 0
        self._buckets: deque[Tally] = deque()
        self._clients: dict[str, float] = {}  # time of the last failure without proof

    def enter(self, event: Event, state: State, now: float) -> None:
        """Changes the state."""
        assert state in TRANSITIONS.get((self.state, event), ()), f"{event}: {self.state} to {state}"
        self.state = state
        self.since = now

    def up(self, now: float) -> None:
        """Handles passed health checks of an engine that was down."""
        self.forget()
        self.enter("UP", "EJECTED" if now < self.until else "HEALTHY", now)

    def served(self) -> None:
        """Records a whole answer. Called for each answer of the engine."""
        self.successes += 1
        self.streak = 0

    def count(self, client: str, proven: bool, now: float) -> bool:
        """Counts a failure; returns False if it does not count.

        `proven`: another engine answered the same request. Failures without proof count once per
        client and `CLIENT_SECONDS`.
        """
        if not proven:
            if now - self._clients.get(client, -math.inf) < CLIENT_SECONDS:
                return False
            if len(self._clients) >= MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
            self._clients.pop(client, None)  # the newest is last
            self._clients[client] = now
        self.failures += 1
        self.streak += 1
        return True

    def forget(self) -> None:
        """Forgets the outcomes so far: an engine that comes back is judged anew."""
        self.successes = self.failures = self.streak = 0
        self._buckets.clear()

    def rotate(self, buckets: int) -> None:
        """Begins a new bucket; `buckets`: how many the window has."""
        self._buckets.append(Tally(self.successes, self.failures))
        self.successes = self.failures = 0
        while len(self._buckets) >= buckets:
            self._buckets.popleft()

    @property
    def tally(self) -> Tally:
        """The counted outcomes in the window."""
        return Tally(
            self.successes + sum(bucket.successes for bucket in self._buckets),
            self.failures + sum(bucket.failures for bucket in self._buckets),
        )

    def shown(self, now: float) -> dict[str, Any]:
        """Returns its JSON object for /debug/engines."""
        tally = self.tally
        held = self.state in ("EJECTED", "PROBING")
        return {
            "state": self.state,
            "in_service": self.in_service,
            "reason": self.reason if held else None,
            "ejected_seconds_left": max(0.0, self.until - now) if self.state == "EJECTED" else None,
            "ejections": self.ejections,
            "saturated_seconds_left": max(0.0, self.saturated_until - now) or None,
            "successes": tally.successes,
            "failures": tally.failures,
        }
