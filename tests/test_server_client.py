"""Clients' connections: the fast path, the path through aiohttp, and the change between them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from lmetric.server import app
from lmetric.server.execution.exchange import ClientRequest
from lmetric.server.http import arrive
from lmetric.server.http import connection as connection_module
from lmetric.server.http.incoming import HOLD_BYTES
from lmetric.server.http.running import DRAINING
from lmetric.server.upstream.connection import Connection
from lmetric.server.upstream.pool import Upstream
from server_world import (
    HEAD,
    JSON,
    STREAM_HEAD,
    STREAM_TAIL,
    FakeEngine,
    Request,
    World,
    answer,
    chunk,
    hang,
    plain,
    says,
    token,
    world,
)
from waiting import PATIENCE_SECONDS

BODY = b'{"prompt":"hello"}'
READ_BYTES = 256 * 1024  # bytes that the loops read at once


def post(body: bytes = BODY, path: str = "/v1/completions", fields: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{fields}content-length: {len(body)}\r\n\r\n".encode() + body


class Reader(asyncio.StreamReader):
    """A reader that keeps bytes received before a reset.

    A client that writes to a server after its answer and close gets a reset.
    """

    def set_exception(self, exc: Exception) -> None:
        self.feed_eof()


class Client:
    """A connection with hand-written bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *pieces: bytes, pause: float = 0.002) -> None:
        """Sends each piece in its own packet."""
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.sleep(pause)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Returns status, fields and body of the next answer, which has a length."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.strip().split("\r\n")
            fields = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            body = await self.reader.readexactly(int(fields.get("content-length", 0)))
            return int(first.split()[1]), fields, body

    async def closed(self) -> bytes:
        """Returns all bytes until the server closes."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def client(w: World) -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    reader = Reader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.create_connection(lambda: protocol, "127.0.0.1", w.server.port)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def unchecked(w: World) -> None:
    """Turns off the periodic check, which would give an incomplete request to aiohttp."""
    w.server.front.check = lambda now: None


def through_aiohttp(w: World) -> int:
    """Counts requests that went through aiohttp."""
    return w.server.front.requests_count


async def test_a_request_cut_anywhere_is_the_same_request() -> None:
    whole = post(fields="x-request-id: r1\r\n")
    async with world(1) as w, client(w) as c:
        unchecked(w)
        await w.until(lambda: w.server.front.connections)
        (connection,) = w.server.front.connections
        for cut in range(1, len(whole)):
            c.writer.write(whole[:cut])
            await w.until(lambda cut=cut: connection._held.size == cut)
            c.writer.write(whole[cut:])
            status, fields, _ = await c.answer()
            assert (status, fields["x-request-id"]) == (200, "r1"), cut
        seen = {(r.path, r.body, tuple(sorted(r.headers.items()))) for r in w.engines[0].requests}
        assert len(seen) == 1
        assert len(w.engines[0].requests) == len(whole) - 1
        assert through_aiohttp(w) == 0


async def test_a_request_in_single_bytes() -> None:
    async with world(1) as w, client(w) as c:
        await c.send(*(bytes([byte]) for byte in post()))
        assert (await c.answer())[0] == 200
        assert w.engines[0].requests[0].body == BODY


async def test_plain_requests_take_the_short_way_and_get_an_id() -> None:
    async with world(1) as w, client(w) as c:
        unchecked(w)
        ids = set()
        for path in ("/v1/completions", "/v1/completions?a=1", "/tokenize"):
            await c.send(post(path=path))
            status, fields, _ = await c.answer()
            sent = w.engines[0].requests[-1]
            assert (status, sent.path, sent.body) == (200, path, BODY)
            assert sent.headers["x-request-id"] == fields["x-request-id"]
            ids.add(fields["x-request-id"])
        big = orjson.dumps({"prompt": "x" * 3_000_000})
        await c.send(post(big))
        assert (await c.answer())[0] == 200
        assert w.engines[0].requests[-1].body == big
        assert (len(ids), through_aiohttp(w)) == (3, 0)
        await c.send(post(fields="connection: close\r\n"))
        assert (await c.answer())[1]["connection"] == "close"
        assert await c.closed() == b""


async def test_refusals_keep_the_connection() -> None:
    async with world(1) as w, client(w) as c:
        for body, path, expected in (
            (b"{", "/v1/completions", 400),
            (b'{"model":"nobody","prompt":"a"}', "/v1/completions", 404),
            (BODY, "/nowhere", 404),
            (BODY, "/health", 405),
            (BODY, "/v1/completions", 200),
        ):
            await c.send(post(body, path, "x-request-id: r2\r\n"))
            status, fields, got = await c.answer()
            assert (status, fields["x-request-id"]) == (expected, "r2")
            assert "connection" not in fields
            assert expected == 200 or orjson.loads(got)["error"]["message"]
        assert through_aiohttp(w) == 2, "the unknown path and the wrong method"
        codes = {code: count for (_, _, code), count in w.server.metrics.requests.requests.items()}
        assert codes == {400: 1, 404: 1, 200: 1}


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + chunk(BODY[:5])
            + chunk(BODY[5:])
            + b"0\r\n\r\n",
            id="chunked",
        ),
        pytest.param(post(fields="expect: 100-continue\r\n"), id="expect"),
        pytest.param(post(fields="connection: upgrade\r\nupgrade: h2c\r\n"), id="upgrade"),
    ],
)
async def test_unusual_requests_go_through_aiohttp(request_: bytes) -> None:
    async with world(1) as w, client(w) as c:
        for cut in (1, 40, len(request_) - 3, len(request_)):
            asked = through_aiohttp(w)
            await c.send(request_[:cut], request_[cut:])
            status, _, got = await c.answer()
            if status == 100:
                status, _, got = await c.answer()
            assert (status, orjson.loads(got)["id"]) == (200, "cmpl-1")
            assert w.engines[0].requests[-1].body == BODY
            assert through_aiohttp(w) == asked + 1


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
ENCODED = post(fields="transfer-encoding: chunked\r\n").split(b"content-length")[0] + b"\r\n"


@pytest.mark.parametrize(
    ("bytes_", "says_so"),
    [
        (b"GARBAGE\r\n\r\n", "invalid token"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "invalid token"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "received TLS on a port without TLS"),
        (b"GET /health HTTP/1.9\r\nhost: x\r\n\r\n", "invalid HTTP version"),
        (b"GET  /health HTTP/1.1\r\nhost: x\r\n\r\n", "invalid token"),
        (b"GET /health  HTTP/1.1\r\nhost: x\r\n\r\n", "invalid HTTP version"),
        (b"get /health HTTP/1.1\r\nhost: x\r\n\r\n", "Invalid method encountered"),
        (b"GET http://[::1/ HTTP/1.1\r\nhost: x\r\n\r\n", "invalid URL http://[::1/"),
        (b"GET /health HTTP/1.1\r\n\r\n", "Missing 'Host' header"),
        (b"POST /v1/completions HTTP/1.1\nhost: x\ncontent-length: 18\n\n" + BODY, "a line feed without"),
        (GET + b"no colon\r\n\r\n", "invalid header name"),
        (GET + b"a: b\x00c\r\n\r\n", "invalid header value"),
        (post(fields="content-length: 3\r\n"), "Content-Length"),
        (post(fields="content-length: x\r\n"), "Invalid character in Content-Length"),
        (post(fields="transfer-encoding: chunked\r\n"), "Transfer-Encoding"),
        (post(fields="transfer-encoding: foo\r\n"), "Transfer-Encoding"),
        (ENCODED + b"zz\r\n", "byte 0x7a in a chunk size"),
        (ENCODED + b"2\r\nabcd\r\n", "byte 0x63 after a chunk, expected 0x0d"),
    ],
)
async def test_malformed_http_gets_an_error_object_and_the_connection_closes(
    bytes_: bytes, says_so: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", 0.2)
    good = post(fields="x-request-id: before\r\n")
    async with world(1) as w:

        async def refused(before: bytes, cut: int) -> None:
            async with client(w) as c:
                await c.send(before + bytes_[:cut], bytes_[cut:])
                if before:
                    assert (await c.answer())[0] == 200
                status, fields, got = await c.answer()
                assert await c.closed() == b""
            error = orjson.loads(got)["error"]
            kept = (fields["content-type"], fields["connection"])
            assert (status, kept) == (400, ("application/json", "close"))
            assert fields["x-request-id"]
            assert says_so in error.pop("message")
            assert error == {"type": "invalid_request_error", "param": None, "code": None}

        # Beside one another: the server closes each connection after a while.
        await asyncio.gather(refused(b"", 0), refused(b"", len(bytes_) - 3), refused(good, 0))
        assert w.server.metrics.requests.requests == {("", "", 400): 3, ("tiny", "", 200): 1}
        assert [request.headers["x-request-id"] for request in w.engines[0].requests] == ["before"]
        await w.until(lambda: not w.server.front.connections)
    assert not caplog.records


def head(first: str, *fields: str, body: bytes = BODY) -> bytes:
    lines = (first, *fields, f"content-length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


POST = "POST /v1/completions HTTP/1.1"


@pytest.mark.parametrize(
    ("bytes_", "expected", "says_so"),
    [
        pytest.param(head(POST), 400, "Missing 'Host' header", id="POST without host"),
        pytest.param(head(POST, "host: x", "host: y"), 400, "Host", id="POST with two hosts"),
        pytest.param(head(POST, "host: x/y"), 400, "'x/y' is not a host", id="POST with a bad host"),
        pytest.param(
            head("GET /health HTTP/1.1", "host: x", "host: x"), 400, "Host", id="GET with two hosts"
        ),
        pytest.param(head("GET /health HTTP/1.1", "host: u@x"), 400, "'u@x'", id="GET with a bad host"),
        pytest.param(
            head(POST, "host: x", "content-type: a/b", "Content-Type: c/d"), 400, "Duplicate", id="two types"
        ),
        pytest.param(
            head("POST /v1/completions?a=<b> HTTP/1.1", "host: x"), 400, "percent-encode", id="POST query"
        ),
        pytest.param(head("GET /health?a=<b> HTTP/1.1", "host: x"), 400, "percent-encode", id="GET query"),
        pytest.param(head("GET /health#a HTTP/1.1", "host: x"), 400, "percent-encode", id="fragment"),
        pytest.param(b"GET /health\r\n\r\n", 400, "HTTP/0.9; send HTTP/1.1", id="HTTP/0.9"),
        pytest.param(head("GET /health HTTP/0.9", "host: x"), 400, "HTTP/0.9", id="HTTP/0.9 in the line"),
        pytest.param(
            head("GET /health HTTP/2.0", "host: x"), 505, "HTTP/2.0 is not supported", id="HTTP/2.0"
        ),
        pytest.param(
            head("GET /health HTTP/9.9", "host: x"), 505, "HTTP/9.9 is not supported", id="HTTP/9.9"
        ),
        pytest.param(
            ENCODED.replace(b"chunked", b"gzip, chunked") + chunk(BODY) + b"0\r\n\r\n",
            501,
            'transfer-encoding "gzip, chunked" is not supported',
            id="transfer-encoding gzip, chunked",
        ),
        pytest.param(
            ENCODED.replace(b"HTTP/1.1", b"HTTP/1.0") + chunk(BODY) + b"0\r\n\r\n",
            400,
            "transfer-encoding needs HTTP/1.1",
            id="transfer-encoding over HTTP/1.0",
        ),
        *(
            pytest.param(head(POST, "host: x", *fields), 415, says_so, id=f"content-encoding {says_so}")
            for fields, says_so in (
                (["content-encoding: xyz"], '"xyz"'),
                (["content-encoding: br"], '"br"'),
                (["content-encoding: zstd"], '"zstd"'),
                (["content-encoding: gzip, gzip"], '"gzip, gzip"'),
                (["content-encoding: gzip", "content-encoding: identity, gzip"], '"gzip, gzip"'),
            )
        ),
    ],
)
async def test_requests_that_break_http_are_refused_whoever_reads_them(
    bytes_: bytes, expected: int, says_so: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reliability L: host, target, version, transfer-encoding, content-encoding; both parsers."""
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", 0.2)
    async with world(1) as w, client(w) as c:
        await c.send(bytes_)
        status, fields, got = await c.answer()
        error = orjson.loads(got)["error"]
        assert (status, fields["connection"]) == (expected, "close")
        assert says_so in error["message"]
        assert (fields.get("accept-encoding") == "gzip, deflate") == (expected == 415)
        assert await c.closed() == b""
        assert not w.engines[0].requests


