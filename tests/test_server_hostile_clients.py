"""Clients that cost the router as much as they can, or send odd heads and credentials.

Security F1 (compressed bodies), F2 (heads), F12 (pieces of bodies), F16 (shares of places), L
(WebSocket, DNS rebinding); bugs 6 (WebSocket), 7 (long heads), 8 (credentials). Evidence: counts
and sizes. `turn_guard.py` measures the time of the loop in all server tests.
"""

import asyncio
import contextlib
import gzip
import time
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from turn_guard import of_reference

from lmetric.server.http import connection as connection_module
from lmetric.server.http import unpacking
from lmetric.server.http.connection import SMALL_HEAD, ClientConnection
from lmetric.server.http.unpacking import LOOP_BYTES, PIECE_BYTES, Unpacker
from lmetric.server.upstream.reading import BYTES_IN_TURN, READERS_IN_TURN
from load_messages import message
from server_world import READ_BYTES, FakeEngine, World, answer, bytes_by_turn, chunk, hang, world
from test_server_client import BODY, ENCODED, GET, client, post, through_aiohttp

PACKED = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "raw deflate": lambda data: zlib.compress(data)[2:-4],
    "members": lambda data: gzip.compress(data[:5]) + gzip.compress(b"") + gzip.compress(data[5:]),
}
SECRET = "sk-SECRET-"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Settings with the keys of two tenants."""
    file = tmp_path / "keys.yaml"
    file.write_text("sk-alice: alice\nsk-bob: bob\n")
    return {"auth": {"keys_file": str(file)}}


# Compressed bodies.


@pytest.mark.parametrize("kind", PACKED)
async def test_compressed_bodies_are_unpacked(kind: str) -> None:
    """Security F1: with a length and in chunks, in all forms that clients send."""
    encoding = "deflate" if "deflate" in kind else "gzip"
    fields = f"content-encoding: {encoding}\r\n"
    async with world(1) as w, client(w) as c:
        for size in (1, LOOP_BYTES, 3 * PIECE_BYTES + 5):
            body = orjson.dumps({"prompt": "x" * size})
            packed = PACKED[kind](body)
            await c.send(post(packed, fields=fields))
            assert (await c.answer())[0] == 200
            assert w.engines[0].requests[-1].body == body
            chunks = b"".join(chunk(packed[at : at + 1000]) for at in range(0, len(packed), 1000))
            await c.send(ENCODED[:-2] + fields.encode() + b"\r\n" + chunks + b"0\r\n\r\n")
            assert (await c.answer())[0] == 200
            assert w.engines[0].requests[-1].body == body
        assert "content-encoding" not in w.engines[0].requests[-1].headers
        await w.until(lambda: w.server.front.clients.body_bytes == 0)


@pytest.mark.parametrize(
    ("encoding", "packed", "says_so"),
    [
        ("gzip", b"no gzip", "it is not gzip"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-3], "it is incomplete"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", "it is not gzip"),
        ("gzip", gzip.compress(b"", mtime=0) * 300, "it has bytes after its end"),
        ("deflate", zlib.compress(BODY) + b"more", "it has bytes after its end"),
        ("deflate", zlib.compress(BODY)[:-1], "it is incomplete"),
    ],
    ids=range(6),
)
async def test_broken_compressed_bodies_are_refused(encoding: str, packed: bytes, says_so: str) -> None:
    async with world(1) as w:
        status, _, got = await w.post(packed, headers={"content-encoding": encoding})
        assert (status, says_so in got["error"]["message"]) == (400, True), got
        assert w.server.front.clients.body_bytes == 0


async def test_no_byte_is_unpacked_without_a_key(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security F1: neither for engines nor for pages, and not after the refusal."""
    made = []
    monkeypatch.setattr(unpacking, "Unpacker", lambda *packed: made.append(packed))
    bomb = gzip.compress(b"\0" * (32 << 20))
    encoded = "content-encoding: gzip\r\n"
    admin = {"enabled": True, "token": "root"}
    async with world(1, admin=admin, replicas={"urls": [], "token": "r"}, **keys) as w:
        for path, status in (
            ("/v1/completions", 401),
            ("/admin/guard", 401),
            ("/health", 405),
            ("/nowhere", 404),
        ):
            for whole in (post(bomb, path, encoded), b"".join(_in_chunks(bomb, path, encoded))):
                async with client(w) as c:
                    await c.send(whole[:500], whole[500:])
                    assert (await c.answer())[0] == status, path
        await w.until(lambda: not w.server.front.connections)
    assert made == []


