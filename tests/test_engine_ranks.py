"""An emulated engine of several data-parallel ranks: each rank's state; the choice of rank."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from lmetric.engines.adapter import samples
from lmetric.engines.identify import identify
from lmetric_lab.emulated import EngineOptions, EngineServer
from lmetric_lab.emulated.metrics import EngineMetrics
from lmetric_lab.emulated.ranks import MetricsPage, consecutive_ports
from lmetric_lab.emulated.sglang import SglangMetrics

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


class AsCollector(Collector):
    """A page for the registry of `prometheus_client`."""

    def __init__(self, page: MetricsPage) -> None:
        self.collect = page.collect  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [EngineMetrics, SglangMetrics])
def test_the_page_is_the_text_of_the_prometheus_client(kind: type[EngineMetrics]) -> None:
    config = {"block_size": "16", "num_gpu_blocks": "9"}
    ranks = [kind('a "b"\\\n', config, lambda: Counter(running=10**7), n) for n in (0, 1)]
    page = MetricsPage(ranks)
    registry = CollectorRegistry()
    registry.register(AsCollector(page))
    for rank in ranks:
        for _ in range(2):
            assert page.render() == generate_latest(registry)
            rank.step(0.0123, 3, 400)
            rank.transferred(1e-7, 5)


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


async def test_waiting_requests_weigh_by_the_use_of_the_cache() -> None:
    """vLLM 0.32: from 60 to 85%, a waiting request counts as 1.6 to 3.1 running ones, not 4."""
    # The answers of rank 1 outgrow its cache after some 90 steps: of 0.8 s on this clock.
    options = EngineOptions(port=0, ranks=2, clock_speed=0.01, cache_blocks=100)
    async with EngineServer(options) as engine, aiohttp.ClientSession() as http:

        async def loads() -> list[float]:
            async with http.get(f"{engine.url}/metrics") as told:
                names = ["num_requests_running", "num_requests_waiting"]
                return [n for _, _, n in samples(await told.read(), "vllm:", names)]

        long = {"prompt": list(range(1, 960)), "max_tokens": 400}  # 60 to 85 blocks
        asks = [asyncio.create_task(post(http, engine.url, "0", **long)) for _ in range(4)]
        asks += [asyncio.create_task(post(http, engine.url, "1", max_tokens=400)) for _ in range(12)]
        while await loads() != [1, 12, 3, 0]:
            assert not any(ask.done() for ask in asks)
        asks.append(asyncio.create_task(post(http, engine.url, max_tokens=400)))
        while sum(now := await loads()) < 17:
            assert not any(ask.done() for ask in asks)
        assert now == [1, 12, 4, 0]
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


async def test_idle_ranks_are_chosen_in_turn_and_report_their_cache_as_vllm() -> None:
    async with (
        EngineServer(EngineOptions(port=0, ranks=3, clock_speed=50, cache_blocks=1000)) as engine,
        aiohttp.ClientSession() as http,
    ):
        for expected in (0, 0, 0, 32):  # tokens
            _, answer = await post(http, engine.url)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected

        async def ask(path: str) -> tuple[int, bytes]:
            async with http.get(engine.url + path) as answer:
                return answer.status, await answer.read()

        _, page = await ask("/metrics")
        assert page.count(b'num_gpu_blocks="3000"') == page.count(b'kv_cache_size_tokens="16000"') == 3
        found = [(await identify(ask, rank))[1].cache_blocks for rank in (None, 0, 2)]
        assert found == [3000, 1000, 1000]


async def test_the_stand_in_for_sglang_has_ranks_as_sglang() -> None:
    sockets = ("kv_events_endpoint", "kv_events_replay_endpoint", "load_publish_endpoint")
    options = EngineOptions(
        port=0,
        api="sglang",
        ranks=3,
        clock_speed=50,
        cache_blocks=1000,
        **dict.fromkeys(sockets, "tcp://*:0"),
    )
    async with EngineServer(options) as engine, aiohttp.ClientSession() as http:

        async def cached(rank: str | None) -> int:
            status, answer = await post(http, engine.url, rank)
            assert status == 200
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached(rank) for rank in ("2", "0", "2", "0")] == [0, 0, 32, 32]
        # Without the header in turn, wherever the prefix is.
        assert sorted([await cached(None) for _ in range(3)]) == [0, 32, 32]
        for rank, why in (
            ("3", "routed_dp_rank=3 out of range [0, 3)"),
            ("-1", "routed_dp_rank=-1 out of range [0, 3)"),
            ("x", "Invalid X-Data-Parallel-Rank header: must be an integer, got 'x'"),
        ):
            status, answer = await post(http, engine.url, rank)
            assert (status, answer["message"]) == (400, why)

        async def ask(path: str) -> tuple[int, bytes]:
            async with http.get(engine.url + path) as answer:
                return answer.status, await answer.read()

        _, whole = await identify(ask)
        assert (whole.ranks, whole.cache_blocks, len(whole.load_feeds)) == ((0, 1, 2), 3000, 3)
        heard = []
        for rank in whole.ranks:
            adapter, told = await identify(ask, rank)
            assert (told.data_parallel_rank, told.cache_blocks, len(told.load_feeds)) == (rank, 1000, 1)
            (source,) = told.event_sources
            assert source.replay_endpoint is not None
            heard += [source.endpoint, source.replay_endpoint, *told.load_feeds]
            (_, body) = await ask("/v1/loads?include=core")
            assert adapter.load(body).names[0] == "num_waiting_reqs"
        assert len(set(heard)) == 9
        with pytest.raises(ValueError, match="data_parallel_rank: 3: the engine has the ranks 0, 1, 2"):
            await identify(ask, 3)


def test_ranks_of_any_port_get_consecutive_ones() -> None:
    place, _, port = consecutive_ports("tcp://*:0", 4).rpartition(":")
    assert place == "tcp://*"
    assert int(port) > 0
    for named in ("tcp://*:5557", "ipc:///kv"):
        assert consecutive_ports(named, 4) == named
