"""Data-parallel ranks as separate engines, each with a queue, a cache and events of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

import lmetric as lm
from lmetric.config import EngineConfig
from lmetric.doctor import Level, Target, examine
from lmetric.engines.adapter import Adapter, Capabilities, EventSource, Handover
from lmetric.engines.connectors import CONNECTORS
from lmetric.engines.handover import COMPLETIONS, FirstSegment
from lmetric.engines.identify import UNKNOWN
from lmetric.engines.sglang import LOADS, Sglang
from lmetric.engines.vllm import Vllm
from server_world import World, world
from test_doctor_client import altered
from test_server_kv import IDS, emulated, routed

PROMPT = list(range(1, 161))
EVENTS_OFF = {"kv_events_endpoint": None, "kv_events_replay_endpoint": None}
APIS = pytest.mark.parametrize("api", ["vllm", "sglang"])


@contextlib.asynccontextmanager
async def ranked(api: str = "vllm", **config: Any) -> AsyncIterator[World]:
    """Starts a server before both ranks of one emulated engine."""
    async with emulated(ranks=2, api=api, cache_blocks=1000) as engine:
        entries = [{"url": engine.url, "data_parallel_rank": rank} for rank in (0, 1)]
        async with routed(*entries, **config) as w:
            yield w


def names(w: World) -> list[str]:
    return sorted(w.server.fleet.models[0].engines)


@APIS
async def test_each_rank_is_an_engine_with_a_cache_of_its_own(api: str) -> None:
    async with ranked(api, policy="lmetric", kv_events=IDS) as w:
        model = w.server.fleet.models[0]
        first, second = names(w)
        assert [name.rpartition("-")[2] for name in (first, second)] == ["dp0", "dp1"]
        await w.until(lambda: all(engine.mode.name == "exact" for engine in model.engines.values()))
        status, headers, _ = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
        assert status == 200
        holder = headers["x-lmetric-instance"]
        request = lm.Request(PROMPT)
        index = model.router.instances().index(holder)
        await w.until(lambda: model.router.cached_tokens(request)[index] == 144)
        assert sorted(model.router.cached_tokens(request).tolist()) == [0, 144]
        # The engine finds the prefix on its rank, so the header named that rank.
        for _ in range(3):
            status, headers, answer = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
            assert headers["x-lmetric-instance"] == holder
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 144


@APIS
async def test_both_ranks_serve_and_each_counts_its_own_cache(api: str) -> None:
    async with ranked(api, policy="round_robin", kv_events="off") as w:
        served = []
        for number in range(4):
            status, headers, answer = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
            assert status == 200
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (0 if number < 2 else 144), "each rank computes the prompt once"
            served.append(headers["x-lmetric-instance"])
        assert served[:2] == served[2:]
        assert sorted(served[:2]) == names(w)
        model = w.server.fleet.models[0]
        async with aiohttp.ClientSession() as http:
            url = next(iter(model.engines.values())).config.url
            async with http.get(f"{url}/metrics") as page:
                whole = await page.read()
        label = {"vllm": b"engine", "sglang": b"dp_rank"}[api]
        for rank, name in enumerate(names(w)):
            own = model.engines[name].adapter.own(whole)
            assert (b'%b="%d"' % (label, rank) in own, b'%b="%d"' % (label, 1 - rank) in own) == (True, False)
        each = [engine.capabilities.cache_blocks for engine in model.engines.values()]
        assert each == [1000, 1000]


@APIS
async def test_a_client_cannot_choose_the_rank(api: str) -> None:
    async with ranked(api, policy="round_robin", kv_events="off") as w:
        for cached in (0, 0, 144, 144):
            _, _, answer = await w.post(
                {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}, headers={"X-data-parallel-rank": "1"}
            )
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


@APIS
@pytest.mark.parametrize("model_known", [True, False])
async def test_a_rank_that_there_is_not_gets_no_requests_and_says_why(model_known: bool, api: str) -> None:
    async with emulated(ranks=2, api=api) as engine:
        entries = [{"url": engine.url, "data_parallel_rank": rank} for rank in (0, 7)]
        given = (
            {"engines": [], "models": [{"name": "tiny", "engines": entries}]}
            if model_known
            else {"engines": entries}
        )
        async with world([], kv_events=IDS, **given) as w:
            wrong = next(e for e in w.server.fleet.engines() if e.config.data_parallel_rank == 7)
            assert not wrong.healthy
            assert wrong.last_error is not None
            assert "data_parallel_rank: 7: the engine has the ranks 0, 1" in wrong.last_error
            for _ in range(3):
                status, headers, _ = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
                assert (status, headers["x-lmetric-instance"][-4:]) == (200, "-dp0")


def second_node(path: str, body: bytes) -> bytes | None:
    """The pages of vLLM's second node, whose ranks are 4 and 5. Its header has 0 and 1."""
    for rank in (0, 1):
        body = body.replace(b'engine="%d"' % rank, b'engine="%d"' % (4 + rank))
        if path == "/kv_event_sources":
            body = body.replace(b'"%d":' % rank, b'"%d":' % (4 + rank))
    return body


