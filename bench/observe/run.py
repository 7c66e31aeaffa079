"""Measures the router's CPU time per request and per streamed chunk with metrics, records, traces,
the live page and the capacity twin.

    python bench/observe/run.py [--rounds 5] [--seconds 1.5] [--wait] [--add] [--out FILE]

Each variant is a router of its own, and all run all the time. A round measures each variant in
turn: 200 requests per second of 1 KB bodies, then 40 streams with a token each 5 ms. All routers
share four mock engines, which cost almost nothing (bench/http/mock.py). ``--add`` adds the rounds
to those in ``--out``.

CPU time is that of the router's process and its threads, in nanoseconds from
/proc/PID/task/TID/schedstat. So it contains threads that write records or send spans, and the share
of work that comes once a second, such as an update of the page.

`metrics`: a client reads /metrics each second. `records`: each request. `traces`: spans of 1% or
all requests go to a collector. `page`: a client receives the events of /ui. `capacity twin`:
records of each request, and `advise --watch` computes. First it gets two minutes of traffic. It
is stopped while other variants are measured. Its own CPU time is counted per round of advice.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "http"))
import load
from handover import answers

from common import about, median_range, write_result

MOCK = Path(__file__).parent.parent / "http" / "mock.py"
ENGINES = [18310, 18311, 18312, 18313]
COLLECTOR, ADVICE, FIRST_PORT = 18320, 18321, 18330
RATE, REQUEST_BYTES, STREAMS = 200, 1024, 40
SCRAPE_SECONDS = 1.0
OFF, TWIN = "off", "capacity twin"
TWIN_RATE = 20  # requests per second before the rounds
ADVICE_SECONDS, TWIN_ROUNDS = 240, 2
TRACING = {"endpoint": f"http://127.0.0.1:{COLLECTOR}"}
Round = dict[str, dict[str, float]]  # the figures of each variant
SERVE = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"
# Name: the configuration beyond engines and port.
VARIANTS: dict[str, dict[str, Any]] = {
    OFF: {},
    "metrics": {},
    "records": {"records": {"path": "{folder}/records"}},
    "traces, 1%": {"tracing": TRACING | {"sample_ratio": 0.01}},
    "traces, 100%": {"tracing": TRACING | {"sample_ratio": 1.0}},
    "page": {},
    TWIN: {"records": {"path": "{folder}/records"}},
}
# Any error of the fit will do: these engines are no real ones, and the work is the same.
ADVISE = ["--slo", "ttft_p99=2s,tpot_p95=50ms", "--every", "5", "--window", "300", "--max-error", "1e9"]


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

    def __init__(self, folder: Path) -> None:
        self.ports = {name: FIRST_PORT + number for number, name in enumerate(VARIANTS)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._all = ExitStack()
        for port in [*ENGINES, COLLECTOR, ADVICE, *self.ports.values()]:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        self._start("mock", [str(MOCK), *map(str, ENGINES)], folder)
        self._start("collector", [__file__, "--collector"], folder)
        answers(ENGINES[0])
        for name, settings in VARIANTS.items():
            (own := folder / name.replace(" ", "-")).mkdir()
            config = own / "router.yaml"
            engines = [{"url": f"http://127.0.0.1:{port}"} for port in ENGINES]
            text = yaml.safe_dump({"port": self.ports[name], "model": "mock", "engines": engines} | settings)
            config.write_text(text.replace("{folder}", str(own)))
            (records := own / "records").mkdir()
            self.processes[name] = self._start(name, ["-c", SERVE, "serve", "--config", str(config)], own)
            if name == TWIN:
                watch = ["advise", str(records), "--watch", "--port", str(ADVICE), *ADVISE]
                self._twin = self._start("advise", ["-c", SERVE, *watch], own)
        for port in self.ports.values():
            answers(port)

    def _start(self, name: str, arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
        log = (folder / f"{name.replace(' ', '-')}.log").open("wb")
        process = subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log)
        self._all.callback(process.wait)
        self._all.callback(process.send_signal, signal.SIGTERM)
        return process

    def twin(self) -> int:
        """Returns the process of the capacity twin."""
        return self._twin.pid

    def advice(self) -> dict[str, Any]:
        """Returns the last advice of the twin; empty if there is none."""
        client = http.client.HTTPConnection("127.0.0.1", ADVICE, timeout=30)
        client.request("GET", "/advice")
        models = json.loads(client.getresponse().read())["models"]
        client.close()
        return (models.get("mock") or {}).get("advice") or {}

    def close(self) -> None:
        """Ends all processes."""
        self._all.close()


class TwinTraffic(threading.Thread):
    """Sends streams of 16 tokens to the twin's router in a fixed rhythm, until it is stopped."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.failed = 0
        self._port, self._over = port, threading.Event()
        self.start()

    def run(self) -> None:
        """Sends."""
        asyncio.run(self._send())

    async def _send(self) -> None:
        loop, number = asyncio.get_running_loop(), 0
        start = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while not self._over.is_set():
                tasks.create_task(self._one(number))
                number += 1
                await asyncio.sleep(start + number / TWIN_RATE - loop.time())

    async def _one(self, number: int) -> None:
        data = load.request(REQUEST_BYTES, "twin", number, '"stream":true,"max_tokens":16,')
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(load.Client, "127.0.0.1", self._port)
        self.failed += not (await client.ask(data)).startswith(b"HTTP/1.1 200")
        transport.close()

    def stop(self) -> None:
        """Ends it. Exits if a request failed."""
        self._over.set()
        self.join()
        if self.failed:
            sys.exit(f"run.py: {self.failed} requests of the twin's traffic failed")


