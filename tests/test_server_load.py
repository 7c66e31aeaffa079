"""Engines' load in the server: its sources, its age, and no herding by old values."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from lmetric.server.upstream.connection import UpstreamError
from lmetric.server.upstream.metrics_page import thin
from lmetric_lab.emulated import EngineOptions, EngineServer
from server_world import FakeEngine, Request, World, answer, plain, says, world
from waiting import until


@contextlib.asynccontextmanager
async def emulated(count: int, **options: Any) -> AsyncIterator[list[dict[str, Any]]]:
    """Returns emulated engines, as entries of a configuration."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(EngineServer(EngineOptions(port=0, **options)))
            for _ in range(count)
        ]
        yield [{"url": engine.url, "name": f"e{number}"} for number, engine in enumerate(engines)]


async def burst(w: World, count: int, **body: Any) -> Counter[str]:
    """Sends requests at once. Returns their number by engine."""

    async def one(number: int) -> str:
        prompt = {"model": "tiny", "prompt": f"{number} asks " * 40, "max_tokens": 4}
        status, headers, _ = await w.post(prompt | body)
        assert status == 200
        return str(headers["x-lmetric-instance"])

    return Counter(await asyncio.gather(*(one(number) for number in range(count))))


def waits_for(go: asyncio.Event) -> Any:
    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await answer(engine, request, writer)

    return behave


# A report that is never renewed: the first engine is idle, the others run three external requests.
FROZEN = [b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n" % n for n in (0, 3, 3, 3)]


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        # Own requests count at once, in addition to reported external requests.
        ("least_requests", {15, 16, 17, 18, 19}),
        # The reports alone lead to this choice (vllm-project/router#178).
        ("reported_running", {64}),
    ],
)
async def test_many_requests_within_one_report_are_spread(policy: str, shares: set[int]) -> None:
    go = asyncio.Event()
    engines = [FakeEngine(metrics=page, behave=waits_for(go)) for page in FROZEN]
    async with world(engines, policy=policy, load={"interval": 0.02}) as w:
        router = w.server.fleet.models[0].router
        await w.until(lambda: (router.indicators()["reported_running"] >= 0).all())
        sent = asyncio.create_task(burst(w, 64))
        await w.until(lambda: sum(len(engine.requests) for engine in engines) == 64)
        await asyncio.sleep(0.1)  # for some more of the same reports
        go.set()
        placed = await sent
    assert set(placed.values()) <= shares


async def test_slow_and_frozen_metrics_of_real_sockets_make_no_herd() -> None:
    """Two bursts over emulated engines whose /metrics is older than a burst takes."""
    async with (
        emulated(4, model="tiny", metrics_every_seconds=1000.0) as engines,
        world([], engines=engines, policy="lmetric", load={"interval": 0.02}) as w,
    ):
        for _ in range(2):
            placed = await burst(w, 64, max_tokens=20)
            assert len(placed) == 4
            assert max(placed.values()) <= 24, placed
            await w.settled()


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_load_is_read_where_the_engine_has_it(api: str) -> None:
    async with (
        emulated(1, model="tiny", api=api, max_sequences=1) as engines,
        world([], engines=engines, policy="lmetric", load={"interval": 0.02}) as w,
    ):
        [model] = w.server.fleet.models
        asks = [asyncio.create_task(w.post({"prompt": "a", "max_tokens": 60})) for _ in range(3)]

        def reported() -> tuple[float, float]:
            columns = model.router.indicators()
            return columns["reported_waiting"][0], columns["reported_running"][0]

        await w.until(lambda: reported() == (2, 1))
        [shown] = orjson.loads((await w.get("/debug/engines"))[1])
        path = "/v1/loads" if api == "sglang" else "/metrics"
        assert shown["load"]["reports"][path] > 0
        assert 0 <= shown["load"]["age_seconds"] < 1
        assert shown["load"]["error"] is None
        assert shown["capabilities"]["engine"] == api
        page = (await w.get("/metrics"))[1].decode()
        assert f'lmetric_load_reports_total{{instance="e0",model="tiny",source="{path}"}}' in page
        assert f'engine="{api}",instance="e0",mode="approximate",model="tiny",reason="' in page
        for ask in asks:
            assert (await ask)[0] == 200
        columns = model.router.indicators()
        assert columns["bs"][0] == 0 or columns["report_age_seconds"][0] < 1


@pytest.mark.parametrize(
    "header",
    [
        b"TEXT named_metrics.num_requests_waiting=7.0, named_metrics.kv_cache_usage_perc=0.5",
        b'JSON {"named_metrics": {"num_requests_waiting": 7.0, "kv_cache_usage_perc": 0.5}}',
    ],
)
async def test_load_comes_on_answers_in_either_form(header: bytes) -> None:
    extra = b"endpoint-load-metrics: %s\r\n" % header
    engine = FakeEngine(behave=says(plain(200, {"choices": []}, extra), then="keep"))
    async with world([engine], policy="lmetric") as w:
        await w.post()
        columns = w.server.fleet.models[0].router.indicators()
        assert (columns["reported_waiting"][0], columns["kv_usage"][0]) == (7.0, 0.5)
        [shown] = orjson.loads((await w.get("/debug/engines"))[1])
        assert shown["load"]["reports"] == {"header": 1}


async def test_an_engine_that_tells_no_load_is_said_to() -> None:
    async with world([FakeEngine(metrics=b"other_gauge 1\n")], load={"interval": 0.02}) as w:
        [engine] = w.server.fleet.engines()
        await w.until(lambda: engine.load_error)
        [shown] = orjson.loads((await w.get("/debug/engines"))[1])
        assert shown["load"] == {
            "reports": {},
            "age_seconds": None,
            "error": "GET /metrics: no load metric with a known name",
            "missing_metrics": [],
        }
        assert (shown["mode"], shown["capabilities"]["engine"]) == ("approximate", "unknown")


