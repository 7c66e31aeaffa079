"""Compares in-process decisions with Dynamo's Python binding, in one run and call by call in turn.

    python bench/index_vs_dynamo.py --rivals DIR [--calls 1000] [--json] [--out FILE]

Over 256 instances that hold a million (instance, block) pairs (`fleet.py`):

- `match`: a prompt of 64, 512 or 2,048 local block hashes -> the depth that each instance holds.
  Dynamo: `RadixTree.find_matches` on a fresh list. Ours: a buffer, chaining included, the answer as
  an array (Dynamo also needs `.scores`, not timed).
- `hash`: token ids -> block hashes, per 1k tokens. Dynamo: `compute_block_hash_for_seq` on a list.
- `decide`: token ids of an 8k prompt -> an instance with the request counted on it; the end of the
  request is timed separately. Dynamo: `SelectionService.select` (nothing counted) and
  `select_and_reserve`, its index fed over ZMQ in vLLM's format.

`decide` runs warm, over 5,000 prompts in turn, with flushed caches, and beside events. The 5,000
prompts have 260 MB of index and token ids, so no cache holds what a call needs. A flush touches 64
MB before each call and evicts the code, too. The events are 100k per second from a second thread
(blocks stored or removed, in batches of 64), in turn and with a pause between calls.

Times are microseconds of wall clock around each single call. The clock's own cost is in the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from common import ROOT, about, percentile, write_result
from fleet import BLOCK, INSTANCES, SHARED_BLOCKS, Fleet, Prompt
from lmetric._core import Request, Router

EVENTS_PER_SECOND = 100_000
EVENT_BLOCKS = 64
FLUSH_BYTES = 64 << 20
PAUSE = 250e-6
# With their part of the index 260 MB: more than a processor's caches.
FAR_PROMPTS = {512: 5000}
WARM_UP_CALLS = 15_000
clock = time.perf_counter_ns


def figures(samples: list[int]) -> dict[str, float]:
    """Returns the median, 99th percentile, mean and number of the nanosecond samples, in us."""
    ordered = sorted(samples)
    return {
        "p50_us": percentile(ordered, 0.5) / 1e3,
        "p99_us": percentile(ordered, 0.99) / 1e3,
        "mean_us": sum(ordered) / len(ordered) / 1e3,
        "calls": len(ordered),
    }


def clock_cost() -> dict[str, float]:
    """Returns the duration of an empty measurement."""
    samples: list[int] = []
    for _ in range(10_000):
        start = clock()
        samples.append(clock() - start)
    return figures(samples)


# --- match


def local_hashes(prompt: Prompt) -> list[int]:
    """Returns Dynamo's local block hashes of the prompt, as Python ints."""
    from dynamo._core import compute_block_hash_for_seq

    return list(compute_block_hash_for_seq(prompt.tokens.tolist(), BLOCK))


def radix_tree(fleet: Fleet, hashes: dict[int, list[int]]) -> Any:
    """Returns Dynamo's tree over the fleet, fed by its JSON events."""
    from dynamo._core import RadixTree

    tree = RadixTree()

    def store(instance: int, parent: int | None, names: list[int], local: list[int]) -> None:
        blocks = [{"block_hash": n, "tokens_hash": h} for n, h in zip(names, local, strict=True)]
        event = {"event_id": 1, "dp_rank": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}
        tree.apply_event(instance, json.dumps(event).encode())

    any_prompt = next(iter(fleet.prompts.values()))[0]
    shared = hashes[id(any_prompt)][:SHARED_BLOCKS]
    for instance in range(INSTANCES):
        store(instance, None, fleet.shared_hashes.tolist(), shared)
    for prompts in fleet.prompts.values():
        for prompt in prompts:
            names = prompt.hashes.tolist()
            local = hashes[id(prompt)][SHARED_BLOCKS : len(names)]
            for instance in prompt.holders:
                store(instance, names[SHARED_BLOCKS - 1], names[SHARED_BLOCKS:], local)
    return tree


