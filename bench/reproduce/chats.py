"""Policies against LMETRIC without its guard where no agents are, by load.

    python bench/reproduce/chats.py --traces FOLDER --seeds 2
    python bench/reproduce/chats.py --traces FOLDER --policies llmd_scorers,linear --loads 0.5,0.9

Loads are shares of the load that LMETRIC sustains on the trace, with 16 instances, as Figure 25 has
found it. FOLDER has mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz. `default` is what
`serve` does. `--figure NAME` keeps the changes of each seed in bench/reproduce/results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from world import DEFAULT, LMETRIC, Choice, Part, Stage, World, change

import result_files
from common import commit
from lmetric_lab.sim.workload import prepare

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ("conversation", "azure", "chat", "agent", "coder")
OF_THE_PAPER = replace(LMETRIC, settings={"guard": None})
FIGURES = ("e2e_mean", "ttft_mean", "ttft_p99", "tpot_mean")


def stage_of(world: World, label: str) -> Stage:
    """A workload with the maximum loads of Figure 25; no search."""
    rows = result_files.read_figure(RESULTS, "25")["maximum"]
    most = [row for row in rows if (row["stage"], row["policy"]) == (label, "lmetric")]
    rates = [float(rate) for row in most for rate in row["requests_per_second"]]
    profile, (_, *traces) = world.traces_of(label)
    parts = [
        Part(prepare(trace, profile), rates[seed % len(rates)] * trace.duration_seconds / len(trace))
        for seed, trace in enumerate(traces)
    ]
    return Stage(label, profile, parts[0], tuple(parts))


def main() -> None:
    """Prints a row per workload, load and policy: changes in percent, mean and range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default="default")
    parser.add_argument("--loads", default="0.3,0.5,0.7,0.9,0.95")
    parser.add_argument("--figure", help="name in bench/reproduce/results")
    options = parser.parse_args()
    world = World(options.traces, seeds=options.seeds, quick=False)
    policies = [
        DEFAULT if name == "default" else Choice(name, settings={"guard": None})
        for name in options.policies.split(",")
    ]
    rows: list[dict[str, Any]] = []
    print("| workload | load | policy | mean end to end | mean TTFT | P99 TTFT | mean TPOT |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for label in options.workloads.split(","):
        stage = stage_of(world, label)
        for load in map(float, options.loads.split(",")):
            *each, base = world.many(stage, [*policies, OF_THE_PAPER], fraction=load)
            for policy, found in zip(policies, each, strict=True):
                changes = {name: change(found, base, name) for name in FIGURES}
                rows.append({"stage": f"{label}, {load:.0%}", "policy": policy.name} | changes)
                cells = [shown(np.array(changes[name]) * 100) for name in FIGURES]
                print(f"| {label} | {load:.0%} | {policy.name} | {' | '.join(cells)} |", flush=True)
    if options.figure:
        about = {"figure": options.figure, "title": "Chats against LMETRIC", "quick": False}
        about |= {"commit": commit(), "seeds": options.seeds, "first_seed": 0}
        result_files.write_figure(about | {"rows": rows}, RESULTS)


def shown(percent: np.ndarray[Any, Any]) -> str:
    """The mean and the range of changes."""
    return f"{percent.mean():+.1f}% ({percent.min():+.1f}, {percent.max():+.1f})"


if __name__ == "__main__":
    main()
