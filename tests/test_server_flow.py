"""Memory of slow readers (security F11) and the turns of busy engines (security F12)."""

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmetric._core import FULL_READ, PASS, ResponseReader
from lmetric.server.http import client_load
from lmetric.server.upstream import connection as connection_module
from lmetric.server.upstream import reading
from lmetric.server.upstream.connection import Connection
from lmetric.server.upstream.pool import Kept
from lmetric.server.upstream.reading import BYTES_IN_TURN, READERS_IN_TURN
from server_world import (
    HEAD,
    READ_BYTES,
    STREAM_HEAD,
    Behaviour,
    FakeEngine,
    Request,
    World,
    answer,
    bytes_by_turn,
    chunk,
    says,
    self_signed,
    token,
    world,
)

BYTES = b"application/octet-stream"
STREAM = {"model": "tiny", "prompt": "x", "stream": True}
ASK = b'{"model":"tiny","prompt":"x","stream":true}'


class TlsEngine(FakeEngine):
    """An engine behind TLS."""

    def __init__(self, context: ssl.SSLContext, **more: Any) -> None:
        super().__init__(**more)
        self._context = context

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]


def sends(size: int) -> Behaviour:
    """Sends an answer of this many bytes as fast as it can."""

    async def behave(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD % (200, BYTES) + b"content-length: %d\r\n\r\n" % size)
        for at in range(0, size, 1 << 20):
            writer.write(bytes(min(1 << 20, size - at)))
            await writer.drain()
        return True

    return behave


@asynccontextmanager
async def flow(behave: Behaviour, where: str, folder: Path, **config: Any) -> AsyncIterator[World]:
    """A router whose clients (`where`: clients) or engines (engines) use TLS."""
    context, certificate = await self_signed(folder)
    key = folder / "key.pem"
    if where == "clients":
        config["tls"] = {"certificate_file": str(certificate), "key_file": str(key)}
    if where == "engines":
        config["engine_tls"] = {"ca_file": str(certificate)}
    engine = TlsEngine(context, behave=behave) if where == "engines" else FakeEngine(behave=behave)
    async with world([engine], **config) as w:
        yield w