def _in_chunks(body: bytes, path: str, fields: str) -> list[bytes]:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{fields}transfer-encoding: chunked\r\n\r\n"
    return [head.encode(), *(chunk(body[at : at + 100]) for at in range(0, len(body), 100)), b"0\r\n\r\n"]


async def test_a_bomb_is_unpacked_in_bounded_pieces_outside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security F1: with a key, pieces count before they are unpacked, and requests take turns."""
    pieces: list[tuple[str, int]] = []
    piece = Unpacker.piece

    def noted(self: Unpacker, size: int) -> bytes:
        with contextlib.suppress(RuntimeError):  # no loop: this is the thread
            asyncio.get_running_loop()
            pieces.append(("loop", size))
            return piece(self, size)
        pieces.append(("thread", size))
        return piece(self, size)

    monkeypatch.setattr(Unpacker, "piece", noted)
    limit = 32 << 20
    bomb, too_long = (gzip.compress(b" " * size) for size in (limit, limit + 1))
    total = 80 << 20
    limits = {"max_body_bytes_total": total, "max_client_share": 1.0}
    async with world(1, limits=limits) as w:
        load = w.server.front.clients
        for packed, status in ((bomb, 400), (too_long, 413)):  # spaces are no JSON
            assert (await w.post(packed, headers={"content-encoding": "gzip"}))[0] == status
            assert {size for place, size in pieces if place == "loop"} == {LOOP_BYTES}
            threads = [size for place, size in pieces if place == "thread"]
            assert len(threads) == limit // PIECE_BYTES
            assert max(threads) == PIECE_BYTES
            pieces.clear()
            assert load.body_bytes == 0
        statuses = await asyncio.gather(
            *(w.post(bomb, headers={"content-encoding": "gzip"}) for _ in range(5))
        )
        assert {status for status, _, _ in statuses} <= {400, 503}
        assert load.refused["body_bytes_total"] == len([1 for status, _, _ in statuses if status == 503])
        assert load.body_bytes == 0


# Heads.


async def test_long_heads_pass_whoever_reads_them() -> None:
    """Bugs 7: heads up to 64 KiB and 256 fields, on all paths; long targets too."""
    token = "a" * 50_000
    long = f"authorization: Bearer {token}\r\n"
    many = "".join(f"x-{number}: b\r\n" for number in range(250))
    query = "?q=" + "x" * 9_000
    async with world(1) as w, client(w) as c:
        for fields in (long, many):
            await c.send(post(path=f"/v1/completions{query}", fields=fields))
            assert (await c.answer())[0] == 200
            await c.send(post(path=f"/v1/completions{query}", fields=fields + "expect: 100-continue\r\n"))
            got = await c.answer()
            assert (got if got[0] != 100 else await c.answer())[0] == 200
            sent = w.engines[0].requests[-1]
            assert sent.path == f"/v1/completions{query}"
            for path in ("/v1/models", f"/health{query}"):
                await c.send(GET.replace(b"/health", path.encode()) + fields.encode() + b"\r\n")
                assert (await c.answer())[0] == 200, path
        assert w.engines[0].requests[0].headers["authorization"] == f"Bearer {token}"
        assert w.engines[0].requests[-1].headers["x-249"] == "b"
        assert w.server.front.clients.body_bytes == 0


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/responses/", "/v1/"])
async def test_long_targets_take_little_time(path: str) -> None:
    async with world(1) as w, client(w) as c:
        for part in ("%", "%41", "/", "a&"):
            head = GET.replace(b"/health", (path + part * (60_000 // len(part))).encode()) + b"\r\n"
            seconds = []
            for _ in range(3):
                began = time.thread_time()
                await c.send(head)
                assert (await c.answer())[0] in (400, 404)
                seconds.append(time.thread_time() - began)
            assert of_reference(min(seconds)) < 0.004, part


@pytest.mark.parametrize("first", [b"POST /v1/completions", b"GET /health", b"GET /v1/models", b"PUT /x"])
@pytest.mark.parametrize("complete", [True, False])
async def test_a_head_above_the_limits_is_a_431_that_shows_no_value(
    first: bytes, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs 7, security F2: the error names the field. No limit of aiohttp comes first."""
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", 0.2)
    end = b"\r\n\r\n" if complete else b""
    start = first + b" HTTP/1.1\r\nhost: x\r\n"
    secret = SECRET.encode()
    too_large = (
        (start + b"x-own: 1\r\nauthorization: Bearer " + secret * 7_000 + end, 'the field "authorization"'),
        (start + b"a: b\r\n" * 255 + b"x-last: " + secret + b"\r\n\r\n", 'the field "x-last"'),
        (first + b"?key=" + secret * 7_000 + b" HTTP/1.1\r\n" + end, "the request line"),
    )
    async with world(1) as w:

        async def refused(head: bytes, named: str) -> None:
            async with client(w) as c:
                await c.send(head)
                status, fields, got = await c.answer()
                error = orjson.loads(got)["error"]
                assert (status, fields["connection"], error["code"]) == (431, "close", "head_too_large")
                assert named in error["message"]
                assert SECRET not in error["message"]
                assert await c.closed() == b""

        # Beside one another: the server closes each connection after a while.
        await asyncio.gather(*(refused(head, named) for head, named in too_large))
        assert w.server.front.clients.refused["head_size"] == 3
        assert through_aiohttp(w) == 0
    async with world(1, limits={"max_head_bytes": 2000}) as w, client(w) as c:
        await c.send(post(fields=f"a: {'b' * 2000}\r\n"))
        assert (await c.answer())[0] == 431


