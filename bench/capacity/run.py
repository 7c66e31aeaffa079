"""The study of capacity advice: the twin, two usual rules, a static fleet and an oracle scale a
fleet over a day with bursts.

The twin was developed on seed 0; the figures are of other seeds. No parameter of a rule is tuned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from policies import P90Rule, QueueHpa, TwinPolicy, oracle, static
from tables import rendered
from world import END_SECONDS, START_SECONDS, Fleet, attainment, closed_loop, kept

from lmetric.sim.run import Run
from rerun import Pool, Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "capacity.md", rendered)
figure = RERUN.figure

ORACLE = "oracle"
QUEUE, P90 = {"threshold": 1.0, "least": 4}, {"up": 0.8, "down": 0.6}
CONFIDENCE = 0.8


@dataclass(frozen=True)
class Stage:
    """A start-up delay."""

    delay_seconds: float

    @property
    def label(self) -> str:
        return f"Engines start in {self.delay_seconds:g} s"


@dataclass(frozen=True)
class Rival:
    """A policy by name, with its parameters."""

    name: str
    parameters: tuple[tuple[str, float], ...] = ()

    @property
    def label(self) -> str:
        if not self.parameters:
            return self.name
        return f"{self.name} ({', '.join(f'{name} {value:g}' for name, value in self.parameters)})"


@dataclass(frozen=True)
class Outcome:
    """Figures of a day."""

    within: float  # share of requests within all bounds
    worst: float  # of a quarter of an hour
    cost: float  # engine hours
    starts: float  # engines started


def outcome(fleet: Fleet, run: Run) -> Outcome:
    """The figures of a run."""
    good, at = kept(run), run.arrival_seconds
    edges = np.arange(START_SECONDS, END_SECONDS, 900.0)
    worst = min(float(good[(at >= edge) & (at < edge + 900.0)].mean()) for edge in edges)
    starts = sum(each.ordered > 0 or each.ready > 0 for each in fleet.leases)
    return Outcome(attainment(run), worst, fleet.cost(run), starts)


def play(stage: Stage, rival: Rival, seed: int) -> Outcome:
    """Runs a day."""
    parameters: dict[str, Any] = dict(rival.parameters)
    if rival.name == "static peak":
        return outcome(*static(seed))
    if rival.name == ORACLE:
        return outcome(*oracle(seed, stage.delay_seconds))
    makers = {
        "queue HPA": QueueHpa,
        "P90 rule": P90Rule,
        "twin": partial(TwinPolicy, stage.delay_seconds),
    }
    return outcome(*closed_loop(makers[rival.name](**parameters), stage.delay_seconds, seed))


def rows(world: Pool, stages: Sequence[Stage], rivals: Sequence[Rival], base: str = ORACLE) -> Row:
    """Runs all policies with all delays, each figure one number per seed."""
    return {"base": base, "rows": list(_rows(world, stages, rivals))}


def _rows(world: Pool, stages: Sequence[Stage], rivals: Sequence[Rival]) -> Iterator[Row]:
    for stage, rival, found in world.all(play, stages, rivals):
        row = {"stage": stage.label, "policy": rival.label, **columns(found, digits=5)}
        print(f"{stage.label}: {rival.label}: {row['within']} {row['cost']}", file=sys.stderr, flush=True)
        yield row


@figure("closed_loop", "Capacity advice in a closed loop")
def day(world: Pool) -> Row:
    rivals = [
        Rival(ORACLE),
        Rival("twin", (("confidence", CONFIDENCE),)),
        Rival("queue HPA", tuple(QUEUE.items())),
        Rival("P90 rule", tuple(P90.items())),
        Rival("static peak"),
    ]
    return rows(world, [Stage(each) for each in ((120.0,) if world.quick else (60.0, 120.0, 300.0))], rivals)


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=3, traces="no files")
