"""Requests of `/v1/messages` and `/v1/responses` whose engine dies, with one and two workers.

Another engine answers if no event has come, or if the answer is not streamed. Later, the stream
ends with an error event that names the reason.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from server_world import STREAM_HEAD, Behaviour, FakeEngine, Request, chunk, plain, reset, says, world
from test_workers import serving

PATHS: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "/v1/messages": (
        {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"b"}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        "AnthropicStreamEvent",
    ),
    "/v1/responses": (
        {"model": "tiny", "input": "a", "store": False},
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n'
        b'event: response.in_progress\ndata: {"type":"response.in_progress","response":{"id":"r"}}\n\n'
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"b"}\n\n'
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n',
        "StreamingResponsesResponse",
    ),
}
# The number of events before the engine has computed anything.
OPENING = {"/v1/messages": 0, "/v1/responses": 2}
WHOLE = {"id": "whole", "usage": {"input_tokens": 1, "output_tokens": 1}}
# The ways in which an engine dies before the first event, and before a whole answer.
DEATHS: dict[str, Behaviour] = {
    "at once": reset,
    "after the head": says(STREAM_HEAD, then="reset"),
    "after a comment": says(STREAM_HEAD + chunk(b": ping\n\n"), then="reset"),
    "after the events that open a response": says(
        STREAM_HEAD + chunk(PATHS["/v1/responses"][1].partition(b"event: response.output")[0]),
        then="reset",
    ),
    "in an event": says(STREAM_HEAD + chunk(b"event: message_start\ndata: {"), then="reset"),
    "in the body": says(plain(200, b'{"id": "whole"}').removesuffix(b"}"), then="reset"),
}


async def lives(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Answers the whole request."""
    if request.json.get("stream"):
        writer.write(STREAM_HEAD + chunk(PATHS[request.path][1]) + b"0\r\n\r\n")
    else:
        writer.write(plain(200, orjson.dumps(WHOLE)))
    return True


def is_whole(path: str, stream: bool, got: Any) -> None:
    if stream:
        events = b"\n\n".join(each for each in got.split(b"\n\n") if not each.startswith(b":"))
        assert events == PATHS[path][1]
    else:
        assert got == WHOLE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("death", DEATHS)
async def test_another_engine_answers_before_the_first_event(path: str, death: str) -> None:
    for stream in (False, True):
        async with world([FakeEngine(behave=DEATHS[death]), FakeEngine(behave=lives)]) as w:
            status, headers, got = await w.post(PATHS[path][0] | {"stream": stream}, path)
            assert (status, headers["x-lmetric-instance"]) == (200, "e1")
            is_whole(path, stream, got)
            assert [len(engine.requests) for engine in w.engines] == [1, 1]
            assert not w.server.fleet.models[0].failovers


async def test_two_workers_use_the_other_engine() -> None:
    async with serving("--policy", "round_robin", engines=2, behave=lives) as (_, client, engines):
        for path in PATHS:
            for each in engines:
                each.requests.clear()
            engines[0].behave = DEATHS["after the head"]
            for stream in [False, True] * 4:
                url, headers = client.url + path, client.headers
                body = PATHS[path][0] | {"stream": stream}
                async with client.session.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    assert answer.headers["x-lmetric-instance"].endswith(str(engines[1].port))
                    is_whole(path, stream, await (answer.read() if stream else answer.json()))
            assert engines[0].requests, "no request met the engine that dies"
            assert len(engines[1].requests) == 8


@pytest.mark.parametrize("path", PATHS)
async def test_after_an_event_the_error_names_what_vllm_lacks(path: str) -> None:
    body, events, lacks = PATHS[path]
    first = b"".join(each + b"\n\n" for each in events.split(b"\n\n")[: OPENING[path] + 1])
    dies = says(STREAM_HEAD + chunk(first), then="reset")
    async with world([FakeEngine(behave=dies), FakeEngine(behave=lives)]) as w:
        _, _, got = await w.post(body | {"stream": True}, path)
        assert got.startswith(first)
        error = orjson.loads(got.removeprefix(first).partition(b"data: ")[2])
        message = error["error"]["message"] if path == "/v1/messages" else error["message"]
        assert f"vLLM reports no token ids in streams of {path} ({lacks} has none)" in message
        assert w.server.fleet.models[0].not_resumable == {"path": 1}
