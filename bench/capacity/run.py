"""The study of capacity advice: the twin, two usual rules, static fleets and an oracle scale a
fleet over a day with bursts.

Rules are tuned, and the twin was developed, on seed 0; `closed_loop` has other seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from policies import P90Rule, QueueHpa, TwinPolicy, oracle, static
from tables import chosen, rendered
from world import (
    START_SECONDS,
    Day,
    Fleet,
    attainment,
    closed_loop,
    day_of,
    joint,
    quarters,
    shares,
    trace_of,
    variation,
)  # fmt: skip

from lmetric_lab.sim.result import Run
from lmetric_lab.sim.traces import load_trace
from rerun import Pool, Rerun, columns, traces
from result_files import read_figure

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "capacity.md", rendered)
figure = RERUN.figure

ORACLE, TWIN, QUEUE, P90 = "oracle", "twin", "queue HPA", "P90 rule"
STATIC_PEAK = "static peak"
DELAYS, REAL_DELAYS, TUNED_DELAY = (60.0, 300.0), (60.0, 120.0, 300.0), 120.0
REAL, SLOW, FAST = 86_400.0, 14_400.0, 5_400.0  # lengths of a day, seconds
ORACLE_STEPS, REAL_ORACLE_STEPS = 20, 8  # per hour; on a day of real length
LOAD = "in-flight HPA"
SETTINGS = {"headroom": 0.1}  # of the twin
RECORDED = {
    "Azure, conversations (1 h)": "azure_conv_2023.csv.gz",
    "Mooncake, conversations (1 h)": "mooncake_conversation.jsonl.gz",
}
GRIDS: dict[str, list[dict[str, float]]] = {
    QUEUE: [{"threshold": a, "least": 12} for a in (0.25, 1.0)],
    LOAD: [{"threshold": a} for a in (4.0, 6.0)],
    P90: [{"up": a, "down": b} for a, b in ((0.8, 0.65), (0.9, 0.75), (1.0, 0.75))],
}


@dataclass(frozen=True)
class Stage:
    """A start-up delay, and the length and the bursts of the day."""

    delay_seconds: float
    day_seconds: float = SLOW
    overlap: bool = False

    @property
    def label(self) -> str:
        label = f"Day of {self.day_seconds / 3600:g} h, engines start in {self.delay_seconds:g} s"
        return f"{label}, bursts overlap" if self.overlap else label


@dataclass(frozen=True)
class Rival:
    """A policy by name, with its parameters."""

    name: str
    parameters: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, name: str, parameters: dict[str, float]) -> Rival:
        return cls(name, tuple(parameters.items()))

    @property
    def label(self) -> str:
        if not self.parameters:
            return self.name
        return f"{self.name} ({', '.join(f'{name} {value:g}' for name, value in self.parameters)})"


@dataclass(frozen=True)
class Outcome:
    """Figures of a day. Shares are of the day's requests."""

    attainment: float  # the smallest share of an objective
    ttft: float
    tpot: float
    joint: float  # within all bounds
    worst: float  # attainment of the worst quarter of an hour
    cost: float  # engine hours
    starts: float  # engines started


def outcome(fleet: Fleet, run: Run) -> Outcome:
    """The figures of a run."""
    starts = sum(each.ordered > 0 or each.ready > 0 for each in fleet.leases)
    ttft, tpot = shares(run, day_of(run))
    worst = min(quarters(run, fleet.day))
    return Outcome(attainment(run), ttft, tpot, joint(run), worst, fleet.cost(run), starts)


def play(stage: Stage, rival: Rival, seed: int) -> Outcome:
    """Runs a day."""
    parameters: dict[str, Any] = dict(rival.parameters)
    day = Day(seed, stage.day_seconds, stage.overlap)
    whole: dict[str, Callable[..., tuple[Fleet, Run]]] = {
        STATIC_PEAK: partial(static, day, lambda run: min(quarters(run, day))),
        ORACLE: partial(
            oracle,
            day,
            stage.delay_seconds,
            steps_per_hour=REAL_ORACLE_STEPS if day.seconds >= REAL else ORACLE_STEPS,
        ),
    }
    if rival.name in whole:
        return outcome(*whole[rival.name](**parameters))
    makers = {
        QUEUE: QueueHpa,
        LOAD: partial(QueueHpa, running=True),
        P90: P90Rule,
        TWIN: partial(TwinPolicy, stage.delay_seconds),
    }
    return outcome(*closed_loop(makers[rival.name](**parameters), stage.delay_seconds, day))