@pytest.mark.parametrize(
    "bytes_",
    [
        GET + f"authorization: Bearer {SECRET}\x00\r\n\r\n".encode(),
        GET + f"authorization : Bearer {SECRET}\r\n\r\n".encode(),
        GET + f"authorization: Bearer\r\n {SECRET}\r\n\r\n".encode(),
        GET + f"authorization: Bearer {SECRET}\n\n".encode(),
        f"GETS /health?key={SECRET} HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
        f"GET http://[::1?key={SECRET} HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
        f"GET  /health?key={SECRET} HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
        f"GET /health?key={SECRET} HTTP/1.1\r\nx-api-key: {SECRET}\r\n\r\n".encode(),
        f"GET /health?key={SECRET} HTTP/3.1\r\nhost: x\r\n\r\n".encode(),
        post(fields=f"x-api-key: {SECRET}\r\ncontent-type: {SECRET}\r\ncontent-type: {SECRET}\r\n"),
    ],
)
async def test_no_error_about_a_head_shows_a_value(bytes_: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling of bugs 7: malformed heads may hold secrets, too."""
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", 0.2)
    async with world(1) as w, client(w) as c:
        await c.send(bytes_)
        status, _, got = await c.answer()
        assert status in (400, 505)
        assert SECRET not in got.decode()
        assert await c.closed() == b""


async def test_unfinished_heads_count_from_their_first_byte() -> None:
    """Security F2: 40 heads without an end count, and one more than the limit allows is refused."""
    size = 60_000
    limits = {"max_body_bytes_total": 41 * size, "max_client_share": 1.0}
    async with world(1, limits=limits) as w, contextlib.AsyncExitStack() as stack:
        load = w.server.front.clients
        for number in range(40):
            c = await stack.enter_async_context(client(w))
            c.writer.write((GET + b"a: " + b"b" * size)[:size])
            await w.until(lambda number=number: load.body_bytes == (number + 1) * size)
        one_more = await stack.enter_async_context(client(w))
        one_more.writer.write((GET + b"a: " + b"b" * 2 * size)[: size + 1000])
        status, _, got = await one_more.answer()
        assert (status, orjson.loads(got)["error"]["code"]) == (503, "too_many_bytes")
        other = await stack.enter_async_context(client(w))
        await other.send(GET + b"\r\n")
        assert (await other.answer())[0] == 200, "small requests are served"
        assert through_aiohttp(w) == 1, "aiohttp keeps nothing of an unfinished head"
        await stack.aclose()
        await w.until(lambda: load.body_bytes == 0)


async def test_bytes_in_aiohttp_count_until_their_request_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Security F2: heads of pages and bodies that nobody reads yet."""
    gate = asyncio.Event()
    async with world(1) as w, client(w) as c:
        pages = w.server.front.pages

        async def gated(*values: Any) -> Any:
            await gate.wait()
            return await pages(*values)

        monkeypatch.setattr(w.server.front, "pages", gated)
        load = w.server.front.clients
        head = GET + b"a: " + b"b" * 2 * SMALL_HEAD + b"\r\n\r\n"
        await c.send(head)
        await w.until(lambda: load.body_bytes == len(head))
        gate.set()
        assert (await c.answer())[0] == 200
        assert load.body_bytes == 0
        gate.clear()
        upload = post(b"x" * 50_000, "/nowhere")
        await c.send(upload[:-1])
        await w.until(lambda: load.body_bytes == len(upload) - 1)
        gate.set()
        await c.send(upload[-1:])
        assert (await c.answer())[0] == 404
        await w.until(lambda: load.body_bytes == 0)


async def test_an_unfinished_head_is_not_read_again_for_each_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling of F2: the work of a head is linear in its bytes, however it is cut."""
    reads = 0
    begin = ClientConnection._begin

    def counted(self: ClientConnection, data: bytes) -> None:
        nonlocal reads
        reads += 1
        begin(self, data)

    monkeypatch.setattr(ClientConnection, "_begin", counted)
    async with world(1) as w, client(w) as c:
        await w.until(lambda: w.server.front.connections)
        (connection,) = w.server.front.connections
        for byte in GET + b"a: " + b"b" * 5_000 + b"\r\n\r\n":
            connection.data_received(bytes([byte]))
        assert (await c.answer())[0] == 200
    assert reads == 2, "the first byte, and the end"


# Pieces.


async def test_chunks_of_one_byte_reach_aiohttp_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security F12: aiohttp's work and memory depend on the bytes of a body, not on its chunks."""
    fed = []
    received = aiohttp.web_protocol.RequestHandler.data_received

    def noted(self: Any, data: bytes) -> None:
        fed.append(data)
        received(self, data)

    monkeypatch.setattr(aiohttp.web_protocol.RequestHandler, "data_received", noted)
    body = orjson.dumps({"prompt": "x" * 20_000})
    async with world(1) as w, client(w) as c:
        c.writer.write(ENCODED + b"".join(b"1;a=%d\r\n%c\r\n" % (byte, byte) for byte in body) + b"0\r\n\r\n")
        assert (await c.answer())[0] == 200
        assert w.engines[0].requests[0].body == body
    assert sum(map(len, fed)) < len(body) + len(ENCODED) + 20 * len(fed)


async def test_long_chunk_extensions_are_refused_and_counted() -> None:
    """Security F12."""
    async with world(1) as w:
        for size, status in ((250, 200), (257, 400)):
            async with client(w) as c:
                await c.send(ENCODED + b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(BODY), b"e" * size, BODY))
                got = await c.answer()
                assert got[0] == status
        assert b"a chunk extension of more than 256 bytes" in got[2]
        assert w.server.front.clients.refused["chunks"] == 1
        metrics = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_client_refusals_total{bound="chunks"} 1.0' in metrics