def by_hashes(fleet: Fleet, hashes: dict[int, list[int]]) -> tuple[Router, dict[int, str]]:
    """Returns our router over the same caches, named by the same local hashes, and the session of
    each instance.

    The router learns the caches from its own decisions.
    """
    router = Router("session_affinity", block_size=BLOCK, kv_source="approximate", index_bytes=1 << 30)
    sessions: dict[int, str] = {}
    for name in fleet.names:
        router.add_instance(name)
    # The policy maps sessions to instances: try sessions until each instance has one.
    for i in range(100 * INSTANCES):
        decision, ticket = router.route(Request(prompt_tokens=1, session=str(i)))
        ticket.failed("cancelled")
        sessions.setdefault(decision.slot, str(i))
        if len(sessions) == INSTANCES:
            break
    else:
        sys.exit("index_vs_dynamo.py: no session for some instance")

    def store(local: list[int], instance: int) -> None:
        router.route(Request(block_hashes=np.array(local, dtype=np.uint64), session=sessions[instance]))[
            1
        ].segment_done()

    any_prompt = next(iter(fleet.prompts.values()))[0]
    for instance in range(INSTANCES):
        store(hashes[id(any_prompt)][:SHARED_BLOCKS], instance)
    for prompts in fleet.prompts.values():
        for prompt in prompts:
            for instance in prompt.holders:
                store(hashes[id(prompt)][: len(prompt.hashes)], instance)
    return router, sessions


def match(fleet: Fleet, calls: int) -> list[dict[str, Any]]:
    """Returns the rows of the match."""
    hashes = {id(p): local_hashes(p) for prompts in fleet.prompts.values() for p in prompts}
    tree, (router, sessions) = radix_tree(fleet, hashes), by_hashes(fleet, hashes)
    ask = router.cached_tokens
    rows = []
    for blocks, prompts in fleet.prompts.items():
        theirs: list[int] = []
        ours: list[int] = []
        for i in range(calls):
            prompt = prompts[i * 7919 % len(prompts)]
            stored = len(prompt.hashes)
            # Fresh ints in a fresh list for Dynamo, a fresh buffer for us. No instance holds the
            # last tenth.
            new = fleet.rng.integers(1, 2**63, blocks - stored).tolist()
            array = np.array(hashes[id(prompt)][:stored] + new, np.uint64)
            as_list = array.tolist()
            start = clock()
            found = tree.find_matches(as_list)
            theirs.append(clock() - start)
            array = array.copy()  # Just written, as Dynamo's list was.
            start = clock()
            kept = ask(Request(block_hashes=array))  # The answer's deallocation is not timed, as for Dynamo.
            ours.append(clock() - start)
            del kept
            if i < 5:
                check("Dynamo", max(found.scores.values()), stored)
                decision, ticket = router.route(
                    Request(block_hashes=array, session=sessions[prompt.holders[0]])
                )
                ticket.failed("cancelled")
                check("ours", decision.predicted_cached_tokens, stored * BLOCK)
        rows.append(row("match", f"{blocks} blocks", figures(theirs), figures(ours), "Router.cached_tokens"))
    return rows


def check(whose: str, found: int, stored: int) -> None:
    """Exits if the index found a depth other than the stored depth."""
    if found != stored:
        sys.exit(f"index_vs_dynamo.py: {whose} index found {found}, stored were {stored}")


def row(
    stage: str, case: str, theirs: dict[str, float] | None, ours: dict[str, float], call: str
) -> dict[str, Any]:
    """Returns one row of the table."""
    ratio = theirs["p50_us"] / ours["p50_us"] if theirs else None
    return {
        "stage": stage,
        "case": case,
        "ours": ours,
        "dynamo": theirs,
        "ratio_p50": ratio,
        "our_call": call,
    }


# --- hash


