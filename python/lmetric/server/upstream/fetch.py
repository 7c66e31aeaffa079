"""Collects whole answers of engines for the router itself."""

import asyncio

from lmetric._core import END, PASS, WireError
from lmetric.server.upstream.connection import Connection, UpstreamError

# Bytes from which on a page of metrics loses its buckets of histograms, and the most that remain:
# 16 MiB have 1.2 MiB without buckets.
THINNED_BYTES, METRICS_BYTES = 512 << 10, 2 << 20


class Fetch:
    """Collects a whole answer of at most ``limit`` bytes. ``done`` gets its status and body.

    ``buckets``: of a page of metrics: the names of buckets that it never loses.
    """

    def __init__(self, connection: Connection, limit: int, buckets: tuple[str, ...] | None = None) -> None:
        self.connection = connection
        self._limit = limit if buckets is None else METRICS_BYTES
        self._buckets = buckets
        self._thinned = self._left_out = 0
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
        if self._buckets is not None and len(self._body) > THINNED_BYTES:
            self._thin(self._buckets)
        if len(self._body) > self._limit:
            self._refuse(self._limit)
        elif flags & END and not self.done.done():
            self.done.set_result((connection.status, bytes(self._body)))

    def _thin(self, buckets: tuple[str, ...]) -> None:
        from lmetric.engines.adapter import MAX_BODY_BYTES
        from lmetric.server.upstream.metrics_page import thin

        before = len(self._body)
        self._thinned = thin(self._body, self._thinned, buckets)
        self._left_out += before - len(self._body)
        if before + self._left_out > MAX_BODY_BYTES:
            self._refuse(MAX_BODY_BYTES)

    def _refuse(self, limit: int) -> None:
        self._body.clear()
        self.connection.transport.abort()
        self.failed(WireError(f"answer longer than {limit} bytes"))

    def failed(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(UpstreamError("reset", str(error)))

    def lost(self) -> None:
        try:
            self.received(self.connection.eof(), b"")
        except WireError as error:
            self.failed(error)
