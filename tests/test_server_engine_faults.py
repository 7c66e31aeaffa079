"""Unreachable and slow engines, wrong reports, too long answers, and the router's reaction."""

import asyncio
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

import lmetric as lm
from lmetric import _core
from server_world import (
    STREAM_HEAD,
    FakeEngine,
    Request,
    World,
    answer,
    chunk,
    event,
    hang,
    plain,
    says,
    self_signed,
    token,
    usage,
    world,
)
from split_world import heard

LONG = "a long prompt that will be cached " * 100


def engine_of(it: World, name: str = "e0") -> Any:
    return it.server.fleet.models[0].engines[name]


def hits(it: World, name: str) -> int:
    """Returns the tokens of the long prompt that the index has for an engine."""
    router = it.server.fleet.models[0].router
    return int(dict(zip(router.instances(), router.cached_tokens(lm.Request(text=LONG)), strict=True))[name])


async def moved_to(it: World, address: str) -> tuple[int, Any]:
    """Sends the long prompt, then again after its engine has moved to another address."""
    body = {"model": "tiny", "prompt": LONG}
    assert (await it.post(body))[0] == 200
    engine = engine_of(it)
    upstream = engine.upstream
    while (connection := upstream.take()) is not None:
        connection.transport.abort()
    fresh = type(upstream)(engine.config.model_copy(update={"url": address}), it.server.config)
    engine.upstream = fresh
    status, _, got = await it.post(body)
    engine.upstream = upstream
    return status, got["error"]


async def test_a_name_that_does_not_resolve_is_an_error_of_dns() -> None:
    """Reliability M1, Server 7.1: as a refusal, it once dropped the engine and its cache."""
    async with world(1, policy="lmetric", health={"interval": 60}) as it:
        status, error = await moved_to(it, "http://no-such-host.invalid:8000")
        assert (status, error["code"]) == (502, "dns")
        assert "DNS: " in error["message"]
        assert engine_of(it).healthy
        assert hits(it, "e0") > 500
        assert (await it.post())[0] == 200


async def test_an_engine_without_tls_is_an_error_of_tls() -> None:
    """Reliability M1, Server 7.1: the engine stays, and its cache stays known."""

    async def speaks_plainly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    plain_server = await asyncio.start_server(speaks_plainly, "127.0.0.1", 0)
    try:
        async with world(1, policy="lmetric", health={"interval": 60}) as it:
            port = plain_server.sockets[0].getsockname()[1]
            status, error = await moved_to(it, f"https://127.0.0.1:{port}")
            assert (status, error["code"]) == (502, "tls")
            assert "TLS: " in error["message"]
            assert engine_of(it).healthy
            assert hits(it, "e0") > 500
            stats = it.server.fleet.models[0].router.stats()
            assert stats["failed"]["tls"] == 1
    finally:
        plain_server.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_a_bad_certificate_is_named(tmp_path: Path) -> None:
    """Reliability M1, Server 7.1: health checks also name the certificate."""
    context, _ = await self_signed(tmp_path)
    fake = FakeEngine()
    secure = await asyncio.start_server(fake._serve, "127.0.0.1", 0, ssl=context)
    port = secure.sockets[0].getsockname()[1]
    try:
        async with world(1, policy="lmetric", health={"interval": 60}) as it:
            status, error = await moved_to(it, f"https://127.0.0.1:{port}")
            assert (status, error["code"]) == (502, "tls")
            assert "certificate" in error["message"]
            assert "self" in error["message"]
            assert hits(it, "e0") > 500
    finally:
        secure.close()