def rows(world: Pool, cases: Iterable[tuple[Stage, Rival]]) -> Iterator[Row]:
    """Runs policies, each figure one number per seed."""
    for (stage, rival), found in world.each(play, cases):
        row = {"stage": stage.label, "policy": rival.label, **columns(found, digits=5)}
        print(f"{stage.label}: {rival.label}: {row['attainment']} {row['cost']}", file=sys.stderr, flush=True)
        yield row


def stages(world: Pool, day_seconds: float, overlap: bool = False) -> list[Stage]:
    """The start-up delays on a day of this length; in a quick run, one delay on a fast day."""
    if world.quick:
        return [Stage(TUNED_DELAY, FAST, overlap)]
    delays = REAL_DELAYS if day_seconds >= REAL else DELAYS
    return [Stage(each, day_seconds, overlap) for each in delays]


def tuned(world: Pool, day_seconds: float = SLOW, overlap: bool = False) -> Stage:
    """The stage of the tuning, or one with its delay on another day."""
    return Stage(TUNED_DELAY, FAST if world.quick else day_seconds, overlap)


def against_oracle(world: Pool, found: Iterable[Stage], others: Iterable[Rival] = ()) -> Row:
    """The oracle, the twin and other policies in some scenarios."""
    rivals = [Rival(ORACLE), Rival.of(TWIN, SETTINGS), *others]
    return {"base": ORACLE, "rows": list(rows(world, product(found, rivals)))}


def searched(world: Pool, stage: Stage, steps: int) -> Row:
    """The oracle without a search, with ``steps`` per hour and with three times as many."""
    each = (0, 4) if world.quick else (0, steps, 3 * steps)
    rivals = [Rival.of(ORACLE, {"steps_per_hour": number}) for number in each]
    return {"base": rivals[0].label, "rows": list(rows(world, product([stage], rivals)))}


@figure("tuning", "Rules with several parameters, on the seed of the tuning")
def tuning(world: Pool) -> Row:
    rivals = [
        Rival.of(name, each) for name, grid in GRIDS.items() for each in grid[:: 4 if world.quick else 1]
    ]
    return {"rows": list(rows(world, product([tuned(world)], rivals)))}


@figure("convergence", "The oracle with more and more steps, on the seed of the tuning")
def convergence(world: Pool) -> Row:
    return searched(world, tuned(world), ORACLE_STEPS)


@figure("closed_loop", "Capacity advice in a closed loop")
def day(world: Pool) -> Row:
    stored = read_figure(RERUN.folder / "results", "tuning")["rows"]
    best = [chosen(stored, name) for name in GRIDS]
    grid = [Rival.of(name, each) for name, grid in GRIDS.items() for each in grid]
    rules = [each for each in grid if each.label in best]
    return against_oracle(world, stages(world, SLOW), [*rules, Rival(STATIC_PEAK)])


@figure("bursts", "How much arrivals vary beyond a Poisson process")
def bursts(world: Pool) -> Row:
    found = {name: [load_trace(traces() / file).arrival_seconds] for name, file in RECORDED.items()}
    for name, overlap in (("the study's day", False), ("the same with overlapping bursts", True)):
        days = [trace_of(Day(seed, SLOW, overlap)).arrival_seconds for seed in world.seeds]
        found[name] = [each[each >= START_SECONDS] for each in days]
    return {
        "rows": [{"load": name, **columns([variation(one) for one in each])} for name, each in found.items()]
    }


@figure("fresh", "The same days on seeds that were first run after all choices")
def fresh(world: Pool) -> Row:
    return against_oracle(world, stages(world, SLOW))


@figure("full_day", "Days of their real length, with overlapping bursts, on fresh seeds")
def full_day(world: Pool) -> Row:
    return against_oracle(world, stages(world, REAL, overlap=True))


@figure("full_day_oracle", "The oracle of full days with more and more steps, on the seed of the tuning")
def full_day_oracle(world: Pool) -> Row:
    return searched(world, tuned(world, REAL, overlap=True), REAL_ORACLE_STEPS)


@figure("harder", "The twin on days with overlapping bursts, and on days that change faster")
def harder(world: Pool) -> Row:
    found = [] if world.quick else stages(world, SLOW, overlap=True)
    return against_oracle(world, [*found, *stages(world, FAST)])


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=1, traces=" and ".join(RECORDED.values()))
