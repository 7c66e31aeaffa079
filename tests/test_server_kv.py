"""KV events in the server, with emulated engines: their modes, and the index."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
import zmq
from structlog.testing import capture_logs

from lmetric import Request
from lmetric.server.fleet import kv_events
from lmetric.server.fleet.engine import Engine
from lmetric_lab.emulated import EngineOptions, EngineServer
from lmetric_lab.ports import free_ports
from server_world import FakeEngine, World, decision_id, world
from test_event_feed import publisher, removed, stored
from waiting import PATIENCE_SECONDS

# Clients here send token ids.
IDS = {"without_tokenizer": True}


def prompt(seed: int, tokens: int = 200) -> list[int]:
    return [100 + (seed * 797 + n * 31) % 1801 for n in range(tokens)]


@contextlib.asynccontextmanager
async def emulated(**changes: Any) -> AsyncIterator[EngineServer]:
    given = {
        "port": 0,
        "model": "tiny",
        "clock_speed": 50.0,
        "kv_events_endpoint": "tcp://*:0",
        "kv_events_replay_endpoint": "tcp://*:0",
    }
    async with EngineServer(EngineOptions.model_validate(given | changes)) as engine:
        yield engine


@contextlib.asynccontextmanager
async def routed(*engines: EngineServer | dict[str, Any], **config: Any) -> AsyncIterator[World]:
    """Starts a server before emulated engines named e0, e1, …."""
    entries = [
        engine if isinstance(engine, dict) else {"url": engine.url, "name": f"e{number}"}
        for number, engine in enumerate(engines)
    ]
    settings = {"policy": "lmetric", "kv_events": IDS, "health": {"interval": 0.05}, **config}
    async with world([], engines=entries, **settings) as w:
        yield w


def engines_of(w: World) -> dict[str, Engine]:
    return {engine.name: engine for engine in w.server.fleet.engines()}


async def direct(engine: EngineServer, ids: list[int], **body: Any) -> int:
    """Sends a request directly to an engine. Returns its cached tokens."""
    url = f"{engine.url}/v1/completions"
    body = {"prompt": ids, "max_tokens": 1, **body}
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        assert response.status == 200
        return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])


async def through(w: World, ids: list[int], **body: Any) -> tuple[str, int, int]:
    """Sends a request through the router.

    Returns its engine, and the predicted and found cached tokens.
    """
    _, headers, answer = await w.post({"model": "tiny", "prompt": ids, "max_tokens": 1, **body})
    [model] = w.server.fleet.models
    record = model.router.explain(decision_id(headers))
    assert record is not None
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return headers["x-lmetric-instance"], record["predicted_cached_tokens"], found


async def hears(w: World, name: str, ids: list[int], tokens: int) -> None:
    """Waits until the router knows this many tokens of a prompt at an engine."""
    router = w.server.fleet.models[0].router
    index, key = router.instances().index(name), array("I", ids)
    await w.until(lambda: router.cached_tokens(Request(token_ids=key))[index] == tokens)


async def connected(w: World) -> None:
    def all_are() -> bool:
        [model] = w.server.fleet.models
        statuses = [model.kv.status(name) for name in model.engines]
        return all(s and all(r["state"] != "connecting" for r in s["ranks"].values()) for s in statuses)

    await w.until(all_are)


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_what_an_engine_caches_is_known_whoever_sent_it(api: str) -> None:
    async with emulated(api=api) as one, emulated(api=api) as two, routed(one, two) as w:
        assert {name: e.mode.name for name, e in engines_of(w).items()} == {"e0": "exact", "e1": "exact"}
        await connected(w)
        for seed in range(6):
            ids = prompt(seed)
            await direct([one, two][seed % 2], ids)
            await hears(w, f"e{seed % 2}", ids, 192)
            assert await through(w, ids) == (f"e{seed % 2}", 192, 192)
        # Each salt has its own cache.
        assert (await through(w, prompt(0), cache_salt="tenant"))[1:] == (0, 0)
        await direct(one, prompt(7), cache_salt="tenant")
        await asyncio.sleep(0.1)
        assert (await through(w, prompt(7), cache_salt="tenant"))[1:] == (192, 192)
        page = (await w.get("/metrics"))[1].decode()
        assert 'mode="exact"' in page
        assert 'lmetric_kv_events_total{instance="e0",model="tiny",what="blocks_stored"}' in page
        shown = orjson.loads((await w.get("/debug/engines"))[1])
        assert shown[0]["kv_events"]["ranks"]["0"]["state"] == "live"
        assert shown[0]["capabilities"]["block_size"] == 16


async def test_the_check_for_silent_engines_reads_two_indicators() -> None:
    """rust 7.21: once a second, of each engine."""
    async with emulated() as engine, routed(engine) as w:
        [model] = w.server.fleet.models
        await connected(w)
        rows: list[dict[str, Any]] = []

        class Seen:
            """The core router; keeps the rows that it returns."""

            def __getattr__(self, name: str) -> Any:
                return getattr(model.router, name)

            def stats(self, **what: Any) -> Any:
                stats = model.router.stats(**what)
                rows.extend(dict(row) for row in stats["instances"].values())
                return stats

        assert model.kv._events is not None
        model.kv._events._router = Seen()  # type: ignore[assignment]
        model.kv.watch(model.engines.values())
        assert rows
        indicators = set(model.router.indicators())
        assert all(row.keys() & indicators == {"window_prefill_tokens", "q_bs"} for row in rows)


async def test_block_and_cache_size_are_the_engines() -> None:
    async with emulated(block_tokens=32, cache_blocks=20) as engine, routed(engine) as w:
        [model] = w.server.fleet.models
        assert (model.block_size, model.block_size_from) == (32, "e0")
        await connected(w)
        for seed in range(8):
            await direct(engine, prompt(seed))
        await hears(w, "e0", prompt(7), 192)
        assert model.router.stats()["instances"]["e0"]["index_blocks"] <= 20
        assert (await through(w, prompt(7)))[1:] == (192, 192)
        assert (await through(w, prompt(0)))[1:] == (0, 0)  # evicted, and the router knows it


async def test_a_block_size_that_differs_is_approximate_and_says_so() -> None:
    async with emulated(block_tokens=32) as one, emulated(block_tokens=64) as two:
        async with routed(one, two) as w:
            engines = engines_of(w)
            names = {engine.mode.name: engine for engine in engines.values()}
            assert set(names) == {"exact", "approximate"}
            reason = names["approximate"].mode.reason
            assert "32" in reason
            assert "64" in reason
            assert f"by {names['exact'].name}" in reason
        async with routed(one, block_size=16) as w:
            [engine] = w.server.fleet.engines()
            assert engine.mode.name == "approximate"
            assert (
                "its blocks have 32 tokens, its model's index 16 (by the configuration)" in engine.mode.reason
            )


async def test_a_restarted_engine_is_asked_again_and_starts_empty() -> None:
    async with contextlib.AsyncExitStack() as first:
        engine = await first.enter_async_context(emulated())
        port = int(engine.url.rpartition(":")[2])
        async with routed(engine, load={"interval": 0.05}) as w:
            [model] = w.server.fleet.models
            [known] = w.server.fleet.engines()
            await connected(w)
            await direct(engine, prompt(1))
            await hears(w, "e0", prompt(1), 192)
            await first.aclose()
            await w.until(lambda: not known.healthy)
            await hears(w, "e0", prompt(1), 0)
            async with emulated(port=port, block_tokens=32) as again:
                await w.until(lambda: known.healthy and model.block_size == 32)
                assert known.capabilities.block_size == 32
                assert known.mode.name == "exact"
                await connected(w)
                await direct(again, prompt(2))
                await hears(w, "e0", prompt(2), 192)
                assert await through(w, prompt(1)) == ("e0", 0, 0)


async def test_a_lost_index_is_filled_again_by_the_requests_that_come() -> None:
    async with emulated(kv_events_buffer_steps=1) as engine:
        for seed in range(5):
            await direct(engine, prompt(seed))
        async with routed(engine) as w:  # it starts too late to get earlier events
            [known] = w.server.fleet.engines()
            await connected(w)
            await direct(engine, prompt(9))
            await w.until(lambda: known.refill is not None)
            before = known.refill.left
            assert (await through(w, prompt(1)))[1:] == (0, 192)
            assert known.refill.left == before - 1
            await hears(w, "e0", prompt(1), 192)
            assert (await through(w, prompt(1)))[1:] == (192, 192)
            assert known.refill.left == before - 1  # all its tokens are known
            # The client's own field stays unchanged, and the request is served.
            assert (await through(w, prompt(2), vllm_xargs={"x": 1}))[1:] == (0, 192)


async def test_an_endpoint_that_nobody_listens_at_is_no_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SILENT_SECONDS", 1.5)
    async with emulated() as engine:
        entry = {"url": engine.url, "name": "e0", "kv_events": {**IDS, "endpoint": "tcp://127.0.0.1:9"}}
        async with routed(entry) as w:
            [known] = w.server.fleet.engines()
            await w.until(lambda: known.mode.name == "approximate")
            assert "no connection to its KV events: tcp://127.0.0.1:9" in known.mode.reason
            # Without events, sent prompts count as cached.
            await through(w, prompt(1))
            assert (await through(w, prompt(1)))[1:] == (192, 192)


async def test_silence_where_there_should_be_events_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SILENT_SECONDS", 1.5)
    async with emulated(kv_events_topic="kv@right") as engine:
        entry = {"url": engine.url, "name": "e0", "kv_events": {**IDS, "topic": "kv@wrong"}}
        async with routed(entry) as w:
            [known] = w.server.fleet.engines()
            await connected(w)
            await w.until(lambda: known.mode.name == "exact")
            await asyncio.sleep(1.5)
            assert known.mode.name == "exact"  # an idle engine sends no events
            for seed in range(4):
                await through(w, prompt(seed))
                await asyncio.sleep(0.5)
            await w.until(lambda: known.mode.name == "approximate")
            assert "no KV event came from" in known.mode.reason
            assert "topic 'kv@right'" in known.mode.reason


async def test_refused_prompts_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine stores no block of a prompt that it refuses, such as a prompt that is too long."""
    monkeypatch.setattr(kv_events, "SILENT_SECONDS", 1.0)
    async with emulated() as engine, routed(engine) as w:
        await connected(w)
        await through(w, prompt(0))
        with capture_logs() as log:
            for seed in range(1, 4):
                body = {"model": "tiny", "prompt": prompt(seed) * 4, "max_tokens": 1, "best_of": 2}
                assert (await w.post(body))[0] == 400
                await asyncio.sleep(0.5)
                await through(w, [seed])  # less than a block
                await asyncio.sleep(0.5)
        assert [each for each in log if each["event"] == "KV index mode changed"] == []


