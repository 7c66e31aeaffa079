"""A request for an engine: as its client sent it, and what answers for it until it ends."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from lmetric._core import RequestHead, ResponseReader
from lmetric.config import ServerConfig, Timeouts
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.transcript import Transcript
from lmetric.server.fleet.pool import Pool

FAILED = "the router failed; its log says why"
STOPPING = "the router is shutting down"

_CORS_FIELDS = re.compile(rb"\r\naccess-control-[^\r\n]*", re.IGNORECASE)


class ClientPort(Protocol):
    """The connection of the client that asks."""

    relay: InFlightRequest | None
    body_size: int

    @property
    def writing_paused(self) -> bool:
        """Whether the client does not keep up."""

    def release_body(self) -> None:
        """The request's body is no longer kept."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of answering. Each request reads it, and reading a model of pydantic takes
    several times as long."""

    attempts: int
    failures: frozenset[str]
    statuses: frozenset[int]
    show_engines: bool
    timeouts: Timeouts

    @classmethod
    def of(cls, config: ServerConfig) -> Rules:
        """The rules of a configuration."""
        retries = config.retries
        return cls(
            retries.attempts,
            frozenset(retries.failures),
            frozenset(retries.statuses),
            config.errors.show_engines,
            config.timeouts,
        )


# Who writes the answer: nobody yet; an engine, whose bytes pass; the router; or it has ended.
AnswerState = Literal["nothing", "passed", "written", "ended"]


class ClientRequest:
    """A request for an engine as its client sent it, and the answer that the client gets: passed on from an
    engine, or written by the router, and ended once. ``done`` is told whether the connection goes on.

    What most requests leave as it is stands at the class: it is not set for each of them.
    """

    address: str | None = None  # of the client, for the access log
    pool: Pool | None = None
    priority: int | None = None  # the router's, lower first; None: requests are not ordered
    drops_priority = False  # the client's own does not go on
    prompt_bytes = 0  # 0 where the prompt was given as tokens
    # Of the answer.
    state: AnswerState = "nothing"
    only_closing_ends_it = False  # as a length or chunks cannot
    _reader: ResponseReader | None = None  # whose bytes pass
    _chunked = False  # what the router writes goes out in chunks

    def __init__(
        self,
        client: ClientPort,
        transport: asyncio.Transport,
        head: RequestHead,
        http11: bool,
        keep_alive: bool,
        done: Callable[[bool], None],
    ) -> None:
        self.client = client
        self.transport = transport
        self.head = head
        self.path = head.path
        self.http11 = http11
        self.keep_alive = keep_alive
        self.done = done
        self.tenant = ""
        self.cors = b""  # lines of the answer's head; empty: CORS is off
        self.started = time.monotonic()  # seconds

    def overdue(self, limit_seconds: float | None, now: float) -> str | None:
        """Why the request has taken too long; None: it has not. `limit_seconds` None: no limit."""
        if limit_seconds is None or now - self.started <= limit_seconds:
            return None
        return f"the request took longer than {limit_seconds:g} s (timeouts.request)"

    # The answer. `lines`: the router's own in its head.

    def pass_on(self, reader: ResponseReader, lines: bytes) -> None:
        """Begins with what an engine has said so far; from now on its bytes pass."""
        self.state = "passed"
        self._reader = reader
        write = self.transport.write
        head = reader.commit(lines, not self.keep_alive, write)
        write(_with_cors(head, self.cors) if self.cors else head)

    def begin(self, kind: bytes, length: int | None, lines: bytes) -> None:
        """Begins an answer of the router's own; `length`: of its body, None: it is streamed."""
        self.state = "written"
        parts = [b"HTTP/1.1 200 OK\r\ncontent-type: ", kind, b"\r\n", lines, self.cors]
        self._chunked = length is None and self.http11
        if length is not None:
            parts.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self.only_closing_ends_it = True
        if self.only_closing_ends_it or not self.keep_alive:
            parts.append(b"connection: close\r\n")
        self.transport.write(b"".join(parts) + b"\r\n")

    def write(self, data: bytes, *, last: bool = False) -> None:
        """More of it, written by the router; where a stream passed so far, behind its last event."""
        if self.state == "passed":
            assert self._reader is not None
            self.state = "written"
            self.only_closing_ends_it = self._reader.closes_client
            self._chunked = not self.only_closing_ends_it
        if self._chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"0\r\n\r\n" if last else b"")
        if data:
            self.transport.write(data)
        if last:
            self.state = "ended"

    def break_off(self, body: bytes) -> None:
        """Ends what the client has some of, with an error as the last event; where that cannot be told, by
        closing its connection."""
        if self.state == "written":
            self.write(b"data: %b\n\ndata: [DONE]\n\n" % body, last=True)
        elif self.state == "passed":
            assert self._reader is not None
            tail = self._reader.end_with(body)
            if tail:
                self.transport.write(tail)
            self.only_closing_ends_it = not tail or self._reader.closes_client
        self.state = "ended"

    def end(self) -> bool:
        """No more of it comes; whether only closing the connection ends it."""
        if self.state == "passed":
            assert self._reader is not None
            self.state = "ended"
            self.only_closing_ends_it = self._reader.closes_client
        return self.only_closing_ends_it


def _with_cors(answer: bytes, lines: bytes) -> bytes:
    """The beginning of an engine's answer with these lines instead of the engine's own CORS fields."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    return b"%b\r\n%b\r\n%b" % (_CORS_FIELDS.sub(b"", head), lines, rest)


class InFlightRequest:
    """What answers for a request until it ends: its connection and the server tell it what happens."""

    committed = False  # the client has something of an engine's answer
    close_client = False
    reason = ""  # why it ended, where it did not end well
    status = 0
    # Of an engine's answer or of a merged one; None until it has ended, and where none is committed.
    usage: ResponseReader | Transcript | None = None

    @property
    def decision(self) -> str | None:
        """Label of its routing decision; None: it was not routed."""
        return None

    @property
    def instance(self) -> str | None:
        """The engine that answered, or was tried last; None: it was not routed."""
        return None

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        """Ends the request in the middle, unless it has ended; ``error`` is for a client that has nothing."""
        raise NotImplementedError

    def client_gone(self) -> None:
        """The client left."""
        self._leave("the client left")

    def client_slow(self) -> None:
        """The client does not keep up."""

    def client_ready(self) -> None:
        """The client caught up."""

    def check(self, now: float) -> None:
        """Called now and then: ends what takes too long."""

    def stop(self) -> None:
        """The server stops."""
        error = ApiError(503, STOPPING, code="shutting_down", headers={"retry-after": "5"})
        self._leave(STOPPING, None if self.committed else error)

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""
        self._leave("internal error", None if self.committed else ApiError(500, FAILED))
