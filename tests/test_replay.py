"""Replay: arrivals keep the trace's time, failures have names, figures match those by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lmetric_lab.replay import Client, Player, Record, ReplayError, Slo, summarize
from lmetric_lab.sim.prompts import PromptWriter
from lmetric_lab.sim.traces import Trace, load_trace

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def trace_of(tmp_path: Path, *, n: int, gap_ms: float, output: int = 3) -> Trace:
    rows = [
        {"timestamp": 1 + i * gap_ms, "input_length": 20, "output_length": output, "hash_ids": [i]}
        for i in range(n)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_trace(path)


@asynccontextmanager
async def served(handler: Handler, models: tuple[str, ...] = ("m",)) -> AsyncIterator[str]:
    async def completions(request: web.Request) -> web.StreamResponse:
        return await handler(request, await request.json())

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in models]})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", completions)
    app.router.add_get("/v1/models", list_models)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def stream(request: web.Request, *pieces: str | float) -> web.StreamResponse:
    """Send each text as it is, and sleep for each number."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        if isinstance(piece, str):
            await response.write(piece.encode())
        else:
            await asyncio.sleep(piece)
    return response


def token(text: str = " a", finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': finish}]})}\n\n"


def usage(prompt: int, output: int, cached: int | None) -> str:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n"


DONE = "data: [DONE]\n\n"


async def one(url: str, **options: Any) -> Record:
    record = Record(0, 0.0)
    async with Client(url, model="m", **options) as client:
        await client.send(client.body("x", 3), record, asyncio.get_running_loop().time())
    return record


async def test_times_tokens_and_usage_of_a_stream() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(body)
        # A comment, an event cut in two, and a line end of two characters: all legal.
        first, second = token()[:20], token()[20:]
        last = token(" z", "length").replace("\n", "\r\n")
        return await stream(
            request, ": hi\n\n", 0.1, first, 0.05, second, 0.1, token(), last, usage(40, 3, 16), DONE
        )

    async with served(handler) as url:
        record = await one(url)
    assert record.completed
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (40, 16, 3)
    assert record.sent is not None
    assert record.first_token is not None
    assert record.last_token is not None
    assert 0.15 <= record.first_token - record.sent < 0.5
    assert 0.1 <= record.last_token - record.first_token < 0.4
    assert seen[0]["max_tokens"] == 3
    assert seen[0]["stream_options"] == {"include_usage": True}
    assert seen[0]["ignore_eos"] is True
    assert seen[0]["prompt"] == "x"


async def test_chat_reads_deltas_and_the_first_chunk_without_text_is_no_token() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert body["messages"] == [{"role": "user", "content": "x"}]
        assert "ignore_eos" not in body
        assert request.headers["authorization"] == "Bearer k"
        deltas = [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "a"}, None),
            ({"content": "b"}, "stop"),
        ]
        events = [{"choices": [{"delta": delta, "finish_reason": finish}]} for delta, finish in deltas]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return await stream(request, lines[0], 0.1, *lines[1:], DONE)

    async with served(handler) as url:
        record = await one(url + "/v1/", chat=True, api_key="k", ignore_eos=False)
    assert record.completed
    assert record.output_tokens == 2  # no usage: chunks with text are counted
    assert record.cached_tokens is None
    assert record.first_token is not None
    assert record.first_token - (record.sent or 0) >= 0.1


async def test_reasoning_and_tool_calls_are_tokens() -> None:
    deltas: list[dict[str, Any]] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        choices = [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        choices += [{"delta": delta, "finish_reason": None} for delta in deltas]
        choices += [{"delta": {}, "finish_reason": "length"}]
        first, *lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
        return await stream(request, first, 0.1, lines[0], 0.1, *lines[1:], usage(40, 2, None), DONE)

    async with served(handler) as url:
        for name, value in (
            ("reasoning", "hm"),
            ("reasoning_content", "hm"),
            ("tool_calls", [{"index": 0, "function": {"arguments": "{"}}]),
        ):
            deltas[:] = [{name: value}, {name: value}]
            record = await one(url, chat=True)
            assert record.completed, record
            assert record.output_tokens == 2
            assert record.sent is not None
            assert record.first_token is not None
            assert record.last_token is not None
            assert record.first_token - record.sent >= 0.1
            assert record.last_token - record.first_token >= 0.09


CUT = [
    ("stream_error", "full", ['data: {"error": {"message": "full", "code": 503}}\n\n', DONE]),
    ("truncated", "without a finish reason", [token(), DONE]),
    ("aborted", "finish reason abort", [token(), token("", "abort"), DONE]),
    ("malformed", "JSONDecodeError", [token(), "data: {oops\n\n"]),
    ("malformed", "KeyError", ["data: {}\n\n"]),
    ("empty", "no text", [token("", "length"), DONE]),
    ("timeout", "", [token(), 2.0, token("", "length"), DONE]),
]


COUNTS = '{"prompt_tokens": %s, "completion_tokens": %s, "prompt_tokens_details": {"cached_tokens": %s}}'
CUT += [
    (
        "malformed",
        "is no count of tokens",
        [token("a", "length"), f'data: {{"choices": [], "usage": {COUNTS % counts}}}\n\n', DONE],
    )
    for counts in ((5, '"3"', 0), (5, -1, 0), (2**70, 3, 0), (5, 3, "2.5"), (5, "true", 0))
]


@pytest.mark.parametrize(("kind", "detail", "pieces"), CUT)
async def test_answers_that_are_not_whole(kind: str, detail: str, pieces: list[str | float]) -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, *pieces)

    async with served(handler) as url:
        record = await one(url, timeout_seconds=0.3)
    assert not record.completed
    assert record.error == kind
    assert detail in record.detail
    assert summarize([record], 1.0, slo=Slo()).failed == 1


