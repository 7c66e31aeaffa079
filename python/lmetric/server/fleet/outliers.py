"""Outlier ejection: which engines of a model are in service, by the outcomes of their requests.

Pure logic: time is an argument, in seconds on the monotonic clock. `Verdicts` reports requests. The
rules and defaults follow Envoy's outlier detection (https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier)
with two differences. Failures count by request instead of by attempt, and success rates are
compared with a test that also works for two engines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from lmetric.config import Ejection
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.service import Event, ServiceRecord, Tally

BUCKET_SECONDS = 10.0  # success rates are compared this often, as in Envoy
# An engine's success rate is an outlier if it is lower than its peers' by both.
MIN_GAP = 0.1
MIN_DEVIATIONS = 3.0  # standard errors of the difference
SUSPECT_LOG_SECONDS = 60.0
# Longest time without new requests for an engine that returned Retry-After.
MAX_SATURATED_SECONDS = 60.0


class Notice(NamedTuple):
    """A log entry."""

    event: str
    details: dict[str, Any]


class Outliers:
    """Ejection among the engines of one model."""

    def __init__(self, settings: Ejection) -> None:
        self.settings = settings
        # Ejections by rule, and ejections not made by limit. Each counter starts at 0: Prometheus
        # does not see the increase of a new series.
        self.ejected = Counter(dict.fromkeys(("consecutive", "success_rate", "probe"), 0))
        self.prevented = Counter(dict.fromkeys(("max_share", "panic_threshold"), 0))
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
        self, member: Engine, peers: Collection[Engine], client: str, proven: bool, reason: str, now: float
    ) -> bool:
        """Counts a request that failed at an engine. Returns whether it was ejected."""
        record = member.service
        if not record.count(client, proven, now):
            return False
        if record.state == "PROBING" and proven:
            return self._eject(member, peers, "probe", reason=reason, now=now)
        if record.streak >= self.settings.consecutive_failures:
            record.streak = 0
            return self._eject(member, peers, "consecutive", reason=reason, now=now)
        return False

    def saturated(self, member: Engine, seconds: float, now: float) -> None:
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

    def probed(self, member: Engine, error: str | None, now: float) -> None:
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
        self._extend(member, "PROBE_FAILED", "probe", reason=error, now=now)

    # -- ejection ----------------------------------------------------------------------------------

    def _eject(self, member: Engine, peers: Collection[Engine], rule: str, reason: str, now: float) -> bool:
        if not self.settings.enabled or member.service.state not in ("HEALTHY", "PROBING"):
            return False
        if limit := self._limit(member, peers):
            self.prevented[limit] += 1
            details = {"engine": member.name, "rule": rule, "limit": limit, "reason": reason}
            self.notices.append(Notice("engine is an outlier and stays in service", details))
            return False
        self.ejected[rule] += 1
        self._extend(member, "OUTLIER", rule, reason=reason, now=now)
        return True

    def _extend(self, member: Engine, event: Event, rule: str, reason: str, now: float) -> None:
        record, settings = member.service, self.settings
        record.ejections += 1
        seconds = min(settings.base_seconds * record.ejections, settings.max_seconds)
        record.enter(event, "EJECTED", now)
        self.calm = False
        record.until, record.reason, record.streak = now + seconds, reason, 0
        details = {"engine": member.name, "rule": rule, "seconds": seconds, "reason": reason}
        self.notices.append(Notice("engine ejected", details))

    def _limit(self, member: Engine, peers: Collection[Engine]) -> str | None:
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

    def review_one(self, member: Engine, members: Collection[Engine], now: float) -> list[Engine]:
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

    def review(self, members: Collection[Engine], now: float) -> list[Engine]:
        """Ends what is over, compares success rates, and decides who is in service.

        Returns the engines whose `in_service` has changed. Called twice a second, and after each
        change of an engine's state.
        """
        self.calm = True
        groups: dict[str, list[Engine]] = {}
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

    def _serving(self, role: str, group: list[Engine], now: float) -> set[Engine]:
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

    def _compare(self, group: list[Engine], members: Collection[Engine], now: float) -> None:
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
            self._eject(member, members, "success_rate", reason=reason, now=now)


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
