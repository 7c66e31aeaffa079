"""Outlier ejection: which engines of a model are in service, by the outcomes of their requests.

Pure logic: time is an argument, in seconds on the monotonic clock. `Engine` reports health checks,
and `Verdicts` (`execution/verdicts.py`) reports requests. The rules and defaults follow Envoy's
outlier detection (https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier)
with two differences. Failures count by request instead of by attempt, and success rates are
compared with a test that also works for two engines.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from lmetric.config import Ejection

# The states of an engine (`MEANINGS`) and the events that change them (`EVENTS`).
State = Literal["HEALTHY", "DOWN", "EJECTED", "PROBING"]
Event = Literal["UP", "LOST", "OUTLIER", "PROBE_PASSED", "PROBE_FAILED", "SERVED"]

MEANINGS: Mapping[State, str] = {
    "HEALTHY": "gets requests",
    "DOWN": "not reachable, not healthy by its own report, or it stopped generating; gets no requests",
    "EJECTED": "its requests failed where others succeeded; gets no requests until its ejection is over",
    "PROBING": "gets requests on trial: the next proven failure ejects it again, for longer",
}
EVENTS: Mapping[Event, str] = {
    "UP": "health checks passed",
    "LOST": "a connection was refused, checks failed repeatedly, or it stopped generating",
    "OUTLIER": "a rule of `health.ejection` found it to be an outlier",
    "PROBE_PASSED": "after its ejection, a health check and the router's own small request succeeded",
    "PROBE_FAILED": "after its ejection, that small request failed",
    "SERVED": "a client's request succeeded, or none came for `base_seconds`",
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

BUCKET_SECONDS = 10.0  # success rates are compared this often, as in Envoy
# Of one client's failures without proof, one counts per engine in this time. So one client can
# neither eject an engine by itself nor hide the failures of others.
CLIENT_SECONDS = 10.0
MAX_CLIENTS = 1024  # clients remembered per engine for that
# An engine's success rate is an outlier if it is lower than its peers' by both.
MIN_GAP = 0.1
MIN_DEVIATIONS = 3.0  # standard errors of the difference
SUSPECT_LOG_SECONDS = 60.0
# Longest time without new requests for an engine that returned Retry-After.
MAX_SATURATED_SECONDS = 60.0


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
        if self.streak:
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


class Member(Protocol):
    """The properties of an engine that ejection needs."""

    name: str
    service: ServiceRecord

    @property
    def role(self) -> str:
        """Engines of one role can replace each other."""

    @property
    def held(self) -> bool:
        """Whether it gets no new requests for a reason other than its health."""


class Notice(NamedTuple):
    """A log entry."""

    event: str
    details: dict[str, Any]


class Outliers:
    """Ejection among the engines of one model."""

    def __init__(self, settings: Ejection) -> None:
        self.settings = settings
        self.ejected: Counter[str] = Counter()  # ejections by rule
        self.prevented: Counter[str] = Counter()  # ejections not made, by limit
        self.panics = 0
        self.panic: set[str] = set()  # roles in panic
        self.suspects = 0  # requests that failed in the same way on two engines
        self.notices: list[Notice] = []
        # Whether the service of each engine depends on its own state alone: no engine is ejected or
        # full.
        self.calm = True
        self._noted: tuple[int, float] = (0, -math.inf)  # suspects in the last notice, and its time
        self._rotate_at = -math.inf

    # -- outcomes ----------------------------------------------------------------------------------

    def failed(
        self, member: Member, peers: Collection[Member], client: str, proven: bool, reason: str, now: float
    ) -> bool:
        """Counts a request that failed at an engine. Returns whether it was ejected."""
        record = member.service
        if not record.count(client, proven, now):
            return False
        if record.state == "PROBING" and proven:
            return self._eject(member, peers, "probe", reason, now)
        if record.streak >= self.settings.consecutive_failures:
            record.streak = 0
            return self._eject(member, peers, "consecutive", reason, now)
        return False

    def saturated(self, member: Member, seconds: float, now: float) -> None:
        """Gives an engine no new requests for its Retry-After, at most `MAX_SATURATED_SECONDS`."""
        until = now + min(seconds, MAX_SATURATED_SECONDS)
        member.service.saturated_until = max(member.service.saturated_until, until)
        self.calm = False

    def suspect(self, reasons: str, now: float) -> None:
        """Counts a request that failed in the same way on two engines; logs some of them."""
        self.suspects += 1
        noted, at = self._noted
        if now - at >= SUSPECT_LOG_SECONDS:
            details = {"requests": self.suspects - noted, "total": self.suspects, "last": reasons}
            self.notices.append(Notice("requests failed on two engines alike; no engine is blamed", details))
            self._noted = (self.suspects, now)

    def probed(self, member: Member, error: str | None, now: float) -> None:
        """Handles the result of a probe after an ejection; `error`: None if it succeeded."""
        record = member.service
        if record.state != "EJECTED":
            return
        if error is None:
            record.enter("PROBE_PASSED", "PROBING", now)
            record.forget()
            self.notices.append(Notice("engine back on trial after its ejection", {"engine": member.name}))
            return
        self.ejected["probe"] += 1
        self._extend(member, "PROBE_FAILED", "probe", error, now)

    # -- ejection ----------------------------------------------------------------------------------

    def _eject(self, member: Member, peers: Collection[Member], rule: str, reason: str, now: float) -> bool:
        if not self.settings.enabled or member.service.state not in ("HEALTHY", "PROBING"):
            return False
        if limit := self._limit(member, peers):
            self.prevented[limit] += 1
            details = {"engine": member.name, "rule": rule, "limit": limit, "reason": reason}
            self.notices.append(Notice("engine is an outlier and stays in service", details))
            return False
        self.ejected[rule] += 1
        self._extend(member, "OUTLIER", rule, reason, now)
        return True

    def _extend(self, member: Member, event: Event, rule: str, reason: str, now: float) -> None:
        record, settings = member.service, self.settings
        record.ejections += 1
        seconds = min(settings.base_seconds * record.ejections, settings.max_seconds)
        record.enter(event, "EJECTED", now)
        self.calm = False
        record.until, record.reason, record.streak = now + seconds, reason, 0
        details = {"engine": member.name, "rule": rule, "seconds": seconds, "reason": reason}
        self.notices.append(Notice("engine ejected", details))

    def _limit(self, member: Member, peers: Collection[Member]) -> str | None:
        """Returns the limit that forbids to eject an engine; None: it may be ejected."""
        group = [each for each in peers if each.role == member.role and not each.held]
        ejected = sum(each.service.state == "EJECTED" for each in group)
        if ejected >= max(1, math.floor(self.settings.max_share * len(group))):
            return "max_share"
        left = sum(each.service.state in ("HEALTHY", "PROBING") for each in group if each is not member)
        if left == 0 or left < self.settings.panic_threshold * len(group):
            return "panic_threshold"
        return None

    # -- review ------------------------------------------------------------------------------------

    def review_one(self, member: Member, members: Collection[Member], now: float) -> list[Member]:
        """Decides who is in service after a change of one engine, as `review` does.

        The time does not grow with the fleet, unless an engine is ejected or full.
        """
        record = member.service
        if not self.calm or record.state == "EJECTED" or record.saturated_until > now:
            return self.review(members, now)
        serves = record.state != "DOWN"
        changed = [member] if record.in_service != serves else []
        record.in_service = serves
        return changed

    def review(self, members: Collection[Member], now: float) -> list[Member]:
        """Ends what is over, compares success rates, and decides who is in service.

        Returns the engines whose `in_service` has changed. Called twice a second, and after each
        change of an engine's state.
        """
        self.calm = True
        groups: dict[str, list[Member]] = {}
        for member in members:
            self._pass_time(member.service, now)
            groups.setdefault(member.role, []).append(member)
        if now >= self._rotate_at:
            self._rotate_at = now + BUCKET_SECONDS
            for group in groups.values():
                self._compare(group, members, now)
            buckets = max(1, round(self.settings.window_seconds / BUCKET_SECONDS))
            for member in members:
                member.service.rotate(buckets)
        changed = []
        for role, group in groups.items():
            serving = self._serving(role, group, now)
            for member in group:
                if member.service.in_service != (member in serving):
                    member.service.in_service = member in serving
                    changed.append(member)
        return changed

    def _pass_time(self, record: ServiceRecord, now: float) -> None:
        base = self.settings.base_seconds
        if record.state == "PROBING" and (record.successes or now - record.since >= base):
            record.enter("SERVED", "HEALTHY", now)
        elif record.state == "HEALTHY" and record.ejections and now - record.since >= base:
            record.ejections -= 1
            record.since = now

    def _serving(self, role: str, group: list[Member], now: float) -> set[Member]:
        """Returns the engines of a role that are in service."""
        counted = [member for member in group if not member.held]
        up = {member for member in group if member.service.state in ("HEALTHY", "PROBING")}
        ejected = {member for member in group if member.service.state == "EJECTED"}
        share_up = sum(member in up for member in counted)
        panic = bool(ejected) and share_up < self.settings.panic_threshold * len(counted)
        if panic != (role in self.panic):
            details = {"role": role, "in_service": share_up, "engines": len(counted)}
            if panic:
                self.panics += 1
                self.panic.add(role)
                self.notices.append(Notice("panic: ejected engines get requests again", details))
            else:
                self.panic.discard(role)
                self.notices.append(Notice("panic is over", details))
        serving = up | ejected if panic else up
        free = {member for member in serving if member.service.saturated_until <= now}
        self.calm &= not ejected and len(free) == len(serving)
        return free if any(not member.held for member in free) else serving

    def _compare(self, group: list[Member], members: Collection[Member], now: float) -> None:
        """Ejects engines whose success rate is far below the rate of all others together."""
        serving = [member for member in group if member.service.state in ("HEALTHY", "PROBING")]
        tallies = {member: member.service.tally for member in serving}
        successes = sum(each.successes for each in tallies.values())
        failures = sum(each.failures for each in tallies.values())
        found = []
        for member, own in tallies.items():
            rest = Tally(successes - own.successes, failures - own.failures)
            if (gap := _gap(own, rest, self.settings.min_requests)) is not None:
                found.append((gap, member, f"success rate {_rate(own):.0%}, its peers' {_rate(rest):.0%}"))
        for _, member, reason in sorted(found, key=lambda each: -each[0]):
            self._eject(member, members, "success_rate", reason, now)


def _rate(tally: Tally) -> float:
    return tally.successes / (tally.successes + tally.failures)


def _gap(own: Tally, rest: Tally, least: int) -> float | None:
    """Returns how far a success rate is below its peers' rate; None: it is no outlier.

    A one-sided test of two proportions. Envoy's rule (mean - 1.9 standard deviations over the
    engines) needs at least five engines: of two, it never ejects one. `least`: requests that both
    sides need.
    """
    own_count, rest_count = sum(own), sum(rest)
    if not own.failures or own_count < least or rest_count < least:
        return None
    gap = _rate(rest) - _rate(own)
    both = (own.successes + rest.successes) / (own_count + rest_count)
    error = math.sqrt(both * (1 - both) * (1 / own_count + 1 / rest_count))
    return gap if gap >= MIN_GAP and gap >= MIN_DEVIATIONS * error else None
