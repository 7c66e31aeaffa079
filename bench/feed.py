"""Measures KV events over ZMQ into the index: their rate, their cost, and the cost of decisions
beside them.

    python bench/feed.py [--seconds 5] [--calls 20000] [--json] [--out FILE]

Another process publishes for 256 instances as vLLM does: batches of one `BlockStored` of 32 blocks
of 16 tokens and one `BlockRemoved` of 32 other blocks. Every cache is full, so each stored block
replaces a removed block: 2,048 blocks per instance, half a million pairs in total.

- `prepared`: messages in memory, without ZMQ (the example `feed_rate`), for 256 and 1,024
  instances. Blocks stored per second of processor time; as many are removed.
- `feed`: as fast as possible. Blocks stored per second of wall clock, and per second of the feed's
  own processor time. Its thread reads, decodes, hashes and applies.
- `decide`: `Router.route` over prompts of 8k tokens, nine tenths cached on some instance, one after
  the other with a pause between. It runs alone, beside 100,000 blocks per second, and beside as
  many as possible. Then 64 requests decode on each instance. It runs alone again, and beside
  100,000 blocks per second and another thread. That thread reads all metrics each second, and
  searches for moves twice a second.

Times are microseconds of wall clock around each call.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from common import ROOT, about, percentile, write_result
from fleet import BLOCK, INSTANCES, Fleet
from lmetric import Star
from lmetric._core import EventFeed, Request, Router, Ticket

BATCH_BLOCKS = 32
CHAINS = 128  # of each instance; half of them are cached at a time
SLICE = 4  # batches in a row to one instance
RANK = 1  # The fleet's own blocks have rank 0.
RATE = 100_000
PAUSE = 250e-6
TICKS = os.sysconf("SC_CLK_TCK")
PREPARED, ROUNDS = (256, 1_024), 6
PREPARED_ROUND = re.compile(r"^round \d+: (\d+) blocks .* (\d+) stored a second", re.MULTILINE)
DECODING, OUTPUT_TOKENS = 64, 500  # requests on each instance; what each has sent
SCRAPE_SECONDS, MOVES_SECONDS = 1.0, 0.5


def names(instance: int, chain: int) -> list[int]:
    """Returns an engine's names for the blocks of one of its chains."""
    numbers = [instance << 40 | chain << 16 | block + 1 for block in range(BATCH_BLOCKS)]
    return [number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers]


