"""Answers of `/v1/messages` and `/v1/responses` as vLLM 0.32 sends them: tokens, errors, aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import structlog
from structlog.testing import capture_logs

from server_world import STREAM_HEAD, FakeEngine, Request, World, chunk, world
from test_server_aborts import model

MESSAGES = "/v1/messages"
ASKED = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
USAGE = {"input_tokens": 4, "output_tokens": 2}


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


def decoding(w: World) -> float:
    """The requests past their first token."""
    return model(w).router.indicators_of("e0", ["decode_bs"])["decode_bs"]
