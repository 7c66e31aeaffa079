"""Keep-alive connections to an engine, and the errors of connecting. Rust reads the answers."""

import asyncio
import errno
import math
import os
import socket
import ssl
import time
from collections import deque
from typing import Protocol

from lmetric._core import FULL_READ, ResponseReader
from lmetric.connection_errors import error_numbers, reason_of
from lmetric.server.upstream.reading import begin_waiting, end_waiting, read_on_later, takes


class Sink(Protocol):
    """Receiver of an answer's bytes, except those already forwarded to the client."""

    def received(self, flags: int, data: bytes) -> None:
        """Receives a piece of the answer. ``flags``: the events in it (END, PASS, ...)."""

    def failed(self, error: Exception) -> None:
        """Receives an error: the answer is malformed (WireError), or forwarding it failed."""

    def lost(self) -> None:
        """Called if the connection closes before the answer's end."""


# Connect errors unrelated to the engine: the router lacks file descriptors, ports or memory.
_OWN_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EADDRINUSE}
)


# Kinds of failures to connect. refused: no process listens. resources: the router lacks file
# descriptors, ports or memory, whether or not the engine works.
NOT_CONNECTED = frozenset({"refused", "dns", "tls", "unreachable", "resources"})


class UpstreamError(Exception):
    """No connection to an engine, or no answer. ``kind`` is a failure kind of a ticket.

    Kinds without a connection: `NOT_CONNECTED`, and saturated: all connections to it are in use.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def before_sending(self) -> bool:
        """Whether connecting failed."""
        return self.kind in NOT_CONNECTED


def connect_error(error: OSError) -> UpstreamError:
    """Returns the error of a failed connection attempt."""
    reason = reason_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return UpstreamError("tls", f"TLS: the certificate is not valid: {error.verify_message or reason}")
    if isinstance(error, ssl.SSLError):
        return UpstreamError("tls", f"TLS: no secure connection: {reason}")
    if isinstance(error, socket.gaierror):
        # Without a free file descriptor, look-ups fail too, but the resolver reports another error.
        own = _own_trouble()
        return UpstreamError("resources", own) if own else UpstreamError("dns", f"DNS: {reason}")
    if isinstance(error, FileNotFoundError):
        return UpstreamError("refused", "no connection: the unix socket does not exist")
    numbers = error_numbers(error)
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
    """Returns the reason why the router cannot open a file now; None: it can."""
    try:
        socket.socket().close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None


# The buffer of `_SmallReads`. One is enough: its bytes are copied before the next read.
_BUFFER = memoryview(bytearray(FULL_READ))


class _SmallReads(asyncio.BufferedProtocol):
    """Reads at most `FULL_READ` bytes at a time for a connection."""

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop."""
        self._connection.data_received(bytes(_BUFFER[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._connection.connection_lost(exc)


class Connection(ResponseReader, asyncio.Protocol):
    """One connection.

    It serves one sink at a time; without a sink it waits in the engine's pool. It reads once
    in each turn of the event loop, and at most `FULL_READ` bytes after a read of that size. A large
    read that does not fit into a turn waits for another turn (`reading.py`). So an engine cannot
    take the time of others, or fill the buffers of a slow client.
    """

    __slots__ = (
        "_late",
        "_lost",
        "_paused",
        "_small",
        "_waits",
        "idle_since",
        "made_at",
        "transport",
        "upstream",
    )

    transport: asyncio.Transport

    def __init__(self, upstream: "Kept") -> None:
        self.upstream = upstream
        self.made_at = self.idle_since = time.monotonic()
        self._paused = False  # by its user
        self._waits = False  # for the next turn of the event loop
        self._small = False  # its reads are small
        self._late = b""  # the read that waits for a turn
        self._lost = False  # closed while a read waited

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = transport  # type: ignore[assignment]

    def large_read(self, data: bytes) -> None:
        """Processes a large read, now or in a later turn of the event loop."""
        loop = asyncio.get_running_loop()
        # Bytes without a request must not wait: the next request would read them as its answer.
        waits = self.attached and not self.transport.is_closing() and not takes(loop, len(data))
        if waits and begin_waiting(loop, len(data)):
            self._late = data
        else:
            self.process(data)
        if (self._late or len(data) >= FULL_READ) and not self._waits and not self.transport.is_closing():
            self._waits = True
            self.transport.pause_reading()
            if len(data) >= FULL_READ and not self._small:
                self._small = True
                self.transport.set_protocol(_SmallReads(self))
            read_on_later(loop, self._next_turn)

    def _next_turn(self) -> None:
        self._waits = False
        if self._paused:
            return
        if self._late:
            try:
                self.process(self._take_late())
            except BaseException:
                self.transport.abort()
                raise
        if self._lost:
            self._end()
        elif not self._paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _take_late(self) -> bytes:
        data, self._late = self._late, b""
        if data:
            end_waiting(asyncio.get_running_loop(), len(data))
        return data

    def pause(self, paused: bool) -> None:
        """Stops or continues reading."""
        self._paused = paused
        if self._waits:
            return
        if self._late:
            if not paused:
                self._waits = True
                read_on_later(asyncio.get_running_loop(), self._next_turn)
        elif not self.transport.is_closing():
            (self.transport.pause_reading if paused else self.transport.resume_reading)()

    def unasked(self) -> None:
        """Closes the connection, which is unreliable: it received bytes without a request."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.upstream.gone(self, waiting=not self.attached)
        if self._late and self.attached:
            self._lost = True  # `_next_turn` processes the read first
        else:
            self._end()

    def _end(self) -> None:
        sink: Sink | None = self.detach()
        if sink is not None:
            sink.lost()

    def release(self) -> None:
        """Returns the connection to its pool if it stays open, else closes it."""
        self.detach()
        if self.keep_alive and not self._late and not self._lost:
            self.upstream.give(self)
        else:
            self._take_late()
            self.transport.close()

    def drop(self) -> None:
        """Closes the connection at once, so that the engine aborts the request."""
        self.detach()
        self._take_late()
        self.transport.abort()


class Kept:
    """Connections to one engine.

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

    def give(self, connection: Connection) -> None:
        """Keeps a connection for its next use."""
        now = time.monotonic()
        if self._closed or len(self._idle) >= self._keep or now - connection.made_at > self._age_seconds:
            connection.transport.close()
            return
        connection.idle_since = now
        self._idle.append(connection)

    def gone(self, connection: Connection, waiting: bool) -> None:
        """Forgets a closed connection."""
        self._open.discard(connection)
        if waiting and connection in self._idle:
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
