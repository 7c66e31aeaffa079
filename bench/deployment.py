"""Costs of a router process without requests: start-up time, memory and CPU.

    python bench/deployment.py [--seconds 15] [--rounds 3]   measure, then write the page
    python bench/deployment.py --blocks 10000000             only the memory of two workers
    python bench/deployment.py --report [--check]            only write the page, or compare it

Engines are mock engines of one process (`bench/http/mock.py`). Their /metrics page has as many
lines as vLLM 0.32's. The router checks their health and reads their load at the default
intervals. CPU times include all threads and children of the router.

`--blocks`: 256 engines publish KV events of this many blocks, no two alike. Resident memory of each
of two workers before and after goes to `DATE-worker-rss.json`. The index may take 1 GiB: the
default of 512 MiB evicts some of 10 million such blocks.

The results go to `bench/results`, and from there into `bench/figures.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import yaml
import zmq

from common import ROOT, about, median_range, write_result
from report import newest, table

sys.path.insert(0, str(ROOT / "bench" / "http"))
from proc import cpu_seconds, rss_mib, tree

ENGINES = (4, 64, 256)
FIRST_PORT, ROUTER = 23000, 22990
SHOWN_PROMPTS = (10_000, 100_000, 1_000_000)
METRIC_LINES = 374  # Lines that begin with vllm: on the page of vLLM 0.32.
MOCK = """
import sys
sys.path.insert(0, "bench/http")
import mock
line = b'vllm:request_seconds_bucket{engine="0",le="%d.0",model_name="mock"} 0.0\\n'
page = mock.METRICS + b"".join(line % i for i in range(LINES))
mock.PAGES[b"/metrics"] = (mock.PAGES[b"/metrics"][0], page)
mock.uvloop.run(mock.main([int(port) for port in sys.argv[1:]]))
"""
PAGE = ROOT / "bench" / "figures.md"


@contextmanager
def running(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone afterwards."""
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def is_ready(path: str = "/ready", port: int = ROUTER) -> bool:
    """Whether a page answers with 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def wait_until_ready(path: str = "/ready", port: int = ROUTER, seconds: float = 60) -> None:
    """Waits for a page. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not is_ready(path, port):
        if time.monotonic() > end:
            raise TimeoutError(f"deployment.py: no answer of port {port}{path} in {seconds} s")
        time.sleep(0.02)


def measured(engines: int, seconds: float) -> dict[str, float]:
    """Start-up, idle CPU and memory of one router in front of idle engines."""
    ports = [str(port) for port in range(FIRST_PORT, FIRST_PORT + engines)]
    program = str(Path(sys.executable).parent / "lmetric-router")
    flags = [word for port in ports for word in ("--engine", f"http://127.0.0.1:{port}")]
    with running([sys.executable, "-c", MOCK.replace("LINES", str(METRIC_LINES)), *ports]):
        wait_until_ready("/health", FIRST_PORT)
        began = time.monotonic()
        with running([program, "serve", "--port", str(ROUTER), *flags]) as router:
            wait_until_ready()
            ready = time.monotonic() - began
            time.sleep(5)  # The first reports, and what the start left behind.
            pids = tree(router.pid)
            before, clock = cpu_seconds(pids), time.monotonic()
            time.sleep(seconds)
            idle = (cpu_seconds(pids) - before) / (time.monotonic() - clock)
            memory = rss_mib(pids)
            ended = time.monotonic()
            router.send_signal(signal.SIGTERM)
            router.wait(30)
            return {
                "ready_seconds": ready,
                "idle_cores": idle,
                "rss_mib": memory,
                "stop_seconds": time.monotonic() - ended,
            }


BLOCKS_OF_A_BATCH, BLOCK_TOKENS = 32, 16
INDEX_BYTES = 1 << 30
INDEXED = re.compile(r"^lmetric_instance_index_blocks\{.*\} (\S+)$", re.MULTILINE)
INDEX_SECONDS = 240.0  # until the workers have applied all events


