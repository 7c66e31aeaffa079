"""Scenarios of many clients: connections without requests, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import orjson
from routers import OwnRouter
from stage import RuleError, Stage, stage, until
from traffic import MODEL

IDLE = 4000
LEAVERS, AT_ONCE = 1500, 100
# The largest growth of the router's memory: of an idle connection, and of a second, equal crowd of
# clients that leave.
IDLE_KIB, CROWD_MIB = 24.0, 8.0
CONFIG = {"limits": {"max_connections": 9000, "max_client_share": 1.0}}


async def idle_clients(folder: Path, seed: int) -> dict[str, float | str]:
    """Thousands of clients connect, and half of them send one request. All stay, then all leave."""
    async with stage(folder, seed) as it:
        router = await it.router(CONFIG)
        await _burst(it, router, AT_ONCE)
        before, files = router.rss_mib(), router.open_files()
        host, port = _address(router)
        crowd = []
        for number in range(IDLE):
            crowd.append(await asyncio.open_connection(host, port))
            if number % 2:
                crowd[-1][1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: _connections(it, router, IDLE), "all idle clients count")
        each_kib = (router.rss_mib() - before) * 1024 / IDLE
        traffic = it.traffic(router)
        await traffic.run(3.0, it.session)
        for _, writer in crowd:
            writer.close()
        await until(lambda: _connections(it, router, 0), "no client counts any more")
        await until(lambda: _files(router, files + 20), "their descriptors are closed")
        figures = await it.check(traffic)
        if each_kib > IDLE_KIB:
            raise RuleError(f"an idle client costs {each_kib:.1f} KiB, expected at most {IDLE_KIB:g}")
        return figures | {"idle clients": IDLE, "KiB each": round(each_kib, 1)}


async def clients_that_leave(folder: Path, seed: int) -> dict[str, float | str]:
    """Hundreds of clients leave in the middle: of the head, of the body, before and in an answer.

    Clients that stay get all their answers. A second crowd adds no memory to the first.
    """
    async with stage(folder, seed) as it:
        router = await it.router(CONFIG)
        traffic = it.traffic(router)
        memory = []
        for crowd in range(3):
            staying = asyncio.create_task(traffic.run(3.0, it.session))
            await _burst(it, router, LEAVERS, seed + crowd)
            await staying
            await until(lambda: _connections(it, router, 0), "no client counts any more")
            await it.check_engines()
            memory.append(router.rss_mib())
        figures = await it.check(traffic)
        growth = memory[2] - memory[1]
        if growth > CROWD_MIB:
            raise RuleError(
                f"a third crowd of clients added {growth:.1f} MiB, expected {CROWD_MIB:g} at most"
            )
        return figures | {
            "clients that left": 3 * LEAVERS,
            "growth of the third crowd, MiB": round(growth, 1),
        }


def _address(router: OwnRouter) -> tuple[str, int]:
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    return host, int(port)


async def _burst(it: Stage, router: OwnRouter, count: int, seed: int = 0) -> None:
    """Clients that leave, some at once."""
    gate = asyncio.Semaphore(AT_ONCE)
    rng = random.Random(seed)

    async def one(number: int) -> None:
        async with gate:
            await _leave(router, number, rng.random(), seed)

    await asyncio.gather(*map(one, range(count)))


async def _leave(router: OwnRouter, number: int, when: float, seed: int) -> None:
    """Sends a part of a request, or all, reads a part of the answer, or nothing, and leaves."""
    body = orjson.dumps(
        {
            "model": MODEL,
            "prompt": f"{seed} {number} leaves " + "on its way " * 40,
            "max_tokens": 100,
            "stream": number % 3 != 0,
        }
    )
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with contextlib.suppress(ConnectionError, TimeoutError):
        reader, writer = await asyncio.open_connection(*_address(router))
        try:
            if number % 5 == 0:  # in the head or in the body
                writer.write((head + body)[: int(when * len(head + body))])
                await asyncio.sleep(0.02 * when)
            else:
                writer.write(head + body)
                async with asyncio.timeout(0.3 * when):
                    while await reader.read(500):
                        pass
        finally:
            if number % 2:
                writer.transport.abort()
            else:
                writer.close()


async def _connections(it: Stage, router: OwnRouter, count: int) -> bool:
    """Whether this many clients are connected, without the client of this look."""
    told = await router.metric(it.session, "lmetric_client_connections")
    return sum(told.values()) == count + 1


async def _files(router: OwnRouter, most: int) -> bool:
    return router.open_files() <= most