@pytest.mark.parametrize("events", [True, False])
async def test_the_second_node_of_a_vllm_deployment(events: bool) -> None:
    given: dict[str, Any] = {} if events else EVENTS_OFF
    async with emulated(ranks=2, **given) as engine, altered(engine.url, second_node) as url:
        entries = [{"url": url, "data_parallel_rank": rank} for rank in (4, 5)]
        async with routed(*entries, policy="round_robin", kv_events=IDS if events else "off") as w:
            assert [(e.healthy, e.last_error) for e in w.server.fleet.engines()] == [(True, None)] * 2
            for number in range(4):
                status, _, answer = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
                assert status == 200, answer
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == (0 if number < 2 else 144)
        found = await examine([Target(EngineConfig(url=url, data_parallel_rank=rank)) for rank in (4, 5, 0)])
        found += await examine([Target(EngineConfig(url=url))])  # it names each rank, or the first one
        for each in (*found[:2], found[3]):
            assert not each.wanting(Level.EXACT if events else Level.APPROXIMATE), each
        assert found[2].verdicts["model"].seen == "data_parallel_rank: 0: the engine has the ranks 4, 5"


@pytest.mark.parametrize("pushed", [False, True])
async def test_each_rank_of_sglang_has_its_own_load(pushed: bool) -> None:
    """Read from /v1/loads, or pushed to a socket of each rank."""
    load = {"load_publish_endpoint": "tcp://*:0" if pushed else None}
    async with emulated(api="sglang", ranks=2, max_sequences=1, clock_speed=1.0, **load) as engine:
        entries = [{"url": engine.url, "data_parallel_rank": rank, "name": f"e{rank}"} for rank in (0, 1)]
        every = {"interval": None if pushed else 0.05}
        async with routed(*entries, load=every) as w, aiohttp.ClientSession() as http:
            model = w.server.fleet.models[0]
            told = [engine.capabilities for engine in model.engines.values()]
            assert [(each.load_path, len(each.load_feeds)) for each in told] == [(LOADS, pushed)] * 2

            async def ask(rank: int) -> None:
                body, headers = {"prompt": PROMPT, "max_tokens": 60}, {"X-Data-Parallel-Rank": str(rank)}
                async with http.post(f"{engine.url}/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200

            def waiting() -> dict[str, float]:
                router = model.router
                return dict(zip(router.instances(), router.indicators()["reported_waiting"], strict=True))

            asks = [asyncio.create_task(ask(rank)) for rank in (0, 0, 0, 1)]
            await w.until(lambda: waiting() == {"e0": 2, "e1": 0})
            await asyncio.gather(*asks)


@APIS
async def test_sources_may_name_ranks_of_one_engine(api: str) -> None:
    """The configuration names one rank, an administrator the other; a rank of either is one
    engine."""
    async with emulated(ranks=2, api=api) as engine:
        first = {"url": engine.url, "data_parallel_rank": 0}
        async with routed(first, admin=True) as w:
            for rank, status in ((1, 200), (0, 409), (None, 409)):
                added = {"url": engine.url, "data_parallel_rank": rank, "name": f"added{rank}"}
                assert (await w.post(added, "/admin/engines"))[0] == status
            await w.until(lambda: all(each.healthy for each in w.server.fleet.engines()))
            ranks = {each.name: each.capabilities.data_parallel_rank for each in w.server.fleet.engines()}
            assert sorted(ranks.values()) == [0, 1]
            assert ranks["added1"] == 1


async def test_a_prefill_rank_of_sglang_computes_the_prompt() -> None:
    """Its decode engine finds the prompt: the bootstrap room names the rank that the router
    chose."""
    both = {"api": "sglang", "ranks": 2}
    async with emulated(role="prefill", **both) as first, emulated(role="decode", **both) as second:
        entries = [
            {"url": engine.url, "data_parallel_rank": rank, "name": f"{name}{rank}"}
            for name, engine in (("p", first), ("d", second))
            for rank in (0, 1)
        ]
        async with routed(
            *entries, policy="round_robin", decode_policy="round_robin", experimental=True
        ) as w:
            served = set()
            for _ in range(8):
                status, headers, answer = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 4})
                assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
                served |= {headers["x-lmetric-prefill"], headers["x-lmetric-instance"]}
            assert served == {"p0", "p1", "d0", "d1"}
            for engine, each in ((first, 4), (second, 16)):
                made = [rank.driver.engine.load()["generation_tokens"] for rank in engine._ranks]
                assert made == [each, each]


