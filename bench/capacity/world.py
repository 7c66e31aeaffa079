"""The scenario of the capacity study: a day's curve with bursts, and a fleet that follows a policy.

A day is shorter here than in reality, so its load changes faster. Start-up delays and bursts keep
their real length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmetric.profiles import load_profile
from lmetric_lab.sim.churn import FleetChange
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.setups import PolicyChoice
from lmetric_lab.sim.synthetic import RequestsTrace
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import Workload, prepare
from lmetric_lab.slo import Goal, Metric
from lmetric_lab.whatif import Recording

Floats = NDArray[np.float64]

PROFILE = load_profile("qwen3-30b-a3b-h20").in_blocks_of(128).slower(5)
GOAL = Goal.of("ttft_p95=12s,tpot_p95=350ms")
TARGET = 0.95
START_SECONDS = 900.0  # before the measured day: constant load, constant fleet
PEAK_RATE = 3.5  # requests/s without bursts
TROUGH = 0.3  # lowest rate, relative to the peak
BURST_EVERY_SECONDS, BURST_SECONDS, BURST = 900.0, (45.0, 150.0), (1.2, 1.6)
FIRST_ENGINES = 7
MOST_ENGINES = 40  # numbers of instances; never all in use
CHUNK_SECONDS = 600.0
PAST_SECONDS = START_SECONDS + 14_400.0  # that a policy can see
TICK_SECONDS = 15.0  # of the observed queue
REQUEST_SECONDS = 0.005  # of a request outside of its engine, in records


@dataclass(frozen=True, slots=True)
class Day:
    """A day by its seed and its length, which does not contain `START_SECONDS`. ``overlap``:
    whether a burst can begin in another one, which multiplies them."""

    seed: int
    seconds: float
    overlap: bool = False

    @property
    def end(self) -> float:
        """Its end on the clock of the arrivals, seconds."""
        return START_SECONDS + self.seconds


def rate_of(at: Floats, day: Day) -> Floats:
    """Requests per second: a cosine from night to night, times bursts."""
    rng = np.random.default_rng(9_000 + day.seed)
    part = np.clip((at - START_SECONDS) / day.seconds, 0, 1)
    skew = part + 0.06 * np.sin(2 * np.pi * part)  # the morning is steeper than the evening
    rate = PEAK_RATE * (TROUGH + (1 - TROUGH) * (1 - np.cos(2 * np.pi * skew)) / 2)
    begin = START_SECONDS
    while (begin := begin + rng.exponential(BURST_EVERY_SECONDS)) < day.end:
        length, factor = rng.uniform(*BURST_SECONDS), rng.uniform(*BURST)
        rate = np.where((at >= begin) & (at < begin + length), rate * factor, rate)
        begin += 0.0 if day.overlap else length
    return np.asarray(rate)


def variation(arrivals: Floats) -> dict[str, float]:
    """How much counts of arrivals vary around the mean of a quarter of an hour.

    For bins of some seconds: the relative standard deviation beyond a Poisson process. For minutes
    also the largest count over that mean.
    """
    found: dict[str, float] = {}
    arrivals = arrivals - arrivals[0]
    for seconds in (30, 60, 120, 300):
        counts = np.histogram(arrivals, np.arange(0.0, arrivals[-1], seconds))[0].astype(np.float64)
        width = (900 // seconds) | 1
        padded = np.pad(counts, width // 2, mode="edge")
        usual = np.convolve(padded, np.full(width, 1 / width), "valid")
        ratio = counts / usual
        found[f"sd_{seconds}"] = float(np.sqrt(max(ratio.var() - (1 / usual).mean(), 0.0)))
        if seconds == 60:
            found["busiest_minute"] = float(ratio.max())
    return found


@lru_cache(maxsize=2)
def trace_of(day: Day) -> Trace:
    """The requests of a day: documents and chats with shared beginnings."""
    grid = np.arange(0.0, day.end + 1.0, 1.0)
    clock = np.concatenate(([0.0], np.cumsum(rate_of(grid[:-1], day))))
    made = RequestsTrace.model_validate(
        {
            "seed": day.seed,
            "rate": 1.0,
            "block_tokens": PROFILE.block_tokens,
            "duration_seconds": float(clock[-1]),
            "prefixes": {"count": 60, "zipf": 1.0, "tokens": {"p50": 3000, "mean": 4000, "max": 12_000}},
            "input_tokens": {"p50": 3000, "mean": 4500, "max": 12_000},
            "output_tokens": {"p50": 100, "mean": 150, "max": 1000},
        }
    ).make()
    return replace(made, arrival_seconds=np.interp(made.arrival_seconds, clock, grid))


@lru_cache(maxsize=8)
def workload_of(day: Day, first: int, end_seconds: float) -> Workload:
    """The requests from number ``first`` on that arrive before a time."""
    trace = trace_of(day)
    end = int(np.searchsorted(trace.arrival_seconds, end_seconds))
    return prepare(trace.take(np.arange(first, end)), PROFILE)


@dataclass(frozen=True)
class Lease:
    """An engine from its order to its end, seconds. ``end``: infinite while it stays."""

    instance: int
    ordered: float
    ready: float
    end: float = np.inf


@dataclass
class Fleet:
    """Leases of engines; changes happen at the present or after the start-up delay."""

    day: Day
    delay_seconds: float
    leases: list[Lease] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = self.leases or [Lease(number, 0.0, 0.0) for number in range(FIRST_ENGINES)]

    def at(self, now: float) -> list[Lease]:
        """Engines that are ordered or serve."""
        return [each for each in self.leases if each.end > now]

    def ready(self, now: float) -> list[Lease]:
        return [each for each in self.at(now) if each.ready <= now]

    def resize(self, wanted: int, now: float, removed: Sequence[int] = ()) -> float:
        """Orders or ends engines. Returns the time of the first effect, infinite without a change.

        ``removed``: instances to end first; otherwise the newest. Engines that still start end
        before all others."""
        current, effect = self.at(now), np.inf
        for _ in range(wanted - len(current)):
            self.leases.append(Lease(self._free(now), now, now + self.delay_seconds))
            effect = now + self.delay_seconds
        for _ in range(len(current) - max(wanted, 1)):
            starting = [each for each in self.at(now) if each.ready > now]
            serving = {each.instance: each for each in self.ready(now)}
            chosen = [serving[each] for each in removed if each in serving]
            victim = starting[-1] if starting else (chosen or list(serving.values())[::-1])[0]
            self.leases[self.leases.index(victim)] = replace(victim, end=now)
            effect = min(effect, max(now, victim.ready))
        return effect

    def _free(self, now: float) -> int:
        """The lowest number whose last engine had time to drain, else the number that ended first.

        In the simulator, a join waits for the end of the old engine's requests.
        """
        ends = dict.fromkeys(range(MOST_ENGINES), -np.inf)
        for each in self.leases:
            ends[each.instance] = max(ends[each.instance], each.end)
        drained = [number for number, end in ends.items() if end <= now - 240.0]
        ended = [number for number, end in ends.items() if end <= now]
        return drained[0] if drained else min(ended, key=lambda number: ends[number])

    def changes(self) -> str:
        """The changes, as `simulate` reads them. Numbers never used join after the end."""
        events = []
        for each in self.leases:
            if each.end <= each.ready:
                continue  # it ended while it started
            if each.ready > 0:
                events.append((each.ready, "join", each.instance))
            if each.end < np.inf:
                events.append((each.end, "leave", each.instance))
        used = {instance for _, _, instance in events} | {
            each.instance for each in self.leases if each.ready <= 0
        }
        events += [
            (self.day.end + 3600.0, "join", number) for number in range(MOST_ENGINES) if number not in used
        ]
        return ",".join(f"{at:.3f} {kind} {number}" for at, kind, number in sorted(events))

    def cost(self, run: Run, begin: float = START_SECONDS, until: float = np.inf) -> float:
        """Engine hours of the day, or of a part: from the order to the end of the last request."""
        gone = {
            (each.change.instance, round(each.change.at_seconds, 3)): each.done_seconds
            for each in run.changes
            if not each.change.joins
        }
        total = 0.0
        for each in self.leases:
            end = each.end
            if end < np.inf and end > each.ready:
                done = gone.get((each.instance, round(end, 3)), end)
                end = end if np.isnan(done) else done
            total += max(0.0, min(end, until, self.day.end) - max(each.ordered, begin))
        return total / 3600.0


def played(fleet: Fleet, until: float | None = None, first: int = 0) -> Run:
    """The run of the fleet on its day's requests, or on those from number ``first`` on and before
    a time."""
    day = fleet.day
    return simulate(
        workload_of(day, first, day.end if until is None else until),
        programs="none",
        policy="lmetric",
        instances=MOST_ENGINES,
        profile=PROFILE,
        seed=day.seed,
        signals="delayed",
        admission="vllm",
        output_known=False,
        cached_answers=True,
        token_stride=8,
        timeline_seconds=TICK_SECONDS,
        changes=fleet.changes(),
        split="none",
        prefix_fetch="none",
    )


def times_of(run: Run, chosen: NDArray[np.bool_]) -> dict[Metric, Floats]:
    """The times of chosen requests, as clients see them; infinite without an end."""
    lost = np.isnan(run.finished_seconds)
    bad = lambda times: np.where(lost, np.inf, times + REQUEST_SECONDS)[chosen]  # noqa: E731
    return {"ttft": bad(run.ttft_seconds), "tpot": run.tpot_seconds[chosen], "e2e": bad(run.e2e_seconds)}


def day_of(run: Run) -> NDArray[np.bool_]:
    """Whether each request arrived in the measured day."""
    return np.asarray(run.arrival_seconds >= START_SECONDS)


def shares(run: Run, chosen: NDArray[np.bool_]) -> tuple[float, ...]:
    """The share of chosen requests within the bound of each objective."""
    return GOAL.shares(times_of(run, chosen))


def attainment(run: Run) -> float:
    """SLO attainment over the day: the smallest share of an objective.

    All objectives have the target `TARGET`, so it is at least `TARGET` if and only if the goal is
    met as the twin counts it.
    """
    return min(shares(run, day_of(run)))


def joint(run: Run) -> float:
    """The share of the day's requests within all bounds."""
    return float(GOAL.kept(times_of(run, day_of(run))).mean())


