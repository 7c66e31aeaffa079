"""Compares the ways in which a running request moves, on emulated engines: client gaps, recomputed
tokens, cost.

    python bench/moves.py [--rounds 3] [--requests 8] [--tokens 360] [--prompts 1000,8000] [--out
    FILE]

A server runs before four emulated engines that can transfer KV caches (the default profile, in real
time, all in this process). Each round plays the same requests at once in each way: prompts of their
own, answers of the same length. Each request moves once, to the next engine, when a third of its
tokens is known here. `none` moves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from common import about, median_range, percentile, write_result
from lmetric import Star
from lmetric.config import Log, PoolSettings, ServerConfig
from lmetric.server import Server
from lmetric.server.observe.logs import configure_logging
from lmetric_lab.emulated import EngineOptions, EngineServer

ENGINES = 4
MAX_GAP_SECONDS = 0.5


@dataclass(frozen=True)
class Way:
    """How requests move."""

    name: str
    by: str
    moves: bool = True


WAYS = (
    Way("none", "recompute", moves=False),
    Way("recompute", "recompute"),
    Way("fetch", "fetch"),
)


@dataclass
class Heard:
    """Client measurements of a round. Seconds; gaps are between two pieces with tokens."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)  # Gap of each request.


async def asked(client: aiohttp.ClientSession, url: str, body: dict[str, Any], heard: Heard) -> int:
    """Sends one request. Returns the tokens of its answer."""
    begun, tokens, times = time.monotonic(), 0, []
    async with client.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"moves.py: status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"moves.py: {event['error']}")
            told = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if told:
                times.append(time.monotonic())
                tokens += told
    gaps = [after - before for before, after in pairwise(times)]
    heard.first.append(times[0] - begun)
    heard.gaps += gaps
    heard.largest.append(max(gaps))
    return tokens


async def moved(server: Server, at: int, every: int) -> None:
    """Moves each request once, when it has `tokens` tokens, until all moves have begun."""
    model = server.fleet.models[0]
    mover, begun = model.mover, set()
    assert mover is not None
    names = list(model.engines)
    while len(begun) < every:
        for number, running in list(mover.running.items()):
            if number not in begun and running.known_tokens >= at:
                target = names[(names.index(running.instance) + 1) % len(names)]
                if mover.begin(number, target, time.monotonic()):
                    begun.add(number)
        await asyncio.sleep(0.001)


async def played(way: Way, prompt_tokens: int, given: argparse.Namespace) -> dict[str, float]:
    """Plays one round of one way."""
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(ENGINES):
            options = EngineOptions(
                port=0, kv_connector="nixl", role="both", kv_load_failure_policy="recompute"
            )
            engines.append(await stack.enter_async_context(EngineServer(options)))
        config = {
            "port": 0,
            "engines": [{"url": engine.url} for engine in engines],
            "policy": "round_robin",
            "load": {"interval": None},
            "rebalance": "star",
            "migration_by": way.by,
            "migration_max_gap_seconds": MAX_GAP_SECONDS,
        }
        # Constants of servers: only `moved` moves streams, all at once.
        PoolSettings.migration_max_concurrent = given.requests
        rebalance = Star(period_seconds=3600.0)
        server = Server(ServerConfig.model_validate(config).model_copy(update={"rebalance": rebalance}))
        await server.start()
        stack.push_async_callback(server.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        model = server.fleet.models[0]
        while not all(engine.identified for engine in model.engines.values()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        heard = Heard()
        bodies = [
            {
                "model": "emulated",
                "prompt": [1000 + (n * 7919 + i * 31) % 1000 for i in range(prompt_tokens)],
                "max_tokens": given.tokens,
                "stream": True,
                "return_token_ids": True,
            }
            for n in range(given.requests)
        ]
        url = f"http://127.0.0.1:{server.port}"
        moving = asyncio.create_task(moved(server, given.tokens // 3, given.requests)) if way.moves else None
        begun = time.monotonic()
        tokens = sum(await asyncio.gather(*(asked(client, url, body, heard) for body in bodies)))
        seconds = time.monotonic() - begun
        if moving is not None:
            moving.cancel()
        if tokens != given.requests * given.tokens:
            raise SystemExit(f"moves.py: {way.name}: {tokens} tokens were heard")
        loads = [dict(rank.driver.engine.load()) for engine in engines for rank in engine._ranks]
        computed = sum(
            load["prompt_tokens"] - load["cached_prompt_tokens"] - load["fetched_prompt_tokens"]
            for load in loads
        )
        stats = model.router.stats()
        return {
            "moved": stats["migrated"] / given.requests,
            "first_token_ms": percentile(sorted(heard.first), 0.5) * 1e3,
            "gap_p50_ms": percentile(sorted(heard.gaps), 0.5) * 1e3,
            "gap_p99_ms": percentile(sorted(heard.gaps), 0.99) * 1e3,
            "largest_gap_p50_ms": percentile(sorted(heard.largest), 0.5) * 1e3,
            "largest_gap_ms": max(heard.largest) * 1e3,
            "computed_again": computed / given.requests - prompt_tokens,
            "fetched": sum(load["fetched_prompt_tokens"] for load in loads) / given.requests,
            "tokens_per_second": tokens / seconds,
        }


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=360)
    parser.add_argument("--prompts", default="1000,8000")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    configure_logging(Log(level="error"))
    cells: dict[str, dict[str, list[float]]] = {}
    for _ in range(given.rounds):
        for prompt_tokens in map(int, given.prompts.split(",")):
            for way in WAYS:
                found = asyncio.run(played(way, prompt_tokens, given))
                cell = cells.setdefault(f"{prompt_tokens} tokens, {way.name}", {})
                for name, value in found.items():
                    cell.setdefault(name, []).append(value)
    medians = {
        name: {what: median_range(values) for what, values in cell.items()} for name, cell in cells.items()
    }
    columns = list(next(iter(medians.values())))
    print("| prompt, way | " + " | ".join(columns) + " |\n|" + " --- |" * (len(columns) + 1))
    for name, cell in medians.items():
        print(f"| {name} | " + " | ".join(f"{cell[what][0]:.4g}" for what in columns) + " |")
    result = {
        **about(None, []),
        "load": os.getloadavg(),
        "given": {name: value for name, value in vars(given).items() if name != "out"},
        "unit": "median, least, greatest, rounds; tokens computed again and pulled are per request",
        "cells": medians,
    }
    print(write_result(result, "moves", given.out))


if __name__ == "__main__":
    main()