def test_bootstrap_rooms_of_a_rank() -> None:
    told = Capabilities("sglang", ranks=(0, 1, 2), handover=Handover("bootstrap", bootstrap_port=8998))
    connector, body = CONNECTORS["bootstrap"], {"prompt": "a"}
    for rank in told.ranks:
        handover = told.of_rank(rank).handover
        assert handover is not None
        for _ in range(20):
            sent = connector.first(FirstSegment(COMPLETIONS, orjson.dumps(body)), "p", handover)
            assert orjson.loads(sent)["bootstrap_room"] % 3 == rank


def test_capabilities_of_a_rank() -> None:
    with pytest.raises(ValueError, match="data_parallel_rank: 1: requests to an unknown engine"):
        UNKNOWN.of_rank(1)
    sources = tuple(EventSource(rank, f"tcp://*:{5557 + rank}") for rank in (0, 1))
    feeds = ("tcp://*:5561", "tcp://*:5562")
    told = Capabilities("sglang", ranks=(0, 1), event_sources=sources, load_feeds=feeds, load_header=True)
    own = told.of_rank(1)
    assert (own.event_sources, own.load_feeds, own.load_header) == (sources[1:], feeds[1:], False)
    with pytest.raises(ValueError, match="data_parallel_rank: 2: the engine has the ranks 0, 1"):
        told.of_rank(2)


@pytest.mark.parametrize(("adapter", "label"), [(Vllm(), b"engine"), (Sglang(), b"dp_rank")])
def test_a_page_keeps_the_samples_of_its_rank(adapter: Adapter, label: bytes) -> None:
    comment, shared, other = b"# HELP a\n", b"b 3\n", b'c{%b_index="9"} 4\n' % label
    first, second = b'a{%b="0",model_name="m"} 1\n' % label, b'a{model_name="m",%b="1"} 2\n' % label
    page = comment + first + second + shared + other
    assert adapter.own(page) == page
    assert adapter.of_rank(1).own(page) == comment + second + shared + other
    assert adapter.rank is None  # which all engines share


def test_names_of_ranks() -> None:
    assert EngineConfig(url="http://a:1", data_parallel_rank=3).label == "a:1-dp3"
    assert EngineConfig(url="http://a:1", data_parallel_rank=3, name="x").label == "x"
