"""One keep-alive connection to an engine, its answers read in Rust; why there may be none."""

import asyncio
import errno
import os
import re
import socket
import ssl
import time
from typing import Protocol

from lmetric._core import ResponseReader


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


def connect_error(error: OSError) -> UpstreamError:
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


class Owner(Protocol):
    """The pool that a connection belongs to."""

    def give(self, connection: "Connection") -> None:
        """Keeps a connection for the next request."""

    def gone(self, connection: "Connection", waiting: bool) -> None:
        """Forgets a closed connection."""


class Connection(ResponseReader, asyncio.Protocol):
    """One connection. It serves one sink at a time; without one it waits in the engine's pool."""

    __slots__ = ("idle_since", "made_at", "transport", "upstream")

    transport: asyncio.Transport

    def __init__(self, upstream: Owner) -> None:
        self.upstream = upstream
        self.made_at = self.idle_since = time.monotonic()

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
        if self.keep_alive:
            self.upstream.give(self)
        else:
            self.transport.close()

    def drop(self) -> None:
        """Closes at once: that tells the engine to stop working on the request."""
        self.detach()
        self.transport.abort()
