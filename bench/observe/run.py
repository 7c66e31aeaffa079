"""Measures the router's CPU time per request and per streamed chunk with metrics, records, traces,
the live page and the capacity twin.

    python bench/observe/run.py [--rounds 9] [--seconds 1.5] [--twin FILE] [--out FILE]

Each variant is a router of its own, and all run all the time. A round measures each variant in
turn: 200 requests per second of 1 KB bodies, then 40 streams with a token each 5 ms. All routers
share four mock engines, which cost almost nothing (bench/http/mock.py).

CPU time is that of the router's process, its threads and its children, in nanoseconds from
/proc/PID/task/TID/schedstat. So it contains threads that write records or send spans, and the share
of work that comes once a second, such as an update of the page.

`metrics`: a client reads /metrics each second. `records`: each request. `traces`: spans of 1% or
all requests go to a collector. `page`: a client receives the events of /ui. `capacity twin`: with
the configuration in ``--twin FILE`` (YAML, `{folder}` is an empty folder); without it, this variant
is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "http"))
import load
import proc
from handover import answers

from common import about, median_range, write_result

MOCK = Path(__file__).parent.parent / "http" / "mock.py"
ENGINES = [18310, 18311, 18312, 18313]
COLLECTOR, FIRST_PORT = 18320, 18330
RATE, REQUEST_BYTES, STREAMS = 200, 1024, 40
SCRAPE_SECONDS = 1.0
OFF = "off"
TRACING = {"endpoint": f"http://127.0.0.1:{COLLECTOR}"}
SERVE = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"
# Name: the configuration beyond engines and port.
VARIANTS: dict[str, dict[str, Any]] = {
    OFF: {},
    "metrics": {},
    "records": {"records": {"path": "{folder}/records"}},
    "traces, 1%": {"tracing": TRACING | {"sample_ratio": 0.01}},
    "traces, 100%": {"tracing": TRACING | {"sample_ratio": 1.0}},
    "page": {},
    "capacity twin": {},  # from --twin
}


def cpu_seconds(pids: list[int]) -> float:
    """Returns the CPU time of the threads of these processes so far."""
    total = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


load.cpu_seconds = cpu_seconds  # finer than clock ticks, which are 10 ms


class Collector(BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Reads the body and answers."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


class Routers:
    """The engines, the collector, and a router for each variant."""

    def __init__(self, variants: dict[str, dict[str, Any]], folder: Path) -> None:
        self.ports = {name: FIRST_PORT + number for number, name in enumerate(variants)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._all = ExitStack()
        for port in [*ENGINES, COLLECTOR, *self.ports.values()]:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        self._start("mock", [str(MOCK), *map(str, ENGINES)], folder)
        self._start("collector", [__file__, "--collector"], folder)
        answers(ENGINES[0])
        for name, settings in variants.items():
            (own := folder / name.replace(" ", "-")).mkdir()
            config = own / "router.yaml"
            engines = [{"url": f"http://127.0.0.1:{port}"} for port in ENGINES]
            text = yaml.safe_dump({"port": self.ports[name], "model": "mock", "engines": engines} | settings)
            config.write_text(text.replace("{folder}", str(own)))
            self.processes[name] = self._start(name, ["-c", SERVE, "serve", "--config", str(config)], own)
        for port in self.ports.values():
            answers(port)

    def _start(self, name: str, arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
        log = (folder / f"{name.replace(' ', '-')}.log").open("wb")
        process = subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log)
        self._all.callback(process.wait)
        self._all.callback(process.send_signal, signal.SIGTERM)
        return process

    def pids(self, name: str) -> list[int]:
        """Returns the processes of a variant."""
        return proc.tree(self.processes[name].pid)

    def close(self) -> None:
        """Ends all processes."""
        self._all.close()


class Viewer(threading.Thread):
    """A client of the live page, which reads all events."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.updates = 0
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"GET /debug/live HTTP/1.1\r\nhost: a\r\naccept: text/event-stream\r\n\r\n")
        self.start()

    def run(self) -> None:
        """Reads until the router ends."""
        while data := self._socket.recv(1 << 20):
            self.updates += data.count(b"event: update")


