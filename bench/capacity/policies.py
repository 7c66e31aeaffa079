"""The policies of the capacity study: the twin, two usual rules, a static fleet and an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
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
    day_of,
    played,
    shares,
    trace_of,
)  # fmt: skip

from lmetric._core import LmetricError
from lmetric_lab.capacity import EngineType, Question, Twin
from lmetric_lab.sim.result import Run
from lmetric_lab.whatif import Limits

WINDOW_SECONDS = 1800.0  # of records that the twin reads
SLOT = 60.0  # seconds
BLOCK_SECONDS = 14_400.0  # of the oracle's search
CHECK_STEPS = 4  # between checks of all changes together
SPARE = 0.02  # share of the allowed misses that changes in several blocks leave
DRAIN = 120.0  # seconds that an engine may take to end its requests
Levels = NDArray[np.int64]  # engines by slot of the day


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


def _fleet(day: Day, delay_seconds: float, levels: Levels) -> Fleet:
    """The fleet with these engines by slot of `SLOT` seconds of the day. Level k is instance k. An
    engine stays through a gap that is shorter than a start."""
    leases = []
    for level in range(1, int(levels.max()) + 1):
        on = (levels >= level).tolist()
        begins = [i for i in range(len(on)) if on[i] and (i == 0 or not on[i - 1])]
        ends = [i + 1 for i in range(len(on)) if on[i] and (i + 1 == len(on) or not on[i + 1])]
        spans = [
            (START_SECONDS + SLOT * b, START_SECONDS + SLOT * e) for b, e in zip(begins, ends, strict=True)
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


@dataclass(frozen=True)
class Trial:
    """A schedule's result by block of `BLOCK_SECONDS`: engine hours, shape (blocks,), and requests
    that missed each objective, shape (blocks, objectives)."""

    costs: Floats
    misses: Floats
    requests: int

    def good(self, spare: float = 0.0) -> bool:
        """Whether the SLO is met over the day with a share of the allowed misses to spare."""
        allowed = (1 - spare) * (1 - TARGET) * self.requests
        return bool((self.misses.sum(axis=0) <= allowed).all())

    @property
    def cost(self) -> float:
        return float(self.costs.sum())

    def with_block(self, other: Trial, block: int) -> Trial:
        """This result with a block of another."""
        costs, misses = self.costs.copy(), self.misses.copy()
        costs[block], misses[block] = other.costs[block], other.misses[block]
        return replace(self, costs=costs, misses=misses)


def _tried(day: Day, delay: float, levels: Levels) -> Trial:
    fleet = _fleet(day, delay, levels)
    run = played(fleet)
    costs, misses = [], []
    for begin in np.arange(START_SECONDS, day.end, BLOCK_SECONDS):
        end = min(begin + BLOCK_SECONDS, day.end)
        inside = (run.arrival_seconds >= begin) & (run.arrival_seconds < end)
        costs.append(fleet.cost(run, begin, end))
        misses.append([(1 - share) * inside.sum() for share in shares(run, inside)])
    return Trial(np.array(costs), np.round(misses), int(day_of(run).sum()))


def oracle(day: Day, delay: float, steps_per_hour: int) -> tuple[Fleet, Run]:
    """The cheapest schedule found that meets the SLO over the day. It knows all arrivals.

    It starts with the best of fleets in proportion to the true load, for several smoothings and
    factors. Then it removes an engine from random spans as long as the SLO is met.
    ``steps_per_hour``: such trials per hour of the day. A run of the day tries one in each block of
    4 h, and keeps those that save engine hours, first those with the fewest new misses.
    """
    best: tuple[Levels, Trial] | None = None
    for before, after in ((1, 1), (3, 1), (5, 2)):
        load = _load(day, before, after)
        low, high = 3.0, 6.0  # engines per request/s
        for _ in range(5):
            middle = (low + high) / 2
            levels = np.maximum(np.round(load * middle), 1).astype(np.int64)
            trial = _tried(day, delay, levels)
            if trial.good():
                high = middle
                if best is None or trial.cost < best[1].cost:
                    best = levels, trial
            else:
                low = middle
    assert best is not None
    levels, state = verified = best
    rng = np.random.default_rng(day.seed)
    size = int(min(day.seconds, BLOCK_SECONDS) / SLOT)
    begins = range(0, _slots(day), size)
    several = len(begins) > 1
    spare = SPARE if several else 0.0
    for step in range(round(steps_per_hour * size * SLOT / 3600)):
        changed = levels.copy()
        for begin in begins:
            _change(changed[begin : begin + size], step, rng)
        trial = _tried(day, delay, changed)
        saving = np.flatnonzero(trial.costs < state.costs)
        new_misses = (trial.misses - state.misses).max(axis=1)
        for block in sorted(saving, key=lambda each: new_misses[each]):
            after_it = state.with_block(trial, block)
            if after_it.good(spare) or new_misses[block] <= 0:
                state = after_it
                levels = levels.copy()
                own = slice(begins[block], begins[block] + size)
                levels[own] = changed[own]
        if not several:
            verified = levels, state
        elif step % CHECK_STEPS == CHECK_STEPS - 1:
            # A change in one block costs and saves requests of others.
            state = _tried(day, delay, levels)
            if state.good() and state.cost < verified[1].cost:
                verified = levels, state
    fleet = _fleet(day, delay, verified[0])
    return fleet, played(fleet)


def _change(levels: Levels, step: int, rng: np.random.Generator) -> None:
    """Removes an engine from a random span of a block, and in every second step adds one to
    another: the SLO's slack is better used there."""
    span = int(rng.choice([4, 8, 15, 30])) if step % 3 else int(rng.choice([2, 3]))
    begin = int(rng.integers(0, len(levels) - span))
    levels[begin : begin + span] = np.maximum(levels[begin : begin + span] - 1, 1)
    if step % 2:
        width = int(rng.choice([2, 4]))
        where = int(rng.integers(0, len(levels) - width))
        levels[where : where + width] += 1
