"""One attempt to have one engine answer: a connection, and the request's bytes."""

import asyncio
import time
from typing import TYPE_CHECKING

from lmetric.server.fleet import priority
from lmetric.server.upstream.connection import Connection, UpstreamError

if TYPE_CHECKING:
    from lmetric.server.execution.exchange import ClientRequest
    from lmetric.server.fleet.engine import Engine

# Bodies up to this size go out in one write with the head.
JOIN_BYTES = 64 * 1024


class Leg:
    """A request at an engine: `go`, then `_ask` on a connection, or `settle` where none is to be had."""

    ended = False
    _fresh = False  # the connection was made for this request
    _connection: Connection | None = None
    _connecting: asyncio.Task[Connection] | None = None
    _engine: "Engine"
    _asked: "ClientRequest"
    _target: bytes | None = None  # None: the client's

    def go(self, engine: "Engine", now: float) -> None:
        """Sends the request, on a connection that waits where there is one."""
        self._engine = engine
        connection = engine.upstream.take()
        if connection is None:
            self._connect()
        else:
            self._fresh = False
            self._ask(connection, now)

    def _connect(self) -> None:
        self._fresh = True
        self._connecting = asyncio.create_task(self._engine.upstream.connect())
        self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        wanted = self._connecting is task
        if wanted:
            self._connecting = None
        if self.ended or task.cancelled() or not wanted:
            if not task.cancelled() and task.exception() is None:
                connection = task.result()
                connection.upstream.give(connection)
            return
        try:
            error = task.exception()
            if isinstance(error, UpstreamError):
                self.settle(error.kind, str(error))
            else:
                self._ask(task.result(), time.monotonic())
        except Exception:
            self.fail()

    def _write(self, connection: Connection, body: bytes, stream: bool) -> None:
        engine, head = self._engine, self._asked.head
        target = self._target or head.target
        given = self._asked.priority
        if given is not None:
            body, given = priority.body(engine, given, body), priority.header(engine, given)
        upstream = engine.upstream
        lines = head.for_engine(
            upstream.head(target, stream), len(body), given, upstream.has_key, self._asked.drops_priority
        )
        if len(body) <= JOIN_BYTES:
            connection.transport.write(lines + body)
        else:
            connection.transport.write(lines)
            connection.transport.write(body)

    def _drop(self) -> None:
        """Gives up; an engine that is at work stops."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def _ask(self, connection: Connection, now: float) -> None:
        raise NotImplementedError

    def settle(self, kind: str, reason: str) -> None:
        """The attempt failed."""
        raise NotImplementedError

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""
        raise NotImplementedError
