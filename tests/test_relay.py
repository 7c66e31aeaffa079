"""`lmetric.Relay` between a router and emulated engines, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import lmetric as lm
from lmetric import relay
from lmetric.relay import COMPLETION_PATHS
from lmetric.server.api.paths import GENERATING, RELAYED
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer
from waiting import until

PROMPT = list(range(1, 101))
PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def engines(count: int = 2, **options: Any) -> AsyncIterator[dict[str, str]]:
    given = {"port": 0, "model": "tiny", "clock_speed": 50.0} | options
    async with contextlib.AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(EngineServer(EngineOptions.model_validate(given)))
            for _ in range(count)
        ]
        yield {f"gpu-{number}": engine.url for number, engine in enumerate(made)}


@contextlib.asynccontextmanager
async def fake(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], path: str = PATH
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def a_router(urls: dict[str, str], policy: str = "round_robin") -> lm.Router:
    router = lm.Router(policy)
    for name in urls:
        router.add_instance(name)
    return router


async def test_a_redirect_is_the_answer_and_is_not_followed() -> None:
    """Prompt and headers of the engine went to the other server."""
    followed: list[str] = []

    async def other(request: web.Request) -> web.StreamResponse:
        followed.append(await request.text())
        return web.json_response({})

    async with fake(other) as elsewhere:

        async def redirect(request: web.Request) -> web.StreamResponse:
            return web.Response(status=307, headers={"location": f"{elsewhere}{PATH}"})

        async with fake(redirect) as url, aiohttp.ClientSession() as http:
            router = a_router({"gpu-0": url})
            engine = {"gpu-0": lm.EngineTarget(url, headers={"x-api-key": "secret"})}
            async with lm.Relay(router, lm.Request(PROMPT), http, engine, body(), path=PATH) as answer:
                await answer.read()
            assert answer.status == 307
    assert followed == []
    assert router.in_flight() == 0


async def test_an_answer_that_is_held_whole_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CLIENT_ANSWER_BYTES", 1 << 20)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                await response.write(b" " * (1 << 16))
        return response

    async with fake(endless) as url, aiohttp.ClientSession() as http:
        router = a_router({"gpu-0": url})
        async with lm.Relay(router, lm.Request(PROMPT), http, {"gpu-0": url}, body(), path=PATH) as answer:
            with pytest.raises(lm.RelayError, match="more than 1 MiB"):
                await answer.read()
    assert router.in_flight() == 0


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, **more}


def totals(router: lm.Router) -> dict[str, Any]:
    assert router.in_flight() == 0
    stats = router.stats()
    return {"finished": stats["finished"], "retries": stats["retries"]} | {
        name: count for name, count in stats["failed"].items() if count
    }


REQUEST = lm.Request(PROMPT, max_tokens=8, request_id="r-1")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_relayed_and_the_router_knows_its_tokens(stream: bool) -> None:
    async with engines(1) as urls, aiohttp.ClientSession() as http:
        router = a_router(urls)
        asked = body(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        async with lm.Relay(router, REQUEST, http, urls, asked, path=PATH) as answer:
            assert router.in_flight() == 1
            assert (answer.instance, answer.status) == ("gpu-0", 200)
            text = await answer.read()
        async with http.post(urls["gpu-0"] + PATH, json=asked) as alone:
            plain = await alone.read()
        assert answer.content_type == ("text/event-stream" if stream else "application/json")
        if stream:
            assert text.count(b"\n\n") == plain.count(b"\n\n")
            assert text.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(text)["choices"] == json.loads(plain)["choices"]
        record = router.explain(answer.decision.id)
        assert record is not None
        assert (record["outcome"], record["output_tokens"], record["request_id"]) == ("finished", 8, "r-1")
        assert (record["ttft_seconds"] is not None) is stream
        assert totals(router) == {"finished": 1, "retries": 0}


async def test_tokens_are_counted_while_the_answer_runs() -> None:
    async with engines(1, clock_speed=2.0) as urls, aiohttp.ClientSession() as http:
        router = a_router(urls)
        asked = body(stream=True, max_tokens=30)
        seen = []
        async with lm.Relay(router, REQUEST, http, urls, asked, path=PATH) as answer:
            async for _piece in answer:
                seen.append(router.stats()["instances"]["gpu-0"]["decode_tokens"])
        assert seen[0] is not None
        assert seen[-2] > seen[0]


async def test_an_engine_that_refuses_is_followed_by_the_next() -> None:
    async with engines(1) as urls, aiohttp.ClientSession() as http:
        urls = {"gpu-9": "http://127.0.0.1:9", **urls}
        router = a_router(urls)
        async with lm.Relay(router, REQUEST, http, urls, body(stream=True), path=PATH) as answer:
            assert (answer.decision.instance, answer.instance) == ("gpu-9", "gpu-0")
            assert b"[DONE]" in await answer.read()
        assert totals(router) == {"finished": 1, "retries": 1}


async def test_if_nobody_answers_the_error_says_why() -> None:
    urls = {"gpu-0": "http://127.0.0.1:9", "gpu-1": "http://127.0.0.1:9"}
    router = a_router(urls)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(lm.RelayError, match=r"instance 'gpu-1': refused: ") as caught:
            async with lm.Relay(router, REQUEST, http, urls, body(), path=PATH):
                raise AssertionError("not entered")
    assert (caught.value.failure, caught.value.instance, caught.value.begun) == ("refused", "gpu-1", False)
    assert totals(router) == {"finished": 0, "retries": 1, "refused": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_request_is_the_clients_and_is_not_tried_again(stream: bool) -> None:
    async with engines(2) as urls, aiohttp.ClientSession() as http:
        router = a_router(urls)
        asked = body(max_tokens=-1, stream=stream)
        async with lm.Relay(router, REQUEST, http, urls, asked, path=PATH) as answer:
            assert answer.status == 400
            assert b"max_tokens" in await answer.read()
        assert totals(router) == {"finished": 0, "retries": 0, "engine_error": 1}


async def test_a_status_of_the_engines_own_trouble_is_tried_again() -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "busy"}}, status=503)

    async with fake(busy) as url, engines(1) as urls, aiohttp.ClientSession() as http:
        urls = {"busy": url, **urls}
        router = a_router(urls)
        async with lm.Relay(router, REQUEST, http, urls, body(), path=PATH) as answer:
            assert answer.instance == "gpu-0"
            await answer.read()
        assert totals(router) == {"finished": 1, "retries": 1}


def begins(first: bytes, content_type: str = "text/event-stream") -> Callable[[web.Request], Any]:
    """An engine that answers 200 with these bytes, and ends."""

    async def answers(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": content_type})
        await response.prepare(asked)
        await response.write(first)
        return response

    return answers


def error_event(code: object) -> bytes:
    return b"data: " + json.dumps({"error": {"message": "no", "code": code}}).encode() + b"\n\n"


@pytest.mark.parametrize("retry", [{}, {"retry_statuses": [507]}], ids=["default", "own"])
async def test_a_stream_that_fails_before_a_token_is_tried_elsewhere(retry: dict[str, Any]) -> None:
    """An engine reports its trouble of a stream as an event, after a head with status 200."""
    code = 507 if retry else 503
    for first in (error_event(code), error_event(code) + b"data: [DONE]\n\n", b": ping\n\n", b""):
        async with fake(begins(first)) as url, engines(1) as urls, aiohttp.ClientSession() as http:
            urls = {"bad": url, **urls}
            router = a_router(urls)
            async with lm.Relay(router, REQUEST, http, urls, body(stream=True), path=PATH, **retry) as answer:
                assert (answer.decision.instance, answer.instance) == ("bad", "gpu-0")
                text = await answer.read()
            assert b"error" not in text
            assert text.endswith(b"data: [DONE]\n\n")
            assert totals(router) == {"finished": 1, "retries": 1}


@pytest.mark.parametrize(
    ("first", "content_type"),
    [
        (error_event(400), "text/event-stream"),
        (error_event(None), "text/event-stream"),
        (b'{"error": {"message": "no", "code": 503}}', "application/json"),
    ],
    ids=["client", "no_code", "whole"],
)
async def test_other_errors_in_an_answer_are_not_tried_elsewhere(first: bytes, content_type: str) -> None:
    """The client may be their cause, or the engine has already done the work."""
    async with (
        fake(begins(first, content_type)) as url,
        engines(1) as urls,
        aiohttp.ClientSession() as http,
    ):
        urls = {"bad": url, **urls}
        router = a_router(urls)
        with pytest.raises(lm.RelayError) as caught:
            async with lm.Relay(router, REQUEST, http, urls, body(stream=True), path=PATH):
                raise AssertionError("not entered")
        assert (caught.value.failure, caught.value.begun) == ("engine_error", False)
        assert totals(router) == {"finished": 0, "retries": 0, "engine_error": 1}


@pytest.mark.parametrize("how", ["leave", "raise", "cancel"])
async def test_leaving_early_stops_the_engine_and_closes_the_ticket(how: str) -> None:
    async with engines(1, clock_speed=1.0) as urls, aiohttp.ClientSession() as http:
        router = a_router(urls)
        begun = asyncio.Event()

        async def one() -> None:
            asked = body(stream=True, max_tokens=2000)
            async with lm.Relay(router, REQUEST, http, urls, asked, path=PATH) as answer:
                async for _piece in answer:
                    begun.set()
                    if how == "raise":
                        raise ValueError("a client went away")
                    if how == "leave":
                        break
                    await asyncio.sleep(0)

        async def running() -> float:
            async with http.get(urls["gpu-0"] + "/metrics") as page:
                lines = (await page.text()).splitlines()
            return sum(
                float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")
            )

        task = asyncio.create_task(one())
        await begun.wait()
        if how == "cancel":
            task.cancel()
        with contextlib.suppress(ValueError, asyncio.CancelledError):
            await task
        assert totals(router) == {"finished": 0, "retries": 0, "cancelled": 1}
        for _ in range(500):
            if await running() == 0:
                break
            await asyncio.sleep(0.01)
        assert await running() == 0


async def test_cancelled_while_it_waits_for_the_engine() -> None:
    waits = asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        waits.set()
        await asyncio.sleep(60)
        raise AssertionError("cancelled before")

    async with fake(silent) as url, aiohttp.ClientSession() as http:
        router = a_router({"gpu-0": url})

        async def one() -> None:
            async with lm.Relay(router, REQUEST, http, {"gpu-0": url}, body(), path=PATH):
                raise AssertionError("not entered")

        task = asyncio.create_task(one())
        await waits.wait()
        assert router.in_flight() == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert totals(router) == {"finished": 0, "retries": 0, "cancelled": 1}


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("end", "failure"), [("reset", "reset"), ("unfinished", "engine_error"), ("error", "engine_error")]
)
async def test_an_answer_that_breaks_off_is_an_error(end: str, failure: str) -> None:
    async def breaks(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        await response.write(event("a"))
        await asyncio.sleep(0.05)
        await response.write(event("b"))
        if end == "reset":
            assert asked.transport is not None
            asked.transport.abort()
        if end == "error":
            await response.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
        return response

    got = []

    async def one(router: lm.Router, http: aiohttp.ClientSession, urls: dict[str, str]) -> None:
        async with lm.Relay(router, REQUEST, http, urls, body(stream=True), path=PATH) as answer:
            async for piece in answer:
                got.append(piece)

    async with fake(breaks) as url, aiohttp.ClientSession() as http:
        router = a_router({"gpu-0": url})
        with pytest.raises(lm.RelayError) as caught:
            await one(router, http, {"gpu-0": url})
        assert (caught.value.failure, caught.value.begun) == (failure, True)
        assert b"".join(got).startswith(event("a"))
        assert totals(router) == {"finished": 0, "retries": 0, failure: 1}


def named(kind: str, **more: Any) -> bytes:
    """An event of Anthropic's or OpenAI's newer API."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


