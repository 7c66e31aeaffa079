"""Keep-alive connections to an engine, and the errors of connecting. Rust reads the answers."""

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable
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
        "_gone",
        "_paused",
        "_small",
        "_waits",
        "idle_since",
        "late",
        "lost",
        "made_at",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, gone: Callable[["Connection"], None]) -> None:
        self._gone = gone  # called once it is closed
        self.made_at = self.idle_since = time.monotonic()
        self._paused = False  # by its user
        self._waits = False  # for the next turn of the event loop
        self._small = False  # its reads are small
        self.late = b""  # the read that waits for a turn
        self.lost = False  # closed while a read waited

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = transport  # type: ignore[assignment]

    def large_read(self, data: bytes) -> None:
        """Processes a large read, now or in a later turn of the event loop."""
        loop = asyncio.get_running_loop()
        # Bytes without a request must not wait: the next request would read them as its answer.
        waits = self.attached and not self.transport.is_closing() and not takes(loop, len(data))
        if waits and begin_waiting(loop, len(data)):
            self.late = data
        else:
            self.process(data)
        if (self.late or len(data) >= FULL_READ) and not self._waits and not self.transport.is_closing():
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
        if self.late:
            try:
                self.process(self._take_late())
            except BaseException:
                self.transport.abort()
                raise
        if self.lost:
            self._end()
        elif not self._paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _take_late(self) -> bytes:
        data, self.late = self.late, b""
        if data:
            end_waiting(asyncio.get_running_loop(), len(data))
        return data

    def pause(self, paused: bool) -> None:
        """Stops or continues reading."""
        self._paused = paused
        if self._waits:
            return
        if self.late:
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
        self._gone(self)
        if self.late and self.attached:
            self.lost = True  # `_next_turn` processes the read first
        else:
            self._end()

    def _end(self) -> None:
        sink: Sink | None = self.detach()
        if sink is not None:
            sink.lost()

    def close(self) -> None:
        """Closes the connection, whose answer is whole."""
        self._take_late()
        self.transport.close()

    def drop(self) -> None:
        """Closes the connection at once, so that the engine aborts the request."""
        self.detach()
        self._take_late()
        self.transport.abort()
