"""Compares two checkouts of the router on the same engines, in interleaved pairs of one run.

    python bench/http/before_after.py --before CHECKOUT [--rounds 9] [--seconds 2] [--out FILE]

CHECKOUT is another working tree of this repository, with its extension built in the same cargo
profile as this one's. Each round runs both, one after the other; the next round begins with the
other one. A ratio is after divided by before, of one round. The table prints the median of the
ratios and their range. CPU time is the router's own, from /proc (see run.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import run
from subjects import HERE, SUBJECTS, checkout

sys.path.insert(0, str(HERE.parent))
from common import about, write_result

CELLS = ("c32_1k", "c32_32k", "o500_1k", "s200")
FIGURES = ("cpu_us", "p50_us", "p99_us")
# Cores that other processes may use. Busier rounds are left out if enough quiet rounds exist.
MAX_FOREIGN_CORES = 0.1


def ratios(runs: list[dict[str, Any]], cell: str, figure: str) -> list[tuple[float, float]]:
    """Returns the pairs (before, after) of one figure, a pair per round."""
    pairs = []
    for round_ in sorted({each["round"] for each in runs}):
        values = {
            each["subject"]: each.get(figure)
            for each in runs
            if each["cell"] == cell and each["round"] == round_ and each["foreign_cores"] <= MAX_FOREIGN_CORES
        }
        if values.get("before") and values.get("after"):
            pairs.append((values["before"], values["after"]))
    return pairs


def show(runs: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = ["| cell | figure | before | after | ratio, median | range | pairs |", "|---" * 7 + "|"]
    for cell in CELLS:
        for figure in FIGURES:
            pairs = ratios(runs, cell, figure)
            if not pairs:
                continue
            changes = [after / before for before, after in pairs]
            before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
            lines.append(
                f"| {cell} | {figure} | {before:.1f} | {after:.1f} | {statistics.median(changes):.3f} "
                f"| {min(changes):.3f} to {max(changes):.3f} | {len(changes)} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=2, help="of a run; open loops take 1 more")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-before-after.json")
    options = parser.parse_args()
    SUBJECTS["before"] = checkout(options.before.resolve())
    SUBJECTS["after"] = checkout(HERE.parent.parent)
    bench = run.Bench(Path(sys.prefix), options.seconds)
    runs: list[dict[str, Any]] = []
    try:
        for round_ in range(options.rounds):
            order = ("before", "after") if round_ % 2 == 0 else ("after", "before")
            for name in order:
                runs += bench.subject(name, list(CELLS), round_)
            print(f"round {round_ + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    finally:
        bench.close()
    result = {
        **about(None, ["wrk"]),
        "setting": {"rounds": options.rounds, "seconds": options.seconds, "engines": run.ENGINES},
        "runs": runs,
    }
    path = write_result(result, "before-after", options.out)
    print(show(runs))
    print(f"\nraw figures: {path}")


if __name__ == "__main__":
    main()
