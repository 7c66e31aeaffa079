"""Measures `/metrics` with 1,000 engines: size, CPU time, and the longest stop of the event loop.

    python bench/observe/metrics.py [--rounds 10] [--out FILE]

The router runs in this process, the engines and the client in processes of their own. First, 2,000
requests of 1 KB give the histograms values. A round reads /metrics in each format. The router reads
load and health of the engines once a minute only: that work is no part of /metrics.

All times are CPU time of the event loop's thread, so other work on the machine does not count. A
stop is the time between two turns of a task that is always ready. `idle` is half a second without
/metrics in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import ROOT, about, median_range, write_result

ENGINES, FIRST_ENGINE, PORT = 1000, 25000, 24999
REQUESTS_PER_SECOND, REQUEST_SECONDS = 200, 10
TICK_SECONDS, IDLE_SECONDS = 0.001, 0.5
ACCEPT = {"text": "text/plain", "openmetrics": "application/openmetrics-text"}
HTTP = ROOT / "bench" / "http"


def client() -> None:
    """Reads /metrics in the format of each line of the input. Prints the bytes and samples."""
    for line in sys.stdin:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
        connection.request("GET", "/metrics", headers={"accept": ACCEPT[line.strip()]})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200:
            sys.exit(f"metrics.py: /metrics answered {answer.status}: {body[:200]!r}")
        samples = sum(bool(row) and not row.startswith(b"#") for row in body.split(b"\n"))
        print(json.dumps({"bytes": len(body), "samples": samples}), flush=True)


async def watched(work: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    """Returns what the work returns, its CPU time and the longest stop meanwhile."""
    longest, last = 0.0, time.thread_time()

    async def turn() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(TICK_SECONDS)

    turning = asyncio.create_task(turn())
    began = time.thread_time()
    found = await work()
    used = time.thread_time() - began
    turning.cancel()
    with suppress(asyncio.CancelledError):
        await turning
    return {"cpu_ms": used * 1e3, "stop_ms": longest * 1e3, "found": found}


async def measured(rounds: int) -> list[dict[str, dict[str, float]]]:
    """Returns the figures of each round: idle, and of each format."""
    from lmetric.config import ServerConfig
    from lmetric.server.app import Server

    ports = [FIRST_ENGINE + number for number in range(ENGINES)]
    engines = [{"url": f"http://127.0.0.1:{port}", "name": f"e{n}"} for n, port in enumerate(ports)]
    mock = await asyncio.create_subprocess_exec(sys.executable, HTTP / "mock.py", *map(str, ports))
    await asyncio.sleep(3)
    quiet = {"load": {"interval": 60}, "health": {"interval": 60}}
    server = Server(ServerConfig.model_validate({"port": PORT, "model": "mock", "engines": engines} | quiet))
    gc.collect()
    await server.start(gc.freeze)  # as `lmetric-router serve`
    pipe = asyncio.subprocess.PIPE
    reader = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=pipe, stdout=pipe
    )
    try:
        load = [HTTP / "load.py", "open", PORT, 1024, REQUESTS_PER_SECOND, REQUEST_SECONDS, "warm", "-"]
        loading = await asyncio.create_subprocess_exec(sys.executable, *map(str, load), stdout=pipe)
        sent = json.loads((await loading.communicate())[0])
        if sent["errors"]:
            sys.exit(f"metrics.py: requests failed: {sent}")

        async def read(accept: str) -> dict[str, int]:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(f"{accept}\n".encode())
            found: dict[str, int] = json.loads(await reader.stdout.readline())
            return found

        result = []
        for number in range(rounds + 1):
            row = {"idle": await watched(lambda: asyncio.sleep(IDLE_SECONDS))}
            for accept in ACCEPT:
                got = await watched(lambda accept=accept: read(accept))
                row[accept] = got["found"] | got
            for each in row.values():
                del each["found"]
            if number:  # the first round warms up
                result.append(row)
        return result
    finally:
        reader.terminate()
        await reader.wait()
        await server.stop()
        mock.terminate()
        await mock.wait()


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-metrics.json")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client()
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    before = os.getloadavg()
    rounds = uvloop.run(measured(given.rounds))
    cells = {
        name: {key: median_range([row[name][key] for row in rounds]) for key in rounds[0][name]}
        for name in rounds[0]
    }
    for name, cell in cells.items():
        shown = ", ".join(
            f"{key} {m:.4g} ({low:.4g} to {high:.4g})" for key, (m, low, high, _) in cell.items()
        )
        print(f"{name}: {shown}")
    result: dict[str, Any] = {
        **about(None, []),
        "load_average": [before, os.getloadavg()],
        "engines": ENGINES,
        "unit": "median, least, greatest, rounds",
        "cells": cells,
    }
    print(write_result(result, "metrics", given.out))


if __name__ == "__main__":
    main()
