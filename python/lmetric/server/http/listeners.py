"""Accepts clients' connections on the server's sockets, with or without TLS."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmetric.server.http.frontend import Frontend
from lmetric.server.http.port import BACKLOG, Bound

if TYPE_CHECKING:
    from lmetric.server.http.tls_listener import TlsListener

# Connections that asyncio's own loop accepts between two looks at other events. Without free
# descriptors, it fails and logs this many times a second. uvloop has a way of its own.
_ACCEPTS = 1


class Listeners:
    """The listeners on bound sockets."""

    def __init__(self, bound: Bound, front: Frontend) -> None:
        self.bound = bound
        self._front = front
        self._running: list[asyncio.Server | TlsListener] = []
        # By worker that has ended: the listeners on its sockets until the next one listens.
        self._adopted: dict[int, list[asyncio.Server | TlsListener]] = {}

    async def start(self) -> None:
        """Listens on all sockets. Raises OSError; then none of them listens."""
        try:
            for each in self.bound.sockets:
                self._running.append(await self._listen(each))
        except OSError:
            self.close()
            raise

    async def _listen(self, each: socket.socket) -> asyncio.Server | TlsListener:
        loop, front = asyncio.get_running_loop(), self._front
        if front.tls is not None:
            from lmetric.server.http.tls_listener import TlsListener

            listener = TlsListener(each, front)
            listener.start(BACKLOG)
            return listener
        if each.family == socket.AF_UNIX:
            # Python 3.13 and newer would remove the file. `Bound.remove_file` does.
            more: Any = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
            server = await loop.create_unix_server(front, sock=each, backlog=_ACCEPTS, **more)
        else:
            server = await loop.create_server(front, sock=each, backlog=_ACCEPTS)
        each.listen(BACKLOG)
        return server

    async def adopt(self, place: int, sockets: Sequence[socket.socket]) -> None:
        """Accepts the connections of another worker, too."""
        listeners = [await self._listen(each.dup()) for each in sockets]
        self.release(place)  # calls may overlap: each list of listeners is closed once
        self._adopted[place] = listeners

    def release(self, place: int) -> None:
        """Leaves them to that worker again."""
        for each in self._adopted.pop(place, []):
            each.close()

    def close(self) -> None:
        """Stops accepting. Connections continue."""
        for each in self._running:
            each.close()
        self._running.clear()
        for place in list(self._adopted):
            self.release(place)