async def test_pings_do_not_keep_a_request_open_for_ever() -> None:
    """Reliability M7: an endless stream ends at its longest duration."""

    async def goes_on(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        while not writer.is_closing():
            writer.write(chunk(token("a")))
            await writer.drain()
            await asyncio.sleep(0.01)
        return False

    async with world([FakeEngine(behave=goes_on)], timeouts={"request": 0.3}) as it:
        status, _, got = await it.post({"model": "tiny", "prompt": "x", "stream": True})
        error = got.rpartition(b"data: [DONE]")[0]
        assert status == 200
        assert b'"code":"timeout"' in error
        assert b"timeouts.request" in error
        stats = it.server.fleet.models[0].router.stats()
        assert stats["failed"]["timeout"] == 1
        assert engine_of(it).failures == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_an_answer_ends_at_its_longest_duration(stream: bool) -> None:
    """Reliability M7: the longest duration holds despite other limits and further engines."""
    async with world([FakeEngine(behave=hang), FakeEngine(behave=hang)], timeouts={"request": 0.3}) as it:
        status, _, got = await it.post({"model": "tiny", "prompt": "x", "stream": stream})
        assert (status, got["error"]["code"]) == (504, "timeout")
        await it.until(lambda: sum(fake.left for fake in it.engines) == 1)


async def test_a_usage_that_cannot_be_is_not_learned_from() -> None:
    """Reliability M2: after one such answer, prompts of 2 kB once got 500."""
    lie = {"id": "1", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    lies = says(plain(200, lie | {"usage": usage(prompt=4294967295)}), then="keep")
    async with world([FakeEngine(behave=lies)], programs="observe") as it:
        ratio = it.server.fleet.models[0].ratio
        before = ratio.tokens_of(100_000)
        for _ in range(4):
            assert (await it.post({"model": "tiny", "prompt": "a" * 330}))[0] == 200
        for size in (2_000, 100_000, 1_000_000):
            assert (await it.post({"model": "tiny", "prompt": "a" * size}))[0] == 200
        assert ratio.tokens_of(100_000) == before
        metrics = (await it.get("/metrics"))[1].decode()
        assert 'lmetric_implausible_usage_total{model="tiny"} 7.0' in metrics
        # No estimate of a caller causes an error.
        router = it.server.fleet.models[0].router
        for far in (2**32 - 1, 2**32, 2**63):
            router.route(lm.Request(prompt_tokens=far, extra_tokens=far))[1].failed("cancelled")


@pytest.mark.parametrize("stream", [False, True])
async def test_output_and_cached_tokens_that_cannot_be_are_dropped(stream: bool) -> None:
    """Reliability M2: holds for every count of `usage`, not only the prompt's."""
    lie = usage(prompt=50, output=10**12, cached=10**9)
    whole = {"id": "1", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "usage": lie}
    body = plain(200, whole)
    if stream:
        body = STREAM_HEAD + chunk(event(whole)) + chunk(event(b"[DONE]")) + b"0\r\n\r\n"
    async with world([FakeEngine(behave=says(body, then="keep"))]) as it:
        request = {"model": "tiny", "prompt": "a" * 200, "stream": stream}
        status, headers, _ = await it.post(request)
        assert status == 200
        record = orjson.loads((await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}"))[1])
        assert "cached_tokens" not in record
        assert record.get("output_tokens") == (1 if stream else None)
        stats = it.server.fleet.models[0].router.stats()
        assert stats["cached_tokens"] == 0
        assert stats["output_tokens"] <= 1
        metrics = (await it.get("/metrics"))[1].decode()
        assert 'lmetric_implausible_usage_total{model="tiny"} 1.0' in metrics


async def test_a_plain_request_that_is_answered_by_a_stream_goes_to_the_next_engine() -> None:
    """Server 7.10 e: the second segment's stream once caused an AttributeError."""
    from test_server_split_faults import ASKED, STORY_TEXT, but, faulty, said_in, streamed_by

    async def streams(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + b"".join(streamed_by(request)))
        return True

    async with faulty(but(streams)) as w:
        status, _, got = await w.post({**ASKED, "stream": False})
        assert (status, said_in(got)) == (200, STORY_TEXT)


async def test_a_stream_that_is_answered_by_one_body_goes_to_the_next_engine() -> None:
    """Server 7.10 e: in the opposite case, the end of a stream was once sent without a head."""
    from test_server_split_faults import ASKED, STORY_TEXT, but, changed, faulty

    async with faulty(but(changed())) as w:
        status, _, got = await w.post({**ASKED, "stream": True})
        assert (status, heard(got)["text"]) == (200, STORY_TEXT)


async def test_a_slow_engine_delays_the_polls_of_no_other() -> None:
    """Server 7.9: rounds of checks and load reports once waited for the slowest engine."""
    stuck = False
    polls: Counter[str] = Counter()

    class Polled(FakeEngine):
        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            if stuck and self.name == "e0":
                await self.until_left(writer)
                return False
            polls[request.path] += self.name == "e1"
            return await super()._answer(request, writer)

    fakes = [Polled(metrics=b"vllm:num_requests_running 1.0\n") for _ in range(2)]
    async with world(fakes, health={"interval": 0.02, "timeout": 60}, load={"interval": 0.02}) as it:
        await it.until(lambda: polls["/metrics"] > 3)  # after the identification
        stuck = True
        before = polls.copy()
        await it.until(lambda: all(polls[path] > before[path] + 5 for path in ("/health", "/metrics")))
        # However slow an engine is, it gets only one request of a kind at a time.
        assert len(it.engines[0]._writers) <= 3


@pytest.mark.parametrize(
    ("written", "limit"),
    [(b"vllm:num_requests_running 7.0\n", 2 << 20), (b"vllm:a_bucket{} 7.0\n", 16 << 20)],
)
async def test_a_page_without_end_is_not_read_to_its_end(written: bytes, limit: int) -> None:
    """Reliability L: 15 MB of /metrics once cost 0.13 s of the router's time per second."""
    sent = 0

    class Talks(FakeEngine):
        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            nonlocal sent
            if request.path != "/metrics":
                return await super()._answer(request, writer)
            line = written * 2048
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(line) * 1000))
            for _ in range(1000):
                writer.write(line)
                await writer.drain()
                sent += len(line)
            return False

    with capture_logs() as logs:
        async with world([Talks()], load={"interval": 0.05}) as it:
            engine = engine_of(it)
            engine.capabilities = replace(engine.capabilities, load_path="/metrics")
            await it.until(lambda: engine.load_error)
            reason = f"answer longer than {limit} bytes"
            assert engine.load_error == reason
            await it.until(lambda read=sent: sent > read)  # again
            assert engine.load_reports["/metrics"] == 0
            assert (await it.post())[0] == 200
    assert [line["reason"] for line in logs if line["event"] == "the load of an engine is not known"] == [
        reason
    ]
    assert 0 < sent < 1000 * 2048 * 30


async def test_overlapping_role_switches_leave_an_engine_in_service() -> None:
    """Server 7.6: overlapping switches and drains restore only their own state.

    The second switch once restored the drain of the first, forever. A drain during a switch was
    undone.
    """
    go = asyncio.Event()

    async def waits(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await answer(engine, request, writer)

    async with world([FakeEngine(behave=waits)], admin=True) as it:
        engine = engine_of(it)

        async def post(verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            async with it.client.post(f"{it.url}/admin/engines/e0/{verb}", json=body or {}) as response:
                assert response.status == 200
                got = await response.json()
                return dict(got[0] if isinstance(got, list) else got)

        for drains in (False, True):
            go.clear()
            request = asyncio.create_task(it.post())
            await it.until(lambda: engine.running)
            switches = [asyncio.create_task(post("role", {"role": "both", "drain": 20})) for _ in range(2)]
            await it.until(lambda: engine.switches == 2)
            assert (await it.post())[0] == 503
            if drains:
                assert (await post("drain"))["draining"]
            go.set()
            assert (await request)[0] == 200
            await asyncio.gather(*switches)
            assert (await it.post())[0] == (503 if drains else 200)


def test_one_engines_rate_is_read_alone() -> None:
    """Server 7.9: fetches and moves once computed all indicators to read one rate."""
    router = _core.Router("lmetric")
    for name in ("a", "b"):
        router.add_instance(name)
    assert router.prefill_rate("a") is None
    decision, ticket = router.route(lm.Request(prompt_tokens=4000), now=1.0)
    ticket.sent(1.0)
    ticket.first_token(1.5)
    rates = dict(zip(router.instances(), router.indicators(2.0)["prefill_tokens_per_second"], strict=True))
    assert router.prefill_rate(decision.instance) == rates[decision.instance] > 0
    assert router.prefill_rate("b" if decision.instance == "a" else "a") is None
    with pytest.raises(lm.UnknownNameError):
        router.prefill_rate("c")
    ticket.failed("cancelled")
