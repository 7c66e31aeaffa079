"""Scenarios of two routers: one is killed, or the network between them is cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from engines import EngineProcess, Proxy
from routers import OwnRouter
from stage import RuleError, Stage, stage, until

from lmetric.config import ReplicasConfig
from lmetric_lab.ports import free_ports

LONG_STREAMS = 8
LONG_TOKENS = 800  # some 20 s
SILENT_SECONDS = ReplicasConfig.silent_after


async def router_killed(folder: Path, seed: int) -> dict[str, float | str]:
    """One of two routers is killed under load, and started again later.

    Clients know both addresses. Only the streams that ran through the killed router may break.
    """
    async with stage(folder, seed) as it:
        ports = free_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        config = {"replicas": {"urls": urls}}
        first, second = [await it.router(config, port=port) for port in ports]
        traffic = it.traffic(first, second)
        sending = asyncio.create_task(traffic.run(7.0, it.session))
        cut = [asyncio.create_task(_cut_stream(it, first, n)) for n in range(LONG_STREAMS)]
        await asyncio.sleep(2.5)
        open_there = {a.number for a in traffic.asked if a.url == first.url and a.ended == 0.0}
        killed = time.monotonic()
        await first.kill()
        await until(lambda: _peers_are(second, it, 0), "the killed router counts no longer")
        forgotten = time.monotonic() - killed
        await asyncio.sleep(1.5)
        await first.start(it.session)
        await until(lambda: _peers_are(second, it, 1), "the new router's load counts")
        await sending
        await traffic.run(2.0, it.session)
        figures = await it.check(traffic, lambda asked: asked.number in open_there)
        took = [ended - killed for ended in await asyncio.gather(*cut)]
        tried = [a for a in traffic.asked if a.tries > 1]
        after = [a for a in traffic.asked if a.url == first.url and a.began > killed]
        if not tried or not after:
            raise RuleError("no client used both routers: the scenario does not test anything")
        return figures | {
            "streams at the killed router": len(open_there) + LONG_STREAMS,
            "last break seen after, s": round(max(took), 2),
            "clients that used the other address": len(tried),
            "load forgotten after, s": round(forgotten, 2),
        }


async def _cut_stream(it: Stage, router: OwnRouter, number: int) -> float:
    """Reads a long stream. Returns when it broke. Raises RuleError if it looks complete."""
    body = _long_body(number)
    try:
        async with it.session.post(f"{router.url}/v1/completions", json=body) as response:
            text = await response.read()
    except aiohttp.ClientError:
        return time.monotonic()
    raise RuleError(f"a stream of a killed router ended like a complete one: {text[-200:]!r}")


async def _peers_are(router: OwnRouter, it: Stage, count: int) -> bool:
    told = await router.page(it.session, "/debug/replicas")
    return len(told["received_from"]) == count


def _long_body(number: int) -> dict[str, Any]:
    prompt = f"{number} of several long streams"
    return {"model": "chaos", "prompt": prompt, "max_tokens": LONG_TOKENS, "stream": True}


async def _long_stream(it: Stage, router: OwnRouter, number: int) -> None:
    body = _long_body(number)
    async with it.session.post(f"{router.url}/v1/completions", json=body) as response:
        text = await response.read()
    if response.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
        raise RuleError(f"a long stream broke: {response.status} {text[-200:]!r}")


async def partition(folder: Path, seed: int) -> dict[str, float | str]:
    """The network between two routers is cut, in two ways, and healed.

    Their clients and engines stay reachable. While it is cut, each router counts its own requests.
    Afterwards, both count all requests of both, once.
    """
    async with stage(folder, seed) as it:
        ports = free_ports(2)
        links = [Proxy(port, seed) for port in ports]  # links[0] leads to the first router
        for link in links:
            await link.start()
        here = [
            await it.router(
                {
                    "replicas": {
                        "urls": [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{links[1 - n].port}"],
                    },
                },
                port=port,
            )
            for n, port in enumerate(ports)
        ]
        try:
            for router in here:
                await until(lambda r=router: _peers_are(r, it, 1), "routers exchange their load")
            long = [asyncio.create_task(_long_stream(it, here[n % 4 == 0], n)) for n in range(LONG_STREAMS)]
            await until(lambda: _both_count(it, here, LONG_STREAMS), "both count all long streams")
            figures: dict[str, float | str] = {}
            for mode in ("silent", "refuse"):
                for link in links:
                    await link.set(mode)  # type: ignore[arg-type]
                for router in here:
                    await until(lambda r=router: _peers_are(r, it, 0), f"{mode}: cut off")
                await _own_count(it, here)
                for link in links:
                    await link.set("pass")
                for router in here:
                    await until(lambda r=router: _peers_are(r, it, 1), f"{mode}: healed")
                figures[f"{mode}: agree after, s"] = round(
                    await until(lambda: _both_count(it, here, LONG_STREAMS), f"{mode}: counts agree"), 2
                )
            if any(task.done() for task in long):
                raise RuleError("a long stream ended before the faults were over: no counts to compare")
            traffic = it.traffic(*here)
            await asyncio.gather(traffic.run(3.0, it.session), *long)
            return figures | await it.check(traffic)
        finally:
            for link in links:
                await link.stop()


async def _both_count(it: Stage, routers: Sequence[OwnRouter], total: int) -> bool:
    """Whether all routers count the same requests on each engine, and this many together."""
    counts = [await router.column(it.session, "bs") for router in routers]
    return counts[0] == counts[1] and sum(counts[0].values()) == total


async def _own_count(it: Stage, routers: Sequence[OwnRouter]) -> None:
    """Checks that routers which are cut off count their own requests, and no request twice."""
    own = [await router.metric(it.session, "lmetric_instance_in_flight") for router in routers]
    seen = [await router.column(it.session, "bs") for router in routers]
    for mine, all_of_them in zip(own, seen, strict=True):
        low, high = sum(mine.values()), sum(all_of_them.values())
        if not 0 < low <= high <= LONG_STREAMS:
            raise RuleError(f"cut off, a router counts {high}: expected {low} (its own) to {LONG_STREAMS}")


async def events_cut(folder: Path, seed: int) -> dict[str, float | str]:
    """The KV events of all engines are cut for one of two routers, and healed.

    Requests go through both meanwhile. Afterwards, both know the same blocks of each engine.
    """
    async with stage(folder, seed, kv_events=True) as it:
        links = [Proxy(port, seed) for e in it.engines for port in (e.events_port, e.replay_port)]
        for link in links:
            await link.start()
        through = [link.port for link in links]
        direct = [port for e in it.engines for port in (e.events_port, e.replay_port)]
        try:
            far, near = [
                await it.router(engines=_with_events(it.engines, ports)) for ports in (through, direct)
            ]
            prompts = _Prompts(it)
            await prompts.send((far, near), 20)
            await until(lambda: _same_blocks(it, far, near), "both routers know the same blocks")
            figures: dict[str, float | str] = {}
            for mode in ("silent", "refuse"):
                for link in links:
                    await link.set(mode)  # type: ignore[arg-type]
                await asyncio.sleep(1.0)
                before = sum((await near.metric(it.session, "lmetric_instance_index_blocks")).values())
                await prompts.send((far, near), 20)
                if await _same_blocks(it, far, near):
                    raise RuleError("the cut router knows blocks that nobody told it of")
                for link in links:
                    await link.set("pass")
                await prompts.send((far, near), 6)  # engines publish again: a gap is seen
                took = await until(lambda: _same_blocks(it, far, near), f"{mode}: views agree", 40)
                after = sum((await near.metric(it.session, "lmetric_instance_index_blocks")).values())
                figures[f"{mode}: blocks meanwhile"] = after - before
                figures[f"{mode}: agree after, s"] = round(took, 2)
            traffic = it.traffic(far, near)
            await traffic.run(2.0, it.session)
            return figures | await it.check(traffic)
        finally:
            for link in links:
                await link.stop()


def _with_events(engines: Sequence[EngineProcess], ports: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "url": engine.url,
            "name": engine.name,
            "kv_events": {
                "endpoint": f"tcp://127.0.0.1:{ports[2 * n]}",
                "replay_endpoint": f"tcp://127.0.0.1:{ports[2 * n + 1]}",
                "without_tokenizer": True,
            },
        }
        for n, engine in enumerate(engines)
    ]


class _Prompts:
    """Different prompts of token ids."""

    def __init__(self, it: Stage) -> None:
        self._it = it
        self._sent = 0

    async def send(self, routers: Sequence[OwnRouter], count: int) -> None:
        """Sends prompts to routers in turn."""
        for _ in range(count):
            self._sent += 1
            ids = [100 + (self._sent * 797 + n * 31) % 1801 for n in range(160)]
            router = routers[self._sent % len(routers)]
            body = {"model": "chaos", "prompt": ids, "max_tokens": 2}
            async with self._it.session.post(f"{router.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise RuleError(f"{response.status}: {await response.text()}")


async def _same_blocks(it: Stage, *routers: OwnRouter) -> bool:
    blocks = [await router.metric(it.session, "lmetric_instance_index_blocks") for router in routers]
    return blocks[0] == blocks[1] and sum(blocks[0].values()) > 0
