"""An emulated engine of several data-parallel ranks: what each has of its own, and which gets a request."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from lmetric.engines.adapter import samples
from lmetric.engines.emulated import EngineOptions, EngineServer

PROMPT = [7] * 40


async def post(
    http: aiohttp.ClientSession, url: str, rank: str | None = None, **body: Any
) -> tuple[int, dict[str, Any]]:
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    body = {"prompt": PROMPT, "max_tokens": 2} | body
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_each_rank_has_a_cache_events_and_figures_of_its_own() -> None:
    events = {"kv_events_endpoint": "tcp://*:0", "kv_events_replay_endpoint": "tcp://*:0"}
    options = EngineOptions(port=0, ranks=2, clock_speed=50, **events)
    async with EngineServer(options) as engine, aiohttp.ClientSession() as http:

        async def cached(rank: str) -> int:
            status, answer = await post(http, engine.url, rank)
            assert status == 200
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached(rank) for rank in ("0", "1", "0", "1")] == [0, 0, 32, 32]
        status, answer = await post(http, engine.url, "2")
        assert (status, answer["error"]["message"]) == (400, "data_parallel_rank 2 is out of range [0, 2).")
        async with http.get(f"{engine.url}/kv_event_sources") as told:
            sources = await told.json()
        assert list(sources) == ["0", "1"]
        assert len({source["endpoint"] for source in sources.values()}) == 2
        async with http.get(f"{engine.url}/metrics") as told:
            page = await told.read()
        for name, each in (("prefix_cache_hits_total", 32), ("generation_tokens_total", 4)):
            found = [
                (labels.count(b'engine="%d"' % n), value)
                for n, (_, labels, value) in enumerate(samples(page, "vllm:", [name]))
            ]
            assert found == [(1, each), (1, each)]
        async with http.post(f"{engine.url}/reset_prefix_cache") as reset:
            assert reset.status == 200
        assert [await cached(rank) for rank in ("0", "1")] == [0, 0]


async def test_a_request_goes_to_the_least_loaded_rank() -> None:
    options = EngineOptions(port=0, ranks=3, clock_speed=5)
    async with EngineServer(options) as engine, aiohttp.ClientSession() as http:
        asks = [asyncio.create_task(post(http, engine.url, max_tokens=100)) for _ in range(9)]
        running: list[float] = []
        while sum(running) < 9:
            async with http.get(f"{engine.url}/metrics") as told:
                running = [n for _, _, n in samples(await told.read(), "vllm:", ["num_requests_running"])]
            assert not asks[0].done()
        assert running == [3, 3, 3]
        for ask in asks:
            assert (await ask)[0] == 200


def test_the_stand_in_for_sglang_has_one() -> None:
    with pytest.raises(ValidationError, match="only with api vllm"):
        EngineOptions(api="sglang", ranks=2)
