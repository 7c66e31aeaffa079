"""Lean keep-alive connections to one engine: bytes in, bytes out, answers read in Rust."""

import asyncio
import errno
import os
import re
import socket
import ssl
import time
from collections import deque
from typing import Protocol
from urllib.parse import urlsplit

from pydantic import SecretStr

from lmetric._core import END, PASS, ResponseReader, WireError
from lmetric.config import EngineConfig, ServerConfig
from lmetric.server.allowed import AllowedEngines


class Sink(Protocol):
    """Who is told of what a connection reads, except of what was passed on already."""

    def received(self, flags: int, data: bytes) -> None:
        """A piece of the answer, and what it brought."""

    def failed(self, error: Exception) -> None:
        """The answer is malformed (a WireError), or could not be passed on."""

    def lost(self) -> None:
        """The connection is gone before the answer's end."""


# Errors of connecting that say nothing of the engine: the router lacks file descriptors, ports or memory.
_OWN_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EADDRINUSE}
)
_ERRNO = re.compile(r"\[Errno (\d+)\]")
# Longest page that is read of an engine: /metrics of a large one has some hundred kB.
PAGE_BYTES = 1 << 20


class UpstreamError(Exception):
    """No connection, or no answer; ``kind`` is one of a ticket's failures.

    Kinds without a connection: refused (nobody listens), dns, tls, unreachable, timeout, and resources (the
    router's own trouble, which says nothing of the engine).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def before_sending(self) -> bool:
        """Whether there was no connection, for a reason other than time."""
        return self.kind in ("refused", "dns", "tls", "unreachable", "resources")


def _no_connection(error: OSError) -> UpstreamError:
    """Why a connection could not be made."""
    reason = error.strerror or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return UpstreamError("tls", f"TLS: the certificate is not valid: {error.verify_message or reason}")
    if isinstance(error, ssl.SSLError):
        return UpstreamError("tls", f"TLS: no secure connection: {reason}")
    if isinstance(error, socket.gaierror):
        # Without a file descriptor, names cannot be resolved, either; the resolver does not say so.
        own = _own_trouble()
        return UpstreamError("resources", own) if own else UpstreamError("dns", f"DNS: {reason}")
    # asyncio tells of several addresses of a host in words.
    numbers = {error.errno} if error.errno else set(map(int, _ERRNO.findall(str(error))))
    if errno.ECONNREFUSED in numbers:
        kind = "refused"
    elif numbers & _OWN_ERRORS:
        kind = "resources"
    elif isinstance(error, ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
        kind = "reset"
    else:
        kind = "unreachable"
    return UpstreamError(kind, f"no connection: {reason}")


def _own_trouble() -> str | None:
    """Why the router cannot open a file now; None: it can."""
    try:
        socket.socket().close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None


class Connection(ResponseReader, asyncio.Protocol):
    """One connection. It serves one sink at a time; without one it waits in the engine's pool."""

    __slots__ = ("idle_since", "transport", "upstream")

    transport: asyncio.Transport

    def __init__(self, upstream: "Upstream") -> None:
        self.upstream = upstream
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = transport  # type: ignore[assignment]

    def unasked(self) -> None:
        """Bytes came that nobody asked for: the connection cannot be trusted with another request."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        sink: Sink | None = self.detach()
        self.upstream.gone(self, waiting=sink is None)
        if sink is not None:
            sink.lost()

    def release(self) -> None:
        """Back to the pool, where the answer's end allows it."""
        self.detach()
        if self.keep_alive and not self.transport.is_closing():
            self.upstream.give(self)
        else:
            self.transport.close()

    def drop(self) -> None:
        """Closes at once: that tells the engine to stop working on the request."""
        self.detach()
        self.transport.abort()