async def test_a_count_that_is_null_is_not_reported() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        counts = COUNTS % ("null", "null", "null")
        return await stream(
            request, token(), token("a", "length"), f'data: {{"choices": [], "usage": {counts}}}\n\n', DONE
        )

    async with served(handler) as url:
        record = await one(url)
    assert record.completed, record
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (None, None, 2)
    assert summarize([record], 1.0, slo=Slo()).output_tokens == 2


async def test_a_host_name_that_cannot_be_encoded_is_an_error() -> None:
    """It counted as interrupted, with a traceback for each request."""
    record = await one("http://a..b")
    assert (record.error, record.completed) == ("connect", False)
    assert "label" in record.detail
    with pytest.raises(ReplayError, match=r"cannot reach http://a\.\.b: cannot look up the host"):
        async with Client("http://a..b"):
            pass


async def test_refusals_and_broken_connections() -> None:
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "try later", "type": "overloaded"}}, status=503)

    async def plain(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="<html>bad gateway</html>", status=502)

    async def reset(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, token(), 0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    for handler, kind, detail in (
        (refuse, "http_503", "try later"),
        (plain, "http_502", "bad gateway"),
        (reset, "reset", ""),
        (cut, "truncated", ""),
    ):
        async with served(handler) as url:
            record = await one(url)
        assert (record.error, record.completed) == (kind, False)
        assert detail in record.detail
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        record = await one(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert record.error == "connect"


async def test_the_model_is_asked_for_or_must_be_named() -> None:
    async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        raise AssertionError

    async with served(never, models=("only",)) as url, Client(url) as client:
        assert client.model == "only"
    async with served(never, models=("a", "b")) as url:
        with pytest.raises(ReplayError, match="serves a, b; choose one with --model"):
            await Client(url).__aenter__()
    with pytest.raises(ReplayError, match="cannot reach"):
        await Client("http://127.0.0.1:1").__aenter__()
    with pytest.raises(ReplayError, match="must be an http:// or https:// address"):
        Client("127.0.0.1:8000")


async def test_arrivals_do_not_wait_for_answers(tmp_path: Path) -> None:
    arrived: list[float] = []

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.append(asyncio.get_running_loop().time())
        return await stream(request, 0.5, token(), token(" b", "length"), usage(20, 2, 0), DONE)

    trace = trace_of(tmp_path, n=10, gap_ms=20)
    async with served(slow) as url, Client(url, model="m") as client:
        player = Player(trace.faster(0.5), client, PromptWriter([" a", " b"]).prompt)
        await player.run()
    # 9 gaps of 20 ms at half speed, all sent before the first answer's 0.5 s are over
    assert 0.3 < arrived[-1] - arrived[0] < 0.48
    assert all(record.completed for record in player.records)
    assert [record.due for record in player.records] == pytest.approx([i * 0.04 for i in range(10)])
    assert all(record.sent is not None and record.sent >= record.due - 0.002 for record in player.records)
    assert 0.8 < player.seconds < 2


async def test_a_turn_waits_for_the_answer_before_it_and_its_think_time(tmp_path: Path) -> None:
    fails = False

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if fails:
            await asyncio.sleep(0.2)
            return web.json_response({"error": {"message": "no"}}, status=503)
        return await stream(request, 0.2, token(), token(" b", "length"), usage(20, 2, 0), DONE)

    trace = dataclasses.replace(
        trace_of(tmp_path, n=4, gap_ms=10),
        previous=np.array([-1, 0, -1, 1]),
        think_seconds=np.array([9.0, 0.1, 9.0, 0.0]),
    )
    async with served(slow) as url, Client(url, model="m") as client:
        for fails in (False, True):
            player = Player(trace, client, PromptWriter([" a", " b"]).prompt)
            await asyncio.wait_for(player.run(), 5)
            assert [record.index for record in player.records] == [0, 2, 1, 3]
            assert all(record.completed is not fails for record in player.records)
            first, other, second, third = (record.sent or 0.0 for record in player.records)
            assert (first, other) == pytest.approx((0, 0.02), abs=0.05)
            assert 0.3 <= second < 0.45  # the answer's 0.2 s and 0.1 s of thought
            assert 0.2 <= third - second < 0.35
            lags = [(record.sent or 0.0) - record.due for record in player.records]
            assert max(lags) < 0.05  # waiting for an answer is no lag of the generator
        # Stopping ends waiting requests together with requests in flight.
        player = Player(trace, client, PromptWriter([" a", " b"]).prompt)
        running = asyncio.create_task(player.run())
        await asyncio.sleep(0.1)
        player.stop()
        await asyncio.wait_for(running, 1)
        assert [record.index for record in player.records] == [0, 2]


async def test_stop_keeps_what_there_is(tmp_path: Path) -> None:
    left = 0

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal left
        if body["prompt"].startswith(fast):
            return await stream(request, token(), token(" b", "length"), usage(20, 2, 0), DONE)
        try:
            return await stream(request, token(), 30.0)
        finally:
            left += 1

    trace = trace_of(tmp_path, n=500, gap_ms=50)
    prompts = PromptWriter([" a", " b"])
    fast = prompts.prompt(trace, 0)
    async with served(handler) as url, Client(url, model="m") as client:
        player = Player(trace, client, prompts.prompt)
        running = asyncio.create_task(player.run())
        await asyncio.sleep(0.4)
        player.stop()
        await asyncio.wait_for(running, 1)
        assert player.interrupted
        assert player.in_flight == 0
    report = summarize(player.records, player.seconds, slo=Slo(), interrupted=True)
    assert report.completed == 1
    assert report.failed == 0
    assert report.unfinished == report.requests - 1
    assert 3 <= report.requests <= 12
    assert left == report.unfinished  # the server saw every one of them leave


def record(sent: float, first: float, last: float, tokens: int, **more: Any) -> Record:
    due, prompt, cached = more.get("due", sent), more.get("prompt", 100), more.get("cached")
    return Record(0, due, sent, first, last, prompt, cached, tokens, ended=True)


def test_report_by_hand() -> None:
    records = [
        record(0.0, 0.5, 1.5, 11, cached=50),  # ttft 0.5, tpot 0.1, e2e 1.5
        record(1.0, 2.0, 2.6, 4, cached=0, prompt=300),  # ttft 1.0, tpot 0.2, e2e 1.6
        # TTFT 0.1 s, no TPOT, end to end 0.1 s, 100 ms late; cached tokens are not reported.
        record(2.0, 2.1, 2.1, 1, due=1.9),
        Record(3, 2.0, sent=2.0, error="http_503", detail="first"),
        Record(4, 2.0, sent=2.0, error="http_503", detail="second"),
        Record(5, 2.5, sent=2.5),
    ]
    report = summarize(records, 4.0, slo=Slo(0.5, 0.1), interrupted=True)
    assert (report.requests, report.completed, report.failed, report.unfinished) == (6, 3, 2, 1)
    assert report.ttft_seconds is not None
    assert report.ttft_seconds.mean == pytest.approx(1.6 / 3)
    assert report.ttft_seconds.p50 == pytest.approx(0.5)
    assert report.ttft_seconds.p90 == pytest.approx(0.9)
    assert report.tpot_seconds is not None
    assert report.tpot_seconds.mean == pytest.approx(0.15)
    assert report.e2e_seconds is not None
    assert report.e2e_seconds.max == pytest.approx(1.6)
    assert report.hit_rate == pytest.approx(50 / 400)
    assert report.output_tokens == 16
    assert report.goodput.requests_per_second == pytest.approx(2 / 4)
    assert report.goodput.tokens_per_second == pytest.approx(12 / 4)
    assert report.goodput.share == pytest.approx(2 / 6)
    assert {kind: (error.count, error.example) for kind, error in report.errors.items()} == {
        "http_503": (2, "first")
    }
    assert report.late_requests == 1
    assert report.lag_seconds is not None
    assert report.lag_seconds.max == pytest.approx(0.1)


def test_report_on_the_engines_clock() -> None:
    report = summarize([record(0.0, 0.5, 1.5, 11)], 2.0, slo=Slo(5.0, 0.9), clock_speed=10)
    assert report.ttft_seconds is not None
    assert report.tpot_seconds is not None
    assert report.ttft_seconds.mean == pytest.approx(5.0)
    assert report.tpot_seconds.mean == pytest.approx(1.0)
    assert report.duration_seconds == pytest.approx(20)
    assert report.requests_per_second == pytest.approx(0.05)
    assert report.goodput.requests_per_second == 0
    assert report.lag_seconds is not None
    assert report.lag_seconds.max == 0


def test_report_of_nothing() -> None:
    report = summarize([], 0.0, slo=Slo())
    assert (report.requests, report.ttft_seconds, report.hit_rate, report.lag_seconds) == (
        0,
        None,
        None,
        None,
    )