async def test_targets_with_a_scheme_and_a_host_are_taken() -> None:
    """Reliability L: absolute-form targets, which a server must accept (RFC 9112, 3.2.2)."""
    async with world(1) as w, client(w) as c:
        for first, path in (
            ("POST http://router:80/v1/completions?a=1 HTTP/1.1", "/v1/completions?a=1"),
            ("POST HTTPS://[::1]/v1/completions HTTP/1.1", "/v1/completions"),
        ):
            await c.send(head(first, "host: x"))
            assert (await c.answer())[0] == 200
            assert w.engines[0].requests[-1].path == path
        for first, expected in (
            ("GET http://router/health HTTP/1.1", 200),
            ("GET http://router HTTP/1.1", 200),
            ("GET http://router?/health HTTP/1.1", 200),
            ("GET ftp://router/health HTTP/1.1", 404),
        ):
            await c.send(head(first, "host: x", body=b""))
            assert (await c.answer())[0] == expected, first


async def test_connection_names_no_field_that_is_for_the_engine_or_the_client() -> None:
    """Reliability L: Connection removes no end-to-end fields, in either direction."""
    names = b"connection: content-type, retry-after, x-hop\r\nx-hop: 1\r\nretry-after: 7\r\n"
    engine = FakeEngine(behave=says(plain(200, {"id": "a"}, names), then="keep"))
    async with world([engine]) as w, client(w) as c:
        for more in ("", "expect: 100-continue\r\n"):
            fields = f"{more}Connection: authorization, content-type, x-hop\r\nx-hop: 1\r\n"
            await c.send(post(fields=fields + "authorization: Bearer a\r\ncontent-type: text/plain\r\n"))
            answer = await c.answer()
            if answer[0] == 100:
                answer = await c.answer()
            assert (answer[0], answer[1]["content-type"], answer[1]["retry-after"]) == (
                200,
                "application/json",
                "7",
            )
            assert "x-hop" not in answer[1]
            sent = engine.requests[-1].headers
            assert (sent["authorization"], sent["content-type"]) == ("Bearer a", "text/plain")
            assert "x-hop" not in sent


