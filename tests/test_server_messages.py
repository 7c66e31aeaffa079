"""Answers of `/v1/messages` and `/v1/responses` as vLLM 0.32 sends them: tokens, errors, aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import structlog
from structlog.testing import capture_logs

from server_world import STREAM_HEAD, Behaviour, FakeEngine, Request, World, chunk, plain, says, world
from test_server_aborts import NOT_ORDERED, ORDERED, Development, engines, model

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
USAGE = {"input_tokens": 4, "output_tokens": 2}
SGLANG = [{"id": "tiny", "parent": None, "owned_by": "sglang"}]


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def delta(**fields: Any) -> bytes:
    return event("content_block_delta", index=0, delta=fields)


def ends(reason: str | None) -> bytes:
    told = {"stop_reason": reason, "stop_sequence": None}
    return event("message_delta", delta=told, usage=USAGE) + event("message_stop")


START = event(
    "message_start",
    message={"id": "m", "type": "message", "role": "assistant", "content": [], "usage": USAGE},
)
TEXT = delta(type="text_delta", text="b")
THINKING = delta(type="thinking_delta", thinking="hm")
ARGUMENTS = delta(type="input_json_delta", partial_json='{"a":')
ANSWER = START + TEXT + ends("end_turn")


def stream(*events: bytes) -> bytes:
    return STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    with capture_logs() as caught:
        yield caught


@pytest.mark.parametrize("first", [TEXT, THINKING, ARGUMENTS])
async def test_each_part_of_a_message_is_a_token(
    logs: list[structlog.typing.EventDict], first: bytes
) -> None:
    """The first one ends the prefill, also of an answer without a text."""
    goes_on = asyncio.Event()

    async def behave(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(START + first))
        await goes_on.wait()
        await asyncio.sleep(0.3)
        writer.write(chunk(first + ends("tool_use")) + b"0\r\n\r\n")
        return True

    async with world([FakeEngine(behave=behave)], log={"access": True}) as w:
        asking = asyncio.create_task(w.post(ASKED | {"stream": True}, MESSAGES))
        await w.until(lambda: decoding(w) == 1)
        goes_on.set()
        await asking
        await w.settled()
        (line,) = (each for each in logs if each["event"] == "request")
        assert line["ttft_seconds"] < line["duration_seconds"] - 0.25
        assert line["output_tokens"] == USAGE["output_tokens"]


# -- the beginning of a response
# -------------------------------------------------------------------------


def opened(**fields: Any) -> bytes:
    response = {"id": "r", "status": "in_progress", "background": False, **fields}
    return event("response.created", response=response) + event("response.in_progress", response=response)


REST = event("response.output_text.delta", delta="a") + event("response.completed", response={"id": "r"})


def late(seconds: float) -> Behaviour:
    """Opens a response at once, and sends the rest after a time."""

    async def behave(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(opened()))
        await asyncio.sleep(seconds)
        writer.write(chunk(REST) + b"0\r\n\r\n")
        return True

    return behave


async def test_a_response_waits_for_its_first_token_like_other_streams() -> None:
    limits = {"first_byte": 30, "between_chunks": 0.2}
    async with world([FakeEngine(behave=late(1.5))], timeouts=limits) as w:
        _, _, got = await w.post({"model": "tiny", "input": "a", "stream": True}, RESPONSES)
        assert got == opened() + REST


async def test_another_engine_answers_a_response_whose_first_token_is_late() -> None:
    behaviours = late(60), says(stream(opened(), REST))
    async with world([FakeEngine(behave=each) for each in behaviours], timeouts={"first_byte": 0.5}) as w:
        status, headers, got = await w.post({"model": "tiny", "input": "a", "stream": True}, RESPONSES)
        assert (status, headers["x-lmetric-instance"], got) == (200, "e1", opened() + REST)


async def test_a_response_in_the_background_begins_at_once() -> None:
    """Its client may leave, and ask for it later."""
    begun = opened(background=True)

    async def behave(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(begun))
        await engine.until_left(writer)
        return False

    async with world([FakeEngine(behave=behave)]) as w:
        asked = {"model": "tiny", "input": "a", "stream": True, "background": True}
        async with w.client.post(w.url + RESPONSES, json=asked) as answer:
            assert await answer.content.readexactly(len(begun)) == begun


# -- errors
# -------------------------------------------------------------------------


# vLLM reads each event of the chat inside as a chunk.
WRAPPED = """1 validation error for ChatCompletionStreamResponse
choices
  Field required [type=missing, input_value={'error': {'message': 'Th...am': None, 'code': %d}}]
    For further information visit https://errors.pydantic.dev/2.14/v/missing"""


@pytest.mark.parametrize("kind", ["internal_error", "api_error", "overloaded_error", "wrapped"])
async def test_another_engine_answers_after_an_error_as_the_first_event(kind: str) -> None:
    error = {"type": kind, "message": "EngineCore encountered an issue."}
    if kind == "wrapped":
        error = {"type": "internal_error", "message": WRAPPED % 500}
    failed = stream(event("error", error=error))
    async with world([FakeEngine(behave=says(failed)), FakeEngine(behave=says(stream(ANSWER)))]) as w:
        status, headers, got = await w.post(ASKED | {"stream": True}, MESSAGES)
        assert (status, headers["x-lmetric-instance"], got) == (200, "e1", ANSWER)
        assert model(w).retried.total() == 1


