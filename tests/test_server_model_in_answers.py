"""The model's name in answers: of the model that answers, or of the request."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from lmetric.config import ServerConfig
from lmetric.server.app import Reloads
from server_world import STREAM_HEAD, Behaviour, FakeEngine, Request, chunk, event, plain, says, world
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, equal, split
from test_server_failover import engine, failing, failover

SMALL = {"id": "small", "root": "/small", "max_model_len": 1000}
LARGE = {"id": "large", "root": "/large", "max_model_len": 5000}
ASKED: dict[str, Any] = {"aliases": {"gpt-4o": "emulated"}, "model_in_answers": "asked"}
PATHS = [CHAT, COMPLETIONS]


def under(said: dict[str, Any], name: str) -> dict[str, Any]:
    """An answer in which the model has this name."""
    return said | {"same": {(*head, name) for *head, _ in said["same"]}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_name_differs(path: str, stream: bool) -> None:
    async with failover(engine(), **ASKED) as w:
        for ids in (False, True):
            body = body_of(path, stream=stream, return_token_ids=ids)
            said = await asked(w, path, body | {"model": "gpt-4o"})
            expected = await alone(w, path, body)
            equal(said, under(expected, "gpt-4o"))
            equal(await asked(w, path, body), expected)  # a request with the model's own name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0.3, 0.97])
async def test_merged_answers_have_the_name(path: str, stream: bool, at: float) -> None:
    async with split(at=at, **ASKED) as w:
        body = body_of(path, stream=stream)
        said = await asked(w, path, body | {"model": "gpt-4o"})
        equal(said, under(await alone(w, path, body), "gpt-4o"))
        assert said["record"]["cuts"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["reset", "event"])
async def test_a_stream_keeps_the_name_on_another_engine(path: str, how: str) -> None:
    async with failover(failing(how), engine(), **ASKED) as w:
        body = body_of(path, stream=True, max_tokens=60)
        said = await asked(w, path, body | {"model": "gpt-4o"})
        equal(said, under(await alone(w, path, body), "gpt-4o"))
        assert [to for _, to in said["record"]["migrations"]] == ["b1"]


MESSAGES = {
    "type": "message_start",
    "message": {"id": "m", "type": "message", "model": "large", "content": [], "usage": {"input_tokens": 3}},
}
RESPONSES = {
    "type": "response.created",
    "response": {"id": "r", "model": "large", "tools": [{"type": "image", "model": "other"}]},
}
DELTA = {"type": "response.output_text.delta", "delta": 'a "model": "large" b'}


@pytest.mark.parametrize(
    ("path", "events"), [("/v1/messages", [MESSAGES, DELTA]), ("/v1/responses", [RESPONSES, DELTA])]
)
async def test_the_other_protocols(path: str, events: list[dict[str, Any]]) -> None:
    streamed = STREAM_HEAD + b"".join(chunk(event(each)) for each in events) + b"0\r\n\r\n"
    engines = [FakeEngine(cards=[LARGE], behave=says(streamed, then="keep"))]
    body = {"model": "gpt", "stream": True, "max_tokens": 9, "input": "x"}
    body["messages"] = [{"role": "user", "content": "x"}]
    async with world(engines, aliases={"gpt": "large"}, model_in_answers="asked") as w:
        status, _, raw = await w.post(body, path)
        assert status == 200
        got = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    expected = orjson.loads(orjson.dumps(events).replace(b'"model":"large"', b'"model":"gpt"'))
    assert got == expected


async def test_a_fallback_does_not_show() -> None:
    """The client asked for `small`, or its alias; `large` answers."""

    async def full(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(429, {"error": {"message": "busy", "code": 429}}))
        return True

    def named(behave: Behaviour) -> FakeEngine:
        return FakeEngine(cards=[LARGE], behave=behave)

    answer = {"id": "c", "model": "large", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
    engines = [FakeEngine(cards=[SMALL], behave=full), named(says(plain(200, answer), then="keep"))]
    more = {"aliases": {"mini": "small"}, "fallbacks": {"small": ["large"]}}
    async with world(engines, model_in_answers="asked", **more) as w:
        for name in ("small", "mini"):
            status, _, said = await w.post({"model": name, "prompt": "x"})
            assert (status, said) == (200, answer | {"model": name})
        assert {request.json["model"] for request in w.engines[1].requests} == {"large"}


async def test_a_reload_changes_the_name() -> None:
    answer = {"id": "c", "model": "large", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
    engines = [FakeEngine(cards=[LARGE], behave=says(plain(200, answer), then="keep"))]
    async with world(engines, aliases={"gpt": "large"}) as w:
        assert (await w.post({"model": "gpt", "prompt": "x"}))[2]["model"] == "large"
        values = w.server.fleet.config.model_dump(exclude_unset=True) | {"model_in_answers": "asked"}
        await Reloads(w.server, lambda: ServerConfig.model_validate(values)).reload()
        assert (await w.post({"model": "gpt", "prompt": "x"}))[2]["model"] == "gpt"


async def test_an_encoded_body_stays() -> None:
    encoded = plain(200, b'{"model":"large"}', b"content-encoding: x-own\r\n")
    engines = [FakeEngine(cards=[LARGE], behave=says(encoded, then="keep"))]
    async with world(engines, aliases={"gpt": "large"}, model_in_answers="asked") as w:
        assert (await w.post({"model": "gpt", "prompt": "x"}))[2] == {"model": "large"}