def next_advice(routers: Routers, before: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns the advice after another one. Exits if there is none within these seconds."""
    end = time.monotonic() + seconds
    while (advice := routers.advice()).get("at") == before.get("at"):
        if time.monotonic() > end:
            sys.exit("run.py: the capacity twin gives no advice; GET /advice has the reason")
        time.sleep(0.05)
    return advice


def twin_rounds(routers: Routers) -> dict[str, float]:
    """Measures the CPU time of the twin's process in its next rounds."""
    pids = [routers.twin()]
    os.kill(routers.twin(), signal.SIGCONT)  # whoever made the machine idle may have stopped it
    advice = next_advice(routers, routers.advice(), ADVICE_SECONDS)
    cpu = cpu_seconds(pids)
    for _ in range(TWIN_ROUNDS):
        advice = next_advice(routers, advice, ADVICE_SECONDS)
    used = (cpu_seconds(pids) - cpu) / TWIN_ROUNDS
    return {"cpu_seconds_per_round": used, "requests": advice["requests"], "seconds": advice["seconds"]}


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


def measured(routers: Routers, name: str, seconds: float, nonce: str) -> dict[str, float]:
    """Returns µs of CPU time per request and per chunk. Exits if a request failed."""
    port, pids = routers.ports[name], [routers.processes[name].pid]
    requests = asyncio.run(load.open_loop(port, REQUEST_BYTES, RATE, seconds, nonce, pids))
    chunks = asyncio.run(load.streams(port, STREAMS, seconds, nonce, pids))
    if requests["errors"] or chunks["errors"]:
        sys.exit(f"run.py: requests failed: {requests}, {chunks}")
    found: dict[str, Any] = {"request_us": requests["cpu_us"], "chunk_us": chunks["cpu_us"]}
    return found | {"chunks_per_second": chunks["chunks_per_second"], "ttlb_p50_us": requests["p50_us"]}


@contextmanager
def use(routers: Routers, name: str) -> Iterator[None]:
    """Reads /metrics of the variant that has it read, and lets the twin's process run."""
    scraper = Scraper(routers.ports[name]) if name == "metrics" else None
    if name == TWIN:
        os.kill(routers.twin(), signal.SIGCONT)
    yield
    if name == TWIN:
        os.kill(routers.twin(), signal.SIGSTOP)
    if scraper is not None and not scraper.stop():
        sys.exit("run.py: /metrics was not read")


def prepared(routers: Routers, wait: bool) -> dict[str, float]:
    """Warms all routers, and brings the twin to its first advice. Returns the twin's figures.

    ``wait``: for a line of the input, when everything is ready.
    """
    traffic = TwinTraffic(routers.ports[TWIN])
    for name in routers.processes:  # until the interpreters have specialized their bytecode
        measured(routers, name, 1.0, f"warm {name}")
    next_advice(routers, {}, ADVICE_SECONDS)
    if wait:
        print("run.py: ready; send a line to begin", file=sys.stderr, flush=True)
        sys.stdin.readline()
    found = twin_rounds(routers)
    traffic.stop()
    os.kill(routers.twin(), signal.SIGSTOP)
    return found


def rounds_of(routers: Routers, rounds: int, seconds: float) -> list[Round]:
    """Measures all variants in each round, in another order each time."""
    names = list(routers.processes)
    viewer = Viewer(routers.ports["page"])
    found = []
    for number in range(rounds):
        shift = number % len(names)
        row = {}
        for name in [*names[shift:], *names[:shift]]:
            with use(routers, name):
                row[name] = measured(routers, name, seconds, f"{number} {name}")
        found.append(row)
        shown = ", ".join(f"{name} {cell['request_us']:.0f}" for name, cell in row.items())
        print(f"round {number + 1}: us per request: {shown}", file=sys.stderr, flush=True)
    if not viewer.updates:
        sys.exit("run.py: the viewer of the page received no update")
    return found


def cells(rounds: list[Round]) -> dict[str, Any]:
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each part of a measurement")
    parser.add_argument("--wait", action="store_true", help="for a line of the input before the rounds")
    parser.add_argument("--add", action="store_true", help="to the rounds in the file")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-observe.json")
    parser.add_argument("--collector", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.collector:
        ThreadingHTTPServer(("127.0.0.1", COLLECTOR), Collector).serve_forever()
    start = about(None, [])
    earlier = json.loads(given.out.read_text()) if given.add else {"runs": [], "rounds": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        routers = Routers(Path(folder))
        stack.callback(routers.close)
        twin = prepared(routers, given.wait)
        before = os.getloadavg()
        found = rounds_of(routers, given.rounds, given.seconds)
        if not any(path.stat().st_size for path in Path(folder).glob("records/records/*")):
            sys.exit("run.py: no record was written")
    rounds = earlier["rounds"] + found
    run = {"date": start["date"], "commit": start["commit"], "load_average": [before, os.getloadavg()]}
    runs = [*earlier["runs"], run | {"rounds": len(found), "twin": twin}]
    result = {
        **start,
        "load_average": [each for run in runs for each in run["load_average"]],
        "unit": "us of CPU: median, least, greatest, rounds",
        "runs": runs,
        "cells": cells(rounds),
        "rounds": rounds,
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