async def reader(w: World, where: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent a request."""
    context = None
    if where == "clients":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    streams = await asyncio.open_connection("127.0.0.1", w.server.port, ssl=context, limit=1024)
    streams[1].write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(ASK) + ASK
    )
    return streams


# -- turns of the event loop -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["plain", "engines"])
async def test_an_engine_gets_one_read_of_each_turn(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security F12: 32 reads of 256 kB in a row cost all other connections their turn."""
    turn, read = 0, Counter[tuple[int, int]]()
    loop = asyncio.get_running_loop()
    received = Connection.data_received

    def counted(self: Connection, data: bytes) -> None:
        read[turn, id(self)] += len(data)
        received(self, data)

    def count() -> None:
        nonlocal turn, ticking
        turn += 1
        ticking = loop.call_soon(count)

    monkeypatch.setattr(Connection, "data_received", counted)
    ticking = loop.call_soon(count)
    size = 24 << 20
    try:
        async with flow(sends(size), where, tmp_path) as w:
            async with w.client.post(w.url + "/v1/completions", data=ASK) as response:
                got = 0
                async for part in response.content.iter_any():
                    got += len(part)
            assert got == size
            w.engines[0].behave = answer
            assert (await w.post())[0] == 200  # the connection goes on
    finally:
        ticking.cancel()
    largest = [size for size in read.values() if size > FULL_READ]
    assert len(largest) <= 2, largest  # until the connection knows that its reads are large
    assert max(read.values()) <= 256 * 1024


def at_once(number: int, data: bytes, then: str = "") -> Behaviour:
    """Sends data when this many requests have arrived, to all of them in one turn."""
    ready, arrived = asyncio.Event(), 0

    async def behave(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal arrived
        arrived += 1
        if arrived == number:
            ready.set()
        await ready.wait()
        writer.write(data)
        if then == "resets":
            writer.transport.close()
        return not then

    return behave


async def answered(w: World, size: int) -> bytes:
    """Returns the body of an answer of this size."""
    stream, writer = await reader(w, "plain")
    try:
        assert (await stream.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        return await stream.readexactly(size)
    finally:
        writer.close()


def waiting_bytes() -> int:
    return reading._queue(asyncio.get_running_loop()).waiting_bytes


@pytest.mark.parametrize("where", ["plain", "engines"])
@pytest.mark.parametrize("then", ["", "closes", "resets"])
async def test_many_engine_streams_take_turns(
    then: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security F12: 128 engines' answers that begin in one turn. 32 MB of newlines took 83 ms.

    All bytes arrive in their order, also if the engine closes its connection behind them.
    """
    number = 16 if where == "engines" else 128
    if where == "engines":
        monkeypatch.setattr(reading, "BYTES_IN_TURN", 1)
    body = b"".join(b"%7d\n" % at for at in range(34_000))
    data = HEAD % (200, BYTES) + b"content-length: %d\r\n\r\n" % len(body) + body
    async with flow(at_once(number, data, then), where, tmp_path) as w:
        with bytes_by_turn(monkeypatch, Connection, "process") as turns:
            got = await asyncio.gather(*(answered(w, len(body)) for _ in range(number)))
        assert got == [body] * number
        if where == "plain":
            assert sum(turns) > 2 * max(turns) > 0
        assert max(turns) <= BYTES_IN_TURN + READERS_IN_TURN * READ_BYTES
        assert waiting_bytes() == 0
        await w.settled()
        w.engines[0].behave = answer
        assert (await w.post())[0] == 200


async def test_reads_that_wait_are_bounded_and_end_with_their_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the bound, reads do not wait. A client that leaves ends the wait."""
    monkeypatch.setattr(reading, "BYTES_IN_TURN", 1)
    monkeypatch.setattr(reading, "WAITING_BYTES", 1 << 20)
    number, most = 32, 0
    body = bytes(270_000)
    data = HEAD % (200, BYTES) + b"content-length: %d\r\n\r\n" % len(body) + body
    begin = connection_module.begin_waiting

    def begun(loop: asyncio.AbstractEventLoop, size: int) -> bool:
        nonlocal most
        waits = begin(loop, size)
        most = max(most, waiting_bytes())
        return waits

    monkeypatch.setattr(connection_module, "begin_waiting", begun)
    async with world([FakeEngine(behave=at_once(number, data))]) as w:
        got = await asyncio.gather(*(answered(w, len(body)) for _ in range(number)))
        assert got == [body] * number
        assert 0 < most <= 1 << 20
        assert waiting_bytes() == 0
        w.engines[0].behave = at_once(1, data)
        monkeypatch.setattr(connection_module, "read_on_later", lambda loop, read_on: None)
        _, writer = await reader(w, "plain")
        await w.until(waiting_bytes)
        writer.transport.abort()
        await w.until(lambda: not waiting_bytes())
        await w.settled()


class Recorder:
    """A sink that collects what it gets."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.got = connection, b""
        connection.begin(self, http11=False)

    def received(self, flags: int, data: bytes) -> None:
        if not self.got:
            self.got = self.connection.commit(b"", True)
        else:
            self.got += data if flags & PASS else self.connection.take()

    def lost(self) -> None:
        self.got += b" lost"

    def failed(self, error: Exception) -> None:
        self.got += b" failed: %a" % error


class Pipe(asyncio.Transport):
    """A transport whose calls are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.calls.append("small")

    def close(self) -> None:
        self.closing = True

    abort = close


class Pool(Kept):
    """A pool that notes whether the connections that it loses had a request."""

    def __init__(self) -> None:
        super().__init__(keep=4, idle_seconds=60.0)
        self.lost: list[bool] = []

    def gone(self, connection: Connection) -> None:
        self.lost.append(connection.attached)
        super().gone(connection)


def waiting_connection(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> tuple[Connection, Pipe, Pool, Recorder]:
    """A connection with a read that waits."""
    monkeypatch.setattr(reading, "BYTES_IN_TURN", 1)
    pool, pipe = Pool(), Pipe()
    connection = Connection(pool.gone)
    connection.connection_made(pipe)
    sink = Recorder(connection)
    connection.data_received(HEAD % (200, BYTES) + head)
    connection.data_received(b"x" * FULL_READ)
    assert pipe.calls == ["pause", "small"]
    assert b"x" not in sink.got
    assert waiting_bytes() == FULL_READ
    return connection, pipe, pool, sink


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_read_that_waits_comes_before_the_end(paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, pipe, pool, sink = waiting_connection(monkeypatch, b"\r\n")
    if paused:
        connection.pause(True)
    pipe.close()
    connection.connection_lost(None)
    assert pool.lost == [True]
    await turns()
    if paused:
        assert waiting_bytes() == FULL_READ
        connection.pause(False)
        await turns()
    assert sink.got.endswith(b"x" * FULL_READ + b" lost")
    assert "resume" not in pipe.calls
    assert waiting_bytes() == 0


async def test_a_pause_keeps_a_read_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, pipe, pool, sink = waiting_connection(monkeypatch, b"content-length: %d\r\n\r\n" % FULL_READ)
    connection.pause(True)
    await turns()
    assert b"x" not in sink.got
    connection.pause(False)
    connection.pause(True)
    await turns()
    assert b"x" not in sink.got
    connection.pause(False)
    assert "resume" not in pipe.calls
    await turns()
    assert sink.got.endswith(b"x" * FULL_READ)
    assert pipe.calls[-1] == "resume"
    pool.give(connection)
    assert list(pool._idle) == [connection]
    # Without a request, a large read does not wait.
    connection.data_received(b"x" * FULL_READ)
    assert pipe.closing
    assert waiting_bytes() == 0


@pytest.mark.parametrize("how", ["drop", "give"])
async def test_a_connection_with_a_read_that_waits_closes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of an ended request never come into another one."""
    connection, pipe, pool, sink = waiting_connection(monkeypatch, b"\r\n")
    connection.drop() if how == "drop" else pool.give(connection)
    assert pipe.closing
    assert not pool._idle
    await turns()
    assert b"x" not in sink.got
    assert waiting_bytes() == 0


HOSTILE = {
    "newlines": b"\n",
    "returns": b"\r",
    "empty events": b"data: \n\n",
    "empty objects": b"data: {}\n\n",
    "pings": b'data: {"type": "ping"}\n\n',
    "comments": b":\n\n",
    "unknown fields": b"x\n",
    "one field without end": b"x",
}
PIECES = {
    "whole": lambda data: chunk(data),
    "single bytes": lambda data: b"".join(b"1\r\n%c\r\n" % byte for byte in data),
}


class Sink:
    """Commits as soon as it may."""

    def __init__(self, reader: ResponseReader) -> None:
        self.reader = reader
        self.error: Exception | None = None

    def received(self, flags: int, data: bytes) -> None:
        if flags & 1:
            self.reader.commit(b"", False, lambda data: None)

    def failed(self, error: Exception) -> None:
        self.error = error


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_stream_without_tokens_is_cut(kind: str, pieces: str, first: bool) -> None:
    """Security F12: a stream that sends 1 MiB without a token is refused, at any framing."""
    it = ResponseReader()
    sink = Sink(it)
    it.begin(sink)
    it.data_received(STREAM_HEAD + (chunk(token("a")) if first else b""))
    unit = HOSTILE[kind] * (24_000 // len(HOSTILE[kind]))
    sent = 0
    while sink.error is None and sent < 8 << 20:
        piece = PIECES[pieces](unit)
        it.data_received(piece)
        sent += len(piece)
    assert "1048576 bytes of a stream without a token" in str(sink.error)
    # A line that is no event, but has no end, is committed like any other long event.
    assert sent <= (1 << 20) + 2 * len(piece)


def test_tokens_keep_a_stream_and_long_events_are_no_silence() -> None:
    """Security F12: comments between tokens, and long events without one, are no attack."""
    it = ResponseReader()
    sink = Sink(it)
    it.begin(sink)
    it.data_received(STREAM_HEAD)
    for _ in range(8):
        it.data_received(chunk(b": keep-alive\n\n" * 50_000))
        it.data_received(chunk(token("a")))
    long = b'data: {"choices": [{"delta": {"role": "assistant"}, "x": "%b"}]}\n\n' % (b"x" * (3 << 20))
    it.data_received(chunk(long) + chunk(long))
    it.data_received(chunk(token("a")))
    assert sink.error is None
    assert it.tokens == 9


@pytest.mark.parametrize("token_first", [False, True])
async def test_an_engine_without_tokens_loses_the_request(token_first: bool) -> None:
    """Security F12, in the server: another engine answers, or the stream ends with an error."""

    async def floods(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + (chunk(token("a")) if token_first else b""))
        while not writer.transport.is_closing():
            writer.write(chunk(b"\n" * 60_000))
            await writer.drain()
            await asyncio.sleep(0)
        return False

    async with world([FakeEngine(behave=floods), FakeEngine()]) as w:
        status, headers, got = await w.post(STREAM)
        assert status == 200
        assert headers["x-lmetric-instance"] == ("e0" if token_first else "e1")
        if token_first:
            assert b"the engine failed in the middle of its answer" in got
            assert got.count(b"\n") < (1 << 20) + (256 << 10)  # and one read
        await w.settled()


# -- slow readers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "stream"])
@pytest.mark.parametrize("where", ["plain", "clients", "engines"])
async def test_a_slow_reader_holds_few_bytes(where: str, kind: str, tmp_path: Path) -> None:
    """Security F11: the write buffer of a client that reads nothing, plain and with TLS."""
    events = says(STREAM_HEAD, *[chunk(token("a" * 400)) * 2000] * 40, then="hang")
    async with flow(sends(64 << 20) if kind == "bytes" else events, where, tmp_path) as w:
        load = w.server.front.clients
        _, writer = await reader(w, where)
        writer.transport.pause_reading()
        await w.until(lambda: load.unread_bytes)
        (connection,) = load._slow
        transport = connection.transport
        assert transport is not None
        for _ in range(200):  # whatever still comes
            await asyncio.sleep(0)
        assert 0 < transport.get_write_buffer_size() <= client_load.WRITE_MARK_BYTES + FULL_READ + 1024
        writer.transport.abort()
        await w.until(lambda: not load.unread_bytes)
        await w.settled()


@pytest.mark.parametrize("where", ["plain", "clients"])
async def test_a_reader_that_was_slow_gets_the_whole_answer(where: str, tmp_path: Path) -> None:
    """Security F11: small reads and pauses lose nothing."""
    size = 24 << 20
    async with flow(sends(size), where, tmp_path) as w:
        load = w.server.front.clients
        stream, writer = await reader(w, where)
        writer.transport.pause_reading()
        await w.until(lambda: load.unread_bytes)
        writer.transport.resume_reading()
        async with asyncio.timeout(60):
            await stream.readuntil(b"\r\n\r\n")
            assert len(await stream.readexactly(size)) == size
        await w.until(lambda: not load.unread_bytes)
        writer.close()


@pytest.mark.parametrize("where", ["plain", "clients"])
async def test_all_slow_readers_together_hold_a_limited_number_of_bytes(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security F11: beyond the limit, the client that has been slow for longest is closed."""
    async with flow(sends(64 << 20), where, tmp_path) as w:
        load = w.server.front.clients
        clients, slow = [], []
        for number in range(4):
            clients.append(await reader(w, where))
            clients[-1][1].transport.pause_reading()
            await w.until(lambda number=number: len(load._slow) == number + 1)
            slow.append(next(reversed(load._slow)))
        monkeypatch.setattr(client_load, "UNREAD_BYTES", load.unread_bytes + 1024)
        clients.append(await reader(w, where))
        clients[-1][1].transport.pause_reading()
        await w.until(lambda: load.refused["unread_bytes"])
        assert load.unread_bytes <= client_load.UNREAD_BYTES
        kept = [each for each in slow if each in load._slow]
        assert kept == slow[-len(kept) :]
        assert 2 <= len(kept) < 4  # sizes differ, so that one or two must go
        await w.until(lambda: len(w.server.front.relays) == len(load._slow))
        if where == "plain":
            text = (await w.get("/metrics"))[1].decode()
            closed = float(load.refused["unread_bytes"])
            assert f'lmetric_client_refusals_total{{bound="unread_bytes"}} {closed}' in text
            assert "lmetric_client_unread_bytes " in text
        for _, writer in clients:
            writer.transport.abort()
        await w.until(lambda: not load.unread_bytes)
        await w.settled()


@pytest.mark.parametrize("size", [100_000, 1_500_000, 20_000_000])
@pytest.mark.parametrize("tls", [False, True])
async def test_no_request_waits_behind_a_refused_body(tls: bool, size: int, tmp_path: Path) -> None:
    """An engine that answers early may never read the rest of the body.

    The rest may be in this process, or in the socket buffers of either side.
    """
    config: dict[str, Any] = {"timeouts": {"answer": 20.0}}
    engine = FakeEngine()
    if tls:
        context, certificate = await self_signed(tmp_path)
        config["engine_tls"] = {"ca_file": str(certificate)}
        engine = TlsEngine(context)
    engine.max_body = 50_000
    async with world([engine], **config) as w:
        await w.post({"model": "tiny", "prompt": "x"})  # the pool has one connection
        status, _, _ = await w.post({"model": "tiny", "prompt": "x" * size})
        assert status == 413
        assert (await w.post({"model": "tiny", "prompt": "x"}))[0] == 200
