"""Data-parallel ranks as separate engines, each with a queue, a cache and events of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

import lmetric as lm
from lmetric.config import EngineConfig
from lmetric.engines.adapter import Capabilities, EventSource, page_of_rank
from server_world import World, world
from test_server_kv import IDS, emulated, routed

PROMPT = list(range(1, 161))


@contextlib.asynccontextmanager
async def ranked(**config: Any) -> AsyncIterator[World]:
    """Starts a server before both ranks of one emulated engine."""
    async with emulated(ranks=2) as engine:
        entries = [{"url": engine.url, "data_parallel_rank": rank} for rank in (0, 1)]
        async with routed(*entries, **config) as w:
            yield w


def names(w: World) -> list[str]:
    return sorted(w.server.fleet.pools[0].engines)


async def test_each_rank_is_an_engine_with_a_cache_of_its_own() -> None:
    async with ranked(policy="lmetric", kv_events=IDS) as w:
        pool = w.server.fleet.pools[0]
        first, second = names(w)
        assert [name.rpartition("-")[2] for name in (first, second)] == ["dp0", "dp1"]
        await w.until(lambda: all(engine.mode.name == "exact" for engine in pool.engines.values()))
        status, headers, _ = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
        assert status == 200
        holder = headers["x-lmetric-instance"]
        request = lm.Request(PROMPT)
        index = pool.router.instances().index(holder)
        await w.until(lambda: pool.router.cached_tokens(request)[index] == 144)
        assert sorted(pool.router.cached_tokens(request).tolist()) == [0, 144]
        # The engine finds the prefix on its rank, so the header named that rank.
        for _ in range(3):
            status, headers, answer = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
            assert headers["x-lmetric-instance"] == holder
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 144


async def test_both_ranks_serve_and_each_counts_its_own_cache() -> None:
    async with ranked(policy="round_robin", kv_events="off") as w:
        served = []
        for number in range(4):
            status, headers, answer = await w.post({"model": "tiny", "prompt": PROMPT, "max_tokens": 2})
            assert status == 200
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (0 if number < 2 else 144), "each rank computes the prompt once"
            served.append(headers["x-lmetric-instance"])
        assert served[:2] == served[2:]
        assert sorted(served[:2]) == names(w)
        pool = w.server.fleet.pools[0]
        async with aiohttp.ClientSession() as http:
            url = next(iter(pool.engines.values())).config.url
            async with http.get(f"{url}/metrics") as page:
                both = page_of_rank(await page.read(), 0), page_of_rank(await page.read(), 1)
        assert all(b"vllm:num_requests_running" in page for page in both)
        each = [engine.capabilities.cache_blocks for engine in pool.engines.values()]
        assert each[0] == each[1]
        assert each[0] is not None


async def test_a_client_cannot_choose_the_rank() -> None:
    async with ranked(policy="round_robin", kv_events="off") as w:
        for cached in (0, 0, 144, 144):
            _, _, answer = await w.post(
                {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}, headers={"X-data-parallel-rank": "1"}
            )
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("model_known", [True, False])
async def test_a_rank_that_there_is_not_gets_no_requests_and_says_why(model_known: bool) -> None:
    async with emulated(ranks=2) as engine:
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


def test_only_vllm_takes_a_rank_by_header() -> None:
    with pytest.raises(ValueError, match="the engine is sglang; only vLLM"):
        Capabilities("sglang").of_rank(1)
    sources = tuple(EventSource(rank, f"tcp://*:{5557 + rank}") for rank in (0, 1))
    assert Capabilities("vllm", event_sources=sources).of_rank(1).event_sources == sources[1:]


def test_a_page_keeps_the_samples_of_its_rank() -> None:
    comment, shared, other = b"# HELP a\n", b"b 3\n", b'c{engine_index="9"} 4\n'
    first, second = b'a{engine="0",model_name="m"} 1\n', b'a{model_name="m",engine="1"} 2\n'
    page = comment + first + second + shared + other
    assert page_of_rank(page, 1) == comment + second + shared + other


def test_names_of_ranks() -> None:
    assert EngineConfig(url="http://a:1", data_parallel_rank=3).label == "a:1-dp3"
    assert EngineConfig(url="http://a:1", data_parallel_rank=3, name="x").label == "x"
