"""An engine's comments before its first token reach the client: bugs 26."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from lmetric.config import Timeouts
from lmetric.server.background import monitor
from lmetric.server.execution import attempt
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
    world,
)
from test_server_held_streams import EVENTS, Client, error_of, split
from waiting import PATIENCE_SECONDS

_SWEEP_SECONDS, _COMMENT_SECONDS = monitor._sweep_seconds, attempt.COMMENT_SECONDS
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
STREAMS: dict[str, tuple[dict[str, Any], bytes]] = {
    COMPLETIONS: ({"prompt": "x"}, EVENTS),
    CHAT: ({"messages": [{"role": "user", "content": "x"}]}, CHUNK + b"data: [DONE]\n\n"),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"text": "a"}}\n\n',
    ),
    "/v1/responses": (
        {"input": "x"},
        b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "a"}\n\n',
    ),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are passed on at once, in place of after a second."""
    monkeypatch.setattr(attempt, "COMMENT_SECONDS", 0.05)
    monkeypatch.setattr(monitor, "_sweep_seconds", lambda timeouts: 0.05)


class Queueing(FakeEngine):
    """Sends comments until `go` is set, then `then`."""

    def __init__(
        self, then: Behaviour, head: bytes = STREAM_HEAD, comment: bytes = b": keep-alive\n\n"
    ) -> None:
        super().__init__(behave=self.queue)
        self.go = asyncio.Event()
        self._then = then
        self._head = head
        self._comment = comment

    async def queue(self, engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        chunked = b"chunked" in self._head
        writer.write(self._head)
        while not self.go.is_set():
            writer.write(chunk(self._comment) if chunked else self._comment)
            await asyncio.sleep(0.05)
        return await self._then(engine, request, writer)


@asynccontextmanager
async def asked(
    path: str, *engines: FakeEngine, version: bytes = b"1.1", **config: Any
) -> AsyncIterator[tuple[World, Client]]:
    """A client that has sent a stream to the first engine."""
    async with world(list(engines), **config) as w:
        client = await Client.of(w)
        client.ask(1, path=path, prompt={"model": "tiny"} | STREAMS[path][0], version=version)
        yield w, client
        await client.close()


async def next_chunk(client: Client) -> bytes:
    async with asyncio.timeout(PATIENCE_SECONDS):
        size = int(await client.reader.readline(), 16)
        return (await client.reader.readexactly(size + 2))[:-2]


def rest_of(path: str) -> Behaviour:
    return says(chunk(STREAMS[path][1]) + b"0\r\n\r\n", then="keep")


def test_a_comment_reaches_the_client_within_two_seconds() -> None:
    """Bugs 26: the longest delay, in sweeps of the time limits."""
    sweep = _SWEEP_SECONDS(Timeouts())
    assert sweep + _COMMENT_SECONDS + sweep <= 2


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("path", STREAMS)
async def test_comments_come_before_the_first_token(path: str, version: bytes) -> None:
    """Bugs 26: head and comments while the engine has no token; then its events, unchanged."""
    engine = Queueing(rest_of(path))
    async with asked(path, engine, version=version) as (w, client):
        head = await client.head()  # the engine sends no token before `go`
        assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n")
        assert b"x-request-id: mine-1\r\n" in head
        for _ in range(3):
            assert b": keep-alive\n" in await client.piece()
        engine.go.set()
        comments, rest = split(b": \n\n" + await client.body(head)) if version == b"1.0" else ([], b"")
        if version == b"1.1":
            told = b""
            while not told.endswith(b"0\r\n\r\n"):
                told += await client.reader.read(1 << 16)
            assert b": x-lmetric-instance: e0\n" in told
            assert chunk(STREAMS[path][1]) in told
            engine.behave = answer
            await client.reuse()
        else:
            assert b": x-lmetric-instance: e0" in comments
            assert rest == STREAMS[path][1]
        model = w.server.fleet.models[0]
        await w.settled()
        assert model.router.stats()["finished"] >= 1


FRAMINGS = {
    "declared length": HEAD % (200, SSE) + b"content-length: 100000\r\n\r\n",
    "until close": HEAD % (200, SSE) + b"\r\n",
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_comments_in_other_framings(framing: str) -> None:
    """Bugs 26, sibling: streams without chunks."""
    engine = Queueing(says(EVENTS), FRAMINGS[framing])
    async with asked(COMPLETIONS, engine) as (_, client):
        await client.head()
        assert b": keep-alive\n" in await client.piece()
        engine.go.set()
        told = b""
        while b"[DONE]" not in told:
            told += await client.reader.readuntil(b"\n\n")
        assert told.count(b"data: ") >= EVENTS.count(b"data: ")


@pytest.mark.parametrize("comment", [b":\n\n", b": a\r\n\r\n", b":a\n:b\n\n", b":" + b"x" * 5000 + b"\n\n"])
async def test_forms_of_comments(comment: bytes) -> None:
    """Bugs 26, sibling: empty, several and long comments; a long one does not pass whole."""
    engine = Queueing(rest_of(COMPLETIONS), comment=comment)
    async with asked(COMPLETIONS, engine) as (_, client):
        head = await client.head()
        assert await next_chunk(client)
        engine.go.set()
        comments, rest = split_all(await client.body(head))
        assert rest == EVENTS
        assert all(len(line) <= 1026 for line in comments)


def split_all(told: bytes) -> tuple[list[bytes], bytes]:
    """Returns the comment lines of a stream, and its other events."""
    blocks = told.split(b"\n\n")
    comments = [line for block in blocks for line in block.split(b"\n") if line.startswith(b":")]
    kept = [b"\n".join(line for line in block.split(b"\n") if not line.startswith(b":")) for block in blocks]
    return comments, b"".join(block.strip(b"\n") + b"\n\n" for block in kept if block.strip(b"\n"))


FAILURES: dict[str, Behaviour] = {
    "reset": reset,
    "end without a token": says(b"0\r\n\r\n", then="keep"),
    "error": says(chunk(event({"error": {"message": "no", "code": 500}})) + b"0\r\n\r\n", then="keep"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_another_engine_answers_after_the_comments(failure: str) -> None:
    """Bugs 26: an opened stream still goes to the next engine, whose comments pass, too."""
    first, second = Queueing(FAILURES[failure]), Queueing(rest_of(COMPLETIONS), comment=b": second\n\n")
    async with asked(COMPLETIONS, first, second) as (_, client):
        head = await client.head()
        assert b": keep-alive\n" in await next_chunk(client)
        first.go.set()
        while b": second\n" not in await next_chunk(client):
            pass
        second.go.set()
        assert split_all(await client.body(head))[1] == EVENTS


REFUSALS: dict[str, tuple[Behaviour, str]] = {
    "refusal": (says(plain(400, {"error": {"message": "too long"}}), then="keep"), "too long"),
    "no stream": (says(plain(200, {"choices": []}), then="keep"), "failed on two engines"),
    "coded": (
        says(HEAD % (200, SSE) + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", then="keep"),
        "failed on two engines",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_the_next_engines_refusal_is_an_event(refusal: str) -> None:
    behave, message = REFUSALS[refusal]
    first = Queueing(reset)
    async with asked(COMPLETIONS, first, FakeEngine(behave=behave)) as (_, client):
        head = await client.head()
        first.go.set()
        _, rest = split_all(await client.body(head))
        assert message in error_of(rest)["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    "said", [{"detail": "too long"}, {"error": "too long"}, {"error": {"reason": "too long"}}]
)
async def test_a_refusal_in_another_form_keeps_its_words(path: str, said: dict[str, Any]) -> None:
    first = Queueing(reset)
    async with asked(path, first, FakeEngine(behave=says(plain(400, said), then="keep"))) as (_, client):
        head = await client.head()
        first.go.set()
        _, rest = split_all(await client.body(head))
        told = orjson.loads(rest.partition(b"data: ")[2])
        assert told["type"] == "error"
        for each in (told, told["error"]) if path == "/v1/responses" else (told["error"],):
            assert "too long" in each["message"]


async def test_a_client_that_leaves_is_noticed() -> None:
    engine = Queueing(rest_of(COMPLETIONS))
    async with asked(COMPLETIONS, engine) as (w, client):
        await client.head()
        await client.close()
        await w.settled()
        assert engine.connections
        engine.go.set()


async def test_a_quick_token_keeps_the_engines_head() -> None:
    """Bugs 26: a comment right before the first token does not open the stream."""
    quick = says(STREAM_HEAD, chunk(b": hello\n\n"), chunk(EVENTS) + b"0\r\n\r\n", then="keep")
    async with asked(COMPLETIONS, FakeEngine(behave=quick)) as (_, client):
        head = await client.head()
        assert b"x-lmetric-decision: " in head
        assert await client.body(head) == EVENTS


async def test_comments_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs 26: comments do not extend `timeouts.first_byte`."""
    engine = Queueing(rest_of(COMPLETIONS))
    async with asked(COMPLETIONS, engine, timeouts={"first_byte": 1.0}) as (_, client):
        _, rest = split_all(await client.body(await client.head()))
        assert error_of(rest)["code"] == "timeout"
        engine.go.set()


async def test_a_stream_of_a_stored_response_begins_with_its_comments() -> None:
    """Bugs 26, sibling: a request for the one engine that holds a response."""
    from test_server_passthrough import RESPONSES, Responses, created

    class Stored(Responses):
        go = asyncio.Event()

        async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
            if request.method != "GET" or RESPONSES + "/" not in request.path:
                return await super()._answer(request, writer)
            return await queueing.queue(self, request, writer)

    queueing = Queueing(rest_of("/v1/responses"))
    async with world([Stored()]) as w:
        stored = await created(w)
        client = await Client.of(w)
        client.writer.write(
            f"GET {RESPONSES}/{stored['id']}?stream=true HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        )
        assert b" 200 " in await client.head()
        assert b": keep-alive\n" in await client.piece()
        queueing.go.set()
        told = b""
        while not told.endswith(b"0\r\n\r\n"):
            told += await client.reader.read(1 << 16)
        assert STREAMS["/v1/responses"][1] in told
        await client.close()
