"""Held streams: comments before the answer, and the end of a stream whose head was sent early."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from server_world import (
    HEAD,
    SSE,
    STREAM_HEAD,
    Behaviour,
    FakeEngine,
    Request,
    World,
    answer,
    chunk,
    event,
    plain,
    reset,
    says,
    token,
    usage,
    world,
)
from split_world import COMPLETIONS, alone, asked, body_of, both, heard
from split_world import split as split_world
from test_server_programs import SETTINGS, body, held, programs
from waiting import PATIENCE_SECONDS

EVENTS = b"".join([*(token(text, "length" if text == "c" else None) for text in "abc")])
EVENTS += event({"choices": [], "usage": usage()}) + event(b"[DONE]")


@asynccontextmanager
async def full_cache(
    behaves: Behaviour | Sequence[Behaviour] = answer,
    forget_seconds: float = 1.5,
    keep_alive_seconds: float = 0.05,
    **config: Any,
) -> AsyncIterator[World]:
    """A router whose caches are full for ``forget_seconds``; then its engines behave so."""
    settings = {**SETTINGS, "forget_seconds": forget_seconds, "keep_alive_seconds": keep_alive_seconds}
    given = behaves if isinstance(behaves, Sequence) else [behaves]
    blocks = {"cache_blocks": 100, "text_block_bytes": 64}  # blocks of text as long as blocks of tokens
    async with world(len(given), **blocks, programs=settings, **config) as w:
        for name, engine in enumerate(w.engines, 101):
            assert (await w.post(body(name)))[0] == 200
            engine.behave = given[name - 101]
        yield w


class Client:
    """A connection that reads answers byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, w: World) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", w.server.port))

    def ask(
        self,
        name: int,
        *,
        stream: bool = True,
        version: bytes = b"1.1",
        fields: bytes = b"",
        path: str = COMPLETIONS,
        prompt: dict[str, Any] | None = None,
    ) -> None:
        data = orjson.dumps({**(prompt or body(name)), "stream": stream})
        head = b"POST %b HTTP/%b\r\nhost: router\r\nx-request-id: mine-%d\r\n%b" % (
            path.encode(),
            version,
            name,
            fields,
        )
        self.writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(data), data))

    async def head(self) -> bytes:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def body(self, head: bytes) -> bytes:
        """Returns the answer's body without its framing."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            if b"transfer-encoding: chunked" not in head:
                return await self.reader.read()
            parts = []
            while size := int(await self.reader.readline(), 16):
                parts.append(await self.reader.readexactly(size))
                assert await self.reader.readexactly(2) == b"\r\n"
            assert await self.reader.readexactly(2) == b"\r\n"
            return b"".join(parts)

    async def piece(self) -> bytes:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.readuntil(b"\n\n")

    async def reuse(self) -> None:
        """Sends another request on the same connection: a chat, which is not held."""
        data = orjson.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3})
        self.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: router\r\n")
        self.writer.write(b"content-length: %d\r\n\r\n%b" % (len(data), data))
        assert (await self.head()).startswith(b"HTTP/1.1 200 ")

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def split(told: bytes) -> tuple[list[bytes], bytes]:
    """Returns the comment lines at the start of a stream, and its rest."""
    lines = []
    while told.startswith(b":"):
        block, _, told = told.partition(b"\n\n")
        lines += block.split(b"\n")
    return lines, told


def error_of(rest: bytes) -> dict[str, Any]:
    """Returns the error of a stream whose only event is an error."""
    data, _, done = rest.partition(b"\n\n")
    assert done == b"data: [DONE]\n\n"
    told: dict[str, Any] = orjson.loads(data.removeprefix(b"data: "))["error"]
    return told


SEVENTHS = [EVENTS[at : at + 7] for at in range(0, len(EVENTS), 7)]
FRAMINGS = {
    "chunked": answer,
    "declared length": says(
        HEAD % (200, SSE), b"content-length: %d\r\n\r\n" % len(EVENTS), EVENTS, then="keep"
    ),
    "until close": says(HEAD % (200, SSE) + b"connection: close\r\n\r\n" + EVENTS),
    "cut anywhere": says(STREAM_HEAD, *map(chunk, SEVENTHS), b"0\r\n\r\n", then="keep"),
}


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_comments_come_while_held_and_the_answer_follows_unchanged(
    framing: str, version: bytes
) -> None:
    async with full_cache(FRAMINGS[framing]) as w:
        client = await Client.of(w)
        client.ask(2, version=version)
        head = await client.head()
        assert (await programs(w))["states"]["held"] == 1
        assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n")
        assert head.count(b"x-request-id: mine-2\r\n") == 1
        comments, rest = split(await client.body(head))
        assert rest == EVENTS
        assert sum(line.startswith(b": held for ") for line in comments) > 1
        assert b": x-lmetric-instance: e0" in comments
        label = next(line for line in comments if line.startswith(b": x-lmetric-decision: "))
        record = w.server.fleet.models[0].router.explain(int(label.split(b"-")[-2].split()[-1]))
        assert record is not None
        assert record["held_seconds"] > 1
        if version == b"1.1":
            w.engines[0].behave = answer
            await client.reuse()
        else:
            assert b"connection: close" in head
        await client.close()


REFUSAL = plain(400, b'{"error":\n {"message": "too long",\r\n "code": 400}}')
PAGE = HEAD % (422, b"text/html") + b"content-length: 3\r\n\r\n<p>"
BAD = STREAM_HEAD + chunk(event({"error": {"message": "bad"}})) + b"0\r\n\r\n"
FAILURES: dict[str, tuple[Behaviour, int, str]] = {
    "refusal": (says(REFUSAL, then="keep"), 400, "too long"),
    "refusal that is no JSON": (says(PAGE, then="keep"), 422, "status 422"),
    "busy": (says(plain(503, {"error": {"message": "busy"}}), then="keep"), 503, "busy"),
    "lost": (reset, 502, "no engine could answer"),
    "no stream": (says(plain(200, {"choices": []}), then="keep"), 502, "no engine could answer"),
    "error as first event": (says(BAD, then="keep"), 200, "bad"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_after_the_head_is_an_event(failure: str) -> None:
    behave, status, message = FAILURES[failure]
    async with full_cache(behave) as w:
        client = await Client.of(w)
        client.ask(2)
        _, rest = split(await client.body(await client.head()))
        told = orjson.loads(rest.partition(b"\n\n")[0].removeprefix(b"data: "))["error"]
        assert message in told["message"]
        if status != 200:
            assert error_of(rest)
            _, metrics = await w.get("/metrics")
            counted = [line for line in metrics.splitlines() if line.startswith(b"lmetric_requests_total")]
            assert any(b'"%d"' % status in line for line in counted), counted
        await w.settled()
        w.engines[0].behave = answer
        await until_healthy(w)
        await client.reuse()
        await client.close()


async def until_healthy(w: World) -> None:
    await w.until(lambda: all(engine.healthy for engine in w.server.fleet.models[0].engines.values()))


TEXT = "".join(f"river {number} " for number in range(600))
NAMED: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/messages": (
        {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
        b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"text": "a"}}\n\n',
    ),
    "/v1/responses": (
        {"model": "tiny", "input": TEXT},
        b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "a"}\n\n',
    ),
}


def named_error(path: str, rest: bytes) -> dict[str, Any]:
    """Returns the error of a stream whose only event is the event `error` of the path's API."""
    data = orjson.loads(rest.removeprefix(b"event: error\ndata: ").removesuffix(b"\n\n"))
    assert data["type"] == "error"
    error: dict[str, Any] = data["error"] if path == "/v1/messages" else data
    return error