def batch(instance: int, chain: int) -> bytes:
    """Returns a batch that removes the blocks of half a round earlier, last ones first, and stores
    the blocks of one chain."""
    rng = np.random.default_rng(instance * CHAINS + chain)
    gone = reversed(names(instance, (chain + CHAINS // 2) % CHAINS))
    removed = [
        {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0} for block in gone
    ]
    stored = {
        "type": "BlockStored",
        "block_hashes": names(instance, chain),
        "parent_block_hash": None,
        "token_ids": rng.integers(0, 150_000, BATCH_BLOCKS * BLOCK).tolist(),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * BATCH_BLOCKS,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return bytes(msgpack.packb([time.time(), [*removed, stored], 0]))


def publish(folder: str, ready: Event, rate: Synchronized[float], over: Event) -> None:
    """Runs the engines' publishers, in a process of their own. ``rate`` is blocks per second; below
    0: no limit."""
    context = zmq.Context()
    sockets = []
    for instance in range(INSTANCES):
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.setsockopt(zmq.XPUB_NODROP, 1)  # A full queue blocks the publisher, so nothing is lost.
        socket.setsockopt(zmq.SNDTIMEO, 100)
        socket.bind(f"ipc://{folder}/{instance}")
        sockets.append(socket)
    batches = [[batch(instance, chain) for chain in range(CHAINS)] for instance in range(INSTANCES)]
    ready.set()
    turn, done, began, last = 0, 0, 0.0, 0.0
    while not over.is_set():
        wanted = rate.value
        if wanted != last:
            done, began, last = 0, time.monotonic(), wanted
        ahead = began + done / wanted - time.monotonic() if wanted > 0 else 0.0
        if wanted == 0 or ahead > 0:
            time.sleep(min(ahead, 0.01) or 0.01)
            continue
        instance, first = turn % INSTANCES, turn // INSTANCES * SLICE
        turn += 1
        for number in range(first, first + SLICE):
            while not over.is_set():
                try:
                    payload = batches[instance][number % CHAINS]
                    sockets[instance].send_multipart((b"", number.to_bytes(8, "big"), payload))
                    break
                except zmq.Again:
                    continue
        done += SLICE * BATCH_BLOCKS
    context.destroy(linger=0)


def thread_seconds() -> float:
    """Returns the processor time of the feed's thread."""
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if name == "lmetric-feed":
            fields = rest.split()
            return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


class Tally:
    """The feed's counters between two moments."""

    def __init__(self, feed: EventFeed) -> None:
        self.feed, self.began, self.cpu = feed, time.monotonic(), thread_seconds()
        self.stored, self.removed, self.lost = self._counts()

    def _counts(self) -> tuple[int, int, int]:
        rows = [self.feed.status(name)[RANK] for name in self.feed.instances()]
        lost = sum(sum(row["skipped"].values()) + row["gaps"] + row["unknown_parent"] for row in rows)
        return sum(row["blocks_stored"] for row in rows), sum(row["blocks_removed"] for row in rows), lost

    def figures(self) -> dict[str, float]:
        """Returns the rates since the tally began."""
        stored, removed, lost = self._counts()
        seconds, cpu = time.monotonic() - self.began, thread_seconds()
        thread = cpu - self.cpu
        stored -= self.stored
        return {
            "seconds": seconds,
            "stored_blocks_per_second": stored / seconds,
            "removed_blocks_per_second": (removed - self.removed) / seconds,
            "thread_cpu_share": thread / seconds,
            "stored_blocks_per_thread_cpu_second": stored / thread if thread else 0.0,
            "lost": lost - self.lost,
        }


def drain(feed: EventFeed) -> None:
    """Waits until no more events arrive."""
    while True:
        tally = Tally(feed)
        time.sleep(0.5)
        if tally.figures()["stored_blocks_per_second"] == 0:
            return


def decide(router: Router, fleet: Fleet, calls: int) -> list[float]:
    """Returns the microseconds of each decision."""
    prompts, samples = fleet.prompts[512], []
    for call in range(calls):
        tokens = prompts[call % len(prompts)].tokens
        began = time.perf_counter_ns()
        _, ticket = router.route(Request(token_ids=tokens))
        samples.append((time.perf_counter_ns() - began) / 1e3)
        ticket.segment_done()
        time.sleep(PAUSE)
    return samples


def figures(samples: list[float]) -> dict[str, float]:
    """Returns the median, 99th and 99.9th percentile and the number of samples."""
    ordered = sorted(samples)
    shares = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999}
    return {name: percentile(ordered, share) for name, share in shares.items()} | {"calls": len(ordered)}


def prepared(instances: int) -> dict[str, Any]:
    """Returns the blocks that one core stores per second, from messages in memory."""
    argv = ["cargo", "run", "--release", "--locked", "--offline", "-q", "-p", "lmetric-feed"]
    argv += ["--example", "feed_rate", "--", str(instances), str(ROUNDS)]
    printed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # The first round fills the index.
    rates = sorted(float(rate) for _, rate in PREPARED_ROUND.findall(printed)[1:])
    if not rates:
        sys.exit(f"feed.py: feed_rate printed no rates:\n{printed}")
    case = f"prepared messages, {instances:,} instances"
    return {"case": case, "stored_blocks_per_cpu_second": rates[len(rates) // 2], "rounds": rates}


def decoding(router: Router) -> list[Ticket]:
    """Places requests that decode on all instances. Returns their tickets."""
    router.set_policy("round_robin")
    tickets = []
    for _ in range(INSTANCES * DECODING):
        ticket = router.route(Request(prompt_tokens=2_000, max_tokens=2_000))[1]
        ticket.first_token()
        ticket.tokens(OUTPUT_TOKENS)
        tickets.append(ticket)
    router.set_policy("lmetric")
    return tickets


@contextmanager
def work(router: Router, feed: EventFeed) -> Iterator[dict[str, int]]:
    """Reads all metrics and searches for moves, in a thread. Yields how often."""
    over, done = threading.Event(), {"scrapes": 0, "searches": 0}

    def run() -> None:
        scrape = search = time.monotonic()
        while not over.wait(max(min(scrape, search) - time.monotonic(), 0.0)):
            if scrape <= search:
                router.stats()
                router.indicators()
                for name in feed.instances():
                    feed.status(name)
                scrape += SCRAPE_SECONDS
                done["scrapes"] += 1
            else:
                router.rebalance()
                search += MOVES_SECONDS
                done["searches"] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
    if not (done["scrapes"] and done["searches"]):
        sys.exit("feed.py: nothing ran beside the decisions")


def run(seconds: float, calls: int) -> list[dict[str, Any]]:
    """Runs all cases, one after the other."""
    fleet = Fleet({512: 500})
    router = fleet.router(rebalance=Star())
    spawn = multiprocessing.get_context("spawn")
    ready, over, rate = spawn.Event(), spawn.Event(), spawn.Value("d", 0.0)
    rows: list[dict[str, Any]] = [prepared(instances) for instances in PREPARED]
    with tempfile.TemporaryDirectory() as folder, EventFeed(router) as feed:
        process = spawn.Process(target=publish, args=(folder, ready, rate, over), daemon=True)
        process.start()
        try:
            if not ready.wait(120):
                sys.exit("feed.py: the publishers did not start")
            for instance, name in enumerate(fleet.names):
                feed.subscribe(name, f"ipc://{folder}/{instance}", rank=RANK)
            while not all(feed.status(name)[RANK]["connected"] for name in fleet.names):
                time.sleep(0.05)
            time.sleep(0.5)  # The publishers need time to see their subscribers.
            rate.value = -1.0
            while Tally(feed).removed < INSTANCES * CHAINS * BATCH_BLOCKS:
                time.sleep(0.2)
            tally = Tally(feed)
            time.sleep(seconds)
            rows.append({"case": "feed, as fast as it can"} | tally.figures())
            for case, blocks in (
                ("decide, nothing beside", 0.0),
                (f"decide, {RATE:,} blocks/s beside", RATE),
                ("decide, all it can beside", -1.0),
            ):
                rate.value = 0.0
                drain(feed)
                rate.value = blocks
                time.sleep(1.0)
                decide(router, fleet, calls // 10)
                tally = Tally(feed)
                decided = figures(decide(router, fleet, calls))
                rows.append({"case": case} | decided | tally.figures())
            rate.value = 0.0
            drain(feed)
            running = decoding(router)
            decide(router, fleet, calls // 10)
            rows.append(
                {"case": f"decide, {len(running):,} requests"} | figures(decide(router, fleet, calls))
            )
            rate.value = RATE
            time.sleep(1.0)
            with work(router, feed) as done:
                tally = Tally(feed)
                decided = figures(decide(router, fleet, calls))
            case = f"decide, {len(running):,} requests, {RATE:,} blocks/s, scrapes and searches beside"
            rows.append({"case": case} | decided | tally.figures() | done)
        finally:
            over.set()
            process.join(10)
            process.kill()
    return rows


def main() -> None:
    """Runs, prints a table, keeps the raw figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="print the raw figures")
    parser.add_argument("--out", type=Path, help="where to keep them (bench/results/DATE-feed.json)")
    options = parser.parse_args()
    load = [os.getloadavg()]
    result = about(None, ["rustc"]) | {"rows": run(options.seconds, options.calls)}
    result["load_average"] = [*load, os.getloadavg()]
    kept = write_result(result, "feed", options.out)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print("| case | decide p50 / p99 / p99.9 us | stored blocks/s | stored blocks per CPU second | lost |")
    print("|---|---|---|---|---|")
    for row in result["rows"]:
        decided = (
            " / ".join(f"{row[p]:.1f}" for p in ("p50_us", "p99_us", "p999_us")) if "calls" in row else "-"
        )
        cells = [f"{row.get(key, 0):,.0f}" for key in ("stored_blocks_per_second", "lost")]
        of_cpu = row.get("stored_blocks_per_cpu_second", row.get("stored_blocks_per_thread_cpu_second", 0))
        print(f"| {row['case']} | {decided} | {cells[0]} | {of_cpu:,.0f} | {cells[1]} |")
    print(f"raw figures: {kept}", file=sys.stderr)


if __name__ == "__main__":
    main()