async def test_engines_may_connect_to_the_router() -> None:
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    async with (
        emulated(kv_events_endpoint=address, kv_events_topic="kv@a", kv_events_replay_endpoint=None) as one,
        emulated(kv_events_endpoint=address, kv_events_topic="kv@b", kv_events_replay_endpoint=None) as two,
    ):
        async with routed(one, two) as w:
            for engine in w.server.fleet.engines():
                assert engine.mode.name == "approximate"
                assert "so that the router listens" in str(engine.mode.fix)
        bound = {**IDS, "endpoint": address, "bind": True}
        async with routed(one, two, kv_events=bound) as w:
            assert {engine.mode.name for engine in w.server.fleet.engines()} == {"exact"}
            # A publisher that connects later sends its earlier events to no subscriber.
            [model] = w.server.fleet.models
            for name, engine in (("e0", one), ("e1", two)):
                seeds = itertools.count(100)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not model.kv.counts(name)["batches"]:
                        await direct(engine, prompt(next(seeds)))
                        await asyncio.sleep(0.05)
            for seed in range(4):
                await direct([one, two][seed % 2], prompt(seed))
            for seed in range(4):
                await hears(w, f"e{seed % 2}", prompt(seed), 192)
    async with (
        emulated(kv_events_endpoint=address, kv_events_topic="same") as one,
        emulated(kv_events_endpoint=address, kv_events_topic="same") as two,
        routed(one, two, kv_events=bound) as w,
    ):
        modes = sorted(engine.mode.name for engine in w.server.fleet.engines())
        assert modes == ["approximate", "exact"]
        [blind] = [e for e in w.server.fleet.engines() if e.mode.name == "approximate"]
        assert "topic" in blind.mode.reason


