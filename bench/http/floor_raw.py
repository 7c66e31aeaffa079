"""The floor of a Python data plane: aiohttp in front, raw connections upstream, bytes straight to
the client.

Round robin, no retries, no metrics, no routing; answers are framed only as far as it takes to see
their end.

    python bench/http/floor_raw.py PORT ENGINE_URL...
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from itertools import cycle
from urllib.parse import urlsplit

import uvloop
from aiohttp import web


class Upstream(asyncio.Protocol):
    """One connection to an engine, serving one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self.client: asyncio.WriteTransport | None = None

    def ask(self, client: asyncio.WriteTransport, request: bytes) -> asyncio.Future[None]:
        """Sends the request. Done when the whole answer went to the client's transport."""
        self.client, self.left = client, -1
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        assert self.client is not None
        self.client.write(data)
        if self.left == -1:  # Heads of the mock engines arrive whole.
            end = data.find(b"\r\n\r\n") + 4
            head = data[:end].lower()
            at = head.find(b"content-length:")
            self.left = end + int(head[at + 15 : head.find(b"\r", at)]) if at >= 0 else -2
        if self.left == -2:
            if data.endswith(b"0\r\n\r\n"):
                self.done.set_result(None)
        else:
            self.left -= len(data)
            if self.left == 0:
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if self.client is not None and not self.done.done():
            self.done.set_exception(exc or ConnectionResetError())


class Written(web.StreamResponse):
    """The handler's result when the answer already went out."""

    _keep_alive = True

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing to send."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to send."""


async def main(port: int, engines: list[str]) -> None:
    """Serves until SIGTERM."""
    loop = asyncio.get_running_loop()
    idle: dict[str, deque[Upstream]] = {engine: deque() for engine in engines}
    turn = cycle(engines)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        engine = next(turn)
        place = urlsplit(engine)
        pool = idle[engine]
        if pool:
            upstream = pool.pop()
        else:
            upstream = (await loop.create_connection(Upstream, place.hostname, place.port))[1]
        head = (
            f"{request.method} {request.path} HTTP/1.1\r\nhost: {place.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        assert request.transport is not None
        await upstream.ask(request.transport, head.encode() + body)  # type: ignore[arg-type]
        pool.append(upstream)
        return Written()

    server = web.Server(handle, access_log=None)
    listening = await loop.create_server(server, "127.0.0.1", port, backlog=1024)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    listening.close()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2:]))
