"""Compares the CPU time of a request in two checkouts of the router: bursts of requests in turn.

    python bench/http/bursts.py --before CHECKOUT [--pairs 80] [--requests 300] [--out FILE]

Both routers run all the time, so other work on the machine affects both alike. CPU time is the
routers' own, in nanoseconds from /proc/PID/schedstat. The interval is the 95% interval of the
median, by order statistics. CHECKOUT and the requests are as for `instructions.py`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from handover import ENGINES, answers, configured
from instructions import CELLS, HERE, SERVE, WARM_UP, ask, started

from common import about, write_result

PORTS = {"before": 8237, "after": 8238}


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process's threads so far, finer than the clock ticks of
    `proc.cpu_seconds`."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the 95% interval of the median."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)) - 1)
    return ordered[low], ordered[n - 1 - low]


def compared(
    trees: dict[str, Path], roles: tuple[str, str], prompt_bytes: int, pairs: int, requests: int
) -> dict[str, Any]:
    """Returns the medians of both, in microseconds, and of the ratio."""
    routers: dict[str, subprocess.Popen[bytes]] = {}
    used: dict[str, list[float]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for name, tree in trees.items():
                (folder := Path(scratch) / name).mkdir()
                config = configured(roles, folder, PORTS[name])
                routers[name] = started(tree, "-c", SERVE, "serve", "--config", config)
            for name in trees:
                answers(PORTS[name])
                ask(0, WARM_UP, prompt_bytes, PORTS[name])
            for pair in range(pairs):
                for name in list(trees)[:: 1 if pair % 2 else -1]:
                    before = cpu_seconds(routers[name].pid)
                    ask(WARM_UP + pair * requests, requests, prompt_bytes, PORTS[name])
                    used[name].append((cpu_seconds(routers[name].pid) - before) / requests * 1e6)
        finally:
            for router in routers.values():
                router.terminate()
                router.wait()
    ratios = [after / before for before, after in zip(used["before"], used["after"], strict=True)]
    medians = {name: statistics.median(values) for name, values in used.items()}
    return {**medians, "ratio": statistics.median(ratios), "interval": interval(ratios), "ratios": ratios}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--requests", type=int, default=300, help="of a burst")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-bursts.json")
    given = parser.parse_args()
    trees = {"before": given.before.resolve(), "after": HERE.parent.parent}
    mock = subprocess.Popen([sys.executable, HERE / "mock.py", "--nixl", *map(str, ENGINES)])
    cells = {}
    print(
        "| request | before, us | after, us | ratio, median | 95% interval |\n| --- | --- | --- | --- | --- |"
    )
    try:
        for cell, (roles, size) in CELLS.items():
            found = cells[cell] = compared(trees, roles, size, given.pairs, given.requests)
            low, high = found["interval"]
            figures = f"{found['before']:.1f} | {found['after']:.1f} | {found['ratio']:.3f}"
            print(f"| {cell} | {figures} | {low:.3f} to {high:.3f} |")
    finally:
        mock.terminate()
        mock.wait()
    print(write_result({**about(None, []), "unit": "microseconds", "cells": cells}, "bursts", given.out))


if __name__ == "__main__":
    main()
