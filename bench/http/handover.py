"""Measures the router's CPU time of a request in two segments over a request in one, from /proc.

    python bench/http/handover.py [--rounds 3] [--seconds 3] [--out FILE]

Two engines that cost almost nothing (`mock.py`). Both serve whole requests, or one prefills and
transfers to the other as vLLM's NIXL connector does. Closed loops of 32 connections (wrk), plain
answers of one token, bodies of 1 and 32 KB, a new prompt each time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import proc

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import about, median_range, write_result

HERE = Path(__file__).parent

ENGINES, ROUTER = (8230, 8231), 8239
SIZES = {"1 KB": 1024, "32 KB": 32768}
SCRIPT = """
local number = 0
local padding = string.rep("word ", %d)
request = function()
  number = number + 1
  return wrk.format("POST", "/v1/chat/completions", {["content-type"] = "application/json"},
    '{"model":"mock","max_tokens":1,"messages":[{"role":"user","content":"'
      .. number .. " " .. padding .. '"}]}')
end
"""


def answers(port: int) -> None:
    """Waits until a port answers; under callgrind that takes half a minute."""
    for _ in range(1200):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.1)
    sys.exit(f"handover.py: no answer on port {port}")


def configured(roles: tuple[str, str], scratch: Path, port: int = ROUTER) -> Path:
    """Returns a configuration file of the router, with the two engines in these roles."""
    engines = [
        f"  - {{url: 'http://127.0.0.1:{engine}', role: {role}}}"
        for engine, role in zip(ENGINES, roles, strict=True)
    ]
    config = scratch / "router.yaml"
    config.write_text("\n".join([f"port: {port}", "model: mock", "engines:", *engines]) + "\n")
    return config


def measured(roles: tuple[str, str], size: int, seconds: int, scratch: Path) -> float:
    """Returns microseconds of the router's CPU time per request."""
    config = configured(roles, scratch)
    (scratch / "wrk.lua").write_text(SCRIPT % ((size - 120) // 5))
    program = Path(sys.executable).parent / "lmetric-router"
    router = subprocess.Popen([program, "serve", "--config", config], stderr=subprocess.DEVNULL)
    try:
        answers(ROUTER)
        pids = proc.tree(router.pid)
        wrk = ["wrk", "-t1", "-c32", "-s", str(scratch / "wrk.lua"), f"http://127.0.0.1:{ROUTER}"]
        subprocess.run([*wrk, "-d1s"], check=True, capture_output=True)
        before = proc.cpu_seconds(pids)
        said = subprocess.run([*wrk, f"-d{seconds}s"], check=True, capture_output=True, text=True).stdout
        used = proc.cpu_seconds(pids) - before
        if "Non-2xx" in said or not (found := re.search(r"(\d+) requests in", said)):
            sys.exit(f"handover.py: some requests failed; expected none:\n{said}")
        return used / int(found[1]) * 1e6
    finally:
        router.terminate()
        router.wait()


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kinds = {"one leg": ("both", "both"), "two legs": ("prefill", "decode")}
    mock = subprocess.Popen([sys.executable, HERE / "mock.py", "--nixl", *map(str, ENGINES)])
    cells: dict[str, list[float]] = {f"{kind}, {size}": [] for size in SIZES for kind in kinds}
    try:
        answers(ENGINES[0])
        with tempfile.TemporaryDirectory() as scratch:
            for _ in range(given.rounds):
                for size, length in SIZES.items():
                    for kind, roles in kinds.items():
                        cost = measured(roles, length, given.seconds, Path(scratch))
                        cells[f"{kind}, {size}"].append(cost)
    finally:
        mock.terminate()
        mock.wait()
    result: dict[str, Any] = {
        **about(None, ["wrk"]),
        "load": os.getloadavg(),
        "unit": "microseconds of CPU a request: median, least, greatest, runs",
        "cells": {name: median_range(costs) for name, costs in cells.items()},
    }
    for name, (median, least, greatest, _) in result["cells"].items():
        print(f"{name:20} {median:7.1f} us  ({least:.1f} to {greatest:.1f})")
    print(write_result(result, "handover", given.out))


if __name__ == "__main__":
    main()
