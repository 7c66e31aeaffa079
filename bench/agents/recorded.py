"""Policies and admission on recorded agent sessions, each seed in another order of the sessions.

    python bench/agents/recorded.py sessions.jsonl.xz --rates 0.02,0.035 --seeds 1,2,3
    python bench/agents/recorded.py coding-agents

The file has one session per line, without start times (docs/research/traces.md). The public
sessions are those of kv-cache-tester (Apache-2.0). `coding-agents` is the synthetic workload that
is fitted to them: each seed makes other sessions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lmetric.profiles import load_profile
from lmetric_lab.packed import open_packed
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.synthetic import read_synthetic
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.workload import Workload, prepare

INSTANCES = 8
BLOCK_TOKENS = 64
PROFILE = load_profile("independent-sim").in_blocks_of(BLOCK_TOKENS)
RIVALS: dict[str, dict[str, Any]] = {
    "total_delay, auto": {"policy": "total_delay", "programs": "auto"},
    "total_delay": {"policy": "total_delay"},
    "lmetric": {"policy": "lmetric"},
    "llmd_scorers": {"policy": "llmd_scorers"},
    "llmd_affinity": {"policy": "llmd_affinity"},
    "linear": {"policy": "linear"},
    "ThunderAgent-like": {"policy": "lmetric", "programs": "thunder_agent"},
}


def numbers(text: str) -> list[float]:
    """The numbers of a list with commas."""
    return [float(each) for each in text.split(",")]


def sessions(file: Path) -> list[str]:
    """The lines of a file with one session per line."""
    with open_packed(file) as opened:
        return [line.decode().rstrip("\n") for line in opened]


def trace_of(lines: list[str] | None, seed: int, rate: float) -> Trace:
    """The sessions in the order of the seed; None: the synthetic workload."""
    if lines is None:
        described = read_synthetic("coding-agents", seed=seed, session_rate=rate, block_tokens=BLOCK_TOKENS)
        return described.make()
    order = np.random.default_rng(seed).permutation(len(lines))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "sessions.jsonl"
        file.write_text("\n".join(lines[each] for each in order) + "\n")
        return load_trace(file, session_rate=rate, block_tokens=BLOCK_TOKENS)


def played(lines: list[str] | None, seed: int, rate: float, rivals: list[str]) -> dict[str, Run]:
    """A run of each rival."""
    workload = prepare(trace_of(lines, seed, rate), PROFILE)
    return {name: run(workload, seed, RIVALS[name]) for name in rivals}


def run(workload: Workload, seed: int, rival: dict[str, Any]) -> Run:
    """A run on the fleet; `rival`: further arguments of `simulate`, which win."""
    fixed: dict[str, Any] = {
        "instances": INSTANCES,
        "profile": PROFILE,
        "programs": "none",
        "admission": "vllm",
        "cached_answers": True,
        "seed": seed,
    }
    return simulate(workload, **{**fixed, **rival})


def main() -> None:
    """Prints a row per rate and rival: means over the seeds, the spread in brackets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--rates", type=numbers, default=[0.02, 0.035, 0.05, 0.08, 0.1], help="sessions per second"
    )
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--rivals", type=int, default=len(RIVALS), help="number of first rivals to run")
    options = parser.parse_args()
    rivals, lines = list(RIVALS)[: options.rivals], None
    if str(options.file) != "coding-agents":
        lines = sessions(options.file)
    print("| sessions/s | | mean end to end, s | cached | longest hold, s |\n| --- | --- | --- | --- | --- |")
    for rate in options.rates:
        runs = [played(lines, int(seed), rate, rivals) for seed in options.seeds]
        for name in rivals:
            each = [run[name] for run in runs]
            means = [float(np.nanmean(run.e2e_seconds)) for run in each]
            cached = np.mean([run.hit_tokens.sum() / run.input_tokens.sum() for run in each])
            hold = max(run.hold_seconds.max() for run in each)
            spread = f"{np.mean(means):.1f} [{min(means):.1f}, {max(means):.1f}]"
            print(f"| {rate:g} | {name} | {spread} | {cached:.1%} | {hold:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