def index_blocks() -> float:
    """Returns the blocks in the index of the worker that answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ROUTER}/metrics", timeout=30) as answer:
        return sum(map(float, INDEXED.findall(answer.read().decode())))


def publish(folder: str, engines: int, blocks: int) -> None:
    """Publishes the KV events of all engines after a line of the input. Runs in its own process."""
    context = zmq.Context()
    sockets = []
    for engine in range(engines):
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.setsockopt(zmq.XPUB_NODROP, 1)  # A full queue blocks the publisher, so nothing is lost.
        socket.bind(f"ipc://{folder}/{engine}")
        sockets.append(socket)
    print("ready", flush=True)
    sys.stdin.readline()
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 150_000, BLOCKS_OF_A_BATCH * BLOCK_TOKENS).tolist()
    for batch in range(blocks // BLOCKS_OF_A_BATCH):
        engine, number = batch % engines, batch // engines
        tokens[0], tokens[1] = batch & 0xFFFF, batch >> 16
        event = {
            "type": "BlockStored",
            "block_hashes": rng.integers(1, 2**63, BLOCKS_OF_A_BATCH).tolist(),
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
        }
        payload = msgpack.packb([time.time(), [event], 0])
        sockets[engine].send_multipart((b"", number.to_bytes(8, "big"), payload))
    print("sent", flush=True)
    sys.stdin.readline()


def worker_memory(engines: int, blocks: int) -> dict[str, Any]:
    """Returns the resident memory of two workers, before and after these blocks."""
    ports = list(range(FIRST_PORT, FIRST_PORT + engines))
    with tempfile.TemporaryDirectory() as folder:
        listed = [
            {
                "url": f"http://127.0.0.1:{port}",
                "kv_events": {"endpoint": f"ipc://{folder}/{number}", "without_tokenizer": True},
            }
            for number, port in enumerate(ports)
        ]
        config = Path(folder) / "router.yaml"
        settings = {"port": ROUTER, "workers": 2, "block_size": BLOCK_TOKENS, "index_bytes": INDEX_BYTES}
        config.write_text(yaml.safe_dump(settings | {"engines": listed}))
        publisher = subprocess.Popen(
            [sys.executable, __file__, "--publish", folder, str(engines), str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert publisher.stdin is not None
        assert publisher.stdout is not None
        mock = [sys.executable, "-c", MOCK.replace("LINES", str(METRIC_LINES)), *map(str, ports)]
        program = str(Path(sys.executable).parent / "lmetric-router")
        try:
            publisher.stdout.readline()
            with running(mock), running([program, "serve", "--config", str(config)]) as router:
                wait_until_ready()
                time.sleep(10)  # until all engines' events are followed
                workers = [pid for pid in tree(router.pid) if pid != router.pid]
                before = [rss_mib([pid]) for pid in workers]
                used, began = cpu_seconds(workers), time.monotonic()
                publisher.stdin.write("\n")
                publisher.stdin.flush()
                publisher.stdout.readline()
                found = 0.0
                while time.monotonic() - began < INDEX_SECONDS:
                    last, found = found, index_blocks()
                    if found and found == last:
                        break
                    time.sleep(1.0)
                if found < blocks // BLOCKS_OF_A_BATCH * BLOCKS_OF_A_BATCH:
                    sys.exit(f"deployment.py: the index has {found:,.0f} of {blocks:,} blocks")
                return {
                    "engines": engines,
                    "blocks": blocks,
                    "index_bytes": INDEX_BYTES,
                    "indexed_blocks": found,
                    "seconds": time.monotonic() - began,
                    "workers_cpu_seconds": cpu_seconds(workers) - used,
                    "before_mib": before,
                    "after_mib": [rss_mib([pid]) for pid in workers],
                }
        finally:
            publisher.kill()
            publisher.wait()


def cell(figure: list[float], digits: int, factor: float = 1) -> str:
    """Median [least-greatest]."""
    middle, low, high, count = figure
    text = f"{middle * factor:.{digits}f}"
    return f"{text} [{low * factor:.{digits}f}-{high * factor:.{digits}f}]" if count > 1 else f"{text} (1)"


def source(name: str, result: dict[str, Any]) -> str:
    """The raw file, its machine and the load of the machine."""
    machine, loads = result["machine"], [load[0] for load in result["load_average"]]
    return (
        f"[{name}](../../bench/results/{name}): {result['date'][:10]}, commit {result['commit']}, "
        f"{machine['cpu']}, {machine['cores']} cores, load average {min(loads):.1f} to {max(loads):.1f}."
    )


def sizing(own: dict[str, Any], http: dict[str, Any], memory: dict[str, Any]) -> dict[str, str]:
    """Tables for the size of a router."""
    summary = http["summary"]
    names = [n for n in ("nginx", "sglang-ca", "smg-ca", "vllm-ca", "lmetric") if n in summary]
    cells = {"1 KB, us": "c32_1k", "32 KB, us": "c32_32k", "256 connections, 1 KB, us": "c256_1k"}
    requests = [
        [
            n,
            *(cell(summary[n][c]["cpu_us"], 0) for c in cells.values()),
            cell(summary[n]["s200"]["cpu_us"], 1),
        ]
        for n in names
    ]
    idle = [
        [
            count,
            cell(row["idle_cores"], 2, 100),
            cell(row["idle_cores"], 2, 1000 / int(count)),
            cell(row["rss_mib"], 0),
        ]
        for count, row in own["summary"].items()
    ]
    blocks = [
        [feed, *(f"{row[name]:,.0f}" for name in ("prompts", "pairs", "evicted")), f"{row['a_pair']:.0f}",
         f"{row['a_name']:.0f}", f"{row['resident'] / 2**20:.0f}"]
        for feed, rows in memory["index_memory"].items()
        for row in rows
        if row["prompts"] in SHOWN_PROMPTS
    ]  # fmt: skip
    return {
        "requests": table(["router", *cells, "chunk of a stream, us"], requests),
        "idle": table(["engines", "% of a core", "thousandths of a core per engine", "resident MiB"], idle),
        "index": table(
            [
                "index",
                "distinct prompts",
                "pairs held",
                "pairs evicted",
                "bytes a pair",
                "map, bytes an entry",
                "MiB",
            ],
            blocks,
        ),
    }


def deploying(own: dict[str, Any]) -> dict[str, str]:
    """The table of starts and stops."""
    rows = [
        [count, cell(row["ready_seconds"], 2), cell(row["stop_seconds"], 2), cell(row["rss_mib"], 0)]
        for count, row in own["summary"].items()
    ]
    return {"starts": table(["engines", "start to ready, s", "SIGTERM to end, s", "resident MiB"], rows)}


def render(check: bool) -> None:
    """Writes the tables into the page, or compares them."""
    files = {what: newest(what) for what in ("deployment", "http", "memory")}
    own = files["deployment"][1]
    made = sizing(own, files["http"][1], files["memory"][1]) | deploying(own)
    for what, file in files.items():
        made[f"{what}-source"] = source(*file).replace("../../bench/", "")
    old = text = PAGE.read_text()
    for name, table_of in made.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        text, count = pattern.subn(
            lambda match, table_of=table_of: f"{match[1]}\n{table_of}\n\n{match[2]}", text
        )
        if count != 1:
            sys.exit(f"deployment.py: bench/figures.md has {count} pairs of {name} marks, not 1")
    if check and text != old:
        sys.exit("deployment.py: bench/figures.md differs from the raw files: run --report")
    if not check:
        PAGE.write_text(text)


def main() -> None:
    """Measures, unless only the page is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15, help="time without requests, seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="only write the page")
    parser.add_argument("--check", action="store_true", help="with --report: compare the page")
    parser.add_argument("--blocks", type=int, help="only the memory of workers with this many blocks")
    parser.add_argument("--out", type=Path, help="file of --blocks")
    parser.add_argument("--publish", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.publish:
        folder, engines_, blocks_ = given.publish
        publish(folder, int(engines_), int(blocks_))
        return
    if given.blocks:
        load = [os.getloadavg()]
        result = about(None, []) | worker_memory(ENGINES[-1], given.blocks)
        result["load_average"] = [*load, os.getloadavg()]
        print(json.dumps({name: result[name] for name in ("indexed_blocks", "before_mib", "after_mib")}))
        print(write_result(result, "worker-rss", given.out))
        return
    if not given.report:
        result = about(None, [])
        loads, runs = [], []
        for round_ in range(given.rounds):
            for engines in ENGINES:
                loads.append(list(os.getloadavg()))
                runs.append({"engines": engines, "round": round_, **measured(engines, given.seconds)})
                print(json.dumps(runs[-1]), file=sys.stderr)
        figures = ("ready_seconds", "idle_cores", "rss_mib", "stop_seconds")
        summary = {
            str(engines): {
                name: median_range([run[name] for run in runs if run["engines"] == engines])
                for name in figures
            }
            for engines in ENGINES
        }
        setting = {"seconds": given.seconds, "rounds": given.rounds, "metric_lines": METRIC_LINES}
        result |= {"load_average": loads, "setting": setting, "summary": summary, "runs": runs}
        print(write_result(result, "deployment"))
    render(given.check)


if __name__ == "__main__":
    main()
