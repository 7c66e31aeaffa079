"""Counts the instructions of a request in two checkouts of the router, by callgrind (Debian: valgrind).

    python bench/http/instructions.py --before CHECKOUT [--requests 500] [--out FILE]

CHECKOUT is another working tree of this repository, with its extension built in the same cargo profile as
this one's. The kernel is not counted. Counts differ by 0.5% between runs, whatever else the machine does;
CPU times of the same requests (`before_after.py`) differ by 20%. One client sends one request after the
other, each with a new prompt; the engines are mocks that answer at once.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from handover import ENGINES, ROUTER, answers, configured

from common import about, write_result

HERE = Path(__file__).parent
WARM_UP = 300  # requests until the interpreter has specialized its bytecode
# Name: roles of the engines, bytes of the prompt.
CELLS = {
    "plain, 1 KB": (("both", "both"), 900),
    "plain, 32 KB": (("both", "both"), 32_000),
    "prefill/decode by NIXL, 1 KB": (("prefill", "decode"), 900),
}
SERVE = "from lmetric.cli import main; main()"


def ask(first: int, requests: int, prompt_bytes: int) -> None:
    """Sends so many requests on one connection, numbered from ``first``."""
    client = http.client.HTTPConnection("127.0.0.1", ROUTER, timeout=60)
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


def counted(tree: Path, roles: tuple[str, str], prompt_bytes: int, requests: int, scratch: Path) -> float:
    """Instructions that the router of a checkout takes for a request."""
    config = configured(roles, scratch)
    for old in scratch.glob("callgrind.*"):
        old.unlink()
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
    command = [sys.executable, "-c", SERVE, "serve", "--config", str(config)]
    router = subprocess.Popen(
        [*valgrind, f"--callgrind-out-file={scratch}/callgrind.%p", *command],
        env={**os.environ, "PYTHONPATH": str(tree / "python")},
        stderr=subprocess.DEVNULL,
    )
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
    totals = [re.search(r"^totals: (\d+)", path.read_text(), re.M) for path in scratch.glob("callgrind.*")]
    return max(int(found[1]) for found in totals if found) / requests


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
            for cell, (roles, size) in CELLS.items():
                found = {
                    name: counted(tree, roles, size, given.requests, Path(scratch))
                    for name, tree in trees.items()
                }
                cells[cell] = found
                before, after = found["before"], found["after"]
                print(f"| {cell} | {before:,.0f} | {after:,.0f} | {after / before - 1:+.1%} |")
    finally:
        mock.terminate()
        mock.wait()
    result: dict[str, Any] = {**about(None, ["valgrind"]), "unit": "instructions a request", "cells": cells}
    print(write_result(result, "instructions", given.out))


if __name__ == "__main__":
    main()
