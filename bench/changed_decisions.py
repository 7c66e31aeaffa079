"""Compares decisions and mean end-to-end times of two checkouts, in simulations of three traces.

    python bench/changed_decisions.py --before CHECKOUT

CHECKOUT is another working tree of this repository with its extension built. Each row is a trace
with one use of queues: agent programs, admission by load, an order by tenants' service, and the
last two together. In all rows but the first, programs are the default's, `auto`. Arrivals come
faster than the fleet serves them. Each conversation is a tenant; in the other traces, the first of
six tenants sends half of the requests. Simulations are deterministic, so a change that only moves
code shows 0 changed decisions. Under overload, one changed decision changes the rest of a run, so
the last column is the mean change over the seeds, with its standard error. A run with 8 seeds takes
about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
SHORT = {"p50": 200, "mean": 600, "max": 8000}
LONG = {"p50": 3000, "mean": 4500, "max": 30_000}
ANSWERS = {"p50": 120, "mean": 200, "max": 2000}
FAMILIES = {"count": 50, "zipf": 1.0, "tokens": 1000}
TURNS = {"turns": {"quantiles": {0: 1, 1: 20}}, "think_seconds": {"p50": 3, "p90": 15}}
SHARED = {"duration_seconds": 40, "output_tokens": ANSWERS, "prefixes": FAMILIES}
TRACES = {
    "chats": SHARED | {"synthetic": "requests", "rate": 45, "input_tokens": SHORT},
    "documents": SHARED | {"synthetic": "requests", "rate": 8, "input_tokens": LONG},
    "conversations": SHARED | {"synthetic": "sessions", "rate": 4, "input_tokens": SHORT} | TURNS,
}
BY_SERVICE = {"priority": "vtc", "local_order": "priority"}
ADMISSION = {"load_admission": {"room_seconds": 0.1}}
USES: dict[str, dict[str, Any]] = {
    "programs": {"programs": "admit"},
    "admission": ADMISSION,
    "order by service": BY_SERVICE,
    "admission, order by service": ADMISSION | BY_SERVICE,
}
RUN = """
import dataclasses, json, sys
import numpy as np
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.synthetic import read_synthetic
from lmetric_lab.sim.workload import prepare
fleet = dict(profile="qwen2.5-14b-a100", instances=4, admission="vllm")
traces, uses, seeds = json.loads(sys.argv[1])
for described in traces.values():
    made = [read_synthetic(json.dumps(described | {"seed": seed})).make() for seed in range(seeds)]
    for use in uses.values():
        instances, means = [], []
        for trace in made:
            if trace.sessions is None:
                shares = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
                tenants = np.random.default_rng(1).choice(6, len(trace), p=shares)
                trace = dataclasses.replace(trace, sessions=tenants)
            run = simulate(prepare(trace, fleet["profile"]), **fleet, **use)
            instances += run.instance.tolist()
            means.append(np.nanmean(run.finished_seconds - run.arrival_seconds))
        print(json.dumps([instances, means]))
"""


def measure(checkout: Path, seeds: int) -> list[tuple[Any, Any]]:
    """Returns the instances of all requests and each seed's mean end-to-end seconds, by row."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "python")}
    command = [sys.executable, "-c", RUN, json.dumps([TRACES, USES, seeds])]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"changed_decisions.py: {checkout}: exit status {done.returncode}: {done.stderr[-500:]}")
    rows = map(json.loads, done.stdout.splitlines())
    return [(np.array(instances), np.array(means)) for instances, means in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    checkouts = [options.before.resolve(), ROOT.resolve()]
    with ThreadPoolExecutor() as threads:
        rows = zip(*threads.map(lambda each: measure(each, options.seeds), checkouts), strict=True)
    print("| trace | queues | requests | changed decisions | mean E2E before (s) | after (s) | change |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    names = [f"{trace} | {use}" for trace in TRACES for use in USES]
    for name, ((chosen, before), (other, after)) in zip(names, rows, strict=True):
        each = after / before - 1
        changed = f"{np.sum(chosen != other):,} ({np.mean(chosen != other):.1%})"
        change = f"{each.mean():+.2%} ± {each.std() / len(each) ** 0.5:.2%}"
        print(
            f"| {name} | {len(chosen):,} | {changed} | {before.mean():.2f} | {after.mean():.2f} | {change} |"
        )


if __name__ == "__main__":
    main()