def hashing(calls: int) -> list[dict[str, Any]]:
    """Returns the rows of token hashing, per 1k tokens."""
    from dynamo._core import compute_block_hash_for_seq

    rng = np.random.default_rng(1)
    router = Router("round_robin", block_size=BLOCK)
    router.add_instance("engine")
    ask = router.cached_tokens
    rows = []
    for thousands in (8, 100):
        theirs: list[int] = []
        ours: list[int] = []
        least: list[int] = []
        for _ in range(max(calls // 4, 20)):
            tokens = rng.integers(0, 150_000, thousands * 1000, dtype=np.uint32)
            as_list, first = tokens.tolist(), tokens[:BLOCK]
            start = clock()
            compute_block_hash_for_seq(as_list, BLOCK)
            theirs.append(clock() - start)
            ask(Request(first))
            tokens = tokens.copy()  # Just written, as Dynamo's list was.
            start = clock()
            ask(Request(first))
            middle = clock()
            ask(Request(tokens))
            ours.append(clock() - middle)
            least.append(middle - start)
        # Nothing is stored: the time beyond one block is the hashing of the long prompt.
        base = figures(least)["p50_us"]
        per = [figures(theirs), figures(ours)]
        for whose, extra in zip(per, (0.0, base), strict=True):
            for key in ("p50_us", "p99_us", "mean_us"):
                whose[key] = (whose[key] - extra) / thousands
        call = f"Router.{ask.__name__}, less one of {BLOCK} tokens"
        rows.append(row("hash, per 1k tokens", f"{thousands}k tokens", *per, call))
    return rows


# --- decide


class Selection:
    """Dynamo's selection service over the fleet, its index fed over ZMQ in vLLM's format."""

    def __init__(self, fleet: Fleet) -> None:
        import zmq
        from dynamo._core import SelectionService

        self.fleet, self.service = fleet, SelectionService()
        context = zmq.Context.instance()
        context.set(zmq.MAX_SOCKETS, 4 * INSTANCES)
        self.sockets = [context.socket(zmq.PUB) for _ in range(INSTANCES)]
        for socket in self.sockets:
            socket.sndhwm = 0

    async def feed(self) -> None:
        """Registers the instances and waits until the deepest prompt of the last event is found."""
        import msgpack

        for worker, socket in enumerate(self.sockets):
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            record = {"worker_id": worker, "model_name": "bench", "endpoint": f"http://127.0.0.1:{port}"}
            await self.service.upsert_worker(
                {**record, "block_size": BLOCK, "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"}}
            )
        await asyncio.sleep(2.0)  # Messages published before the subscriptions are lost.
        counts = [0] * INSTANCES
        for instance, parent, names, tokens in self.fleet.stored():
            event = ["BlockStored", names.tolist(), parent, tokens.tolist(), BLOCK, None]
            payload = msgpack.packb([time.time(), [event], 0])
            self.sockets[instance].send_multipart([b"", struct.pack(">Q", counts[instance]), payload])
            counts[instance] += 1
        for prompts in self.fleet.prompts.values():
            for prompt in prompts[:: max(len(prompts) // 20, 1)]:
                await self._arrived(prompt)

    async def _arrived(self, prompt: Prompt) -> None:
        stored, found = len(prompt.hashes), 0
        for _ in range(300):
            answer = await self.service.overlap_scores(request(prompt.tokens))
            found = max(worker["device_blocks"] for worker in answer["workers"])
            if found == stored:
                return
            await asyncio.sleep(0.1)
        check("Dynamo's selection", found, stored)

    def close(self) -> None:
        """Ends the service and the feeds."""
        self.service.shutdown()
        for socket in self.sockets:
            socket.close(0)


def request(tokens: Any) -> dict[str, Any]:
    """Returns a selection request; the binding takes a list of tokens."""
    return {"model_name": "bench", "token_ids": tokens.tolist()}


async def decide(fleet: Fleet, calls: int) -> list[dict[str, Any]]:
    """Returns the rows of the whole decision."""
    router = fleet.router()
    selection = Selection(fleet)
    await selection.feed()
    prompts = fleet.prompts[512]
    prompt = prompts[3]
    decision, ticket = router.route(Request(token_ids=prompt.tokens))
    ticket.failed("cancelled")
    check("ours", decision.predicted_cached_tokens, len(prompt.hashes) * BLOCK)

    async def theirs(
        call: Callable[[dict[str, Any]], Awaitable[Any]], count: int, flush: Any = None
    ) -> tuple[list[int], list[int]]:
        samples: list[int] = []
        freeing: list[int] = []
        for i in range(count):
            tokens = prompts[i * 7919 % len(prompts)].tokens
            if flush is not None:
                np.add(flush, 1, out=flush)
            ask = request(tokens)  # After the flush, as Dynamo's list was just written, too.
            start = clock()
            answer = await call(ask)
            samples.append(clock() - start)
            if "selection_id" in answer:
                start = clock()
                await selection.service.free_reservation(answer["selection_id"])
                freeing.append(clock() - start)
        return samples, freeing

    def ours(
        count: int, prompts: list[Prompt], *, flush: Any = None, pause: float = 0.0, new: bool = False
    ) -> tuple[list[int], list[int]]:
        samples: list[int] = []
        closing: list[int] = []
        for i in range(count):
            tokens = prompts[i * 7919 % len(prompts)].tokens
            if flush is not None:
                np.add(flush, 1, out=flush)
            if pause:
                time.sleep(pause)
            if new:
                tokens = tokens.copy()  # As from a tokenizer: data that was just written is in the cache.
            start = clock()
            _, ticket = router.route(Request(token_ids=tokens))
            middle = clock()
            ticket.segment_done()
            closing.append(clock() - middle)
            samples.append(middle - start)
        return samples, closing

    select: list[int] = []
    reserve: list[int] = []
    free: list[int] = []
    warm: list[int] = []
    wide: list[int] = []
    close: list[int] = []
    # Until the ring of decision records has been full once, its memory is new to the process.
    ours(WARM_UP_CALLS, prompts)
    few = max(calls // 10, 20)
    for _ in range(5):  # in turn
        select += (await theirs(selection.service.select, few))[0]
        both = await theirs(selection.service.select_and_reserve, few)
        reserve, free = reserve + both[0], free + both[1]
        both = ours(calls, prompts[:16])
        warm, close = warm + both[0], close + both[1]
        wide += ours(calls, prompts)[0]
    flushed = np.zeros(FLUSH_BYTES // 8, np.uint64)
    cold_select = figures((await theirs(selection.service.select, few * 3, flushed))[0])
    cold = ours(few * 3, prompts, flush=flushed)[0]
    cold_new = ours(few * 3, prompts, flush=flushed, new=True)[0]
    selection.close()
    looped = ours(calls * 10, prompts, new=True)[0]
    paced = ours(calls * 4, prompts, pause=PAUSE, new=True)[0]
    with Events(fleet, router) as loop_events:
        beside = ours(calls * 40, prompts, new=True)[0]
    with Events(fleet, router) as pause_events:
        paced_beside = ours(calls * 10, prompts, pause=PAUSE, new=True)[0]
    far_fleet = Fleet(FAR_PROMPTS)
    router, prompts = far_fleet.router(), far_fleet.prompts[512]
    ours(WARM_UP_CALLS, prompts)
    far = ours(calls * 5, prompts, new=True)[0]
    select_figures, call = figures(select), "Router.route"
    beside_row = row("decide 8k, 100k cache events/s beside", "in turn", None, figures(beside), call)
    beside_row["events_per_second"] = loop_events.rate
    paced_row = row(
        "decide 8k, 100k cache events/s beside", "a new prompt each 250 us", None, figures(paced_beside), call
    )
    paced_row["events_per_second"] = pause_events.rate
    return [
        row("decide 8k, warm", "16 prompts in turn; select: 500", select_figures, figures(warm), call),
        row("decide 8k, warm", "500 prompts in turn; select", select_figures, figures(wide), call),
        row("decide 8k, warm", "500 prompts in turn; reserve", figures(reserve), figures(wide), call),
        row("end of a booking", "500 prompts in turn", figures(free), figures(close), "Ticket.segment_done"),
        row("decide 8k, caches flushed", "prompt just written; select", cold_select, figures(cold_new), call),
        row("decide 8k, caches flushed", "prompt flushed, too", None, figures(cold), call),
        row("decide 8k, index beyond the caches", "5,000 prompts in turn", None, figures(far), call),
        row("decide 8k, nothing beside", "in turn", None, figures(looped), call),
        beside_row,
        row("decide 8k, nothing beside", "a new prompt each 250 us", None, figures(paced), call),
        paced_row,
    ]


class Events:
    """A thread that stores and removes blocks at a fixed rate, on all instances in turn."""

    def __init__(self, fleet: Fleet, router: Router) -> None:
        self.router, self.names = router, fleet.names
        self.batches = [
            (
                fleet.rng.integers(1, 2**63, EVENT_BLOCKS, dtype=np.uint64),
                fleet.rng.integers(0, 150_000, EVENT_BLOCKS * BLOCK, dtype=np.uint32),
            )
            for _ in range(2 * INSTANCES)
        ]
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.rate = 0.0

    def _run(self) -> None:
        began = time.monotonic()
        done = 0
        while not self.over.is_set():
            instance, turn = done % INSTANCES, done // INSTANCES
            hashes, tokens = self.batches[(instance + turn // 2 * 7) % len(self.batches)]
            if turn % 2 == 0:
                self.router.blocks_stored(self.names[instance], hashes, tokens)
            else:
                self.router.blocks_removed(self.names[instance], hashes)
            done += 1
            wait = began + done * EVENT_BLOCKS / EVENTS_PER_SECOND - time.monotonic()
            if wait > 0:
                time.sleep(wait)
        self.rate = done * EVENT_BLOCKS / (time.monotonic() - began)

    def __enter__(self) -> Events:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def show(rows: list[dict[str, Any]]) -> str:
    """Returns the rows in Markdown."""

    def pair(figures: dict[str, float] | None) -> str:
        return f"{figures['p50_us']:.2f} / {figures['p99_us']:.2f}" if figures else "-"

    lines = [
        "| stage | case | ours p50 / p99 us | Dynamo p50 / p99 us | ratio p50 |",
        "|---|---|---|---|---|",
    ]
    for line in rows:
        ratio = f"{line['ratio_p50']:.1f}" if line["dynamo"] else "-"
        cells = [line["stage"], line["case"], pair(line["ours"]), pair(line["dynamo"]), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs all three measurements and writes the raw file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rivals", type=Path, default=ROOT / "bench" / "rivals" / ".venv", help="made by install.sh"
    )
    parser.add_argument("--calls", type=int, default=1000, help="calls a row")
    parser.add_argument(
        "--only", nargs="+", choices=["match", "hash", "decide"], default=["match", "hash", "decide"]
    )
    parser.add_argument("--json", action="store_true", help="print the raw result instead of the table")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-decision.json")
    options = parser.parse_args()
    packages = sorted(options.rivals.glob("lib/python3*/site-packages"))
    if not packages:
        sys.exit(
            f"index_vs_dynamo.py: no virtual environment at {options.rivals}: run bench/rivals/install.sh"
        )
    sys.path.append(str(packages[0]))  # After our own packages.
    os.environ.setdefault("DYN_LOG", "error")
    load = [os.getloadavg()]
    fleet = Fleet()
    rows: list[dict[str, Any]] = []
    if "match" in options.only:
        rows += match(fleet, options.calls)
    if "hash" in options.only:
        rows += hashing(options.calls)
    if "decide" in options.only:
        rows += asyncio.run(decide(fleet, options.calls))
    result = {
        **about(options.rivals / "bin" / "python", []),
        "load_average": [*load, os.getloadavg()],
        "setting": {
            "instances": INSTANCES,
            "pairs": fleet.pairs(),
            "block_size": BLOCK,
            "calls": options.calls,
        },
        "clock": clock_cost(),
        "rows": rows,
    }
    path = write_result(result, "decision", options.out)
    print(json.dumps(result) if options.json else f"{show(rows)}\n\nraw figures: {path}")


if __name__ == "__main__":
    main()