async def test_a_client_that_closes_its_half_has_left() -> None:
    """Reliability L: a half-closed connection counts as closed (docs/reference/engines.md)."""
    async with world([FakeEngine(behave=hang)]) as w, client(w) as c:
        await c.send(post())
        await w.engines[0].asked(1)
        c.writer.write_eof()
        assert await c.closed() == b""
        await w.until(lambda: w.engines[0].left == 1)
        assert list(w.server.metrics.requests.requests) == [("tiny", "", 499)]


@pytest.mark.parametrize(
    ("status", "kind", "extra"),
    [
        pytest.param(302, b"text/html", b"location: http://elsewhere/\r\n", id="redirect"),
        pytest.param(200, b"text/html; charset=utf-8", b"set-cookie: a=1\r\n", id="page and cookie"),
        pytest.param(200, JSON, b"access-control-allow-origin: *\r\n", id="CORS"),
    ],
)
async def test_an_engines_answer_passes_whatever_it_is(status: int, kind: bytes, extra: bytes) -> None:
    """Reliability L: redirects, cookies, CORS fields and pages pass (docs/reference/engines.md)."""
    body = b"<p>hello</p>"
    sent = HEAD % (status, kind) + extra + b"content-length: %d\r\n\r\n" % len(body) + body
    async with world([FakeEngine(behave=says(sent, then="keep"))]) as w, client(w) as c:
        await c.send(post())
        got_status, fields, got = await c.answer()
        name, _, value = extra.decode().strip().partition(": ")
        assert (got_status, fields["content-type"], fields[name]) == (status, kind.decode(), value)
        assert got == body