def quarters(run: Run, day: Day) -> list[float]:
    """SLO attainment in each quarter of an hour of the day."""
    at = run.arrival_seconds
    edges = np.arange(START_SECONDS, day.end, 900.0)
    return [min(shares(run, (at >= edge) & (at < edge + 900.0))) for edge in edges]


@dataclass(frozen=True)
class Sight:
    """The past, as a policy sees it. ``run`` is complete until ``now``, and begins with request
    ``first`` of the day."""

    run: Run
    first: int
    fleet: Fleet
    now: float

    def in_engines(self, *, running: bool) -> float:
        """Requests that wait in engines, and with ``running`` those that run; mean of a tick."""
        bucket = int(self.now / TICK_SECONDS) - 1
        load = self.run.timeline.queued[:, bucket].sum()
        return float(load + self.run.timeline.running[:, bucket].sum() if running else load)

    def p90(self, seconds: float) -> float:
        """The largest P90 of an objective, relative to its bound; 0 without a request.

        TTFT is of first tokens, and TPOT of ends, in the last seconds."""
        run, found = self.run, [0.0]
        for each, at in zip(GOAL.objectives, (run.first_token_seconds, run.finished_seconds), strict=True):
            times = getattr(run, f"{each.metric}_seconds")
            recent = times[(at > self.now - seconds) & (at <= self.now) & ~np.isnan(times)]
            if len(recent):
                found.append(float(np.percentile(recent, 90)) / each.seconds)
        return max(found)

    def running(self) -> int:
        """Requests that have arrived and not ended, as the router counts them."""
        arrived = self.run.arrival_seconds <= self.now
        return int((arrived & ~(self.run.finished_seconds <= self.now)).sum())

    def recording(self, window: float) -> tuple[Recording, float]:
        """The records of requests that arrived in the window and have ended, and the present on
        their clock."""
        run, now = self.run, self.now
        chosen = np.flatnonzero((run.arrival_seconds > now - window) & (run.finished_seconds <= now))
        trace = trace_of(self.fleet.day).take(self.first + chosen)
        start = float(trace.arrival_seconds[0])
        numbers = sorted({*run.instance[chosen].tolist(), *(each.instance for each in self.fleet.ready(now))})
        place = np.full(MOST_ENGINES, -1, np.int64)
        place[numbers] = np.arange(len(numbers))
        changes = [
            FleetChange(max(at - start, 0.0), kind, int(place[number]))
            for at, kind, number in self._events(start)
            if place[number] >= 0
        ]
        shifted = replace(trace, arrival_seconds=trace.arrival_seconds - start)
        return Recording(
            trace=shifted,
            instance=place[run.instance[chosen]],
            held_seconds=np.zeros(len(chosen)),
            ttft_seconds=run.ttft_seconds[chosen] + REQUEST_SECONDS,
            tpot_seconds=run.tpot_seconds[chosen],
            e2e_seconds=run.e2e_seconds[chosen] + REQUEST_SECONDS,
            cached_tokens=run.hit_tokens[chosen].astype(np.float64),
            engines=tuple(f"e{number}" for number in numbers),
            policy=PolicyChoice("lmetric", {}, "lmetric"),
            guard=None,
            block_tokens=PROFILE.block_tokens,
            cache_blocks=PROFILE.cache_blocks,
            exact=True,
            sessions=False,
            notes=(),
            changes=tuple(changes),
        ), now - start

    def _events(self, start: float) -> list[tuple[float, Any, int]]:
        """Joins and leaves between the start and now."""
        found: list[tuple[float, Any, int]] = []
        for each in self.fleet.leases:
            if start < each.ready <= self.now and each.end > each.ready:
                found.append((each.ready, "join", each.instance))
            if start < each.end <= self.now and each.end > each.ready:
                found.append((each.end, "leave", each.instance))
        return sorted(found)


