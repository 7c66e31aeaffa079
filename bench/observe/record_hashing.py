"""Measures how long the writing of records stops the event loop, in two checkouts.

    python bench/observe/record_hashing.py --before CHECKOUT [--rounds 5] [--out FILE]

The records are those of 100 prompts of 100,000 tokens, which come at once. Meanwhile the event loop
wakes up each millisecond. A stop is the time beyond that. `idle` is the longest stop without any
record, in the same process before. Each round runs both checkouts, each in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import ROOT, about, median_range, write_result

PROMPTS, TOKENS, BLOCK_TOKENS = 100, 100_000, 16
TICK_SECONDS = 0.001
IDLE_SECONDS = 1.0


async def longest_stop(is_over: Any) -> float:
    """Returns the longest stop of the event loop until ``is_over`` returns true, in ms."""
    longest, last = 0.0, time.monotonic()
    while not is_over():
        await asyncio.sleep(TICK_SECONDS)
        now = time.monotonic()
        longest, last = max(longest, now - last - TICK_SECONDS), now
    return longest * 1e3


async def measured(folder: Path) -> dict[str, float]:
    """Writes the records, and returns stops in ms and the time of all records in ms."""
    from lmetric._core import Request
    from lmetric.config import RecordsConfig
    from lmetric.server.observe.recorder import Draft, Ended, Recorder

    recorder = Recorder(RecordsConfig(path=folder), cast(Any, SimpleNamespace(pools=[])))
    writer = recorder.writer
    rng = np.random.default_rng(1)
    ended = []
    for number in range(PROMPTS):
        tokens = rng.integers(0, 100_000, TOKENS, np.uint32)
        ended.append(
            Ended(
                Draft(Request(tokens), True, tokens.nbytes),
                *(1.0, "m", "/v1/completions", "", f"{number}", 200, "", "e0", BLOCK_TOKENS, 256),
                *(1.0, 0.1, TOKENS, 0, 10),
            )
        )
    recorder.start()
    until = time.monotonic() + IDLE_SECONDS
    idle = await longest_stop(lambda: time.monotonic() > until)
    began = time.monotonic()
    for each in ended:
        writer.put(each, each.draft.prompt_bytes)
    stop = await longest_stop(lambda: writer.outcomes["written"] == PROMPTS)
    took = time.monotonic() - began
    recorder.close()
    return {"idle_ms": idle, "stop_ms": stop, "all_records_ms": took * 1e3}


def of_checkout(tree: Path) -> dict[str, float]:
    """Returns the figures of a checkout, from a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "python")}
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-record-hashing.json")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(measured(Path(folder)))))
        return
    trees = {"after": ROOT} if given.before is None else {"before": given.before.resolve(), "after": ROOT}
    rounds = [{name: of_checkout(tree) for name, tree in trees.items()} for _ in range(given.rounds)]
    cells = {
        name: {key: median_range([each[name][key] for each in rounds]) for key in rounds[0][name]}
        for name in trees
    }
    print("| checkout | longest stop | without records | all records |\n| --- | --- | --- | --- |")
    for name, cell in cells.items():
        shown = [f"{m:.1f} ms ({low:.1f} to {high:.1f})" for m, low, high, _ in map(cell.get, KEYS)]
        print(f"| {name} | {' | '.join(shown)} |")
    result: dict[str, Any] = {**about(None, []), "unit": "ms: median, least, greatest, runs", "cells": cells}
    print(write_result(result, "record-hashing", given.out))


KEYS = ("stop_ms", "idle_ms", "all_records_ms")

if __name__ == "__main__":
    main()