@pytest.mark.parametrize("first", [b"", ENCODED + chunk(BODY) + b"0\r\n\r\n"])
async def test_a_chunk_that_turns_out_broken_ends_its_request_at_once(
    first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the request waits for the answer to the previous request."""
    for path, status in ((b"/v1/completions", 400), (b"/nowhere", 404)):
        async with world([FakeEngine(pace=0.05)]) as w, client(w) as c:
            await c.send(first, ENCODED.replace(b"/v1/completions", path), chunk(BODY), b"zz\r\n", pause=0.01)
            if first:
                assert (await c.answer())[0] == 200
            got_status, _, got = await c.answer()
            told = "chunk size" in orjson.loads(got)["error"]["message"]
            assert (got_status, told) == (status, status == 400)
            assert await c.closed() == b""
            assert len(w.engines[0].requests) == bool(first)
    assert not caplog.records


async def test_a_body_that_is_too_long_never_reaches_an_engine() -> None:
    async with world(1, limits={"max_body_bytes": 1000}) as w, client(w) as c:
        await c.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
        assert (await c.closed()).startswith(b"HTTP/1.1 413 ")
        assert not w.engines[0].requests


async def test_pipelined_requests_of_both_ways_are_answered_in_order() -> None:
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    encoded = post(fields="transfer-encoding: chunked\r\n").split(b"content-length")[0]
    requests = [
        *(post(fields="x-request-id: 0\r\n"), get, post(fields="x-request-id: 2\r\n")),
        *(post(b"{", fields="x-request-id: 3\r\n"), post(BODY, "/nowhere"), get),
        post(fields="x-request-id: 6\r\n"),
        encoded + b"x-request-id: 7\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n",
        *(post(fields="x-request-id: 8\r\n"), get),
    ]
    whole = b"".join(requests)
    expected = [200, 200, 200, 400, 404, 200, 200, 200, 200, 200]
    async with world([FakeEngine(pace=0.001)]) as w:
        for size in (len(whole), 7, 64, 200):
            async with client(w) as c:
                await c.send(*(whole[at : at + size] for at in range(0, len(whole), size)), pause=0.001)
                answers = [await c.answer() for _ in requests]
                assert [status for status, _, _ in answers] == expected
                for number in (0, 2, 3, 6, 7, 8):
                    assert answers[number][1]["x-request-id"] == str(number)


async def test_what_is_pipelined_is_bounded_and_all_answered() -> None:
    gate = asyncio.Event()

    async def gated(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await gate.wait()
        return await answer(engine, request, writer)

    async with world([FakeEngine(behave=gated)]) as w, client(w) as c:
        unchecked(w)
        for size, count in ((50_000, 200), (10, 6_000)):
            gate.clear()
            one = post(orjson.dumps({"prompt": "x" * size}))
            c.writer.write(one * count)
            await w.engines[0].asked(1)
            await asyncio.sleep(0.3)
            (connection,) = w.server.front.connections
            # The bytes held when reading stops, and those read at once before.
            assert 0 < connection._held.size < HOLD_BYTES + READ_BYTES
            gate.set()
            for number in range(count):
                assert (await c.answer())[0] == 200
                assert connection._held.size < HOLD_BYTES + READ_BYTES, number
        assert through_aiohttp(w) == 0


async def test_the_body_of_a_refused_request_is_skipped() -> None:
    rest = b"y" * 3000
    async with world(1) as w, client(w) as c:
        await c.send(post(b"x" * 100 + rest, "/nowhere").removesuffix(rest))
        assert (await c.answer())[0] == 404
        await c.send(rest[:1000], rest[1000:] + post())
        assert (await c.answer())[0] == 200
        assert through_aiohttp(w) == 1


async def test_a_slow_body_has_a_time_limit_whoever_reads_it() -> None:
    whole = post()
    async with world(1, timeouts={"body": 0.4}) as w:
        async with client(w) as c:
            await c.send(whole[:-5], whole[-5:], pause=0.25)
            assert (await c.answer())[0] == 200
            await c.send(whole)
            assert (await c.answer())[0] == 200
        async with client(w) as c:
            await c.send(whole[:20], whole[20:], pause=0.25)
            assert (await c.answer())[0] == 200
        assert through_aiohttp(w) == 0
        unusual = post(fields="expect: 100-continue\r\n")
        told = b"incomplete after 0.4 s: %d of %d bytes received" % (len(BODY) - 5, len(BODY))
        for part in (whole[:-5], unusual[:-5]):
            async with client(w) as c:
                await c.send(part)
                status, fields, got = await c.answer()
                if status == 100:
                    status, fields, got = await c.answer()
                assert (status, fields["connection"]) == (408, "close")
                assert told in got
                assert await c.closed() == b""
        async with client(w) as c:
            await c.send(ENCODED + chunk(BODY))
            status, _, got = await c.answer()
            assert status == 408
            assert b"incomplete after 0.4 s: %d bytes received" % len(BODY) in got
        await w.until(lambda: not w.server.front.connections)
        assert w.server.front.clients.body_bytes == 0


async def test_the_clock_of_a_request_starts_when_its_body_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 6.1: the time of a slow upload is not the engine's, whoever reads the body."""
    starts = []
    async with world(1) as w:
        serve = w.server.front.arrivals.serve

        def noted(client_request: ClientRequest, body: bytes) -> None:
            starts.append(client_request.started)
            serve(client_request, body)

        monkeypatch.setattr(w.server.front.arrivals, "serve", noted)
        for request in (
            post(),
            post(fields="expect: 100-continue\r\n"),
            ENCODED + chunk(BODY) + b"0\r\n\r\n",
        ):
            async with client(w) as c:
                await c.send(request[:-5], pause=0.05)
                sent_at = time.monotonic()
                await c.send(request[-5:])
                status, _, _ = await c.answer()
                if status == 100:
                    status, _, _ = await c.answer()
                assert status == 200
                assert starts[-1] >= sent_at
        assert len(starts) == 3


async def test_a_large_body_comes_whole_where_aiohttps_reader_fills_up_in_between() -> None:
    """aiohttp's parser keeps the end of the body, and continues when its reader has room."""
    body = orjson.dumps({"prompt": "x" * 3 * READ_BYTES})
    unusual = post(body, fields="expect: 100-continue\r\n")
    async with world(1, timeouts={"body": 1.0}) as w, client(w) as c:
        unchecked(w)
        await w.until(lambda: w.server.front.connections)
        (connection,) = w.server.front.connections
        # Within one iteration of the loop, as after a burst: aiohttp's task reads nothing in
        # between.
        for pieces in ([unusual], [unusual[:READ_BYTES], unusual[READ_BYTES:]], [unusual[:-1], unusual[-1:]]):
            asked = through_aiohttp(w)
            for piece in pieces:
                connection.data_received(piece)
            status, _, _ = await c.answer()
            if status == 100:
                status, _, _ = await c.answer()
            assert status == 200
            assert w.engines[0].requests[-1].body == body
            assert through_aiohttp(w) == asked + 1


async def test_a_large_body_that_nobody_asked_for_is_skipped() -> None:
    """The body comes after the answer and before the next request."""
    refused = post(b"x" * 3 * READ_BYTES, "/nowhere")
    async with world(1) as w, client(w) as c:
        unchecked(w)
        await w.until(lambda: w.server.front.connections)
        (connection,) = w.server.front.connections
        for _ in range(3):
            connection.data_received(refused)
            assert (await c.answer())[0] == 404
            await c.send(post())
            assert (await c.answer())[0] == 200
        await asyncio.sleep(1.2)  # aiohttp waits one second for the rest of a body
        assert w.server.front.connections
        assert through_aiohttp(w) == 3


async def test_a_head_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security F2: it begins with the first byte, and further bytes do not extend it."""
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.3)
    async with world(1) as w, client(w) as c, client(w) as unused:
        await c.send(b"POST /v1/comp")
        for byte in b"letions HTTP/1.1\r\nhost: x\r\na: " + b"b" * 1000:
            await c.send(bytes([byte]), pause=0.01)
            if c.reader.at_eof() or c.reader._buffer:  # type: ignore[attr-defined]
                break
        status, fields, got = await c.answer()
        assert (status, fields["connection"]) == (408, "close")
        assert b"the head is incomplete after" in got
        assert await c.closed() == b""
        assert w.server.front.clients.refused["head_time"] == 1
        assert w.server.front.clients.body_bytes == 0
        await unused.send(post())
        assert (await unused.answer())[0] == 200


async def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    gate = asyncio.Event()

    async def gated(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.json.get("stream"):
            writer.write(STREAM_HEAD + chunk(token("a")))
            await gate.wait()
            writer.write(chunk(token("b", "stop")) + STREAM_TAIL)
            return True
        return await answer(engine, request, writer)

    async with world([FakeEngine(behave=gated)], timeouts={"keep_alive": 0.3}) as w:
        async with (
            client(w) as unused,
            client(w) as used,
            client(w) as busy,
            client(w) as page,
        ):
            await page.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await page.answer())[0] == 200
            await used.send(post())
            assert (await used.answer())[0] == 200
            await busy.send(post(b'{"prompt":"a","stream":true}'))
            for idle in (unused, used, page):
                assert await idle.closed() == b""
            gate.set()
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert (await busy.reader.readuntil(b"0\r\n\r\n")).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        await w.until(lambda: not w.server.front.connections)


async def test_stopping_closes_idle_connections_at_once_and_tells_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "STOP_SECONDS", 3600.0)  # nothing waits for it
    async with (
        world([FakeEngine(behave=hang)]) as w,
        client(w) as idle,
        client(w) as used,
        client(w) as busy,
    ):
        await used.send(post(b"{"))
        await used.answer()
        await busy.send(post())
        await w.engines[0].asked(1)
        await w.until(lambda: len(w.server.front.connections) == 3)
        w.server.front.running.phase = DRAINING
        async with asyncio.timeout(PATIENCE_SECONDS):
            await w.server.stop()
        assert await idle.closed() == await used.closed() == b""
        got = await busy.closed()
        assert got.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"connection: close\r\n" in got
        assert b"shutting down" in got
        assert w.in_flight() == 0


async def test_a_client_that_leaves_while_its_engine_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    started = asyncio.Event()

    async def never(self: Upstream) -> Connection:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with world(1) as w:
        monkeypatch.setattr(Upstream, "connect", never)
        async with client(w) as c:
            await c.send(post())
            await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
            assert w.in_flight() == 1
        await w.settled()
        assert list(w.server.metrics.requests.requests) == [("tiny", "", 499)]
        assert w.server.fleet.models[0].router.stats()["failed"]["cancelled"] == 1


async def test_pipelined_requests_behind_a_client_that_left_are_forgotten() -> None:
    async with world([FakeEngine(behave=hang)]) as w:
        async with client(w) as c:
            await c.send(post() + post())
            await w.engines[0].asked(1)
        await w.settled()
        assert len(w.engines[0].requests) == 1


@pytest.mark.parametrize("place", ["arrive.parse", "upstream.head", "connect"])
async def test_a_fault_of_the_router_is_a_500_and_leaves_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug")

    async def fail_later(*_: Any) -> Any:
        fail()

    async with world(1) as w, client(w) as c:
        if place == "arrive.parse":
            monkeypatch.setattr(arrive, "parse", fail)
        else:
            name = place.removeprefix("upstream.")
            monkeypatch.setattr(Upstream, name, fail_later if name == "connect" else fail)
        await c.send(post())
        status, _, got = await c.answer()
        assert (status, orjson.loads(got)["error"]["message"]) == (
            500,
            "internal error of the router; see its log for the reason",
        )
        await w.settled()
        assert w.in_flight() == 0


async def test_a_fault_on_the_way_through_aiohttp_is_a_500_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug")

    async with world(1) as w, client(w) as c:
        monkeypatch.setattr(w.server.front.admission, "admits", fail)
        await c.send(ENCODED + chunk(BODY) + b"0\r\n\r\n")
        status, _, got = await c.answer()
        assert (status, orjson.loads(got)["error"]["type"]) == (500, "server_error")
        assert await c.closed() == b""


async def test_tokens_reach_the_indicators_while_the_stream_goes_on() -> None:
    steps = [asyncio.Event() for _ in range(3)]

    async def stepwise(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(token("a")))
        for step in steps:
            await step.wait()
            writer.write(chunk(token("b")) + chunk(token("c")))
        writer.write(chunk(token("", "stop")) + STREAM_TAIL)
        return True

    async with world([FakeEngine(behave=stepwise)], policy="lmetric") as w, client(w) as c:
        model = w.server.fleet.models[0]
        await c.send(post(b'{"prompt":"a","stream":true}'))
        await c.reader.readuntil(token("a"))
        assert model.router.stats()["output_tokens"] == 1
        for done, step in enumerate(steps, 1):
            step.set()
            await w.until(lambda done=done: model.router.stats()["output_tokens"] == 1 + 2 * done)
        await c.reader.readuntil(b"0\r\n\r\n")