@pytest.mark.parametrize("path", NAMED)
async def test_streams_with_named_events_are_held_with_comments(path: str) -> None:
    prompt, events = NAMED[path]
    async with full_cache(says(STREAM_HEAD, chunk(events), b"0\r\n\r\n", then="keep")) as w:
        client = await Client.of(w)
        client.ask(2, path=path, prompt=prompt)
        head = await client.head()
        comments, rest = split(await client.body(head))
        assert rest == events
        assert any(line.startswith(b": held for ") for line in comments)
        w.engines[0].behave = answer
        await client.reuse()
        await client.close()


@pytest.mark.parametrize("path", NAMED)
@pytest.mark.parametrize("failure", ["refusal", "busy", "middle"])
async def test_the_error_of_a_stream_with_named_events_is_its_apis_event(path: str, failure: str) -> None:
    prompt, events = NAMED[path]
    middle: Behaviour = says(STREAM_HEAD + chunk(events), then="reset")
    behave, _, message = {**FAILURES, "middle": (middle, 502, "middle of its answer")}[failure]
    async with full_cache(behave) as w:
        client = await Client.of(w)
        client.ask(2, path=path, prompt=prompt)
        _, rest = split(await client.body(await client.head()))
        if failure == "middle":
            assert rest.startswith(events)
            rest = rest.removeprefix(events)
        assert b"[DONE]" not in rest
        error = named_error(path, rest)
        assert message in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "api_error"  # the engine's own errors have no type
        await client.close()