async def test_a_busy_connection_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security F12: after a large read, a connection reads on in a later turn of the loop."""
    body = orjson.dumps({"prompt": "x" * (16 << 20)})
    async with world(1) as w, client(w) as c:
        with bytes_by_turn(monkeypatch, ClientConnection, "data_received") as turns:
            for request in (post(body), post(body, fields="expect: 100-continue\r\n")):
                c.writer.write(request)
                status, _, _ = await c.answer()
                if status == 100:
                    status, _, _ = await c.answer()
                assert status == 200
        assert max(turns) <= READ_BYTES
        assert [len(request.body) for request in w.engines[0].requests] == [len(body)] * 2


async def test_many_busy_connections_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security F12: the bytes that all connections process in a turn are bounded.

    Bytes instead of the 5 ms of the review: they do not depend on the speed of the machine. 4 MiB
    of such chunks take 35 ms.
    """
    piece = b"1;" + b"e" * 200 + b"\r\n \r\n"
    flood = ENCODED + piece * (2_000_000 // len(piece))
    async with world(1) as w, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(w)) for _ in range(64)]
        with bytes_by_turn(monkeypatch, ClientConnection, "_received") as turns:
            for c in clients:
                c.writer.write(flood)
            await w.until(lambda: sum(turns) >= 64 * len(flood))
        assert max(turns) <= BYTES_IN_TURN + READERS_IN_TURN * READ_BYTES
        assert w.server.front.clients.body_bytes > 0
        for c in clients:
            c.writer.transport.abort()
        await w.until(lambda: not w.server.front.connections)
        assert w.server.front.clients.body_bytes == 0


