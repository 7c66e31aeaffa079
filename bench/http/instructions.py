"""Counts the instructions of a request in two checkouts, by callgrind (Debian: valgrind).

    python bench/http/instructions.py --before CHECKOUT [--requests 500] [--out FILE]

CHECKOUT is another working tree of this repository, with its extension built in the same cargo
profile as this one's. The kernel is not counted, nor is periodic work, which a slow machine runs
more often between two requests. Counts differ by 0.5% between runs, independent of the machine's
load; CPU times of the same requests (`bursts.py`) differ by several percent. One client sends one
request after the other, each with a new prompt; the engines are mocks that answer at once. Chunks
are counted from received bytes to written bytes (`chunks.py`): with sockets, the count depends on
the number of chunks that arrive together.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from handover import ENGINES, ROUTER, answers, configured

from common import about, write_result

HERE = Path(__file__).parent
WARM_UP = 300  # Requests until the interpreter has specialized its bytecode.
# Name: roles of the engines, bytes of the prompt.
CELLS = {
    "plain, 1 KB": (("both", "both"), 900),
    "plain, 32 KB": (("both", "both"), 32_000),
    "prefill/decode by NIXL, 1 KB": (("prefill", "decode"), 900),
}
CHUNKS = (2_000, 22_000)  # The count is the difference of the two runs.
SERVE = "from lmetric.cli import main; main()"


def ask(first: int, requests: int, prompt_bytes: int, port: int = ROUTER) -> None:
    """Sends `count` requests on one connection, numbered from ``first``."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number in range(first, first + requests):
        text = f"{number} " + "word " * (prompt_bytes // 5)
        messages = [{"role": "user", "content": text}]
        body = json.dumps({"model": "mock", "max_tokens": 1, "messages": messages})
        client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = client.getresponse()
        said = answer.read()
        if answer.status != 200:
            sys.exit(f"instructions.py: the router answered {answer.status}: {said!r:.300}")
    client.close()


def started(tree: Path, *command: Any, under: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Starts Python with the package of a checkout; ``under`` is the program that runs it."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "python")}
    line = [*under, sys.executable, *map(str, command)]
    return subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL)


def callgrind(scratch: Path, from_start: str) -> tuple[str, ...]:
    """Returns the command line of callgrind, with an empty folder for counts. ``from_start``: count
    from the start."""
    for old in scratch.glob("callgrind.*"):
        old.unlink()
    out = f"--callgrind-out-file={scratch}/callgrind.%p"
    return ("valgrind", "--tool=callgrind", out, f"--instr-atstart={from_start}")


def on_sockets(scratch: Path) -> int:
    """Returns the instructions of what libuv calls for sockets."""
    dump = max(scratch.glob("callgrind.*"), key=lambda path: path.stat().st_size)
    annotate = ["callgrind_annotate", "--threshold=100", "--inclusive=yes", "--show-percs=no", str(dump)]
    said = subprocess.run(annotate, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^ *([\d,]+) .*:uv__io_poll( |$)", said, re.M)
    if found is None:
        sys.exit("instructions.py: uv__io_poll was not counted; is the event loop uvloop's?")
    return int(found[1].replace(",", ""))


def total(scratch: Path) -> int:
    """Returns all instructions that callgrind counted."""
    totals = [re.search(r"^totals: (\d+)", path.read_text(), re.M) for path in scratch.glob("callgrind.*")]
    return max(int(found[1]) for found in totals if found)


def counted(tree: Path, roles: tuple[str, str], prompt_bytes: int, requests: int, scratch: Path) -> float:
    """Returns the instructions of a checkout's router for a request."""
    config = configured(roles, scratch)
    router = started(tree, "-c", SERVE, "serve", "--config", config, under=callgrind(scratch, "no"))
    try:
        answers(ROUTER)
        ask(0, WARM_UP, prompt_bytes)
        control = ["callgrind_control", str(router.pid)]
        subprocess.run([*control, "--instr=on"], check=True, capture_output=True)
        ask(WARM_UP, requests, prompt_bytes)
        subprocess.run([*control, "--instr=off"], check=True, capture_output=True)
        subprocess.run([*control, "--dump"], check=True, capture_output=True)
        time.sleep(1)
    finally:
        router.terminate()
        router.wait()
    return on_sockets(scratch) / requests


def chunk(tree: Path, scratch: Path) -> float:
    """Returns the instructions of a checkout's reader for a chunk of a stream."""
    counts = []
    for chunks in CHUNKS:
        if started(tree, HERE / "chunks.py", chunks, under=callgrind(scratch, "yes")).wait() != 0:
            sys.exit("instructions.py: chunks.py failed")
        counts.append(total(scratch))
    return (counts[1] - counts[0]) / (CHUNKS[1] - CHUNKS[0])


def main() -> None:
    """Counts, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-instructions.json")
    given = parser.parse_args()
    trees = {"before": given.before.resolve(), "after": HERE.parent.parent}
    mock = subprocess.Popen([sys.executable, HERE / "mock.py", "--nixl", *map(str, ENGINES)])
    cells: dict[str, dict[str, float]] = {}
    print("| request | before | after | difference |\n| --- | --- | --- | --- |")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            counts: dict[str, Callable[[Path], float]] = {
                cell: partial(
                    counted, roles=roles, prompt_bytes=size, requests=given.requests, scratch=folder
                )
                for cell, (roles, size) in CELLS.items()
            }
            counts["chunk of a plain stream"] = partial(chunk, scratch=folder)
            for cell, count in counts.items():
                found = cells[cell] = {name: count(tree) for name, tree in trees.items()}
                before, after = found["before"], found["after"]
                print(f"| {cell} | {before:,.0f} | {after:,.0f} | {after / before - 1:+.1%} |")
    finally:
        mock.terminate()
        mock.wait()
    result: dict[str, Any] = {**about(None, ["valgrind"]), "unit": "instructions", "cells": cells}
    print(write_result(result, "instructions", given.out))


if __name__ == "__main__":
    main()
