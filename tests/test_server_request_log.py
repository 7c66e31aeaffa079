"""Trace ids: spans of stored responses, and log lines that a request writes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from lmetric.config import Log
from lmetric.server.api.paths import RELAYED, route
from lmetric.server.execution import request_log
from lmetric.server.execution.execution import Execution
from lmetric.server.observe.logs import configure_logging, flush_logs
from otlp_world import receiver
from server_world import FakeEngine, reset, world
from test_server_passthrough import RESPONSES, Responses, ask, created
from waiting import until

TRACES = [f"{number:032x}" for number in range(1, 9)]
STREAM = {"model": "tiny", "prompt": "abc", "stream": True, "max_tokens": 3}
SERVER, CLIENT = 2, 3


def parent(trace: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-b7ad6b7169203331-0{int(sampled)}", "x-request-id": f"id-{trace[-1]}"}


@contextlib.contextmanager
def log_lines(level: Any = "info") -> Iterator[list[dict[str, Any]]]:
    """The router's log as JSON, read at the end."""
    stream = io.StringIO()
    configure_logging(Log(json=True, level=level), stream)
    lines: list[dict[str, Any]] = []
    try:
        yield lines
    finally:
        flush_logs()
        lines += map(orjson.loads, stream.getvalue().splitlines())
        logging.getLogger("aiohttp.server").setLevel(logging.NOTSET)


def test_routes_have_few_values() -> None:
    assert route(f"{RESPONSES}/resp_1") == f"{RESPONSES}/{{response_id}}"
    assert route(f"{RESPONSES}/resp%2F1/cancel") == f"{RESPONSES}/{{response_id}}/cancel"
    assert [route(path) for path in RELAYED] == list(RELAYED)


async def test_spans_of_stored_responses() -> None:
    async with receiver() as spans, world([Responses()], tracing={"endpoint": spans.url}) as w:
        one = await created(w)
        await until(lambda: len(spans.spans) == 4)
        assert {span.name for span in spans.spans if span.kind == SERVER} == {f"POST {RESPONSES}"}
        for method, action, name in (
            ("GET", "", "GET /v1/responses/{response_id}"),
            ("DELETE", "", "DELETE /v1/responses/{response_id}"),
            ("POST", "/cancel", "POST /v1/responses/{response_id}/cancel"),
        ):
            spans.spans.clear()
            path = f"{RESPONSES}/{one['id']}{action}"
            status, _, _ = await ask(w, method, path, parent(TRACES[0]))
            await until(lambda: len(spans.spans) == 2)
            (server,) = [span for span in spans.spans if span.kind == SERVER]
            (client,) = [span for span in spans.spans if span.kind == CLIENT]
            assert server.name == client.name == name
            assert (server.trace, client.trace) == (TRACES[0], TRACES[0])
            assert client.parent == server.id
            # The engine's spans become children of the attempt.
            engine = w.engines[0].requests[-1].headers["traceparent"]
            assert engine == f"00-{TRACES[0]}-{client.id}-01"
            template = name.partition(" ")[2]
            expected = {"http.request.method": method, "http.response.status_code": status}
            assert (
                expected | {"http.route": template, "url.path": path}
            ).items() <= server.attributes.items()
            assert (expected | {"url.template": template}).items() <= client.attributes.items()
            for span in spans.spans:
                assert not [key for key in span.attributes if key.startswith("gen_ai.oper")]
                assert one["id"] not in span.name


async def test_spans_of_stored_responses_that_fail() -> None:
    """Unknown ones, and one whose engine is gone, each of another id: the names stay the same."""
    async with receiver() as spans, world([Responses()], tracing={"endpoint": spans.url}) as w:
        one = await created(w)
        for number in range(3):
            assert (await ask(w, "GET", f"{RESPONSES}/unknown-{number}"))[0] == 404
        await w.engines[0].stop()
        assert (await ask(w, "GET", f"{RESPONSES}/{one['id']}"))[0] == 502
        await until(lambda: len(spans.spans) == 4 + 3 + 2)
        servers = [span for span in spans.spans[4:] if span.kind == SERVER]
        assert {span.name for span in servers} == {"GET /v1/responses/{response_id}"}
        assert [span.attributes.get("error.type") for span in servers] == [None, None, None, "502"]
        (client,) = [span for span in spans.spans[4:] if span.kind == CLIENT]
        assert client.attributes["error.type"] == "refused"