async def test_reads_for_a_later_turn_count_as_body_bytes() -> None:
    """Security F12 and F2: reads that wait are within the limits, and end with their client."""
    async with (
        world(1, limits={"max_body_bytes_total": 8 << 20, "max_client_share": 0.5}) as w,
        client(w) as c,
    ):
        await w.until(lambda: w.server.front.connections)
        (connection,) = w.server.front.connections
        load = w.server.front.clients
        connection.data_received(ENCODED + b"1000000\r\n" + b"x" * (BYTES_IN_TURN + 1))
        assert load.body_bytes > BYTES_IN_TURN
        connection.data_received(b"x" * (1 << 20))
        connection.data_received(b"x" * (1 << 20))
        assert load.refused["body_bytes_per_client"] == 1
        with contextlib.suppress(ConnectionError):
            await c.reader.read()
        await w.until(lambda: not w.server.front.connections)
        assert load.body_bytes == 0


async def test_a_body_in_many_pieces_takes_no_more_memory_than_it_counts() -> None:
    """A sibling of F12: pieces are joined as they come."""
    async with world([FakeEngine(behave=answer)]) as w, client(w) as c:
        await w.until(lambda: w.server.front.connections)
        (connection,) = w.server.front.connections
        request = post(orjson.dumps({"prompt": "x" * 20_000}))
        for byte in request[:-1]:
            connection.data_received(bytes([byte]))
        assert len(connection._held.parts) <= 2
        assert w.server.front.clients.body_bytes == len(request) - 1
        connection.data_received(request[-1:])
        assert (await c.answer())[0] == 200


# Places.


@contextlib.asynccontextmanager
async def waiting(w: World, number: int, headers: dict[str, str] | None = None) -> Any:
    """Requests that their engine never answers."""
    before = w.in_flight()
    tasks = [asyncio.create_task(w.post(headers=headers)) for _ in range(number)]
    await w.until(lambda: w.in_flight() == before + number)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await w.until(lambda: w.in_flight() == before)


async def from_address(w: World, address: str) -> int:
    """Returns the status of a bad request of another client address."""
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(w.url + "/v1/completions", data=b"{") as response,
    ):
        return response.status