async def test_pushed_load_is_heard() -> None:
    async with (
        emulated(api="sglang", load_publish_endpoint="tcp://*:0", max_sequences=1, clock_speed=1.0) as engine,
        routed(engine) as w,  # it reads no pages: load.interval is null here
    ):
        [model] = w.server.fleet.models
        asks = [asyncio.create_task(through(w, prompt(n), max_tokens=40)) for n in range(3)]
        await w.until(lambda: model.router.indicators()["reported_waiting"][0] == 2)
        await asyncio.gather(*asks)
        status = model.kv.status("e0")
        assert status is not None
        assert status["load"]["connected"]


async def test_pushed_load_is_heard_also_if_events_are_refused() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as used:
        port = used.bind_to_random_port("tcp://127.0.0.1")
        bound = {**IDS, "endpoint": f"tcp://127.0.0.1:{port}", "bind": True}
        async with (
            emulated(api="sglang", load_publish_endpoint="tcp://*:0") as engine,
            routed(engine, kv_events=bound) as w,
        ):
            [model] = w.server.fleet.models
            assert model.engines["e0"].mode.cause == "cannot subscribe to its KV events"
            await w.until(lambda: ((model.kv.status("e0") or {})["load"] or {}).get("connected", False))
            # Without events, the router remembers what it has sent.
            assert [(await through(w, prompt(1)))[1] for _ in range(2)] == [0, 192]


