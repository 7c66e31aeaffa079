"""The policies of the capacity study: the twin, two usual rules, a static fleet and an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from world import (
    FIRST_ENGINES,
    GOAL,
    MOST_ENGINES,
    PROFILE,
    START_SECONDS,
    TARGET,
    Day,
    Fleet,
    Floats,
    Lease,
    Sight,
    attainment,
    played,
    trace_of,
)  # fmt: skip

from lmetric._core import LmetricError
from lmetric.capacity import EngineType, Question, Twin
from lmetric.sim.run import Run
from lmetric.whatif import Limits

WINDOW_SECONDS = 1800.0  # of records that the twin reads


@dataclass
class TwinPolicy:
    """The capacity twin: it sees records and the number of running requests.

    Its engines are fitted: it does not know the true ones. It removes engines in its own order. A
    refusal keeps the fleet.
    """

    delay_seconds: float
    headroom: float
    every_seconds: float = 60.0
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        question = Question(
            GOAL, (EngineType("h20"),), startup_seconds=self.delay_seconds, every_seconds=self.every_seconds,
            headroom=self.headroom, max_engines=MOST_ENGINES,
        )  # fmt: skip
        self.twin = Twin(
            question, Limits(), WINDOW_SECONDS, max_batch_tokens=PROFILE.max_batch_tokens, check_seeds=1
        )
        self._wanted: list[tuple[float, int]] = []

    def wanted(self, sight: Sight) -> tuple[int, Sequence[int]]:
        recording, now = sight.recording(WINDOW_SECONDS)
        ready = [f"e{each.instance}" for each in sight.fleet.ready(sight.now)]
        current = len(sight.fleet.at(sight.now))
        try:
            advice = self.twin.advise_recording(
                recording,
                now,
                running=sight.running(),
                usable=ready,
                alternatives=False,
                interval=False,
                at=sight.now,
            )
        except LmetricError as error:
            self.refused.append(f"{sight.now:.0f} s: {error}")
            return current, ()
        self._wanted.append((sight.now, advice.wanted[0].replicas))
        return advice.wanted[0].replicas, [int(each.engine[1:]) for each in advice.removals]


def stabilized(history: list[tuple[float, int]], now: float, wanted: int, seconds: float) -> int:
    """The highest recommendation of the last seconds, as the HPA's scale-down stabilization."""
    history.append((now, wanted))
    return max(number for at, number in history if at > now - seconds - 1)


@dataclass
class QueueHpa:
    """KEDA on the number of requests in engines, with an HPA's behavior.

    Replicas = requests / threshold, rounded up (`AverageValue`), at least ``least``. ``running``:
    whether running requests count, besides waiting ones. The HPA at most doubles the fleet or adds
    4 pods in 15 s, and scales down to the highest recommendation of 300 s.
    """

    threshold: float
    least: int = 1
    running: bool = False
    every_seconds: float = 30.0
    history: list[tuple[float, int]] = field(default_factory=list)

    def wanted(self, sight: Sight) -> tuple[int, Sequence[int]]:
        current = len(sight.fleet.at(sight.now))
        ideal = max(self.least, math.ceil(sight.in_engines(running=self.running) / self.threshold))
        number = stabilized(self.history, sight.now, ideal, 300.0)
        return min(number, max(2 * current, current + 4)), ()


@dataclass
class P90Rule:
    """A tenth more engines, at least one, while P90 of a latency is above the share ``up`` of its
    bound; one engine less after all were below ``down`` for ``calm_seconds``."""

    up: float
    down: float
    calm_seconds: float = 300.0
    every_seconds: float = 30.0
    changed: float = -math.inf
    calm: float = math.inf  # since when P90 is low

    def wanted(self, sight: Sight) -> tuple[int, Sequence[int]]:
        current, now = len(sight.fleet.at(sight.now)), sight.now
        p90 = sight.p90(60.0)
        if p90 > self.up:
            self.calm = math.inf
            # Engines that start count as ordered: the rule waits for them.
            if now - self.changed < sight.fleet.delay_seconds:
                return current, ()
            self.changed = now
            return current + max(1, round(0.1 * current)), ()
        if p90 < self.down:
            self.calm = min(self.calm, now)
            if now - self.calm >= self.calm_seconds:
                self.calm = now
                return max(1, current - 1), ()
        else:
            self.calm = math.inf
        return current, ()


def static(day: Day, judged: Callable[[Run], float]) -> tuple[Fleet, Run]:
    """The smallest constant fleet with ``judged`` of at least `TARGET`."""
    number = 14
    fits: dict[int, tuple[Fleet, Run]] = {}

    def enough(engines: int) -> bool:
        fleet = Fleet(day, 0.0, [Lease(each, 0.0, 0.0) for each in range(engines)])
        fits[engines] = fleet, played(fleet)
        return judged(fits[engines][1]) >= TARGET

    while not enough(number):
        number += 2
    while number > 1 and enough(number - 1):
        number -= 1
    return fits[number]


