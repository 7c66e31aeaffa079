"""Draws docs/images/planner.png: the work of each instance with whole requests, fixed roles, and
planner.

python bench/planner/picture.py [--traces DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from goal_world import FIXED, INSTANCES, LMETRIC, PLANNER, TRANSFER, Rival, Stage, made
from matplotlib.figure import Figure

from common import ROOT
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from rerun import _use

SPEED = 3.0
BUCKET_SECONDS = 30.0
PANELS = [
    (LMETRIC, "lmetric: all do both"),
    (next(rival for rival in FIXED if rival.label == "12P4D"), "12P4D: roles that somebody fixed"),
    (PLANNER, "planner: roles arise"),
]


def play(rival: Rival) -> Run:
    """Runs one simulation. Returns its timeline in half minutes."""
    settings: dict[str, Any] = {"instances": INSTANCES, **rival.settings}
    return simulate(
        made(Stage(load=SPEED), 0),
        programs="none",
        policy=rival.policy,
        knobs=dict(rival.knobs) or None,
        output_known=False,
        guard=False,
        transfer=TRANSFER,
        profile=Stage().profile,
        timeline_seconds=BUCKET_SECONDS,
        **settings,
    )


def main() -> None:
    """Runs and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    options = parser.parse_args()
    _use(options.traces)
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    for axis, (rival, title) in zip(axes, PANELS, strict=True):
        run = play(rival)
        line = run.timeline
        busy = slice(1, int(run.arrival_seconds.max() // BUCKET_SECONDS))  # while requests arrive
        prefilled = line.prefill_tokens[:, busy].ravel() / BUCKET_SECONDS / 1e3
        axis.plot(
            prefilled, line.running[:, busy].ravel(), ".", ms=4.5, alpha=0.4, mec="none", color="#1f5fa8"
        )
        mean, tpot = run.e2e_seconds.mean(), np.nanpercentile(run.tpot_seconds, 99) * 1e3
        axis.set_title(f"{title}\nmean E2E {mean:.1f} s, P99 TPOT {tpot:.0f} ms", fontsize=10)
        axis.set_xlabel("prompt tokens computed, 1,000/s")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("requests in the batch")
    figure.supxlabel("one dot: one of 16 instances in half a minute", fontsize=9)
    figure.savefig(ROOT / "docs" / "images" / "planner.png", dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