async def test_an_engine_without_a_prefix_cache_is_routed_by_load_only() -> None:
    page = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",num_gpu_blocks="9"} 1\n'
    async with world([FakeEngine(metrics=page)], policy="lmetric") as w:
        [known] = w.server.fleet.engines()
        assert (known.mode.name, known.mode.reason) == ("load_only", "its prefix cache is off")
        for _ in range(3):
            assert (await through(w, prompt(1)))[1] == 0


async def test_text_prompts_without_a_tokenizer_are_approximate() -> None:
    async with emulated() as engine, routed(engine, kv_events="auto", tokenizer="off") as w:
        [known] = w.server.fleet.engines()
        assert known.mode.name == "approximate"
        assert "the model's tokenizer is not known" in known.mode.reason


async def test_a_prompt_in_an_engines_cpu_tier_is_found_there() -> None:
    async with emulated() as one, emulated() as two:
        with publisher() as first, publisher() as second:
            entries = [
                {"url": engine.url, "name": name, "kv_events": {**IDS, "endpoint": events.endpoint}}
                for name, engine, events in (("e0", one, first), ("e1", two, second))
            ]
            async with routed(*entries) as w:
                await connected(w)
                await w.until(lambda: first.heard() and second.heard())
                ids, hashes = prompt(1), list(range(1, 13))
                second.publish(stored(hashes, ids[:192]))
                # Without `self_describing_kv_events`, vLLM reports a CPU block by its hash alone.
                second.publish(*(stored([n], [], block_size=0, medium="CPU") for n in hashes))
                second.publish(stored(hashes, [], block_size=0, medium="STORAGE"))
                await hears(w, "e1", ids, 192)
                second.publish(*(removed(n) for n in hashes))
                await hears(w, "e1", ids, 0)
                [model] = w.server.fleet.models
                _, headers, _ = await w.post({"model": "tiny", "prompt": ids, "max_tokens": 1})
                assert headers["x-lmetric-instance"] == "e1"
                record = model.router.explain(decision_id(headers))
                assert record is not None
                assert (record["predicted_cached_tokens"], record["predicted_tier_tokens"]) == (192, 192)
                shown = orjson.loads((await w.get("/debug/engines"))[1])
                feed = shown[1]["kv_events"]["ranks"]["0"]
                assert (feed["tiers"], feed["hints"]) == ({"CPU": 12, "STORAGE": 12}, ["CPU", "STORAGE"])
                # The GPU's copy on another engine is nearer.
                first.publish(stored(hashes, ids[:192]))
                await hears(w, "e0", ids, 192)
                assert (await through(w, ids))[:2] == ("e0", 192)


async def test_an_emulated_engine_loads_from_its_host_tier_and_the_router_predicts_it() -> None:
    # The GPU holds two prompts, the host all six. A load takes 9.4 s of the engine's clock.
    async with emulated(cache_blocks=26, host_tier="4,0.002") as engine, routed(engine) as w:
        await connected(w)
        for seed in range(6):
            assert await through(w, prompt(seed)) == ("e0", 0, 0)
            await hears(w, "e0", prompt(seed), 192)
        start = asyncio.get_running_loop().time()
        _, headers, answer = await w.post({"model": "tiny", "prompt": prompt(0), "max_tokens": 1})
        assert asyncio.get_running_loop().time() - start > 9.4 / 50
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert (record["predicted_cached_tokens"], record["predicted_tier_tokens"]) == (192, 192)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        assert (await through(w, prompt(0)))[1:] == (192, 192)
        shown = orjson.loads((await w.get("/debug/engines"))[1])
        assert shown[0]["kv_events"]["ranks"]["0"]["tiers"] == {"CPU": 72}
        # A client leaves during a load, and others are served.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await direct(engine, prompt(2))
        assert await direct(engine, prompt(0)) == 192
        assert await direct(engine, prompt(3)) == 192


async def test_a_host_tier_drops_blocks_and_says_so() -> None:
    async with emulated(cache_blocks=26, host_tier="1,50") as engine, routed(engine) as w:
        await connected(w)
        for seed in range(6):
            assert (await through(w, prompt(seed)))[1:] == (0, 0)
            await hears(w, "e0", prompt(seed), 192)
        await hears(w, "e0", prompt(0), 0)
        assert (await through(w, prompt(0)))[1:] == (0, 0)
