"""Lean keep-alive connections to one engine: bytes in, bytes out, answers read in Rust."""

import asyncio
import ssl
import time
from collections import deque
from urllib.parse import urlsplit

from pydantic import SecretStr

from lmetric.config import EngineConfig, ServerConfig
from lmetric.server.upstream.allowed import AllowedEngines
from lmetric.server.upstream.connection import Connection, UpstreamError, _no_connection
from lmetric.server.upstream.fetch import Fetch

# Longest page that is read of an engine: /metrics of a large one has some hundred kB.
PAGE_BYTES = 1 << 20


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
