"""Budgets that routers share through a real Redis or Valkey server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric._core import Budgets
from lmetric.config import ConfigError, load_config
from lmetric.server.background import redis_budgets
from lmetric.server.background.redis_budgets import COUNTS, MARKS, RedisBudgets, RedisState
from lmetric_lab.ports import free_ports
from server_world import FakeEngine, World, answer, world
from test_server_budgets import ask, budget, left, tenants
from test_server_process import engine
from test_server_shared_budgets import used
from test_workers import workers_of
from test_workers_replicas import WORKERS, Fleet, eventually
from waiting import PATIENCE_SECONDS, until

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        BINARY is None, reason="needs redis-server or valkey-server (apt install redis-server)"
    ),
]
PASSWORD = "open-sesame"
WINDOW = budget("requests", 10, "month")


class Store:
    """A Redis server that may end and start again on its port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.flags: tuple[str, ...] = ()
        self.process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def begin(self) -> None:
        assert BINARY is not None
        flags = ("--port", str(self.port), "--requirepass", PASSWORD, "--dir", str(self.folder), "--save", "")
        flags += self.flags
        self.process = subprocess.Popen([BINARY, *flags], stdout=subprocess.DEVNULL)

    async def start(self) -> None:
        self.begin()
        from redis.asyncio import Redis

        async with asyncio.timeout(PATIENCE_SECONDS), Redis.from_url(self.url) as client:
            while True:
                with contextlib.suppress(Exception):
                    if await client.ping():
                        return
                await asyncio.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(redis_budgets, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(redis_budgets, "RETRY_SECONDS", 0.1)
    made = Store(tmp_path)
    await made.start()
    try:
        yield made
    finally:
        made.stop()


@contextlib.asynccontextmanager
async def routers(store: Store, count: int, **more: Any) -> AsyncIterator[list[World]]:
    """Starts routers that reach each other only through Redis."""
    shared = {"redis_url": store.url, "interval": 0.02}
    async with contextlib.AsyncExitStack() as stack:
        settings: dict[str, Any] = {"tenants": tenants(WINDOW), "replicas": shared, **more}
        yield [await stack.enter_async_context(world([FakeEngine()], **settings)) for _ in range(count)]


def problems(w: World) -> list[str]:
    return [f"{each.cause}: {each.reason}" for each in w.server.fleet.own_problems() if each.what == "redis"]


async def test_routers_share_budgets_through_redis_in_cluster_mode(store: Store) -> None:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    store.stop()
    store.flags = ("--cluster-enabled", "yes", "--cluster-port", str(free_ports(1)[0]))
    await store.start()
    async with Redis.from_url(store.url) as client:
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:  # until the one node serves all slots
                with contextlib.suppress(RedisError):
                    await client.set("a", "b")
                    break
                await asyncio.sleep(0.02)
    async with routers(store, 2) as (a, b):
        assert [(await ask(a))[0] for _ in range(3)] == [200] * 3
        await until(lambda: used(b) == 3, seen=lambda: (used(b), problems(b)))


async def test_routers_share_budgets_through_redis_and_ended_ones_stay_counted(store: Store) -> None:
    async with routers(store, 1) as (a,):
        async with routers(store, 2) as (b, c):
            for turn in range(6):
                status, headers, _ = await ask((a, b, c)[turn % 3])
                assert (status, left(headers, "requests")) == (200, 9 - turn)
                await until(lambda n=turn + 1: used(a) == used(b) == used(c) == n)
            page = (await a.get("/metrics"))[1].decode()
            assert "lmetric_redis_up 1.0" in page
        assert used(a) == 6
    # All routers start anew: Redis has the counts of their earlier lives.
    async with routers(store, 2) as (d, e):
        await until(lambda: used(d) == used(e) == 6)
        for turn in range(4):
            assert (await ask((d, e)[turn % 2]))[0] == 200
            await until(lambda n=turn + 7: used(d) == used(e) == n)
        assert (await ask(d))[0] == (await ask(e))[0] == 429


async def test_options_of_a_url_change_no_counts_and_unknown_ones_are_refused(store: Store) -> None:
    """URLs of applications have options of their client."""
    store.url += "?decode_responses=True"
    async with routers(store, 2) as (a, b):
        assert (await ask(a))[0] == 200
        await until(lambda: used(b) == 1, seen=lambda: problems(b))
    url = store.url
    for option, named in {"timeout=1": "'timeout'", "protocol=x": "protocol", "retry=3": "attribute"}.items():
        store.url = f"{url}&{option}"
        with pytest.raises(ConfigError, match=f"redis_url is not valid: .*{named}"):
            async with routers(store, 1):
                pass


async def test_without_redis_routers_go_on_with_what_they_know_and_merge_later(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    async with routers(store, 2) as (a, b):
        assert (await ask(a))[0] == 200
        await until(lambda: used(b) == 1)
        store.stop()
        await until(lambda: problems(a) and problems(b))
        assert "Redis cannot be used: the routers do not share budgets" in problems(a)[0]
        assert PASSWORD not in problems(a)[0]
        warnings = orjson.loads((await a.get("/ready"))[1])["warnings"]
        assert "redis" in [each["what"] for each in warnings]
        for w in (a, b):
            for _ in range(2):
                assert (await ask(w))[0] == 200
        assert (used(a), used(b)) == (3, 3)
        await asyncio.sleep(1)
        assert "lmetric_redis_up 0.0" in (await a.get("/metrics"))[1].decode()
        await store.start()
        await until(lambda: used(a) == used(b) == 5)
        assert problems(a) == problems(b) == []
    log = capsys.readouterr()
    assert (log.err + log.out).count("cannot share budgets through Redis") == 2  # once per router
    assert PASSWORD not in log.err + log.out


async def test_a_redis_that_hangs_delays_no_request(store: Store) -> None:
    async with routers(store, 1) as (w,):
        await until(lambda: w.server.front.replicas.redis and w.server.front.replicas.redis.reached)
        assert store.process is not None
        store.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(0.4):  # less than the time to wait for an answer
            assert (await ask(w))[0] == 200
        await until(lambda: problems(w))
        assert "no answer" in problems(w)[0] or "Timeout" in problems(w)[0]
        store.process.send_signal(signal.SIGCONT)
        await until(lambda: not problems(w))


async def test_values_that_no_router_wrote_are_named_and_harm_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = redis_budgets.ENDED_MINUTES
    monkeypatch.setattr(redis_budgets, "ENDED_MINUTES", 10**10)  # until the problems have been seen
    from redis.asyncio import Redis

    async with Redis.from_url(store.url) as client, routers(store, 2) as (a, b):
        assert (await ask(a))[0] == 200
        await until(lambda: used(b) == 1)
        good = (await client.hvals(COUNTS))[0]
        for number, value in enumerate((b"", b"hello", good[:-1], good + b"x", bytes(500))):
            await client.hset(COUNTS, f"strange {number}", value)
            await client.hset(MARKS, f"strange {number}", "? ?")
        await client.hset(MARKS, "no counts", "x 9")
        await until(lambda: len(problems(a)) == 6)
        assert all(problem.startswith("Redis has counts that no router wrote") for problem in problems(a))
        assert (await ask(b))[0] == 200
        await until(lambda: used(a) == 2)
        monkeypatch.setattr(redis_budgets, "ENDED_MINUTES", minutes)
        await until(lambda: not problems(a), 30)  # marks without a time are removed
        # The key of another program.
        await client.delete(MARKS)
        await client.set(MARKS, "something else")
        await until(lambda: problems(a) and "WRONGTYPE" in problems(a)[0])
        assert (await ask(a))[0] == 200
        await client.delete(MARKS)
        await until(lambda: not problems(a) and used(b) == 3)


async def test_a_wrong_password_is_named_and_the_router_serves(store: Store) -> None:
    wrong = Store(store.folder)
    wrong.url = store.url.replace(PASSWORD, "wrong-word")
    async with routers(wrong, 1) as (w,):
        await until(lambda: problems(w))
        assert "invalid username-password pair" in problems(w)[0]
        assert "wrong-word" not in problems(w)[0]
        assert (await ask(w))[0] == 200


async def test_a_router_whose_clock_differs_from_redis_shares_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_budgets.Budgets, "MOST_SKEW_SECONDS", -1.0, raising=False)
    async with routers(store, 1) as (w,):
        await until(lambda: problems(w))
        assert "the Redis server's" in problems(w)[0]


@pytest.mark.parametrize(("seconds", "way"), [(600, "ahead of"), (-600, "behind")])
async def test_the_clock_of_rolling_windows_is_compared_too(store: Store, seconds: int, way: str) -> None:
    """It is not the system clock, which may have been set since the start of the router."""

    async def tell(_: RedisState, counts: list[bytes]) -> None:
        assert not counts

    budgets = Budgets(time.time() - time.monotonic() + seconds)
    budgets.share("a")
    exchange = RedisBudgets(store.url, "a", budgets, 0.02, tell=tell)
    exchange.start()
    try:
        await until(lambda: exchange.state.reached is not None)
        assert exchange.state.error == f"this router's clock is 600 s {way} the Redis server's"
    finally:
        await exchange.stop()


@pytest.mark.parametrize(
    "url",
    [
        "http://host:6379",
        "redis://",
        "redis://host:port",
        "redis://host/name",
        "host:6379",
        "redis://h:99999",
    ],
)
def test_urls_that_are_no_redis_servers_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis_url.*a Redis URL looks like redis://:password@host:6379/0"):
        load_config(None, {"replicas.redis_url": url}, environ={})


async def test_workers_share_budgets_with_other_routers_through_redis(store: Store, tmp_path: Path) -> None:
    window = tenants(budget("requests", 12, "month"))
    async with (
        engine(behave=answer) as fake,
        Fleet(tmp_path, fake, {"redis_url": store.url}, tenants=window) as fleet,
    ):
        a, b = [await fleet.add(port) for port in free_ports(2)]
        for turn in range(6):
            assert await (a, b)[turn % 2].ask() == 11 - turn
            await asyncio.sleep(0.4)
        os.kill(workers_of(a.process)[0], signal.SIGKILL)
        await until(lambda: len(workers_of(a.process)) == WORKERS)
        c = await fleet.add(free_ports(1)[0])  # all counts are new to it
        await asyncio.sleep(0.4)
        for turn in range(6):
            assert await (a, b, c)[turn % 3].ask() == 5 - turn
            await asyncio.sleep(0.4)
        assert {await each.ask() for each in (a, b, c) for _ in range(4)} == {-1}
        store.stop()

        async def all_warn() -> bool:
            pages = [await each.page("/ready") for each in (a, b, c) for _ in range(4)]
            return all("redis" in [each["what"] for each in page["warnings"]] for page in pages)

        await eventually(all_warn)
        states = [(await each.page("/debug/replicas"))["redis"] for each in (a, b, c)]
        assert [(state["reached"], state["routers"]) for state in states] == [(False, 2)] * 3
        assert PASSWORD not in str(states)
