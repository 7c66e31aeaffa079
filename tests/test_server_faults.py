"""Faults that once left a relay, a wrong count, or an empty cache."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

import lmetric as lm
from lmetric.engines.replaced import BALANCED
from server_world import FakeEngine, Request, decision_id, plain, reset, says, usage, world

GOOD: dict[str, Any] = {
    "id": "cmpl-1",
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "usage": usage(),
}


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "much", "1e999"])
async def test_a_load_header_that_cannot_be_is_passed_over(value: str) -> None:
    header = b"endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=%s\r\n" % value.encode()
    async with world([FakeEngine(behave=says(plain(200, GOOD, header), then="keep"))]) as it:
        for _ in range(2):
            assert (await it.post())[0] == 200
        await it.settled()
        assert it.server.fleet.models[0].router.stats()["finished"] == 2


async def test_an_engine_may_be_removed_while_it_answers() -> None:
    go = asyncio.Event()

    async def wait(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        header = b"endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=1\r\n"
        writer.write(plain(200, GOOD, header))
        return True

    async with world([FakeEngine(behave=wait)], admin=True) as it:
        request = asyncio.create_task(it.post())
        await it.engines[0].asked(1)
        async with it.client.delete(it.url + "/admin/engines/e0") as response:
            assert response.status == 200
        go.set()
        assert (await request)[0] == 200
        await it.settled()


async def test_used_up_attempts_are_booked_as_what_they_were() -> None:
    busy = says(plain(503, {"error": {"message": "busy"}}), then="keep")
    async with world([FakeEngine(behave=busy) for _ in range(4)]) as it:
        status, headers, _ = await it.post()
        assert status == 503
        router = it.server.fleet.models[0].router
        record = router.explain(decision_id(headers))
        assert record is not None
        assert (len(record["tried"]), record["outcome"]) == (3, "status")
        stats = router.stats()
        assert (stats["retries"], stats["failed"]["status"]) == (2, 1)


async def test_failed_attempts_count_by_kind_also_if_another_engine_answered() -> None:
    """UX, section 3: `lmetric_failures_total` stayed 0 after an attempt that was retried."""
    async with world(2, health={"interval": 60}) as it:
        it.engines[0].behave = reset
        for _ in range(2):
            assert (await it.post())[0] == 200
        await it.engines[0].stop()
        for _ in range(2):
            assert (await it.post())[0] == 200
        _, page = await it.get("/metrics")
        for kind in ("refused", "reset"):
            assert b'lmetric_failures_total{kind="%b",model="tiny"} 1.0' % kind.encode() in page


async def test_a_request_that_failed_twice_is_not_invited_back() -> None:
    """Python, section 6, number 8: the 502 had a Retry-After."""
    too_long_to_pass = says(plain(500, b"x" * 2_000_000), then="keep")
    async with world([FakeEngine(behave=too_long_to_pass) for _ in range(3)]) as it:
        status, headers, got = await it.post()
        assert (status, got["error"]["code"]) == (502, "failed_twice")
        assert "retry-after" not in headers


async def test_an_engine_that_only_fails_is_taken_out() -> None:
    broken = FakeEngine(behave=says(plain(500, {"error": {"message": "no"}}), then="keep"))
    async with world([broken, FakeEngine()], policy="lmetric", health={"interval": 60}) as it:
        statuses = [(await it.post())[0] for _ in range(40)]
        assert statuses.count(500) <= 3
        assert set(statuses[-20:]) == {200}


async def test_a_refused_connection_ends_what_is_believed_of_the_cache() -> None:
    prompt = "a long prompt that will be cached " * 100
    async with world(2, policy="lmetric") as it:
        _, headers, _ = await it.post({"model": "tiny", "prompt": prompt})
        holder = next(e for e in it.engines if e.name == headers["x-lmetric-instance"])
        router = it.server.fleet.models[0].router
        hits = dict(zip(router.instances(), router.cached_tokens(lm.Request(text=prompt)), strict=True))
        assert hits[holder.name] > 500
        await holder.stop()
        assert (await it.post({"model": "tiny", "prompt": prompt}))[0] == 200
        await it.until(lambda: not it.server.fleet.models[0].engines[holder.name].healthy)
        hits = dict(zip(router.instances(), router.cached_tokens(lm.Request(text=prompt)), strict=True))
        assert hits[holder.name] == 0


async def test_another_start_time_ends_what_is_believed_of_the_cache() -> None:
    """Between two health checks, a new process may begin to listen. A load balancer shows the start
    times of several processes in turn."""
    body = {"model": "tiny", "prompt": "a long prompt that will be cached " * 100}

    def page(start: str, running: int) -> bytes:
        return b"# x\nprocess_start_time_seconds %b\nvllm:num_requests_running %d\n" % (
            start.encode(),
            running,
        )

    fake = FakeEngine(metrics=page("1.7e9", 0))
    with capture_logs() as logs:
        async with world([fake], policy="lmetric", load={"interval": 0.02}) as it:
            [model] = it.server.fleet.models
            asked = lm.Request(text=body["prompt"])

            async def reported(start: str, running: int) -> None:
                fake.metrics = page(start, running)
                await it.until(lambda: model.router.indicators()["reported_running"][0] == running)

            await reported("1.7e9", 1)
            await it.post(body)
            assert model.router.cached_tokens(asked)[0] > 500
            await reported("1.8e9", 2)
            assert model.router.cached_tokens(asked)[0] == 0
            await it.until(lambda: model.engines["e0"].identified)
            await it.post(body)
            await reported("1.71e9", 3)  # also a failover to an older process
            assert model.router.cached_tokens(asked)[0] == 0
            await it.until(lambda: model.engines["e0"].identified)
            await it.post(body)
            # The times go back and forth, and most processes were not seen before.
            for running, start in enumerate(("1.8e9", "1.9e9", "1.72e9", "1.9e9"), start=4):
                await reported(start, running)
                assert model.engines["e0"].identified
                assert model.router.cached_tokens(asked)[0] > 500
    assert [each["engine"] for each in logs if each["event"] == BALANCED] == ["e0"]


async def test_several_prompts_teach_no_ratio_and_count_as_load() -> None:
    seen: list[int] = []

    async def behave(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        router = it.server.fleet.models[0].router
        seen.append(int(router.stats()["instances"][engine.name]["tokens"]))
        writer.write(plain(200, {**GOOD, "usage": usage(prompt=9000)}))
        return True

    async with world([FakeEngine(behave=behave)]) as it:
        ratio = it.server.fleet.models[0].ratio
        before = ratio.tokens_of(1000)
        await it.post({"model": "tiny", "prompt": ["a" * 4000, "b" * 4000]})
        await it.post({"model": "tiny", "input": ["a" * 4000, "b" * 4000]}, path="/v1/embeddings")
        assert ratio.tokens_of(1000) == before
        assert min(seen) > 1900
