"""The study of fleet changes: instances that join, leave and restart, with cold and with warm
caches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tables import rendered
from world import COLD, STEADY, WARM, Rival, Stage, play

from rerun import Pool, Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "fleet_changes.md", rendered)
figure = RERUN.figure

RATE = 0.8
RIVALS = [STEADY, COLD, WARM]


def rows(world: Pool, stages: Sequence[Stage], rivals: Sequence[Rival]) -> Row:
    """Runs all rivals in all scenarios, each figure one number per seed."""
    made = []
    stages = [replace(stages[0], rate=stages[0].rate / 4)] if world.quick else stages
    for stage, rival, found in world.all(play, stages, rivals):
        made.append({"stage": stage.label, "policy": rival.label, **columns(found, digits=5)})
        print(f"{stage.label}: {rival.label}: p99 {made[-1]['ttft_p99']}", file=sys.stderr, flush=True)
    return {"base": rivals[0].label, "rows": made}


@figure("restart", "Three engines restart one after another")
def restart(world: Pool) -> Row:
    return rows(world, [Stage("restart", RATE)], RIVALS)


@figure("leave", "An engine leaves")
def leave(world: Pool) -> Row:
    return rows(world, [Stage("leave", RATE)], RIVALS)


@figure("join", "An engine joins")
def join(world: Pool) -> Row:
    return rows(world, [Stage("join", RATE)], RIVALS)


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=5, traces="no files")