# Whole streams of APIs whose events have no choices.
STREAMS = {
    "/v1/messages": [
        named("message_start", message={"role": "assistant", "usage": {"input_tokens": 100}}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1}),
        named("message_stop"),
    ],
    "/v1/responses": [
        named("response.created", response={"id": "r"}),
        named("response.output_text.delta", delta="a"),
        named("response.completed", response={"usage": {"input_tokens": 100, "output_tokens": 1}}),
    ],
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("query", ["", "?beta=true"])
async def test_streams_of_other_apis_end_without_a_finish_reason(path: str, query: str) -> None:
    async def streams(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        for each in STREAMS[path]:
            await response.write(each)
        return response

    async with fake(streams, path) as url, aiohttp.ClientSession() as http:
        router = a_router({"gpu-0": url})
        asked = body(stream=True)
        async with lm.Relay(router, REQUEST, http, {"gpu-0": url}, asked, path=path + query) as answer:
            assert await answer.read() == b"".join(STREAMS[path])
        assert totals(router) == {"finished": 1, "retries": 0}


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("", "/v1/chat/completions?a=b"),
        ("/v1", "/completions"),
        ("/proxy", "/inference/v1/generate"),
        ("", "/v3/chat/completions"),
    ],
)
async def test_streams_with_choices_need_a_finish_reason_at_any_base_url(base: str, path: str) -> None:
    async def breaks(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        await response.write(event("a"))
        return response

    async with fake(breaks, base + path.partition("?")[0]) as url, aiohttp.ClientSession() as http:
        router, urls = a_router({"gpu-0": url}), {"gpu-0": url + base}
        async with contextlib.AsyncExitStack() as stack:
            relay = lm.Relay(router, REQUEST, http, urls, body(stream=True), path=path)
            with pytest.raises(lm.RelayError, match="ends without a finish_reason"):
                await (await stack.enter_async_context(relay)).read()
        assert totals(router) == {"finished": 0, "retries": 0, "engine_error": 1}


def test_relay_and_server_require_a_finish_reason_on_the_same_paths() -> None:
    assert {path for path in RELAYED if path.endswith(COMPLETION_PATHS)} == GENERATING


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_a_data_parallel_rank_is_a_target(api: str) -> None:
    async with engines(1, ranks=2, api=api) as urls, aiohttp.ClientSession() as http:
        (url,) = urls.values()
        targets = {f"gpu-0-dp{rank}": lm.EngineTarget(url, data_parallel_rank=rank) for rank in (0, 1)}
        router = lm.Router("session_affinity")
        for name in targets:
            router.add_instance(name)
        cached: dict[str, list[int]] = {}
        for number in (0, 1, 2, 3, 0, 1, 2, 3):
            request = lm.Request(PROMPT, session=f"session {number}")
            async with lm.Relay(router, request, http, targets, body(), path=PATH) as answer:
                usage = json.loads(await answer.read())["usage"]
            cached.setdefault(answer.instance, []).append(usage["prompt_tokens_details"]["cached_tokens"])
        assert set(cached) == set(targets)
        for hits in cached.values():  # each rank computes the prompt once, then finds it
            assert hits == [0, *[96] * (len(hits) - 1)]


async def test_a_request_that_the_router_splits_is_refused() -> None:
    router = lm.Router("least_requests", split=lm.SplitAt(fraction=0.5))
    urls = {"gpu-0": "http://127.0.0.1:9", "gpu-1": "http://127.0.0.1:9"}
    for name in urls:
        router.add_instance(name)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(lm.BadValueError, match="allow_split=False"):
            async with lm.Relay(router, lm.Request(PROMPT, max_tokens=100), http, urls, body(), path=PATH):
                raise AssertionError("not entered")
    assert router.in_flight() == 0


async def test_an_instance_without_a_url_is_named() -> None:
    router = a_router({"gpu-0": ""})
    async with aiohttp.ClientSession() as http:
        with pytest.raises(lm.BadValueError, match="engines: no URL for instance 'gpu-0'"):
            async with lm.Relay(router, REQUEST, http, {}, body(), path=PATH):
                raise AssertionError("not entered")
    assert router.in_flight() == 0


async def test_many_at_once_leave_nothing_in_flight() -> None:
    async with engines(3) as urls, aiohttp.ClientSession() as http:
        router = a_router(urls, "lmetric")

        async def one(number: int) -> bytes:
            request = lm.Request([number, *PROMPT], max_tokens=8)
            async with lm.Relay(
                router, request, http, urls, body(stream=number % 2 == 0), path=PATH
            ) as answer:
                return await answer.read()

        answers = await asyncio.gather(*(one(number) for number in range(60)))
        assert all(answers)
        await until(lambda: router.in_flight() == 0)
        assert totals(router) == {"finished": 60, "retries": 0}
        assert all(each["decisions"] for each in router.stats()["instances"].values())