def large_page(ranks: int, buckets: int = 22) -> bytes:
    """The metrics of an engine with ``ranks`` data-parallel ranks, each with 3 waiting requests."""
    lines = ["# TYPE process_start_time_seconds gauge", "process_start_time_seconds 1.0"]
    for number in range(25):
        name = f"vllm:histogram_{number}_seconds"
        lines.append(f"# TYPE {name} histogram")
        for rank in range(ranks):
            labels = f'engine="{rank}",model_name="an/example-of-a-70b-model"'
            lines += [f'{name}_bucket{{{labels},le="{each}.0"}} {each}.0' for each in range(buckets)]
            lines += [f"{name}_sum{{{labels}}} 1.0", f"{name}_count{{{labels}}} 1.0"]
    for name, value in (("waiting", 3.0), ("running", 2.0)):
        lines += [f'vllm:num_requests_{name}{{engine="{rank}"}} {value}' for rank in range(ranks)]
    return "\n".join([*lines, ""]).encode()


@pytest.mark.parametrize("ranks", [1, 40, 270])
async def test_the_load_of_many_ranks_is_read(ranks: int) -> None:
    page = large_page(ranks)
    cards = [{"id": "tiny", "owned_by": "vllm", "max_model_len": 4096}]
    async with world([FakeEngine(metrics=page, cards=cards)], load={"interval": 0.02}) as w:
        [engine] = w.server.fleet.engines()
        await until(lambda: engine.load_reports["/metrics"], seen=lambda: str(engine.load_error))
        columns = w.server.fleet.models[0].router.indicators()
        assert columns["reported_waiting"][0] == 3.0 * ranks
        assert engine.capabilities.engine == "vllm"


@pytest.mark.parametrize("piece", [1000, 100_000, 10_000_000])
def test_large_pages_lose_only_buckets(piece: int) -> None:
    page = large_page(40)
    read, begin = bytearray(), 0
    for at in range(0, len(page), piece):
        read += page[at : at + piece]
        begin = thin(read, begin)
    assert read == b"".join(line for line in page.splitlines(keepends=True) if b"_bucket{" not in line)


@pytest.mark.parametrize("ranks", [1, 40])
async def test_large_pages_keep_the_buckets_of_indicators(ranks: int) -> None:
    """Of 40 ranks, 1.9 MiB, all buckets were once left out, and the indicator had no value."""
    declared = {"waits": {"source": "vllm:histogram_3_seconds_bucket"}}
    engine = FakeEngine(metrics=large_page(ranks))
    async with world([engine], load={"interval": 0.02}, indicators=declared) as w:
        router = w.server.fleet.models[0].router
        await until(lambda: router.indicators()["waits"][0] == ranks * sum(range(22)))


async def test_a_page_of_metrics_that_is_too_large_is_logged_at_the_start() -> None:
    page = large_page(300)
    cards = [{"id": "tiny", "owned_by": "vllm", "max_model_len": 4096}]
    with capture_logs() as logs:
        async with world([FakeEngine(metrics=page, cards=cards)], load={"interval": 0.02}) as w:
            [engine] = w.server.fleet.engines()
            await until(lambda: engine.load_error, seen=lambda: str(engine.load_reports))
            assert engine.load_error == "answer longer than 16777216 bytes"
            assert (await w.post())[0] == 200
    assert [line["reason"] for line in logs if line["event"] == "the load of an engine is not known"] == [
        "answer longer than 16777216 bytes"
    ]


async def test_entries_of_one_url_share_a_read_of_its_metrics() -> None:
    """A server with 8 data-parallel ranks has an entry for each. Its page has all metrics."""

    class Slow(FakeEngine):
        pages = lists = 0

        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            self.lists += request.path == "/v1/models"
            if request.path == "/metrics":
                self.pages += 1
                await until(lambda: self.lists == 8)  # then each entry asks for the metrics
                await asyncio.sleep(0.05)
            return await super()._answer(request, writer)

    slow = Slow(metrics=large_page(8), cards=[{"id": "tiny", "owned_by": "vllm", "max_model_len": 4096}])
    await slow.start()
    ranks = [{"url": slow.url, "name": f"rank{rank}", "data_parallel_rank": rank} for rank in range(8)]
    async with world(0, engines=ranks, load={"interval": 0.2}) as w:
        engines = list(w.server.fleet.engines())
        before = slow.pages
        await until(lambda: all(each.load_reports["/metrics"] >= 3 for each in engines))
        assert slow.pages - before <= 2 * max(each.load_reports["/metrics"] for each in engines)
        assert before <= 2  # the identification of all
    await slow.stop()


async def test_a_shared_read_that_all_readers_left_fails_silently() -> None:
    failures: list[dict[str, Any]] = []
    gate = asyncio.Event()

    class Fails(FakeEngine):
        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            if request.path == "/left":
                self.page_reads.append(request.path)
                await gate.wait()
                return False
            return await super()._answer(request, writer)

    fake = Fails()
    async with world([fake]) as w:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        fleet = w.server.fleet
        [engine] = fleet.engines()
        reader = asyncio.create_task(fleet.page(engine, "/left"))
        await until(lambda: "/left" in fake.page_reads)
        reader.cancel()
        await asyncio.wait([reader])
        gate.set()
        await until(lambda: not fleet.pages)
        del reader  # its traceback has the read
        gc.collect()
        with pytest.raises(UpstreamError):
            await fleet.page(engine, "/left")
    assert failures == []