class Policy(Protocol):
    """Decides the number of engines. ``every_seconds``: time between decisions."""

    every_seconds: float

    def wanted(self, sight: Sight) -> tuple[int, Sequence[int]]:
        """The number of engines, and the instances to remove first."""


def closed_loop(policy: Policy, delay_seconds: float, day: Day) -> tuple[Fleet, Run]:
    """Runs a day under a policy.

    A run stays valid until the first effect of a later decision: an ordered engine changes nothing
    before it is ready. The policy sees runs of the last `PAST_SECONDS`, which begin with empty
    caches: whole days would take too long. The returned run is of the whole day.
    """
    fleet = Fleet(day, delay_seconds)
    arrivals = trace_of(day).arrival_seconds
    run, first, until = played(fleet, START_SECONDS), 0, START_SECONDS
    now = START_SECONDS
    while now < day.end:
        if now > until:
            until = min(day.end, (now // CHUNK_SECONDS + 1) * CHUNK_SECONDS)
            first = int(np.searchsorted(arrivals, until - PAST_SECONDS))
            run = played(fleet, until, first)
        number, removed = policy.wanted(Sight(run, first, fleet, now))
        until = min(until, fleet.resize(min(number, MOST_ENGINES - 8), now, removed))
        now += policy.every_seconds
    return fleet, played(fleet)