async def test_an_engine_lost_in_the_middle_of_its_answer_ends_the_stream_with_an_event() -> None:
    async with full_cache(says(STREAM_HEAD + chunk(token("a")), then="reset")) as w:
        client = await Client.of(w)
        client.ask(2)
        _, rest = split(await client.body(await client.head()))
        assert rest.startswith(token("a"))
        assert "middle of its answer" in error_of(rest.removeprefix(token("a")))["message"]
        await client.close()


async def test_another_engine_answers_if_the_first_fails_after_the_head() -> None:
    busy = says(plain(503, {"error": {"message": "busy"}}), then="keep")
    failed: list[FakeEngine] = []

    async def fails_once(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if failed:
            return await answer(engine, request, writer)
        failed.append(engine)
        return await busy(engine, request, writer)

    async with full_cache([fails_once, fails_once]) as w:
        client = await Client.of(w)
        client.ask(3)
        comments, rest = split(await client.body(await client.head()))
        assert comments
        assert rest == EVENTS
        assert failed
        assert [len(engine.requests) for engine in w.engines] == [2, 2]
        await client.close()


async def test_a_held_stream_that_is_merged_from_two_engines_follows_the_comments() -> None:
    settings = {**SETTINGS, "forget_seconds": 1.5, "keep_alive_seconds": 0.1}
    engines = [both(cache_blocks=200) for _ in range(2)]
    async with split_world(*engines, at=0.97, programs=settings) as w:
        for number in range(2):
            await asked(w, COMPLETIONS, body_of(COMPLETIONS, f"{number} " + "river " * 2500))
        request = body_of(COMPLETIONS, "the " * 2500, stream=True)
        async with w.client.post(w.url + COMPLETIONS, json=request) as response:
            assert "x-lmetric-decision" not in response.headers
            comments, rest = split(await response.read())
        assert any(line.startswith(b": held for ") for line in comments)
        (label,) = (line for line in comments if line.startswith(b": x-lmetric-decision: "))
        record = w.server.fleet.models[0].router.explain(int(label.split(b"-")[-2].split()[-1]))
        assert record is not None
        assert record["cuts"]
        assert heard(rest)["text"] == (await alone(w, COMPLETIONS, request))["text"]


async def test_a_client_that_leaves_a_held_stream_is_forgotten() -> None:
    async with full_cache(forget_seconds=60) as w:
        client = await Client.of(w)
        client.ask(2)
        await client.head()
        await client.piece()
        await client.close()
        await held(w, 0)
        await w.settled()
        assert len(w.engines[0].requests) == 1


async def test_a_held_stream_ends_at_the_longest_duration_and_its_connection_goes_on() -> None:
    async with full_cache(forget_seconds=60, timeouts={"request": 1.5}) as w:
        client = await Client.of(w)
        client.ask(2)
        comments, rest = split(await client.body(await client.head()))
        assert comments
        error = error_of(rest)
        assert error["code"] == "timeout"
        assert "it was held: its program needs 1,200 tokens" in error["message"]
        await held(w, 0)
        await client.reuse()
        await client.close()


async def test_a_server_that_stops_ends_a_held_stream_with_an_event() -> None:
    async with full_cache(forget_seconds=60) as w:
        client = await Client.of(w)
        client.ask(2)
        head = await client.head()
        for relay in list(w.server.front.relays):
            relay.stop()
        _, rest = split(await client.body(head))
        assert error_of(rest)["code"] == "shutting_down"
        await client.close()


@pytest.mark.parametrize(("stream", "seconds"), [(False, 0.1), (True, 0.0)])
async def test_answers_without_comments_begin_with_the_engine(stream: bool, seconds: float) -> None:
    async with full_cache(keep_alive_seconds=seconds) as w:
        client = await Client.of(w)
        client.ask(2, stream=stream)
        await held(w, 1)
        head = await client.head()
        assert b"x-lmetric-decision: " in head
        assert (await programs(w))["states"]["held"] == 0
        if stream:
            assert await client.body(head) == EVENTS
        await client.close()


async def test_the_early_head_has_the_cors_lines() -> None:
    async with full_cache(forget_seconds=60, cors={"origins": ["http://page"]}) as w:
        client = await Client.of(w)
        client.ask(2, fields=b"origin: http://page\r\n")
        assert b"access-control-allow-origin: http://page\r\n" in (await client.head()).lower()
        await client.close()


async def test_a_slow_client_gets_no_further_comments() -> None:
    async with full_cache(forget_seconds=60) as w:
        client = await Client.of(w)
        client.ask(2)
        await client.head()
        (relay,) = w.server.front.relays
        (connection,) = (each for each in w.server.front.connections if each.relay is relay)
        connection.pause_writing()
        await asyncio.sleep(0.3)
        await client.piece()  # the comment on its way
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.readuntil(b"\n\n"), 1.5)
        connection.resume_writing()
        assert b": held for " in await client.piece()
        await client.close()
