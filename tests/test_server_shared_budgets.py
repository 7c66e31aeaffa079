"""Budgets that several routers share: counts, bound of the overshoot, clocks and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric._core import BudgetRefusal, BudgetReservation, Budgets
from lmetric.config import ServerConfig
from lmetric.server.background.replicas import PATH
from lmetric.server.observe.budgets import TenantBudgets
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.ports import free_ports
from load_messages import message
from server_world import FakeEngine, World, answer, world
from test_server_budgets import ask, budget, left, tenants
from test_server_process import Process, router
from test_server_replicas import several, two
from waiting import PATIENCE_SECONDS, until

TWO = {"urls": ["http://127.0.0.1:1"]}


def used(w: World) -> int:
    """Returns what a router counts of the budget of tenant `a`."""
    times = time.monotonic(), time.time()
    window = w.server.config.tenants["a"].budgets[0]
    probe = w.server.front.budgets.core.reserve("a", ("tiny", "", ""), (0, 0), times)
    if isinstance(probe, BudgetRefusal):
        return probe.used
    assert isinstance(probe, BudgetReservation)
    line = re.search(rb"-remaining-[a-z]+: ([0-9]+)", probe.lines)
    assert line is not None
    return window.limit - int(line[1]) - (window.counts == "requests")


async def test_routers_count_the_use_of_each_other() -> None:
    window = budget("requests", 5, "day", time_zone="UTC")
    async with several(3, [FakeEngine()], tenants=tenants(window)) as routers:
        for turn in range(5):
            status, headers, _ = await ask(routers[turn % 3])
            assert (status, left(headers, "requests")) == (200, 4 - turn)
            await until(lambda n=turn + 1: all(used(each) == n for each in routers))
        for each in routers:
            status, headers, got = await ask(each)
            assert (status, left(headers, "requests")) == (429, 0)
            assert "5 of 5 per day are used" in got["error"]["message"]


async def test_what_a_router_gives_back_is_given_back_at_the_others() -> None:
    open_ = asyncio.Event()

    async def slow(engine: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        await open_.wait()
        return await answer(engine, request, writer)

    async with two([FakeEngine(behave=slow)], tenants=tenants(budget("total_tokens", 100))) as (a, b):
        running = asyncio.create_task(ask(a, max_tokens=80))
        await until(lambda: used(b) == 90)
        assert (await ask(b, max_tokens=3))[0] == 429
        open_.set()
        assert (await running)[0] == 200
        await until(lambda: used(b) == 13)


async def test_a_router_that_stops_leaves_its_use_behind_and_one_that_starts_learns_it() -> None:
    window = budget("requests", 10, "month")
    ports = free_ports(3)
    shared = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": 0.02}
    engines = [FakeEngine()]
    settings: dict[str, Any] = {"tenants": tenants(window), "replicas": shared}
    async with world(engines, **settings, port=ports[0]) as a:
        named = [{"url": engines[0].url, "name": "e0"}]
        async with world([], **settings, port=ports[1], engines=named) as b:
            for _ in range(4):
                assert (await ask(b))[0] == 200
            await until(lambda: used(a) == 4)
        await until(lambda: not a.server.front.replicas.received)
        assert used(a) == 4
        # It starts again: its earlier use comes back from the other router, and counts once.
        async with world([], **settings, port=ports[1], engines=named) as b:
            await until(lambda: used(b) == 4)
            assert (await ask(b))[0] == 200
            await until(lambda: used(a) == 5)
            assert (await ask(a))[0] == 200
            await until(lambda: used(b) == 6)
            async with world([], **settings, port=ports[2], engines=named) as c:
                await until(lambda: used(c) == 6)
                assert used(a) == used(b) == 6


async def test_a_restart_from_a_file_counts_nothing_twice(tmp_path: Path) -> None:
    window = budget("requests", 10, "month")
    ports = free_ports(2)
    shared = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": 0.02}
    engines = [FakeEngine()]
    settings: dict[str, Any] = {"tenants": tenants(window), "replicas": shared}
    async with world(engines, **settings, port=ports[0], state_folder=str(tmp_path / "a")) as a:
        named = [{"url": engines[0].url, "name": "e0"}]
        own = {"engines": named, "port": ports[1], "state_folder": str(tmp_path / "b")}
        for life in range(1, 4):
            async with world([], **settings, **own) as b:
                await until(lambda n=life: used(a) == used(b) == 2 * (n - 1))
                assert (await ask(b))[0] == 200
                assert (await ask(a))[0] == 200
                await until(lambda n=life: used(a) == used(b) == 2 * n)
    file = tmp_path / "a" / "budgets.bin"
    # Without other routers, the file has the use of all.
    async with world(1, tenants=tenants(window), state_folder=str(file.parent)) as alone:
        assert used(alone) == 6


async def test_an_idle_router_writes_no_state_file(tmp_path: Path) -> None:
    ports = free_ports(2)
    shared = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": 0.02}
    settings: dict[str, Any] = {"tenants": tenants(budget("requests", 10, "month")), "replicas": shared}
    async with (
        world(1, **settings, port=ports[0], state_folder=str(tmp_path)) as a,
        world(1, **settings, port=ports[1]) as b,
    ):
        await until(lambda: all(len(each.server.front.replicas.received) == 1 for each in (a, b)))
        assert (await ask(a))[0] == 200
        file = tmp_path / "budgets.bin"
        await until(file.exists)
        await asyncio.sleep(1.2)
        before = file.stat().st_mtime_ns
        await asyncio.sleep(1.2)
        assert file.stat().st_mtime_ns == before


def other(ahead: float = 0.0, requests: int = 3) -> bytes:
    """Returns the counts of another router whose clock is ahead by seconds."""
    config = ServerConfig.model_validate({"tenants": tenants(budget("requests", 5, "day", time_zone="UTC"))})
    core = TenantBudgets(config.tenants).core
    core.share("ab")
    times = time.monotonic() + ahead, time.time() + ahead
    for _ in range(requests):
        made = core.reserve("a", ("tiny", "", ""), (0, 0), times)
        assert isinstance(made, BudgetReservation)
        made.keep()
    core.enter()
    return core.encode(None, times)


async def test_budgets_of_a_router_with_another_clock_do_not_count_and_ready_names_it() -> None:
    window = budget("requests", 5, "day", time_zone="UTC")
    async with world(1, replicas=TWO, tenants=tenants(window)) as w:
        assert (await w.post(message(budgets=other(Budgets.MOST_SKEW_SECONDS / 2)), PATH))[0] == 200
        assert used(w) == 3
        for version, ahead, words in ((1, 86_400.0, "86400 s ahead"), (2, -86_400.0, "86400 s behind")):
            answer = await w.post(message(version=version, budgets=other(ahead, 5)), PATH)
            assert answer[0] == 200
            assert used(w) == 3
            (problem,) = [each for each in w.server.fleet.own_problems() if "clock" in each.cause]
            assert words in problem.reason
        state = orjson.loads((await w.get("/debug/replicas"))[1])
        assert state["received_from"][0]["clock_ahead_seconds"] == pytest.approx(-86_400, abs=60)
        assert (await w.post(message(version=3, budgets=other()), PATH))[0] == 200
        assert not [each for each in w.server.fleet.own_problems() if "clock" in each.cause]


@pytest.mark.parametrize("broken", [b"x", b"lmbudge1", bytes(100), secrets.token_bytes(300)])
async def test_counts_that_no_router_sends_are_refused(broken: bytes) -> None:
    async with world(1, replicas=TWO, tenants=tenants(budget("requests", 5))) as w:
        for counts in (broken, other()[:-1], other() + b"x"):
            status, _, got = await w.post(message(budgets=counts), PATH)
            assert status == 400
            assert "counts of budgets" in got["error"]["message"]
            assert used(w) == 0


# Three router processes before embedded engines, and one of them is killed.

LIMIT = 120
INTERVAL = 0.1
# An exchange, and what a busy machine adds to it, at least.
EXCHANGE_SECONDS = INTERVAL + 0.9
LOOK_SECONDS = 0.05  # between two looks at the age of the messages


@dataclass
class Traffic:
    """Requests through several routers, and when each was granted."""

    client: aiohttp.ClientSession
    granted: dict[int, list[float]] = field(default_factory=dict)  # by router: time of the request
    lost: int = 0  # requests whose router was killed before it answered
    refused: set[int] = field(default_factory=set)
    slowest: float = 0.0  # longest time of a request, seconds
    exchange: float = EXCHANGE_SECONDS

    async def watch(self, urls: list[str], killed: str) -> None:
        """Measures how long exchanges take on this machine: how old a message gets, and its way.

        ``killed``: ID of the router that sends no more at some time.
        """
        looked = time.monotonic()
        sent_at = dict.fromkeys(urls, looked)  # by receiver: the last message of the other router
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for url in urls:
                async with self.client.get(f"{url}/debug/replicas") as page:
                    peers = (await page.json())["received_from"]
                now = time.monotonic()
                ages = [peer["age_seconds"] for peer in peers if peer["router"] != killed]
                oldest = now - sent_at[url] + now - looked
                self.exchange = max(self.exchange, oldest + self.slowest)
                sent_at[url] = max([sent_at[url], *(now - age for age in ages)])
            looked = time.monotonic()

    async def send(self, place: int, url: str) -> None:
        """Sends requests one after the other until the router refuses them or is killed."""
        body = {"model": "emulated", "prompt": "a", "max_tokens": 2}
        while True:
            began = time.monotonic()
            try:
                async with self.client.post(
                    f"{url}/v1/completions", json=body, headers={"x-tenant": "a"}
                ) as answer:
                    await answer.read()
            except aiohttp.ClientError:
                self.lost += 1
                return
            if answer.status == 429:
                self.refused.add(place)
                return
            assert answer.status == 200
            self.granted.setdefault(place, []).append(began)
            self.slowest = max(self.slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)

    @property
    def total(self) -> int:
        return sum(map(len, self.granted.values()))

    def bound(self) -> int:
        """Returns what all routers grant at most within one exchange."""
        return sum(_most_within(self.exchange, times) for times in self.granted.values())


def _most_within(seconds: float, times: list[float]) -> int:
    times = sorted(times)
    return max(
        (sum(1 for other in times[n:] if other - at <= seconds) for n, at in enumerate(times)), default=0
    )


@contextlib.contextmanager
def configuration(folder: Path, ports: list[int], engines: list[str], **more: Any) -> Iterator[Path]:
    file = folder / "router.yaml"
    values = {
        "engines": [{"url": url} for url in engines],
        "tenants": tenants(budget("requests", LIMIT, "month")),
        "replicas": {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": INTERVAL},
        "policy": "round_robin",
        **more,
    }
    file.write_bytes(orjson.dumps(values))
    yield file


@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.nightly)])
async def test_three_routers_and_one_killed_stay_within_the_documented_bound(
    tmp_path: Path, restarts: bool
) -> None:
    ports = free_ports(3)
    async with contextlib.AsyncExitStack() as stack:
        engines = await stack.enter_async_context(EmbeddedEngines(2))
        file = stack.enter_context(configuration(tmp_path, ports, list(engines.urls)))
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(port: int) -> Process:
            process = await stack.enter_async_context(router("--config", str(file), "--port", str(port)))
            await process.listening(60)
            return process

        routers = await asyncio.gather(*map(start, ports))

        async def exchanged(url: str, others: int) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    async with client.get(f"{url}/debug/replicas") as page:
                        if len((await page.json())["received_from"]) >= others:
                            return
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(exchanged(each.url, 2) for each in routers))
        traffic = Traffic(client)
        async with client.get(f"{routers[2].url}/debug/replicas") as page:
            killed = (await page.json())["router"]
        watch = asyncio.create_task(traffic.watch([each.url for each in routers[:2]], killed))
        senders = [
            asyncio.create_task(traffic.send(place, each.url))
            for place, each in enumerate(routers)
            for _ in range(2)
        ]
        await until(lambda: traffic.total >= LIMIT // 2, 60)
        routers[2].process.kill()
        await routers[2].process.wait()
        if restarts:
            again = await start(ports[2])
            await exchanged(again.url, 1)
            senders += [asyncio.create_task(traffic.send(3, again.url)) for _ in range(2)]
        await asyncio.gather(*senders)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert traffic.refused == {0, 1, *([3] if restarts else [])}
        assert traffic.granted[2]
        assert traffic.total <= LIMIT + traffic.bound()
        assert traffic.total < 2 * LIMIT  # two routers alone grant more, however slow exchanges are
        # No use counts twice: the budget was not refused early. A killed request counts as used.
        assert traffic.total >= LIMIT - traffic.lost
