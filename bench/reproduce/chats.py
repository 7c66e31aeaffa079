"""Policies against LMETRIC without its guard where no agents are, by load.

    python bench/reproduce/chats.py --traces FOLDER --seeds 2
    python bench/reproduce/chats.py --traces FOLDER --policies llmd_scorers,linear --loads 0.5,0.9
    python bench/reproduce/chats.py --traces FOLDER --workloads conversation --fleets "4 routers"

Loads are shares of the load that LMETRIC sustains on the trace, with 16 instances, as Figure 25 has
found it. FOLDER has mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz. `default` is what
`serve` does. `POLICY+auto` and `POLICY+observe` follow programs, and `unmeasured` is total_delay
with a `recompute_ratio` of 0. LMETRIC has the same fleet and follows no programs. `--figure NAME`
keeps the changes of each seed and the number of held requests in bench/reproduce/results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from world import DEFAULT, LMETRIC, Choice, Part, Stage, World, change

import result_files
from common import commit
from lmetric import policy_table
from lmetric_lab.sim.workload import prepare

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ("conversation", "azure", "chat", "agent", "coder")
OF_THE_PAPER = replace(LMETRIC, settings={"guard": None})
FIGURES = ("e2e_mean", "ttft_mean", "ttft_p99", "tpot_mean")
FORMULA = next(each["formula"] for each in policy_table() if each["name"] == "total_delay")
UNMEASURED = FORMULA.removesuffix(", lowest").replace("recompute_ratio", "0")
FLEETS: dict[str, dict[str, Any]] = {
    "equal": {},
    "delayed": {"signals": "delayed"},  # load reports each second
    "1 s late": {"signals": "delayed", "event_delay_seconds": 1.0},  # events of caches, too
    "4 routers": {"routers": 4},
    "4 routers, exchange": {"routers": 4, "sharing_seconds": 0.1},
}


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


def choice_of(name: str) -> Choice:
    """A policy, with its treatment of programs after a plus; without, none."""
    if name == "default":
        return replace(DEFAULT, label="default")
    policy, _, programs = name.partition("+")
    settings: dict[str, Any] = {"guard": None, "programs": programs or "none"}
    if policy == "unmeasured":
        return Choice(UNMEASURED, label=name, settings=settings | {"guard": True})
    return Choice(policy, label=name, settings=settings)


def main() -> None:
    """Prints a row per workload, load and policy: changes in percent, mean and range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default="default")
    parser.add_argument("--loads", default="0.3,0.5,0.7,0.9,0.95")
    parser.add_argument("--fleets", default="equal", help="; ".join(FLEETS))
    parser.add_argument("--figure", help="name in bench/reproduce/results")
    options = parser.parse_args()
    world = World(options.traces, seeds=options.seeds, quick=False)
    policies = [choice_of(name) for name in options.policies.split(",")]
    rows: list[dict[str, Any]] = []
    print("| workload | load | policy | mean end to end | mean TTFT | P99 TTFT | mean TPOT | held |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for label in options.workloads.split(","):
        stage = stage_of(world, label)
        for load, fleet in product(map(float, options.loads.split(",")), options.fleets.split(";")):
            *each, base = world.many(stage, [*policies, OF_THE_PAPER], fraction=load, **FLEETS[fleet])
            where = f"{load:.0%}" if fleet == "equal" else f"{load:.0%}, {fleet}"
            for policy, found in zip(policies, each, strict=True):
                changes = {name: change(found, base, name) for name in FIGURES}
                held = [run["held"] for run in found]
                rows.append({"stage": f"{label}, {where}", "policy": policy.name} | changes | {"held": held})
                cells = [shown(np.array(changes[name]) * 100) for name in FIGURES]
                print(
                    f"| {label} | {where} | {policy.name} | {' | '.join(cells)} | {sum(held):.0f} |",
                    flush=True,
                )
    if options.figure:
        about = {"figure": options.figure, "title": "Chats against LMETRIC", "quick": False}
        about |= {"commit": commit(), "seeds": options.seeds, "first_seed": 0}
        result_files.write_figure(about | {"rows": rows}, RESULTS)


def shown(percent: np.ndarray[Any, Any]) -> str:
    """The mean and the range of changes."""
    return f"{percent.mean():+.1f}% ({percent.min():+.1f}, {percent.max():+.1f})"


if __name__ == "__main__":
    main()