class Upstream:
    """All connections to one engine, bounded in number. ``allowed``: the addresses that it may have."""

    def __init__(
        self, config: EngineConfig, server: ServerConfig, allowed: AllowedEngines | None = None
    ) -> None:
        parts = urlsplit(config.url)
        self.url = config.url
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = (parts.hostname or "", parts.port or (443 if self._tls else 80))
        self._allowed = allowed
        self._path = parts.path.rstrip("/")
        self._host = parts.netloc
        self._ask_load = "endpoint-load-metrics-format: TEXT\r\n" if server.load.from_answers else ""
        self._heads: dict[bytes, tuple[bytes, bytes]] = {}
        self.set_key(config.api_key)
        self._connect_seconds = server.timeouts.connect
        self._idle_seconds = server.limits.idle_seconds
        self._limit = server.limits.max_connections_per_engine
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._closed = False

    def set_key(self, key: SecretStr | None) -> None:
        """Takes the key that requests carry from now on; None: clients' own go on."""
        secret = key.get_secret_value() if key else ""
        self.has_key = bool(secret)
        self._fixed = f"host: {self._host}\r\n" + (f"authorization: Bearer {secret}\r\n" if secret else "")
        self._heads.clear()

    @property
    def in_use(self) -> int:
        """Connections on which a request is on its way, or that are made for one."""
        return len(self._open) - len(self._idle)

    def head(self, target: bytes, stream: bool) -> bytes:
        """Request line, host, the engine's key, and for plain answers the wish for its load, for a POST."""
        heads = self._heads.get(target)
        if heads is None:
            line = b"POST %s%s HTTP/1.1\r\n" % (self._path.encode(), target)
            heads = (line + (self._fixed + self._ask_load).encode(), line + self._fixed.encode())
            if len(self._heads) < 64:
                self._heads[target] = heads
        return heads[stream]

    def take(self) -> Connection | None:
        """The connection used last, where one waits."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def give(self, connection: Connection) -> None:
        """Keeps a connection for the next request."""
        if self._closed:
            connection.transport.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def gone(self, connection: Connection, waiting: bool) -> None:
        """Forgets a closed connection."""
        self._open.discard(connection)
        if waiting and connection in self._idle:
            self._idle.remove(connection)

    async def connect(self) -> Connection:
        """A new connection. Raises UpstreamError, of kind status if the bound is reached."""
        if len(self._open) >= self._limit:
            raise UpstreamError("status", f"all {self._limit} connections to it are in use")
        connection = Connection(self)
        self._open.add(connection)
        try:
            await self._connect(connection)
        except BaseException:
            self._open.discard(connection)
            raise
        return connection

    async def _connect(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                await loop.create_connection(lambda: connection, *self._address, ssl=self._tls)
        except TimeoutError:
            raise UpstreamError("timeout", f"no connection within {self._connect_seconds:g} s") from None
        except OSError as error:
            raise _no_connection(error) from None
        if self._allowed is not None:
            # A name may lead elsewhere than when the engine was added.
            address = connection.transport.get_extra_info("peername")[0]
            if not self._allowed.permits(self._address[0], address):
                connection.transport.abort()
                raise UpstreamError("refused", f"admin.allowed_engines does not allow {address}")

    async def get(self, path: str, seconds: float) -> tuple[int, bytes]:
        """Status and body of a GET, on a connection beside the bounded ones. Raises UpstreamError."""
        return await self._fetch("GET", path, "", b"", seconds)

    async def post(self, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Status and body of a POST of JSON, as `get`."""
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return await self._fetch("POST", path, fields, body, seconds)

    async def _fetch(
        self, method: str, path: str, fields: str, body: bytes, seconds: float
    ) -> tuple[int, bytes]:
        connection = Connection(self)
        await self._connect(connection)
        if connection.transport.is_closing():
            raise UpstreamError("reset", f"no answer to {method} {path}: connection closed at once")
        fetch = Fetch(connection, PAGE_BYTES)
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._fixed}{fields}connection: close\r\n\r\n"
        fetch.connection.transport.write(head.encode() + body)
        try:
            async with asyncio.timeout(seconds):
                return await fetch.done
        except TimeoutError:
            raise UpstreamError("timeout", f"no answer to {method} {path} within {seconds:g} s") from None
        finally:
            fetch.connection.drop()

    def expire(self, now: float) -> None:
        """Closes connections that waited too long."""
        while self._idle and now - self._idle[0].idle_since > self._idle_seconds:
            self._close_oldest()

    def close(self) -> None:
        """Closes the waiting connections; those in use close with their requests."""
        self._closed = True
        while self._idle:
            self._close_oldest()

    def _close_oldest(self) -> None:
        connection = self._idle.popleft()
        self._open.discard(connection)
        connection.transport.close()


class Fetch:
    """A whole answer of at most ``limit`` bytes, for the router alone."""

    def __init__(self, connection: Connection, limit: int = 16 << 20) -> None:
        self.connection = connection
        self._limit = limit
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._body = bytearray()
        self._committed = False
        connection.begin(self, http11=False)

    def received(self, flags: int, data: bytes) -> None:
        connection = self.connection
        if not self._committed and connection.status:
            self._committed = True
            _, _, held = connection.commit(b"", True).partition(b"\r\n\r\n")
            self._body += held
        elif self._committed:
            self._body += data if flags & PASS else connection.take()
        if len(self._body) > self._limit:
            self._body.clear()
            connection.transport.abort()
            self.failed(WireError(f"answer longer than {self._limit} bytes"))
        elif flags & END and not self.done.done():
            self.done.set_result((connection.status, bytes(self._body)))

    def failed(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(UpstreamError("reset", str(error)))

    def lost(self) -> None:
        try:
            self.received(self.connection.eof(), b"")
        except WireError as error:
            self.failed(error)