async def test_engines_learn_that_a_request_for_a_stored_response_is_not_sampled() -> None:
    settings = {"sample_ratio": 0}
    async with receiver() as spans, world([Responses()], tracing={"endpoint": spans.url} | settings) as w:
        one = await created(w)
        path = f"{RESPONSES}/{one['id']}"
        assert (await ask(w, "GET", path))[0] == 200
        given = w.engines[0].requests[-1].headers["traceparent"]
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", given)
        assert (await ask(w, "GET", path, parent(TRACES[0], sampled=False)))[0] == 200
        assert w.engines[0].requests[-1].headers["traceparent"] == parent(TRACES[0], False)["traceparent"]
        await asyncio.sleep(0.6)
        assert spans.spans == []


async def test_a_request_that_the_router_cannot_read_has_a_span_of_that_name() -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url}) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        (span,) = (await spans.trace(1)).values()
        assert (span.name, span.attributes["http.request.method"]) == ("HTTP", "_OTHER")
        assert "http.route" not in span.attributes


# Log lines.


@pytest.mark.parametrize("sampled", [True, False])
async def test_each_line_of_a_request_has_its_trace_id(
    monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    """An internal error, which a request meets in a callback of the engine's connection."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("a defect")

    async with receiver() as spans, world(1, tracing={"endpoint": spans.url}) as w:
        assert (await w.post(STREAM))[0] == 200  # its connection serves the next requests, too
        with log_lines() as lines:
            monkeypatch.setattr(Execution, "attempt", broken)
            answers = await asyncio.gather(
                *(w.post(STREAM, headers=parent(TRACES[number], sampled)) for number in range(4))
            )
            assert {status for status, _, _ in answers} == {500}
            monkeypatch.undo()
    failed = [line for line in lines if line["event"] == "a request failed with an internal error"]
    assert {line["trace_id"]: line["request_id"] for line in failed} == {
        trace: f"id-{trace[-1]}" for trace in TRACES[:4]
    }


async def test_the_line_of_an_engine_that_fails_names_the_request() -> None:
    """The router finds by a request that an engine is down. Lines outside requests have no id."""
    async with (
        receiver() as spans,
        world(2, tracing={"endpoint": spans.url}, health={"interval": 3600}) as w,
    ):
        await w.engines[0].stop()
        with log_lines() as lines:
            for number in range(3):
                assert (await w.post(STREAM, headers=parent(TRACES[number])))[0] == 200
            await w.server.stop()
    (down,) = [line for line in lines if line["event"] == "engine down"]
    assert down["trace_id"] in TRACES[:3]
    assert down["left"] == "1 of 2 usable"
    (stopped,) = [line for line in lines if line["event"] == "stopped"]
    assert "trace_id" not in stopped


async def test_refused_requests_have_their_trace_id_in_the_access_log() -> None:
    settings: dict[str, Any] = {"log": {"access": True}}
    async with receiver() as spans, world([Responses()], tracing={"endpoint": spans.url}, **settings) as w:
        with log_lines() as lines:
            assert (await w.post({"model": "unknown", "prompt": "x"}, headers=parent(TRACES[1])))[0] == 404
            assert (await ask(w, "GET", f"{RESPONSES}/unknown", parent(TRACES[2])))[0] == 404
    assert [line["trace_id"] for line in lines if line["event"] == "request"] == TRACES[1:3]


async def test_without_traces_no_line_has_an_id_and_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("called without traces")

    monkeypatch.setattr(request_log, "in_request", unexpected)
    async with world([FakeEngine(behave=reset), FakeEngine()], log={"access": True}) as w:
        with log_lines("debug") as lines:
            assert (await w.post(STREAM, headers=parent(TRACES[0])))[0] == 200
        assert type(w.server.front).__name__ == "Frontend"
    assert [line["event"] for line in lines if line["event"] == "request"] == ["request"]
    assert not [line for line in lines if "trace_id" in line]


def test_ids_end_with_the_request_and_belong_to_its_thread() -> None:
    """Another thread, and the code after the call, log without ids; nested calls restore."""

    class Head:
        request_id = "a"

    class Request:
        trace = type("Trace", (), {"hex_id": TRACES[0]})
        head = Head

    seen = []

    def look() -> None:
        seen.append(request_log.add_request_ids(None, "", {"event": "x"}))

    def inside() -> None:
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        with contextlib.suppress(ZeroDivisionError):
            request_log.in_request(Request, lambda: 1 // 0)  # type: ignore[arg-type]
        look()

    request_log.in_request(Request, inside)  # type: ignore[arg-type]
    look()
    ids = {"event": "x", "trace_id": TRACES[0], "request_id": "a"}
    assert seen == [ids, {"event": "x"}, ids, {"event": "x"}]