class Scraper(threading.Thread):
    """Reads /metrics each second until it is stopped."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.scrapes = 0
        self._port, self._over = port, threading.Event()
        self.start()

    def run(self) -> None:
        """Reads, in a fixed rhythm."""
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        due = time.monotonic() + 0.25
        while not self._over.wait(max(0.0, due - time.monotonic())):
            client.request("GET", "/metrics")
            client.getresponse().read()
            self.scrapes += 1
            due += SCRAPE_SECONDS
        client.close()

    def stop(self) -> int:
        """Ends it. Returns the number of scrapes."""
        self._over.set()
        self.join()
        return self.scrapes


def measured(port: int, pids: list[int], seconds: float, nonce: str) -> dict[str, float]:
    """Returns µs of CPU time per request and per chunk. Exits if a request failed."""
    requests = asyncio.run(load.open_loop(port, REQUEST_BYTES, RATE, seconds, nonce, pids))
    chunks = asyncio.run(load.streams(port, STREAMS, seconds, nonce, pids))
    if requests["errors"] or chunks["errors"]:
        sys.exit(f"run.py: requests failed: {requests}, {chunks}")
    found: dict[str, Any] = {"request_us": requests["cpu_us"], "chunk_us": chunks["cpu_us"]}
    return found | {"chunks_per_second": chunks["chunks_per_second"], "ttlb_p50_us": requests["p50_us"]}


def rounds_of(routers: Routers, rounds: int, seconds: float) -> list[dict[str, dict[str, float]]]:
    """Measures all variants in each round, in another order each time."""
    names = list(routers.processes)
    viewer = Viewer(routers.ports["page"])
    for name in names:  # until the interpreters have specialized their bytecode
        measured(routers.ports[name], routers.pids(name), 1.0, f"warm {name}")
    found = []
    for number in range(rounds):
        shift = number % len(names)
        row = {}
        for name in [*names[shift:], *names[:shift]]:
            scraper = Scraper(routers.ports[name]) if name == "metrics" else None
            row[name] = measured(routers.ports[name], routers.pids(name), seconds, f"{number} {name}")
            if scraper is not None:
                row[name]["scrapes"] = scraper.stop()
        found.append(row)
        shown = ", ".join(f"{name} {cell['request_us']:.0f}" for name, cell in row.items())
        print(f"round {number + 1}: us per request: {shown}", file=sys.stderr, flush=True)
    if not viewer.updates:
        sys.exit("run.py: the viewer of the page received no update")
    return found


def cells(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns medians and ranges, and those of the differences to `off` in the same round."""
    result: dict[str, Any] = {}
    for name in rounds[0]:
        cell = result[name] = {}
        for key in ("request_us", "chunk_us"):
            values = [row[name][key] for row in rounds]
            more = [row[name][key] - row[OFF][key] for row in rounds]
            cell[key], cell[f"{key}_more"] = median_range(values), median_range(more)
    return result


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each part of a measurement")
    parser.add_argument("--twin", type=Path, metavar="FILE", help="configuration of the capacity twin")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-observe.json")
    parser.add_argument("--collector", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.collector:
        ThreadingHTTPServer(("127.0.0.1", COLLECTOR), Collector).serve_forever()
    variants = dict(VARIANTS)
    if given.twin is None:
        del variants["capacity twin"]
    else:
        variants["capacity twin"] = yaml.safe_load(given.twin.read_text())
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        routers = Routers(variants, Path(folder))
        stack.callback(routers.close)
        found = rounds_of(routers, given.rounds, given.seconds)
        written = sum(path.stat().st_size for path in Path(folder).glob("records/records/*"))
        if not written:
            sys.exit("run.py: no record was written")
    result = {
        **about(None, []),
        "load_average": [before, os.getloadavg()],
        "unit": "us of CPU: median, least, greatest, rounds",
        "twin": None if given.twin is None else variants["capacity twin"],
        "cells": cells(found),
        "rounds": found,
    }
    print("| variant | CPU per request | more | CPU per chunk | more |\n| --- | --- | --- | --- | --- |")
    for name, cell in result["cells"].items():
        parts = [cell[key] for key in ("request_us", "request_us_more", "chunk_us", "chunk_us_more")]
        print(
            f"| {name} | "
            + " | ".join(f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high, _ in parts)
            + " |"
        )
    print(write_result(result, "observe", given.out))


if __name__ == "__main__":
    main()
