"""The study of overload: goodput against the offered load, and a flood by one tenant."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tables import rendered
from world import ARMS, Arm, Stage, play

from rerun import Pool, Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "overload.md", rendered)
figure = RERUN.figure

LOADS = (0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
SHOWN = ["offered", "goodput", "refused", "late", "ttft_p50", "ttft_p99"]
FLOODS = (0.4, 1.0, 2.0, 3.0)


def rows(world: Pool, stages: Sequence[Stage], arms: Sequence[Arm], **told: Any) -> Row:
    """Runs all arms on all scenarios, each figure one number per seed."""
    made = []
    if world.quick:
        stages = [replace(stages[-1], load=min(stages[-1].load, 1.5))]
    for stage, arm, found in world.all(play, stages, arms):
        made.append({"stage": stage.label, "policy": arm.label, **columns(found)})
        print(f"{stage.label}: {arm.label}: {made[-1]}", file=sys.stderr, flush=True)
    return {"rows": made, "columns": SHOWN, **told}


@figure("chats", "Goodput against the offered load: chats")
def chats(world: Pool) -> Row:
    return rows(world, [Stage(load) for load in LOADS], ARMS, compared=["goodput", "peak"])


@figure("documents", "Goodput against the offered load: documents")
def documents(world: Pool) -> Row:
    stages = [Stage(load, "documents") for load in LOADS]
    return rows(world, stages, ARMS, compared=["goodput", "peak"])


@figure("flood", "A flood by another tenant")
def flood(world: Pool) -> Row:
    stages = [Stage(0.4, name, more) for name in ("chats", "documents") for more in FLOODS]
    return rows(world, stages, ARMS, compared=["ttft_p99", "first"], columns=[*SHOWN, "wait_p99"])


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=5, traces="no file: the workload is made")