async def test_one_address_gets_half_of_the_places() -> None:
    """Security F16: the other half is for other addresses."""
    async with world([FakeEngine(behave=hang)], limits={"max_concurrent_requests": 6}) as w:
        async with waiting(w, 3):
            status, headers, got = await w.post()
            assert (status, headers["retry-after"], got["error"]["code"]) == (503, "1", "too_many")
            assert "of this client address" in got["error"]["message"]
            assert await from_address(w, "127.0.0.2") == 400, "it is read"
            assert w.server.front.clients.refused["requests_per_client"] == 1
        w.engines[0].behave = answer
        assert (await w.post())[0] == 200


async def test_one_tenant_gets_half_of_the_places(keys: dict[str, Any]) -> None:
    """Security F16: with keys, tenants behind one gateway do not displace each other."""
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    proxies = {"trusted_proxies": ["127.0.0.0/8"]}
    limits = {"max_concurrent_requests": 4}
    async with world([FakeEngine(behave=hang)], limits=limits, forwarded=proxies, **keys) as w:
        async with waiting(w, 2, alice | {"x-forwarded-for": "10.0.0.1"}):
            status, _, got = await w.post(headers=alice | {"x-forwarded-for": "10.0.0.2"})
            assert (status, got["error"]["code"]) == (503, "too_many")
            assert "of this tenant" in got["error"]["message"]
            assert (await w.post(b"{", headers=bob | {"x-forwarded-for": "10.0.0.3"}))[0] == 400
            assert w.server.front.clients.refused["requests_per_tenant"] == 1
        w.engines[0].behave = answer
        assert (await w.post(headers=alice))[0] == 200
        assert +w.server.front.running.tenants == {}


# Upgrades.


WEBSOCKET = b"connection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\nsec-websocket-version: 13\r\n"


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/chat/completions", "/v1/responses/resp_1", "/v1/realtime"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_websocket_is_refused_with_426(path: str, method: str) -> None:
    """Bugs 6, security L: clients such as Codex then use HTTP at once. The connection closes."""
    first = f"{method} {path}?model=tiny HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n".encode()
    async with world(1) as w:
        async with client(w) as c:
            await c.send(first + WEBSOCKET + b"\r\n" + b"\x81\x85frame" + post())
            status, fields, got = await c.answer()
            error = orjson.loads(got)["error"]
            assert (status, error["code"]) == (426, "websocket")
            assert (fields["upgrade"], fields["connection"]) == ("HTTP/1.1", "upgrade, close")
            assert ("audio/transcriptions" in error["message"]) == (path == "/v1/realtime")
            assert await c.closed() == b"", "nothing that follows is answered"
        async with client(w) as c:  # without the option of `connection`, the field has no meaning
            await c.send(first + b"upgrade: websocket\r\n\r\n")
            assert (await c.answer())[0] != 426
        assert not w.engines[0].requests


async def test_own_pages_ignore_upgrades() -> None:
    """RFC 9110, 7.8: a server may ignore an upgrade. The next request is read as usual."""
    async with world(1) as w, client(w) as c:
        for _ in range(2):
            await c.send(GET + WEBSOCKET + b"\r\n" + post())
            assert (await c.answer())[0] == 200
            assert (await c.answer())[0] == 200
        assert len(w.engines[0].requests) == 2


@pytest.mark.parametrize(
    "fields", ["connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n"]
)
async def test_java_clients_may_ask_for_h2c(fields: str) -> None:
    """Bugs 5: the request is served over HTTP/1.1, with its body, and the connection stays open."""
    async with world(1) as w, client(w) as c:
        for request in (
            post(fields=fields),
            ENCODED[:-2] + fields.encode() + b"\r\n" + chunk(BODY) + b"0\r\n\r\n",
        ) * 2:
            await c.send(request + post())
            assert (await c.answer())[0] == 200
            assert w.engines[0].requests[-1].body == BODY
            assert (await c.answer())[0] == 200


