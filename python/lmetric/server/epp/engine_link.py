"""The router's side of an engine that a gateway asks: it looks like a connection to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from lmetric.server.execution.plan import OtherEngine
from lmetric.server.fleet.engine import Engine
from lmetric.server.upstream.connection import Connection, Sink

# Fields of an answer that belong to the engine's connection.
_OF_CONNECTION = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"upgrade"})

# Called with a request's head and body for the engine.
OnRequest = Callable[[bytes, bytes], None]


class EngineLink(Connection):
    """An engine's connection that the gateway has. The gateway's messages are its bytes.

    ``on_request``: called once, with the request. ``on_drop``: called if the router ends the
    request early. The engine counts the link until it is detached: at each kind of end.
    """

    __slots__ = ("_counts", "_on_drop", "engine")

    def __init__(
        self, engine: Engine, on_request: OnRequest | None, on_drop: Callable[[], None] | None
    ) -> None:
        super().__init__(engine.upstream.gone)
        engine.upstream.links += 1
        self._counts = True
        self.engine = engine
        self._on_drop = on_drop
        self.transport = _Request(on_request)

    def large_read(self, data: bytes) -> None:
        """Processes it now: the gateway controls the flow."""
        self.process(data)

    def unasked(self) -> None:
        """Ignores bytes after the end of the answer: the client gets them from the gateway."""

    def detach(self) -> Sink | None:
        """Ends the use of the link. Returns its sink."""
        if self._counts:
            self._counts = False
            self.engine.upstream.links -= 1
        sink: Sink | None = super().detach()
        return sink

    def drop(self) -> None:
        """Called if the router ends the request early."""
        self.detach()
        if self._on_drop is not None:
            self._on_drop()

    def head(self, status: int, fields: Iterable[tuple[bytes, bytes]]) -> None:
        """Receives the head of the engine's answer."""
        lines = [b"%b: %b\r\n" % field for field in fields if field[0] not in _OF_CONNECTION]
        self.data_received(b"HTTP/1.1 %d \r\n%b\r\n" % (status, b"".join(lines)))

    def end(self) -> None:
        """Receives the end of the engine's answer."""
        sink: Sink | None = self.detach()
        if sink is not None:
            sink.lost()

    def leave(self, other: OtherEngine) -> None:
        """Ends the attempt: the gateway has its answer from another engine."""
        sink: Any = self.detach()
        self._on_drop = None
        if sink is not None:
            sink.end_elsewhere(other)


class _Request(asyncio.Transport):
    """Receives the bytes that a connection to the engine would send."""

    def __init__(self, on_request: OnRequest | None) -> None:
        super().__init__()
        self._on_request = on_request
        self._head: bytes | None = None

    def write(self, data: Any) -> None:
        """Receives the head with the body, or the head first."""
        if self._on_request is None:
            return
        head = self._head
        if head is None:
            head, _, data = data.partition(b"\r\n\r\n")
            self._head = head
            if not data and not head.endswith(b"\r\ncontent-length: 0"):
                return  # the body follows
        on_request, self._on_request = self._on_request, None
        on_request(head, data)

    def is_closing(self) -> bool:
        """Returns False: only the gateway closes the engine's connection."""
        return False

    def pause_reading(self) -> None:
        """Does nothing: the gateway controls the flow."""

    def resume_reading(self) -> None:
        """Does nothing: the gateway controls the flow."""

    def abort(self) -> None:
        """Does nothing: `EngineLink.drop` ends the request."""
