"""Engines with chosen faults, and a running server in front of them."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from constants import configured
from lmetric.server import Server
from lmetric.server.fleet.parsing import DERENDER, PROBE
from log_watch import MARKED_KEY, MARKED_PROMPT
from waiting import PATIENCE_SECONDS, until

HEAD = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\n"
SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"


@dataclass
class Request:
    """A request that an engine received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int  # number of its connection

    @property
    def json(self) -> dict[str, Any]:
        return orjson.loads(self.body)


Behaviour = Callable[["FakeEngine", Request, asyncio.StreamWriter], Awaitable[bool]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else orjson.dumps(value)) + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event(
        {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    )


def usage(prompt: int = 10, output: int = 3, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


def plain(status: int, value: Any, extra: bytes = b"") -> bytes:
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return HEAD % (status, JSON) + extra + b"content-length: %d\r\n\r\n" % len(body) + body


STREAM_HEAD = HEAD % (200, SSE) + b"transfer-encoding: chunked\r\n\r\n"
STREAM_TAIL = chunk(event({"choices": [], "usage": usage()})) + chunk(event(b"[DONE]")) + b"0\r\n\r\n"


async def answer(engine: "FakeEngine", request: Request, writer: asyncio.StreamWriter) -> bool:
    """Answers like a healthy engine. Returns whether the connection stays open."""
    if request.json.get("stream"):
        writer.write(STREAM_HEAD)
        for text in ("a", "b", "c"):
            writer.write(chunk(token(text, "length" if text == "c" else None)))
            await writer.drain()
            await asyncio.sleep(engine.pace)
        writer.write(STREAM_TAIL)
    else:
        text = f"from {engine.name}"
        choices = [{"index": 0, "text": text, "finish_reason": "length"}]
        writer.write(plain(200, {"id": "cmpl-1", "choices": choices, "usage": usage(cached=4)}))
    return True


def lora(name: str, parent: str = "tiny", **more: Any) -> dict[str, Any]:
    """The card of an adapter."""
    return {"id": name, "parent": parent, **more}


async def strict(engine: "FakeEngine", request: Request, writer: asyncio.StreamWriter) -> bool:
    """Answers as vLLM does to models that it does not list, and else like a healthy engine."""
    name = request.json.get("model")
    if all(card["id"] != name for card in engine.cards or [{"id": engine.model}]):
        said = {"message": f"The model `{name}` does not exist.", "type": "NotFoundError", "param": "model"}
        writer.write(plain(404, {"error": said | {"code": 404}}))
        return True
    return await answer(engine, request, writer)


async def reset(_: "FakeEngine", __: Request, writer: asyncio.StreamWriter) -> bool:
    """Reads the request and breaks the connection."""
    writer.transport.abort()
    return False


async def hang(engine: "FakeEngine", _: Request, writer: asyncio.StreamWriter) -> bool:
    """Sends no answer until the client leaves."""
    await engine.until_left(writer)
    return False


def says(*pieces: bytes, then: str = "close") -> Behaviour:
    """Writes these bytes. Then: close, keep, reset or hang."""

    async def behave(engine: "FakeEngine", _: Request, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if then == "hang":
            await engine.until_left(writer)
        elif then == "reset":
            writer.transport.abort()
        return then == "keep"

    return behave


async def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """The files of a TLS server at 127.0.0.1, and its certificate. Needs openssl."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    await asyncio.to_thread(
        subprocess.run,
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=engine"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@dataclass
class FakeEngine:
    """A small HTTP server that writes exact bytes."""

    name: str = "engine"
    model: str = "tiny"
    behave: Behaviour = answer
    pace: float = 0.0
    health: int = 200
    metrics: bytes = b""
    parses: bool = False  # it parses the token ids of other engines
    # It refuses longer bodies at once, reads no more, and keeps the connection.
    max_body: int | None = None
    # Its list of models, instead of `model` alone, and any other page by path: status and body.
    cards: list[dict[str, Any]] | None = None
    extra_pages: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    page_reads: list[str] = field(default_factory=list)  # the paths of its pages, as they were read
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    left: int = 0
    port: int = 0
    host: str = "127.0.0.1"
    _server: asyncio.Server | None = None
    _kept: socket.socket | None = None  # bound, never listens
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _readers: dict[int, asyncio.StreamReader] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listens on its port. It keeps the port when it stops, so that nobody else gets it."""
        if self._kept is None:
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._kept.bind((self.host, self.port))
            self.port = self._kept.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, self.host, self.port, reuse_port=True)

    async def stop(self) -> None:
        """Refuses new connections and breaks the open ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def asked(self, times: int) -> None:
        """Waits until this many requests have come."""
        await until(lambda: len(self.requests) >= times, seen=lambda: f"{len(self.requests)} requests")

    async def until_left(self, writer: asyncio.StreamWriter) -> None:
        reader = self._readers[id(writer)]
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        self.left += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        number = self.connections
        self._readers[id(writer)] = reader
        try:
            while True:
                raw_head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = raw_head.decode("latin-1").split("\r\n")
                method, path, _ = first.split(" ")
                headers = {
                    n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines if line)
                }
                if headers.get("transfer-encoding") == "chunked":  # as gateways send streamed bodies
                    body = b""
                    while size := int(await reader.readuntil(b"\r\n"), 16):
                        body += (await reader.readexactly(size + 2))[:-2]
                    await reader.readexactly(2)
                else:
                    size = int(headers.get("content-length", 0))
                    if self.max_body is not None and size > self.max_body:
                        writer.write(plain(413, {"error": {"message": "too long"}}))
                        await until(writer.transport.is_closing)
                        break
                    body = await reader.readexactly(size)
                if not await self._answer(Request(method, path, headers, body, number), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            self._readers.pop(id(writer), None)
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.method == "GET":
            self.page_reads.append(request.path)
            cards = self.cards or [{"id": self.model, "parent": None}]
            pages = {
                "/health": (self.health, b""),
                "/metrics": (200, self.metrics),
                "/v1/models": (200, orjson.dumps({"data": cards})),
                **self.extra_pages,
            }
            writer.write(plain(*pages.get(request.path, (404, b"{}"))))
            return "close" not in request.headers.get("connection", "")
        if request.path == DERENDER and request.body == PROBE:  # whether it parses
            writer.write(plain(200 if self.parses else 404, b"{}"))
            return True
        self.requests.append(request)
        return await self.behave(self, request, writer)

    @property
    def used_connections(self) -> int:
        """The number of connections that carried requests."""
        return len({request.connection for request in self.requests})


class World:
    """Engines, a server and a client."""

    def __init__(self, server: Server, engines: list[FakeEngine], client: aiohttp.ClientSession) -> None:
        self.server = server
        self.engines = engines
        self.client = client
        self.url = f"http://127.0.0.1:{server.port}"

    async def post(
        self, body: Any = None, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], Any]:
        """Returns status, headers (lower case) and the parsed answer; for a stream, its bytes."""
        if body is None:
            body = {"model": "tiny", "prompt": MARKED_PROMPT}
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.client.post(
            self.url + path, data=data, headers={"content-type": "application/json", **(headers or {})}
        ) as response:
            got = await response.read()
            plain_json = response.content_type == "application/json"
            low = {name.lower(): value for name, value in response.headers.items()}
            return response.status, low, orjson.loads(got) if plain_json else got

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.read()

    def in_flight(self) -> int:
        return sum(model.router.in_flight() for model in self.server.fleet.models)

    async def settled(self) -> None:
        """Waits until no request is in flight."""
        relays = self.server.front.relays
        await until(
            lambda: not self.in_flight() and not relays,
            seen=lambda: f"{self.in_flight()} in flight, {len(relays)} relays",
        )

    async def until(self, true: Callable[[], object]) -> None:
        """Waits until a condition is true."""
        await until(true)


def decision_id(headers: Mapping[str, str]) -> int:
    """Returns the decision id in an answer: `12-TAG`, or `1-12-TAG` for a second model."""
    return int(headers["x-lmetric-decision"].split("-")[-2])


@contextlib.asynccontextmanager
async def world(fakes: int | Sequence[FakeEngine] = 1, /, **config: Any) -> AsyncIterator[World]:
    """Starts a server before ``fakes`` engines named e0, e1, ….

    At the end, no request may be in flight.
    """
    engines = [FakeEngine() for _ in range(fakes)] if isinstance(fakes, int) else list(fakes)
    for number, engine in enumerate(engines):
        engine.name = f"e{number}"
        await engine.start()
    values: dict[str, Any] = {
        "port": 0,
        "engines": [{"url": engine.url, "name": engine.name} for engine in engines],
        "policy": "round_robin",
        "experimental": True,
        "load": {"interval": None},
        **config,
        # Engines on loopback accept at once, but the machine may stop for seconds.
        "timeouts": {"connect": PATIENCE_SECONDS, **config.get("timeouts", {})},
    }
    with configured(values) as settings:
        server = Server(settings)
        await server.start()
        try:
            # Without configured keys, a client's key has no meaning. It must not be in any log.
            marked = {} if "auth" in config else {"authorization": f"Bearer {MARKED_KEY}"}
            timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
            async with aiohttp.ClientSession(timeout=timeout, headers=marked) as client:
                it = World(server, engines, client)
                yield it
                await it.settled()
        finally:
            await server.stop()
            for engine in engines:
                await engine.stop()
    assert sum(model.router.in_flight() for model in server.fleet.models) == 0


READ_BYTES = 256 << 10  # largest read of the loop


@contextlib.contextmanager
def bytes_by_turn(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> Iterator[list[int]]:
    """Counts the bytes that a method of all connections gets in each turn of the loop."""
    turns: list[int] = [0]
    call, loop, on = getattr(owner, method), asyncio.get_running_loop(), True

    def counted(self: Any, data: bytes) -> None:
        turns[-1] += len(data)
        call(self, data)

    def turn() -> None:
        turns.append(0)
        if on:
            loop.call_soon(turn)

    monkeypatch.setattr(owner, method, counted)
    turn()
    yield turns
    on = False
