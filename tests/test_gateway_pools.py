"""The routers inside other gateways, over real emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lmetric import Request, Router
from lmetric.gateways import pools
from lmetric.gateways.placements import Placement
from lmetric.gateways.pools import Deployment, Pool
from lmetric.tokens.prompt import PromptTokenizer
from lmetric_lab.emulated import options as emulated
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer
from waiting import PATIENCE_SECONDS, until

TOKENIZER = Path(emulated.__file__).parent
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello there. " * 50}], "max_tokens": 5}


def route(pool: Pool) -> str:
    placement = Placement(pool.router, pool.fields("chat", CHAT))
    placement.send()
    placement.done(output_tokens=1)
    return pool.id_of(placement.decision.instance)


def test_only_usable_deployments_get_requests() -> None:
    pool = Pool(Router("round_robin"), None)
    all_three = [Deployment(each, f"http://{each}:1") for each in ("a", "b", "c")]
    pool.use(all_three)
    assert {route(pool) for _ in range(6)} == {"a", "b", "c"}
    pool.use(all_three[:2])
    assert {route(pool) for _ in range(6)} == {"a", "b"}
    pool.use([all_three[2]])
    assert {route(pool) for _ in range(3)} == {"c"}
    pool.use([*all_three, Deployment("provider")])
    assert {route(pool) for _ in range(8)} == {"a", "b", "c", "provider"}
    assert pool.router.in_flight() == 0


def test_two_deployments_of_one_engine_keep_their_identifiers() -> None:
    pool = Pool(Router("round_robin"), None)
    pool.use([Deployment("x", "http://e:1"), Deployment("y", "http://e:1")])
    assert {route(pool) for _ in range(4)} == {"x", "y"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]}),
        ("responses", {"input": "x", "tools": [{"type": "namespace", "tools": [{"type": "function"}]}]}),
    ],
)
def test_engines_judge_malformed_prompts(path: str, body: dict[str, Any]) -> None:
    pool = Pool(Router("lmetric"), PromptTokenizer.load(TOKENIZER))
    pool.use([Deployment("a", "http://user:secret@a:1")])
    fields = pool.fields(path, body)
    assert "token_ids" not in fields
    placement = Placement(pool.router, fields)
    assert placement.decision.instance == "a:1"
    placement.done(output_tokens=1)


def test_a_repeated_prompt_goes_to_the_same_deployment() -> None:
    pool = Pool(Router("lmetric"), None)
    pool.use([Deployment(str(number)) for number in range(4)])
    first = route(pool)
    assert {route(pool) for _ in range(4)} == {first}
    longer = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Yes?"}]}
    cached = pool.router.cached_tokens(Request(**pool.fields("chat", longer)))
    assert max(cached) > 100


def test_prompts_of_all_kinds() -> None:
    pool = Pool(Router("lmetric"), PromptTokenizer.load(TOKENIZER))
    chat = pool.fields("chat", CHAT, session="s")
    assert len(chat["token_ids"]) > 100
    assert (chat["max_tokens"], chat["session"]) == (5, "s")
    assert len(pool.fields("completion", {"prompt": "Hello there"})["token_ids"]) > 0
    ids = pool.fields("completion", {"prompt": [1, 2, 3], "cache_salt": "pepper"})
    assert list(ids["token_ids"]) == [1, 2, 3]
    assert ids["cache_salt"] == "pepper"
    assert "token_ids" not in pool.fields("input", {"input": "An embedding"})
    told = {"role": "system", "content": "Be brief."}
    whole = list(pool.fields("chat", {"messages": [told, *CHAT["messages"]]})["token_ids"])
    apart = pool.fields("messages", {"messages": CHAT["messages"], "system": "Be brief."})
    assert list(apart["token_ids"]) == whole
    response = {"input": CHAT["messages"][0]["content"], "instructions": "Be brief."}
    assert list(pool.fields("responses", response)["token_ids"]) == whole
    salted = {"cache_salt": "pepper", "user": "u", "max_completion_tokens": 7}
    salted_chat = pool.fields("chat", CHAT | salted)
    assert len(salted_chat["token_ids"]) == len(chat["token_ids"])
    found = (salted_chat["cache_salt"], salted_chat["session"], salted_chat["max_tokens"])
    assert found == ("pepper", "u", 7)
    filled = pool.fields("completion", {"prompt": "Hello there", "suffix": "Bye. " * 80})
    assert filled["extra_tokens"] == 100
    cut = pool.fields("completion", {"prompt": "Hello there", "truncate_prompt_tokens": 1})
    assert "token_ids" not in cut  # only the engine knows which tokens it keeps
    without = Pool(Router("lmetric"), None).fields("chat", CHAT)
    assert b"Hello there" in bytes(without["text"])
    for each in (chat, ids, salted_chat, filled, without):
        Request(**each)


async def test_engines_report_their_features_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = f"ipc://{tmp_path}/events"
    options = EngineOptions(
        port=0,
        block_tokens=32,
        cache_blocks=777,
        kv_events_endpoint=events,
        kv_events_replay_endpoint=f"{events}-r",
    )
    async with EngineServer(options) as engine:
        pool = Pool(Router("lmetric"), PromptTokenizer.load(TOKENIZER))
        pool.use([Deployment("one", engine.url), Deployment("gone", "http://127.0.0.1:9")])
        pool.keep()
        for _ in range(200):
            if pool.modes:
                break
            await asyncio.sleep(0.05)
        assert list(pool.modes.values()) == ["exact"]
        assert pool.router.block_size == 32
        route(pool)
        assert pool._feed is not None
        assert pool._feed.instances() == list(pool.modes)
        monkeypatch.setattr(pools, "UNUSED_SECONDS", 0.1)
        pool.use([Deployment("gone", "http://127.0.0.1:9")])
        await until(lambda: not pool.modes)
        assert pool._feed.instances() == []
        await pool.close()
        assert pool.router.in_flight() == 0


@pytest.mark.parametrize("notices", [True, False])
async def test_an_engine_that_replaces_another_at_its_address(
    notices: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(pools, "AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(pools, "REPLACED_SECONDS", 0.0)
    pool = Pool(Router("lmetric"), PromptTokenizer.load(TOKENIZER))
    asked = Request(**pool.fields("chat", CHAT))
    async with EngineServer(EngineOptions(port=0)) as engine:
        one = Deployment("one", engine.url)
        pool.use([one])
        pool.keep()
        await until(lambda: pool._adapters)
        route(pool)
        assert max(pool.router.cached_tokens(asked)) > 100
        if not notices:
            pool.use([])  # the gateway pauses it
    if notices:
        await until(lambda: not pool._adapters)
        assert max(pool.router.cached_tokens(asked)) == 0
    events = f"ipc://{tmp_path}/events"
    port = int(one.name.rpartition(":")[2])
    options = EngineOptions(port=port, kv_events_endpoint=events, kv_events_replay_endpoint=f"{events}-r")
    async with EngineServer(options):
        pool.use([one])
        await until(lambda: pool.modes == {one.name: "exact"})
        await pool.close()
    assert max(pool.router.cached_tokens(asked)) == 0


async def test_a_paused_engine_keeps_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(pools, "AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(pools, "REPLACED_SECONDS", 0.0)
    pool = Pool(Router("lmetric"), None)
    asked = Request(**pool.fields("chat", CHAT))
    async with metrics_of("1.7e9") as (url, started):
        one = Deployment("one", url)
        pool.use([one])
        pool.keep()
        await until(lambda: pool._starts)
        route(pool)
        pool.use([])
        await asyncio.sleep(0.1)
        pool.modes.clear()
        pool.use([one])
        await until(lambda: pool.modes)  # its features were read again
        assert max(pool.router.cached_tokens(asked)) > 100
        started[0] = "1.8e9"  # another process has the address, and no connection failed
        await until(lambda: max(pool.router.cached_tokens(asked)) == 0)
        await until(lambda: one.name in pool._adapters)
        route(pool)
        started[0] = "1.7e9"  # an older process: a load balancer with two engines, or a failover
        await until(lambda: max(pool.router.cached_tokens(asked)) == 0)
        await until(lambda: one.name in pool._adapters)
        started[0] = "1.8e9"  # a load balancer
        await until(lambda: pool._starts[one.name]._balanced)
        route(pool)
        for _ in range(4):
            started[0] = "1.8e9" if started[0] == "1.7e9" else "1.7e9"
            await asyncio.sleep(0.1)
            assert one.name in pool._adapters
            assert max(pool.router.cached_tokens(asked)) > 100
        await pool.close()


@contextlib.asynccontextmanager
async def metrics_of(started: str) -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of an engine that reports the start of its process, and this time."""
    times = [started]

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=f"# x\nprocess_start_time_seconds {times[0]}\nvllm:num_requests_running 0\n")

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", times
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def no_engine(*, closes: bool) -> AsyncIterator[tuple[str, list[None]]]:
    """The URL of a server that closes each connection, or never answers, and its connections."""
    connections: list[None] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(None)
        await reader.read(1 if closes else -1)
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()), connections