# Credentials.


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
@pytest.mark.parametrize("unusual", [{}, {"content-encoding": "gzip"}])
async def test_without_keys_all_credentials_reach_the_engine(name: str, unusual: dict[str, str]) -> None:
    """Bugs 8: `x-api-key` and `api-key` are treated as `authorization` is."""
    body = gzip.compress(BODY) if unusual else BODY
    async with world(1) as w:
        assert (await w.post(body, headers={name: "Bearer sk-of-the-engine"} | unusual))[0] == 200
        assert w.engines[0].requests[0].headers[name] == "Bearer sk-of-the-engine"


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
async def test_an_engines_own_key_replaces_all_credentials(name: str) -> None:
    """Bugs 8: `engines[].api_key` replaces them."""
    fake = FakeEngine()
    await fake.start()
    engines = [{"url": fake.url, "name": "e0", "api_key": "sk-engine"}]
    async with world([], engines=engines) as w:
        await w.until(lambda: w.server.fleet.names)
        assert (await w.post(headers={name: "Bearer sk-client"}))[0] == 200
        sent = fake.requests[0].headers
        assert sent["authorization"] == "Bearer sk-engine"
        assert "sk-client" not in str(sent)
    await fake.stop()


async def test_with_keys_one_known_credential_is_enough_and_none_is_passed_on(keys: dict[str, Any]) -> None:
    """Bugs 8: an OAuth token beside a valid key, in any of the fields."""
    good, other = "sk-alice", "oauth-token"
    async with world(1, **keys) as w:
        for fields in (
            {"authorization": f"Bearer {other}", "x-api-key": good},
            {"authorization": f"Bearer {other}", "api-key": good},
            {"authorization": f"Bearer {good}", "x-api-key": other},
            {"authorization": f"Basic {other}", "x-api-key": other, "api-key": good},
            {"api-key": good},
        ):
            assert (await w.post(headers=fields))[0] == 200, fields
            assert (await w.get("/v1/models", fields))[0] == 200, fields
            sent = w.engines[0].requests[-1].headers
            assert not {"authorization", "x-api-key", "api-key"} & sent.keys()
        for fields in (
            {"x-api-key": other, "api-key": other, "authorization": f"Bearer {other}"},
            {"authorization": f"Basic {good}"},
            {"api-key": ""},
        ):
            assert (await w.post(headers=fields))[0] == 401, fields
            assert (await w.get("/v1/models", fields))[0] == 401, fields


# Pages on loopback without a token.


@pytest.mark.parametrize(
    ("host", "opens"),
    [
        ("localhost", True),
        ("LOCALHOST.:80", True),
        ("127.0.0.1:8080", True),
        ("127.9.9.9", True),
        ("[::1]:8080", True),
        ("evil.example", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("[::2]", False),
        ("", False),
    ],
)
async def test_open_pages_answer_only_to_loopback_names(host: str, opens: bool) -> None:
    """Security L, DNS rebinding: a name of the attacker that resolves to a loopback address."""
    replicas = {"urls": ["http://127.0.0.1:1"]}
    async with world(1, admin=True, ui={"enabled": True}, replicas=replicas) as w, client(w) as c:

        async def asks(method: str, path: str, fields: str = "", body: bytes = b"") -> tuple[int, bytes]:
            head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{fields}content-length: {len(body)}\r\n\r\n"
            await c.send(head.encode() + body)
            status, _, got = await c.answer()
            return status, got

        for path in (
            "/debug/engines",
            "/debug/decisions",
            "/debug/live",
            "/debug",
            "/admin/engines",
            "/admin/policy",
        ):
            status, _ = await asks("GET", path)
            assert status == (200 if opens else 403), path
        assert (await asks("POST", "/admin/guard", body=b'{"on":true}'))[0] == (200 if opens else 403)
        for path in ("/", "/ready"):
            status, got = await asks("GET", path)
            assert (status, b'"e0"' in got) == (200, opens), path
        good = message()
        assert (await asks("POST", "/replicas", body=good))[0] == (200 if opens else 403)
        assert (await asks("POST", "/replicas", "origin: http://evil.example\r\n", good))[0] == 403
