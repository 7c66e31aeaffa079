"""Several routers with several workers each: load, budgets and API keys, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from lmetric_lab.ports import free_ports
from server_world import FakeEngine, answer, hang
from test_server_budgets import budget, tenants
from test_server_keys import settings
from test_server_keys_shared import Client
from test_server_passthrough import RESPONSES, Responses
from test_server_process import Process, engine, router
from test_workers import workers_of
from waiting import PATIENCE_SECONDS, until

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 1}
WORKERS = 2


ADMIN = {"authorization": "Bearer root-token"}


class Router:
    """A router with workers. Each request comes on a new connection, so at any worker."""

    def __init__(self, process: Process, file: Path) -> None:
        self.process = process
        self.file = file
        self.client = Client(process.url)

    async def page(self, path: str) -> Any:
        async with self.client.session.get(self.client.url + path, headers=ADMIN) as got:
            return orjson.loads(await got.read())

    async def bs(self) -> set[float]:
        """Returns the requests on the engine, as the workers that answer count them."""
        pages = [await self.page("/debug/indicators") for _ in range(8)]
        return {each["tiny"]["e0"]["bs"] for each in pages}

    async def ask(self) -> int:
        """Sends a request of tenant `a`. Returns what is left of its budget; -1: it is refused."""
        headers = {"x-tenant": "a"}
        url = self.client.url + "/v1/completions"
        async with self.client.session.post(url, json=BODY, headers=headers) as got:
            assert got.status in (200, 429), await got.text()
            return int(got.headers["x-ratelimit-remaining-requests"]) if got.status == 200 else -1


class Fleet:
    """Routers with workers before one engine. Each has the addresses of all of them."""

    def __init__(self, folder: Path, fake: FakeEngine, replicas: dict[str, Any], **more: Any) -> None:
        self._folder = folder
        self._fake = fake
        self._replicas = replicas
        self._more = more
        self._stack = contextlib.AsyncExitStack()

    async def add(self, port: int) -> Router:
        own = self._folder / str(port)
        own.mkdir(exist_ok=True)
        values = settings(own, engines=[{"url": self._fake.url, "name": "e0"}], port=port, **self._more)
        if "tenants" in values:
            del values["auth"]  # clients name their tenant
        values |= {"workers": WORKERS, "replicas": {"token": "among-us", "interval": 0.05, **self._replicas}}
        file = own / "router.yaml"
        file.write_text(yaml.safe_dump(values))
        process = await self._stack.enter_async_context(router("--config", str(file), "--port", str(port)))
        await process.listening(60)
        added = Router(process, file)
        self._stack.push_async_callback(added.client.session.close)
        return added

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def met(*routers: Router) -> None:
    """Waits until all workers of each router receive the load of each process of the others."""
    count = (len(routers) - 1) * (WORKERS + 1)

    async def all_receive() -> bool:
        states = [await each.page("/debug/replicas") for each in routers for _ in range(6)]
        return all(len(state["received_from"]) == count for state in states)

    await eventually(all_receive)


async def test_workers_of_all_routers_count_each_others_requests_and_find_each_others_responses(
    tmp_path: Path,
) -> None:
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    fake = Responses()
    fake.behave = hang
    async with contextlib.AsyncExitStack() as stack:
        await fake.start()
        stack.push_async_callback(fake.stop)
        fleet = await stack.enter_async_context(Fleet(tmp_path, fake, {"urls": urls}))
        a, b = [await fleet.add(port) for port in ports]
        await met(a, b)
        async with a.client.session.get(a.client.url + "/metrics") as page:
            assert "\nlmetric_replicas 1.0\n" in await page.text()
        key = await a.client.issue()
        previous = None
        for turn in range(12):
            body = {"model": "tiny", "input": "a", "previous_response_id": previous}
            status, answered = await (a, b)[turn % 2].client.call("POST", RESPONSES, body, key["key"])
            assert status == 200, answered
            previous = answered["id"]
        asking = [asyncio.create_task(each.client.use(key)) for each in (a, b) for _ in range(5)]

        async def count(number: float) -> bool:
            return await a.bs() == await b.bs() == {number}

        await eventually(lambda: count(10))
        # A worker ends: its requests no longer count. Its successor gets the load of all others.
        os.kill(workers_of(a.process)[0], signal.SIGKILL)
        await until(lambda: len(workers_of(a.process)) == WORKERS)
        await met(a, b)
        left = sum(not each.done() for each in asking)
        assert 5 <= left <= 10
        await eventually(lambda: count(left))
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await eventually(lambda: count(0))


@pytest.mark.nightly
async def test_workers_of_all_routers_share_a_budget_and_a_restart_forgets_none(tmp_path: Path) -> None:
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    window = tenants(budget("requests", 12, "month"))
    async with engine(behave=answer) as fake, Fleet(tmp_path, fake, {"urls": urls}, tenants=window) as fleet:
        a, b = [await fleet.add(port) for port in ports]
        await met(a, b)
        for turn in range(8):
            assert await (a, b)[turn % 2].ask() == 11 - turn
            await asyncio.sleep(0.3)  # more than the time of a message
        # A worker that starts anew knows the counts.
        os.kill(workers_of(a.process)[0], signal.SIGKILL)
        await until(lambda: len(workers_of(a.process)) == WORKERS)
        await met(a, b)
        assert await a.ask() == 3
        await asyncio.sleep(0.3)
        assert await b.ask() == 2
        await asyncio.sleep(1.5)  # the files have the counts
        for each in (a, b):
            each.process.process.kill()
            await each.process.ended()
        a, b = [await fleet.add(port) for port in ports]
        await met(a, b)
        assert await a.ask() == 1
        await asyncio.sleep(0.3)
        assert [await b.ask(), await b.ask()] == [0, -1]
        await asyncio.sleep(0.3)
        assert [await a.ask() for _ in range(4)] == [-1] * 4


@pytest.mark.nightly
async def test_workers_of_all_routers_have_each_key(tmp_path: Path) -> None:
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with engine(behave=answer) as fake, Fleet(tmp_path, fake, {"urls": urls}) as fleet:
        a, b = [await fleet.add(port) for port in ports]
        await met(a, b)
        for here, there in ((a, b), (b, a)):
            key = await here.client.issue()  # waits for the other router
            assert [await each.client.use(key) for each in (a, b) for _ in range(8)] == [200] * 16
            await there.client.revoke(key)
            assert [await each.client.use(key) for each in (a, b) for _ in range(8)] == [401] * 16
        key = await a.client.issue()
        b.process.process.kill()
        await b.process.ended()
        b = await fleet.add(ports[1])
        assert [await b.client.use(key) for _ in range(8)] == [200] * 8
