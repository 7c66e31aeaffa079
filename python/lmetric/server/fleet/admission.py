"""Admission of a model's requests: the held requests, and the limits of tenants and classes.

The core router decides which requests run, wait or are refused. This module keeps the waiting
requests, and asks the core for the next ones at the right times.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import structlog

from lmetric._core import Arrival, Request, Router
from lmetric.config import AdmissionConfig, SloClass, TenantConfig
from lmetric.options import ProgramAdmission, ProgramOption
from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.fleet.levels import Levels

ROUND_SECONDS = 0.05  # time between two rounds while requests wait
KEEP_ALIVE_SECONDS = 10.0  # time between two comments to a held stream, without settings of programs
SHOWN_TENANTS = 16  # tenants in a snapshot
MOST_REFUSED = 10_000  # counts by tenant and reason, after which further tenants share one

log = structlog.get_logger("lmetric.admission")


class Waiting(NamedTuple):
    """A held request. One of its functions is called, once. `now`: the monotonic clock, s."""

    arrival: Arrival
    tenant: str
    slo_class: str
    run: Callable[[float], None]  # argument: now
    refuse: Callable[[str, float], None]  # arguments: reason, seconds for Retry-After


class HeldRequests:
    """The held requests of a model, in all queues of the core router."""

    def __init__(
        self,
        router: Router,
        programs: ProgramOption | None,
        admission: AdmissionConfig | None,
        tenants: Mapping[str, TenantConfig],
    ) -> None:
        self._router = router
        self._programs = programs
        self._settings: dict[str, Any] | None = None  # of the core router
        self.admits = False  # requests must arrive before they are routed
        self.requests: dict[int, Waiting] = {}  # those that wait, by the number of the arrival
        self._round: asyncio.Handle | None = None  # the next round
        self._soon = False  # the next round runs in this turn of the event loop
        self._runs = False  # a round runs now
        self.refused: Counter[tuple[str, str]] = Counter()  # by tenant and reason
        self.longest_hold_seconds = 0.0
        self.classes: Mapping[str, SloClass] = {}
        self.levels = Levels(None, {}, holds=False)
        # Time between two comments to the client of a held stream, s; 0: none.
        self.keep_alive_seconds = KEEP_ALIVE_SECONDS
        if isinstance(programs, ProgramAdmission):
            self.keep_alive_seconds = programs.keep_alive_seconds
        self.configure(admission, tenants)

    def configure(self, admission: AdmissionConfig | None, tenants: Mapping[str, TenantConfig]) -> None:
        """Replaces the settings. Waiting requests stay, unless the new settings let them run.

        Raises LmetricError.
        """
        given = admission or AdmissionConfig()
        holds = admission is not None or isinstance(self._programs, ProgramAdmission)
        levels = Levels(admission, tenants, holds=holds)
        settings = core_settings(admission, tenants)
        if settings is not None and levels.on:
            settings["aging_seconds"] = given.aging_seconds
        if settings != self._settings:
            self._router.set_admission(settings)
            self._settings = settings
        self.admits = settings is not None or isinstance(self._programs, ProgramAdmission)
        self.classes, self.levels = given.classes, levels
        if self.requests:
            self._router.set_levels({number: self._level(each) for number, each in self.requests.items()})
        self.poke()

    def arrive(
        self, request: Request, tenant: str, slo_class: str, *, now: float, sheddable: bool = False
    ) -> Arrival | None:
        """Records the arrival of a request; None if every request runs.

        A sheddable request is refused if it would have to wait.
        """
        level = self.levels.of(tenant, slo_class) if self.levels.on else 0
        arrival = self._router.arrive(request, now=now, level=level, sheddable=sheddable)
        if self.requests:
            self.poke()  # its arrival may have let them run
        return arrival

    def wait(self, waiting: Waiting) -> None:
        """Holds a request whose verdict is "held"."""
        self.requests[waiting.arrival.id] = waiting
        if self._round is None:
            self._round = asyncio.get_running_loop().call_later(ROUND_SECONDS, self._next_round)

    def leave(self, arrival: Arrival) -> None:
        """Drops a held request that has ended."""
        if self.requests.pop(arrival.id, None) is not None:
            arrival.drop()

    def poke(self) -> None:
        """Runs a round soon, because an engine may have room now."""
        if self.requests and not self._soon and not self._runs:
            if self._round is not None:
                self._round.cancel()
            self._soon = True
            self._round = asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._round, self._soon = None, False
        try:
            self.release(time.monotonic())
        except Exception:
            log.exception("a round of admission failed")
        if self.requests and self._round is None:
            self._round = asyncio.get_running_loop().call_later(ROUND_SECONDS, self._next_round)

    def release(self, now: float) -> None:
        """Starts the requests that may run, and refuses those that would be late."""
        if self._runs:
            return
        self._runs = True
        try:
            ready, refused = self._router.release_held(now=now)
            for number, held_seconds in ready:
                self.longest_hold_seconds = max(self.longest_hold_seconds, held_seconds)
                if (waiting := self.requests.pop(number, None)) is not None:
                    self._try(waiting.run, now)
            for number, reason, seconds in refused:
                if (waiting := self.requests.pop(number, None)) is not None:
                    self._try(waiting.refuse, reason, seconds)
        finally:
            self._runs = False

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a function of one request. Its failure must not cost the others their turn."""
        try:
            call(*arguments)
        except Exception:
            log.exception("a held request failed")

    def count_refused(self, tenant: str, reason: str) -> None:
        """Counts a refused request."""
        if len(self.refused) >= MOST_REFUSED and (tenant, reason) not in self.refused:
            tenant = OTHER_TENANTS
        self.refused[tenant, reason] += 1

    def waiting(self) -> Counter[str]:
        """Returns the number of waiting requests by tenant; the empty name: without a tenant."""
        return Counter(each.tenant for each in self.requests.values())

    def waiting_by_level(self) -> Counter[int]:
        """Returns the number of waiting requests by level; empty without levels."""
        return Counter(map(self._level, self.requests.values()) if self.levels.on else ())

    def _level(self, waiting: Waiting) -> int:
        return self.levels.of(waiting.tenant, waiting.slo_class)

    def snapshot(self) -> dict[str, Any] | None:
        """Returns the numbers of admission by load; None if it is off."""
        if self._settings is None:
            return None
        told = self._router.admission()
        if told is None:
            return None
        # The core knows tenants only by hashes of their names.
        by_tenant = dict(self.waiting().most_common(SHOWN_TENANTS))
        finite = {name: None if value == math.inf else value for name, value in told.items()}
        return finite | {"waiting_by_tenant": by_tenant, "longest_hold_seconds": self.longest_hold_seconds}


def core_settings(
    admission: AdmissionConfig | None, tenants: Mapping[str, TenantConfig]
) -> dict[str, Any] | None:
    """Returns the settings of the core router; None: neither admission nor a limit is on."""
    limits = {name: found for name, tenant in tenants.items() if (found := _limits(tenant))}
    if admission is None and not limits:
        return None
    given = admission or AdmissionConfig()
    settings: dict[str, Any] = {
        "max_waiting": given.max_waiting,
        "max_waiting_per_tenant": given.max_waiting_per_tenant,
        "tenants": limits,
    }
    if admission is None:
        settings["room_seconds"] = math.inf  # requests wait only for their tenant's limits
    else:
        wanted = ("ttft_seconds", "tpot_seconds", "room_seconds")
        settings |= {name: value for name in wanted if (value := getattr(given, name)) is not None}
    return settings


def _limits(tenant: TenantConfig) -> dict[str, float]:
    names = ("max_concurrent", "max_waiting")
    return {name: value for name in names if (value := getattr(tenant, name)) is not None}