async def test_an_engine_that_never_answers_delays_no_other_engine() -> None:
    seconds: list[None] = []
    async with no_engine(closes=False) as (url, connections), EngineServer(EngineOptions(port=0)) as engine:
        pool = Pool(Router("lmetric"), None, each_second=lambda: seconds.append(None))
        pool.use([Deployment("silent", url), Deployment("live", engine.url)])
        pool.keep()
        await until(lambda: pool.modes and len(seconds) >= 3, 15)  # the limit of an answer is 30 s
        assert len(pool.modes) == len(connections) == 1
        await pool.close()


async def test_unused_deployments_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(pools, "AGAIN_SECONDS", 0.02)
    async with no_engine(closes=True) as (url, connections):
        pool = Pool(Router("lmetric"), None)
        pool.use([Deployment("closes", url)])
        pool.keep()
        await until(lambda: len(connections) > 2)
        pool.use([])
        before = len(connections)
        await asyncio.sleep(0.5)
        assert len(connections) <= before + 1  # one may be on its way
        pool.use([Deployment("closes", url)])
        await until(lambda: len(connections) > before + 1)
        await pool.close()


async def test_deployments_that_stay_unused_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(pools, "AGAIN_SECONDS", 0.02)
    async with EngineServer(EngineOptions(port=0)) as engine, EngineServer(EngineOptions(port=0)) as other:
        pool = Pool(Router("round_robin"), None)
        both = [Deployment("one", engine.url), Deployment("two", other.url)]
        pool.use(both)
        pool.keep()
        await until(lambda: len(pool.modes) == 2)
        left = Placement(pool.router, {**pool.fields("chat", CHAT), "instances": [both[1].name]})
        left.send()
        pool.use(both[:1])
        await asyncio.sleep(0.2)
        assert len(pool.router.instances()) == 2  # it may come back
        pool.use(both)
        assert {route(pool) for _ in range(4)} == {"one", "two"}
        monkeypatch.setattr(pools, "UNUSED_SECONDS", 0.1)
        await asyncio.sleep(0.3)
        assert len(pool.router.instances()) == 2
        pool.use(both[:1])
        await until(lambda: len(pool.router.instances()) == 1)
        assert list(pool.modes) == [both[0].name]
        left.done(output_tokens=1)
        assert {route(pool) for _ in range(4)} == {"one"}
        pool.use(both)
        assert {route(pool) for _ in range(4)} == {"one", "two"}
        await until(lambda: len(pool.modes) == 2)
        await pool.close()
        assert pool.router.in_flight() == 0


async def test_a_pool_without_requests_asks_its_engines_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(pools, "IDLE_SECONDS", 0.3)
    pool = Pool(Router("lmetric"), None)
    async with EngineServer(EngineOptions(port=0)) as engine:
        for _ in range(2):
            pool.use([Deployment("one", engine.url)])
            pool.keep()
            placement = Placement(pool.router, pool.fields("chat", CHAT))
            await until(lambda: len(pool.modes) == 1)
            await asyncio.sleep(0.5)
            assert pool.router.instances(), "a request is in flight"
            placement.fail("cancelled")
            keeper = pool._keeper
            assert keeper is not None
            async with asyncio.timeout(PATIENCE_SECONDS):
                await keeper
            assert (pool.router.instances(), pool.modes) == ([], {})
