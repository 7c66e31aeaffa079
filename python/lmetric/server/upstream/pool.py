"""Pools of keep-alive connections to one engine."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import SecretStr

from lmetric.config import EngineConfig, EngineTls, ServerConfig, unix_path
from lmetric.host_names import is_ip_address, look_up
from lmetric.server.tls.used import EngineContexts
from lmetric.server.upstream.connection import Connection, UpstreamError, connect_error
from lmetric.server.upstream.fetch import Fetch

if TYPE_CHECKING:
    from lmetric.server.tls.contexts import TlsContext
    from lmetric.server.upstream.allowed import AllowedEngines

# Size limit of an engine's pages other than metrics.
PAGE_BYTES = 1 << 20
# Connections kept for pages of an engine. A check and a read of its load may run at once.
PAGE_CONNECTIONS = 2
# Longest use of a page connection. After that, the name is looked up again: its address may change.
PAGE_CONNECTION_SECONDS = 30.0


class Kept:
    """Connections to one engine, taken for a request and given back after its answer.

    At most ``keep`` idle connections are kept, each for ``idle_seconds``, none older than
    ``age_seconds``.
    """

    def __init__(self, keep: int, idle_seconds: float, age_seconds: float = math.inf) -> None:
        self._keep = keep
        self._idle_seconds = idle_seconds
        self._age_seconds = age_seconds
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._closed = False

    def take(self) -> Connection | None:
        """Returns the idle connection that was used last; None if none is idle."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def give(self, connection: Connection, *, unused: bool = False) -> None:
        """Ends the use of a connection: keeps it for its next use if it stays open, else closes it.

        ``unused``: it got no request.
        """
        connection.detach()
        stays_open = unused or (connection.keep_alive and not connection.late and not connection.lost)
        now = time.monotonic()
        is_young = now - connection.made_at <= self._age_seconds
        if stays_open and is_young and len(self._idle) < self._keep and not self._closed:
            connection.idle_since = now
            self._idle.append(connection)
        else:
            connection.close()

    def gone(self, connection: Connection) -> None:
        """Forgets a closed connection."""
        self._open.discard(connection)
        if not connection.attached and connection in self._idle:
            self._idle.remove(connection)

    def expire(self, now: float) -> None:
        """Closes connections that were idle too long."""
        while self._idle and now - self._idle[0].idle_since > self._idle_seconds:
            self._close_oldest()

    def clear(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._close_oldest()

    def close(self) -> None:
        """Closes the idle connections. Connections in use close when they are given back."""
        self._closed = True
        self.clear()

    def _close_oldest(self) -> None:
        connection = self._idle.popleft()
        self._open.discard(connection)
        connection.transport.close()


class Upstream(Kept):
    """All connections to one engine: a bounded number for requests, and a few for its pages.

    ``allowed``: the addresses that the engine may have; None: any. ``contexts``: TLS contexts that
    engines share. ``tls``: settings of an https URL. ``links``: requests that a gateway sends.
    """

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        allowed: AllowedEngines | None = None,
        contexts: EngineContexts | None = None,
        tls: EngineTls | None = None,
    ) -> None:
        limits = server.limits
        super().__init__(limits.max_connections_per_engine, limits.idle_seconds)
        self._pages = Kept(PAGE_CONNECTIONS, limits.idle_seconds, PAGE_CONNECTION_SECONDS)
        self.buckets: tuple[str, ...] = ()  # of histograms, which large pages of metrics keep
        parts = urlsplit(config.url)
        self.url = config.url
        self._socket = unix_path(config.url)
        self._secure = parts.scheme == "https"
        self._contexts = contexts if contexts is not None else EngineContexts()
        self.tls: TlsContext | None = None
        self._server_name: str | None = None
        self._address = (parts.hostname or "", parts.port or (443 if self._secure else 80))
        self._has_name = not is_ip_address(self._address[0])
        self._path = "" if self._socket is not None else parts.path.rstrip("/")
        self._host = parts.netloc or "localhost"
        rank = config.data_parallel_rank
        self._rank = None if rank is None else str(rank)
        self._heads: dict[bytes, tuple[bytes, bytes]] = {}
        self.links = 0
        self.configure(server, allowed)
        self.set_key(config.api_key)
        self.set_tls(tls)

    def configure(self, server: ServerConfig, allowed: AllowedEngines | None) -> None:
        """Applies limits, the time to connect and the request for load headers.

        ``allowed``: the addresses that the engine may have; None: any.
        """
        self._keep = server.limits.max_connections_per_engine
        self._idle_seconds = self._pages._idle_seconds = server.limits.idle_seconds
        self._connect_seconds = server.timeouts.connect
        self._allowed = allowed
        # A load header does not name the rank.
        by_header = server.load.from_answers and self._rank is None
        self._ask_load = "endpoint-load-metrics-format: TEXT\r\n" if by_header else ""
        self._heads.clear()

    @property
    def allowed(self) -> AllowedEngines | None:
        """The addresses that the engine may have; None: any."""
        return self._allowed

    def set_tls(self, settings: EngineTls | None) -> None:
        """Sets TLS for new connections, if the URL is https. Raises ConfigError."""
        if self._secure:
            self.tls = self._contexts.get(settings)
            self._server_name = settings.server_name if settings is not None else None

    @property
    def is_unverified(self) -> bool:
        """Whether the engine's certificate is not checked."""
        return self.tls is not None and self.tls.context.verify_mode == ssl.CERT_NONE

    def set_key(self, key: SecretStr | None) -> None:
        """Sets the API key for new requests. None: requests keep their clients' keys."""
        secret = key.get_secret_value() if key else ""
        self.has_key = bool(secret)
        self._authorization = f"authorization: Bearer {secret}\r\n" if secret else ""
        self._fix()

    def _fix(self) -> None:
        # Without this field, engines may send any coding (RFC 9110, 12.5.3).
        self._fixed = f"host: {self._host}\r\naccept-encoding: identity\r\n{self._authorization}"
        if self._rank is not None:
            self._fixed += f"x-data-parallel-rank: {self._rank}\r\n"
        self._heads.clear()

    def set_rank(self, header: str) -> None:
        """Sets `X-data-parallel-rank` for new requests."""
        if header != self._rank:
            self._rank = header
            self._fix()

    @property
    def in_use(self) -> int:
        """The number of connections that serve a request or are being opened for one, and links."""
        return len(self._open) - len(self._idle) + self.links

    def head(self, target: bytes, stream: bool, method: bytes = b"POST") -> bytes:
        """Returns the first lines of a request: request line, host and the engine's key.

        A POST without a stream also asks for the engine's load.
        """
        if method != b"POST":  # its target is seldom used twice
            return b"%s %s%s HTTP/1.1\r\n%s" % (method, self._path.encode(), target, self._fixed.encode())
        heads = self._heads.get(target)
        if heads is None:
            line = b"POST %s%s HTTP/1.1\r\n" % (self._path.encode(), target)
            heads = (line + (self._fixed + self._ask_load).encode(), line + self._fixed.encode())
            if len(self._heads) < 64:
                self._heads[target] = heads
        return heads[stream]

    async def connect(self) -> Connection:
        """Opens a new connection. Raises UpstreamError: saturated at the limit."""
        if len(self._open) >= self._keep:
            raise UpstreamError("saturated", f"all {self._keep} connections to it are in use")
        return await self._connect(self)

    async def _connect(self, owner: Kept) -> Connection:
        connection = Connection(owner.gone)
        owner._open.add(connection)
        try:
            await self._make(connection)
        except BaseException as error:
            owner._open.discard(connection)
            if isinstance(error, UpstreamError) and error.kind != "resources":
                # A check on an idle connection must not hide that new connections fail.
                self._pages.clear()
            raise
        return connection

    async def _make(self, connection: Connection) -> None:
        is_found = False
        try:
            async with asyncio.timeout(self._connect_seconds):
                if self._socket is not None:
                    loop = asyncio.get_running_loop()
                    await loop.create_unix_connection(lambda: connection, self._socket)
                elif not self._has_name:
                    await self._open_first(connection, [self._address[0]])
                else:
                    found = await look_up(self._address[0])
                    is_found = True
                    await self._open_first(connection, [ip for _, ip in found])
        except TimeoutError:
            seconds = f"{self._connect_seconds:g} s"
            if self._has_name and not is_found:
                raise UpstreamError("dns", f"DNS: no answer within {seconds}") from None
            raise UpstreamError("unreachable", f"no connection within {seconds}") from None
        except OSError as error:
            raise connect_error(error) from None
        if self._allowed is not None and self._socket is None:
            # The name may resolve to another address than when the engine was added.
            address = connection.transport.get_extra_info("peername")[0]
            if not self._allowed.permits(self._address[0], address):
                connection.transport.abort()
                raise UpstreamError("refused", f"admin.allowed_engines does not allow {address}")

    async def _open_first(self, connection: Connection, ips: list[str]) -> None:
        """Connects to the first address that accepts. Raises OSError with all reasons."""
        tls, name, port = None, None, self._address[1]
        if self.tls is not None:
            tls, name = self.tls.context, self._server_name or self._address[0]
        loop = asyncio.get_running_loop()
        failed = []
        for ip in ips:
            try:
                await loop.create_connection(lambda: connection, ip, port, ssl=tls, server_hostname=name)
                return
            except ssl.SSLError:
                raise  # the next address would hide the reason
            except OSError as error:
                failed.append(error)
        raise failed[0] if len(failed) == 1 else OSError(", ".join(map(str, failed)))

    async def get(self, path: str, seconds: float) -> tuple[int, bytes]:
        """Sends a GET on a page connection. Returns status and body. Raises UpstreamError."""
        return await self._fetch("GET", path, "", body=b"", seconds=seconds)

    async def post(self, path: str, body: bytes, seconds: float, *, once: bool = False) -> tuple[int, bytes]:
        """Sends JSON by POST on a page connection.

        `once`: on a new connection, so that it is never sent twice. Returns status and body. Raises
        UpstreamError.
        """
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return await self._fetch("POST", path, fields, body=body, seconds=seconds, once=once)

    async def _fetch(
        self, method: str, path: str, fields: str, body: bytes, seconds: float, *, once: bool = False
    ) -> tuple[int, bytes]:
        request = f"{method} {self._path}{path} HTTP/1.1\r\n{self._fixed}{fields}\r\n".encode() + body
        what = f"{method} {path}"
        kept = None if once else self._pages.take()
        if kept is not None:
            try:
                return await self._ask(kept, request, what, seconds=seconds)
            except UpstreamError as error:
                # An engine may close an idle connection just when it is used again: no failure.
                if error.kind != "reset" or kept.pieces:
                    raise
        return await self._ask(await self._connect(self._pages), request, what, seconds=seconds)

    async def _ask(
        self, connection: Connection, request: bytes, what: str, seconds: float
    ) -> tuple[int, bytes]:
        if connection.transport.is_closing():
            raise UpstreamError("reset", f"no answer to {what}: connection closed at once")
        fetch = Fetch(connection, PAGE_BYTES, self.buckets if what.endswith("/metrics") else None)
        connection.transport.write(request)
        try:
            async with asyncio.timeout(seconds):
                answer = await fetch.done
        except BaseException as error:
            connection.drop()
            # Other idle connections may be broken too. The next page looks up the address again.
            self._pages.clear()
            if isinstance(error, TimeoutError):
                raise UpstreamError("timeout", f"no answer to {what} within {seconds:g} s") from None
            raise
        self._pages.give(connection)
        return answer

    def expire(self, now: float) -> None:
        """Closes connections that were idle too long."""
        super().expire(now)
        self._pages.expire(now)

    def close(self) -> None:
        """Closes the idle connections. Connections in use close with their requests."""
        super().close()
        self._pages.close()