@pytest.mark.parametrize(
    "error",
    [
        {"type": "invalid_request_error", "message": "m"},
        {"type": "internal_error", "message": WRAPPED % 400},
    ],
    ids=["plain", "wrapped"],
)
async def test_an_error_of_the_request_is_the_clients(error: dict[str, str]) -> None:
    refused = event("error", error=error)
    async with world([FakeEngine(behave=says(stream(refused))), FakeEngine()]) as w:
        _, _, got = await w.post(ASKED | {"stream": True}, MESSAGES)
        assert got == refused
        assert not model(w).retried
        assert not model(w).engines["e0"].service.tally.failures


# -- aborts
# -------------------------------------------------------------------------


def once(state: str, *pieces: bytes, then: bytes = b"") -> Behaviour:
    """Answers the first message with these pieces, and the others with `then`."""
    left = True

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal left
        assert isinstance(engine, Development)
        if request.path != MESSAGES:
            writer.write(plain(404, {}))
        elif left:
            left, engine.state = False, state
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.05)
        else:
            writer.write(then)
        return True

    return behave


def whole(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"id": "m", "type": "message", "content": content, "model": "tiny", "usage": USAGE, **more}


# vLLM leaves null fields out of a whole message; others may not.
@pytest.mark.parametrize("aborted", [whole("a"), whole("a", stop_reason=None)], ids=["absent", "null"])
@pytest.mark.parametrize("state", [*ORDERED, *NOT_ORDERED])
async def test_a_whole_message_that_its_engine_aborted(state: str, aborted: dict[str, Any]) -> None:
    done = whole("b", stop_reason="end_turn")
    behave = once(state, plain(200, aborted), then=plain(200, done))
    async with engines(behave, behave, timeouts={"between_chunks": 1.5}) as w:
        _, _, got = await w.post(ASKED, MESSAGES)
        ordered = state in ORDERED
        assert got == (aborted if ordered else done)
        assert failed(w) == ({"cancelled": 1} if ordered else {})
        assert model(w).retried == ({} if ordered else {"reset": 1})


@pytest.mark.parametrize("begun", [START + TEXT, START], ids=["text", "start"])
@pytest.mark.parametrize("state", [*ORDERED, *NOT_ORDERED])
async def test_a_stream_of_a_message_that_its_engine_aborted(state: str, begun: bytes) -> None:
    """By order it ends as the engine ends it. Otherwise it must not look whole."""
    behave = once(state, STREAM_HEAD + chunk(begun), chunk(ends(None)) + b"0\r\n\r\n")
    async with engines(behave, timeouts={"between_chunks": 1.5}) as w:
        _, _, got = await w.post(ASKED | {"stream": True}, MESSAGES)
        await w.settled()
        if state in ORDERED:
            assert got == begun + ends(None)
            assert failed(w) == {"cancelled": 1}
        else:
            end = got.removeprefix(begun)
            assert end.startswith(b"event: error\n")
            assert b"the engine aborted the answer" in end
            assert b"message_delta" not in end
            assert failed(w) == {"engine_error": 1}


@pytest.mark.parametrize("state", [*ORDERED, *NOT_ORDERED])
async def test_an_abort_that_comes_at_once(state: str) -> None:
    """Another engine answers, except after an order."""
    aborted, done = stream(START + ends(None)), stream(ANSWER)
    behave = once(state, aborted, then=done)
    async with engines(behave, behave, timeouts={"between_chunks": 1.5}) as w:
        status, headers, got = await w.post(ASKED | {"stream": True}, MESSAGES)
        ordered = state in ORDERED
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert got == (START + ends(None) if ordered else ANSWER)
        await w.settled()
        assert failed(w) == ({"cancelled": 1} if ordered else {})
        assert model(w).retried == ({} if ordered else {"reset": 1})


@pytest.mark.parametrize("pieces", [1, 2])
async def test_aborts_by_other_engines_than_vllm_pass(pieces: int) -> None:
    """They do not show which aborts were ordered."""
    parts = [START, ends(None)] if pieces == 2 else [START + ends(None)]

    async def behave(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        for part in parts:
            writer.write(chunk(part))
            await asyncio.sleep(0.05)
        writer.write(b"0\r\n\r\n")
        return True

    async with world([FakeEngine(behave=behave, cards=SGLANG) for _ in "ab"]) as w:
        await w.until(lambda: all(each.identified for each in model(w).engines.values()))
        _, _, got = await w.post(ASKED | {"stream": True}, MESSAGES)
        assert got == START + ends(None)
        await w.settled()
        assert not model(w).retried
        assert failed(w) == {"engine_error": 1}


@pytest.mark.parametrize("cards", [None, SGLANG], ids=["unknown", "SGLang"])
async def test_a_message_continues_after_an_event_without_a_reason(
    cards: list[dict[str, Any]] | None,
) -> None:
    """Engines may report the usage so far."""
    usage = event("message_delta", delta={"stop_reason": None}, usage=USAGE)
    sent = START + TEXT + usage + TEXT + ends("end_turn")
    async with world(
        [FakeEngine(behave=says(stream(*sent.splitlines(keepends=True)), then="keep"), cards=cards)]
    ) as w:
        await w.until(lambda: all(each.identified for each in model(w).engines.values()))
        _, _, got = await w.post(ASKED | {"stream": True}, MESSAGES)
        assert got == sent
        await w.settled()
        assert failed(w) == {}
        assert model(w).router.stats()["finished"] == 1


def decoding(w: World) -> float:
    """The requests past their first token."""
    return model(w).router.indicators_of("e0", ["decode_bs"])["decode_bs"]


def failed(w: World) -> dict[str, int]:
    """The failures of requests, by kind."""
    return {kind: count for kind, count in model(w).router.stats()["failed"].items() if count}
