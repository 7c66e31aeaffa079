"""Policies and admission on recorded agent sessions, each seed in another order of the sessions.

    python bench/agents/recorded.py sessions.jsonl.xz --rates 0.02,0.035 --seeds 1,2,3
    python bench/agents/recorded.py coding-agents
    python bench/agents/recorded.py sessions.jsonl.xz --rates 0.035 --fleets "equal;endless"

`--figure NAME` keeps the figures of each seed in bench/agents/results.

The file has one session per line, without start times (docs/research/traces.md). The public
sessions are those of kv-cache-tester (Apache-2.0). `coding-agents` is the synthetic workload that
is fitted to them: each seed makes other sessions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import result_files
from common import commit
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
    "lmetric, auto": {"policy": "lmetric", "programs": "auto"},
    "planner, auto": {"policy": "planner", "programs": "auto", "transfer": "25"},
    "lmetric_pull, auto": {
        "policy": "lmetric_pull",
        "programs": "auto",
        "prefix_fetch": "on",
        "transfer": "25",
    },
    "total_delay, auto, fetches": {
        "policy": "total_delay",
        "programs": "auto",
        "prefix_fetch": "on",
        "transfer": "25",
    },
}


FLEETS: dict[str, dict[str, Any]] = {
    "equal": {},
    "endless": {"profile": PROFILE.model_copy(update={"cache_blocks": 2_000_000})},  # evicts nothing
    "host tier": {"host_tier": {"capacity": 2.0, "gigabytes_per_second": 50.0, "step_ratio": 0.05}},
    "unequal": {"profile": [PROFILE] * 4 + [PROFILE.slower(2.0)] * 4},
    "delayed": {"signals": "delayed"},  # load reports each second
    "1 s late": {"signals": "delayed", "event_delay_seconds": 1.0},  # events of caches, too
    "4 routers": {"routers": 4},
    "4 routers, exchange": {"routers": 4, "sharing_seconds": 0.1},
    "4 routers, exchange 1 s": {"routers": 4, "sharing_seconds": 1.0},
}
RESULTS = Path(__file__).parent / "results"
FIGURES = ("e2e", "cached", "hold")
Row = dict[str, Any]


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


def played(workload: Workload, seed: int, rivals: list[str], fleets: list[str]) -> Iterator[Row]:
    """The figures of each rival on each fleet."""
    for fleet in fleets:
        for name in rivals:
            found = run(workload, seed, RIVALS[name] | FLEETS[fleet])
            yield {
                "stage": fleet,
                "policy": name,
                "e2e": float(np.nanmean(found.e2e_seconds)),
                "cached": float(found.hit_tokens.sum() / found.input_tokens.sum()),
                "hold": float(found.hold_seconds.max()),
            }


def shown(rows: Iterable[Row]) -> str:
    """A table: means over the seeds, the spread in brackets."""
    lines = ["| | | mean end to end, s | cached | longest hold, s |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        spread = f"{np.mean(row['e2e']):.1f} [{min(row['e2e']):.1f}, {max(row['e2e']):.1f}]"
        cells = [
            row["stage"],
            row["policy"],
            spread,
            f"{np.mean(row['cached']):.1%}",
            f"{max(row['hold']):,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def keep(figure: str, title: str, seeds: list[int], rows: list[Row]) -> None:
    """Writes the values of consecutive seeds."""
    about = {"figure": figure, "title": title, "quick": False, "commit": commit()}
    about |= {"seeds": len(seeds), "first_seed": seeds[0]}
    result_files.write_figure(about | {"rows": rows}, RESULTS)


def main() -> None:
    """Prints a row per rate, fleet and rival."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--rates", type=numbers, default=[0.02, 0.035, 0.05, 0.08, 0.1], help="sessions per second"
    )
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    every = [*range(1, len(RIVALS) + 1)]
    named = "; ".join(f"{place} {name}" for place, name in enumerate(RIVALS, 1))
    parser.add_argument("--rivals", type=numbers, default=every, help=named)
    parser.add_argument("--fleets", default="equal", help="; ".join(FLEETS))
    parser.add_argument("--figure", help="name in bench/agents/results")
    options = parser.parse_args()
    rivals = [list(RIVALS)[int(place) - 1] for place in options.rivals]
    fleets, lines = options.fleets.split(";"), None
    if str(options.file) != "coding-agents":
        lines = sessions(options.file)
    rows: dict[tuple[str, str], Row] = {}
    for seed in map(int, options.seeds):
        for rate in options.rates:
            workload = prepare(trace_of(lines, seed, rate), PROFILE)
            for each in played(workload, seed, rivals, fleets):
                each["stage"] = f"{rate:g} sessions/s, {each['stage']}"
                print(f"seed {seed}: {each}", file=sys.stderr, flush=True)
                row = rows.setdefault((each["stage"], each["policy"]), each | {name: [] for name in FIGURES})
                for name in FIGURES:
                    row[name].append(each[name])
    if options.figure:
        seeds = [int(seed) for seed in options.seeds]
        keep(options.figure, f"Recorded agents: {options.fleets}", seeds, list(rows.values()))
    print(shown(rows.values()))


if __name__ == "__main__":
    main()