@dataclass(frozen=True)
class Schedule:
    """Engines by slot of `SLOT` seconds of the day."""

    levels: tuple[int, ...]

    def fleet(self, day: Day, delay_seconds: float) -> Fleet:
        """Level k is instance k. An engine stays through a gap that is shorter than a start."""
        leases = []
        for level in range(1, max(self.levels) + 1):
            on = [number >= level for number in self.levels]
            begins = [i for i in range(len(on)) if on[i] and (i == 0 or not on[i - 1])]
            ends = [i + 1 for i in range(len(on)) if on[i] and (i + 1 == len(on) or not on[i + 1])]
            spans = [
                (START_SECONDS + SLOT * b, START_SECONDS + SLOT * e)
                for b, e in zip(begins, ends, strict=True)
            ]
            merged: list[tuple[float, float]] = []
            for begin, end in spans:
                if merged and begin - merged[-1][1] <= max(delay_seconds, DRAIN):
                    merged[-1] = merged[-1][0], end
                else:
                    merged.append((begin, end))
            for begin, end in merged:
                ready = 0.0 if begin <= START_SECONDS and level <= FIRST_ENGINES else begin
                ordered = 0.0 if ready == 0.0 else ready - delay_seconds
                leases.append(Lease(level - 1, ordered, ready, np.inf if end >= day.end else end))
            if level <= FIRST_ENGINES and (not merged or merged[0][0] > START_SECONDS):
                leases.append(Lease(level - 1, 0.0, 0.0, START_SECONDS))
        return Fleet(day, delay_seconds, sorted(leases, key=lambda lease: lease.ready))


SLOT = 60.0
DRAIN = 120.0


def _slots(day: Day) -> int:
    return int(day.seconds / SLOT)


def _load(day: Day, before: int, after: int) -> Floats:
    """True work by slot: the mean of the slots from ``before`` to ``after`` around each."""
    trace = trace_of(day)
    edges = START_SECONDS + SLOT * np.arange(_slots(day) + 1)
    work = np.histogram(trace.arrival_seconds, edges)[0] / SLOT
    padded = np.concatenate((np.full(before, work[0]), work, np.full(after, work[-1])))
    width = before + after + 1
    return np.convolve(padded, np.ones(width) / width, "valid")


@lru_cache(maxsize=4)
def _seen(day: Day, delay: float) -> dict[Schedule, tuple[float, float]]:
    return {}


def _tried(day: Day, delay: float, schedule: Schedule) -> tuple[float, float]:
    """Attainment and cost."""
    seen = _seen(day, delay)
    if schedule not in seen:
        fleet = schedule.fleet(day, delay)
        run = played(fleet)
        seen[schedule] = attainment(run), fleet.cost(run)
    return seen[schedule]


def oracle(day: Day, delay: float, steps_per_hour: int) -> tuple[Fleet, Run]:
    """The cheapest schedule found that meets the SLO over the day. It knows all arrivals.

    It starts with the best of fleets in proportion to the true load, for several smoothings and
    factors. Then it removes an engine from random spans as long as the SLO is met.
    ``steps_per_hour``: such trials per hour of the day.
    """
    best: tuple[float, Schedule] | None = None
    for before, after in ((1, 1), (3, 1), (5, 2)):
        load = _load(day, before, after)
        low, high = 3.0, 6.0  # engines per request/s
        for _ in range(5):
            middle = (low + high) / 2
            levels = np.maximum(np.round(load * middle), 1).astype(int)
            schedule = Schedule(tuple(levels.tolist()))
            good, cost = _tried(day, delay, schedule)
            if good >= TARGET:
                high = middle
                if best is None or cost < best[0]:
                    best = cost, schedule
            else:
                low = middle
    assert best is not None
    rng = np.random.default_rng(day.seed)
    slots = _slots(day)
    for step in range(round(steps_per_hour * day.seconds / 3600)):
        span = int(rng.choice([4, 8, 15, 30])) if step % 3 else int(rng.choice([2, 3]))
        begin = int(rng.integers(0, slots - span))
        levels = np.array(best[1].levels)
        levels[begin : begin + span] = np.maximum(levels[begin : begin + span] - 1, 1)
        if step % 2:  # move an engine: the SLO's slack is better used elsewhere
            width = int(rng.choice([2, 4]))
            where = int(rng.integers(0, slots - width))
            levels[where : where + width] += 1
        schedule = Schedule(tuple(levels.tolist()))
        good, cost = _tried(day, delay, schedule)
        if good >= TARGET and cost < best[0]:
            best = cost, schedule
    fleet = best[1].fleet(day, delay)
    return fleet, played(fleet)
