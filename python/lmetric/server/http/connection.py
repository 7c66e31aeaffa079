"""A client's connection: plain requests for engines go a short way, all others through aiohttp.

A request goes the short way when the Rust reader finds it plain (`rust/wire/src/request.rs`): it needs no
task and no future unless an engine must first be connected to. Whatever else comes is given to aiohttp
unchanged, one request at a time where its end is known, else with all that follows.

What the short way saves: a plain chat of 1 KB takes 160,000 instructions of the router's process, and
286,000 if aiohttp reads it (callgrind, 300 requests). tests/test_layers.py checks that aiohttp still has the
undocumented attributes that are used here.
"""

import asyncio
import time as clock
from enum import IntEnum
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from lmetric._core import RequestHead, RequestReader, WireError
from lmetric.server.api.errors import ApiError, whole_answer
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.http.client_load import Client, ClientLoad

# Of requests that come before the answer to the one before, so much is read before reading stops, and so much
# costs the connection (aiohttp, too, may have it read on).
HOLD_BYTES = 64 * 1024
HOLD_LIMIT = 64 * HOLD_BYTES
# Bodies up to this size do not count against the bounds once they are whole: the bound on requests at once
# bounds them, too.
SMALL_BODY = 64 * 1024
# A connection that closes before a refused body came goes on reading for this long, so that its client can
# read why.
LINGER_SECONDS = 1.0
# aiohttp closes idle connections by timers of its own, which know nothing of the short way.
NEVER_SECONDS = 365.0 * 86_400

TOO_MANY_CONNECTIONS = whole_answer(
    ApiError(503, "too many connections", code="too_many_connections", headers={"retry-after": "1"}), None
)


def in_short(error: Exception) -> str:
    """What aiohttp says of malformed HTTP, in a line and without its drawing of the place."""
    message = error.message if isinstance(error, HttpProcessingError) else str(error)
    said = " ".join(line.strip() for line in message.splitlines() if line.strip(" ^"))
    return f"invalid URL {said}" if isinstance(error, InvalidURLError) else said


class AlreadySentResponse(web.StreamResponse):
    """An answer that is already on the wire; tells aiohttp only whether the connection goes on."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._goes_on = keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self._goes_on

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to do: the head was relayed."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to do: the body was relayed."""


class State(IntEnum):
    """Where the next bytes belong."""

    FREE = 0  # to a new request
    COLLECTING = 1  # to a request that is not whole
    ASKED = 2  # behind a request that is not answered
    SKIPPING = 3  # to the body of a request that aiohttp has answered
    HANDED_OVER = 4  # to aiohttp, for good
    DISCARDING = 5  # to nobody: a refusal is written, and the connection closes behind the refused body


FREE, COLLECTING, ASKED, SKIPPING, HANDED_OVER, DISCARDING = State


class Server(Protocol):
    """What a connection needs of the server."""

    requests: RequestReader
    clients: ClientLoad

    def takes(self, head: RequestHead) -> bool:
        """Whether the request can go the short way."""

    def ask(self, client: "ClientConnection", head: RequestHead, body: bytes) -> None:
        """Has a request answered, then calls ``client.answered``."""

    def admit(self, client: "ClientConnection", head: RequestHead) -> ClientRequest | None:
        """A request whose body is still to come; None: it was refused, and ``client.answered`` was called."""

    def serve(self, asked: ClientRequest, body: bytes) -> None:
        """Has an admitted request answered, then calls ``client.answered``."""

    def no_room(self, client: "ClientConnection", asked: ClientRequest | None) -> None:
        """Refuses a request because of the bytes that clients hold, then calls ``client.answered``."""

    def refuse(self, client: "ClientConnection", malformed: HttpProcessingError | None) -> web.StreamResponse:
        """Answers a request that aiohttp could not read, or (None) one at which the router failed."""


class ClientConnection(RequestHandler):
    """One client's connection."""

    __slots__ = (
        "_asked",
        "_client",
        "_front",
        "_held",
        "_left",
        "_need",
        "_size",
        "_state",
        "answering",
        "body_size",
        "idle_since",
        "relay",
    )

    def __init__(self, front: Server, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, keepalive_timeout=NEVER_SECONDS, **options)
        self._front = front
        self.relay: InFlightRequest | None = None
        self.answering = False
        self.idle_since = clock.monotonic()
        self._state = FREE
        self._client: Client | None = None  # None: not connected, or one too many
        self._asked: ClientRequest | None = None  # the request that is collected, once its head is known
        self._held: list[bytes] = []
        self._size = 0  # bytes held
        self.body_size = 0  # bytes that count for a body that is held elsewhere
        self._need = 0  # bytes held that are worth another look
        self._left = 0  # bytes still to come of a request that aiohttp has

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._client = self._front.clients.open(peer[0] if isinstance(peer, tuple) else "")
        if self._client is None and self.transport is not None:
            self._state = DISCARDING
            self.transport.write(TOO_MANY_CONNECTIONS)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Called by the loop; without data by aiohttp, whose parser stopped (be it before a body's end) while
        its reader was full, and is to go on."""
        state = self._state
        if not data:
            self._parse(data)
        elif state == FREE:
            self._begin(data)
        elif state == HANDED_OVER:
            self._parse(data)
        elif state == COLLECTING:
            if not self._hold(data):
                self._no_room(self._need - self._size - len(data))
            elif self._size >= self._need:
                self._begin(self._take_held())
        elif state == DISCARDING:
            self._left -= len(data)
            if self._left <= 0:
                self.force_close()
        else:
            if self._left:
                rest = data[self._left :]
                self._feed(data[: self._left])
                data = rest
            if self._state == SKIPPING and not self._left:
                self._state = FREE
                if data:
                    self._begin(data)
            elif data:
                self._hold_back(data)

    def _begin(self, data: bytes) -> None:
        """Reads the request at the start of ``data``."""
        asked, self._asked = self._asked, None
        try:
            head = self._front.requests.read(data) if asked is None else asked.head
        except WireError:
            self._hand_over(data)
            return
        if head is None:
            self._collect(data, None, len(data) + 1)
            return
        start, length = head.start, head.length
        end = start + length
        if head.plain and self._front.takes(head):
            if len(data) < end:
                if asked is None:
                    self._discard(end - len(data))
                    asked = self._front.admit(self, head)
                if asked is not None:
                    self._collect(data, asked, end)
                return
            self._state = ASKED
            self.answering = True
            if len(data) > end:
                self._hold_back(data[end:])
            if length > SMALL_BODY and not self.hold_body(length):
                self._front.no_room(self, asked)
            elif asked is None:
                self._front.ask(self, head, data[start:end])
            else:
                self._front.serve(asked, data[start:end])
        elif head.framed:
            self._give(data, end)
        else:
            self._hand_over(data)

    def _give(self, data: bytes, end: int) -> None:
        """Gives aiohttp one request, of ``end`` bytes."""
        self._state = ASKED
        self._left = end
        if len(data) > end:
            self._hold_back(data[end:])
        self._feed(data[:end])

    def _feed(self, data: bytes) -> None:
        self._left -= len(data)
        super().data_received(data)

    def _hand_over(self, data: bytes) -> None:
        self._state = HANDED_OVER
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        # A body that turns out broken: aiohttp queues an error, and its request would wait for the rest.
        if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            error = self._messages[-1][0].exc
            bodies = [body for _, body in self._messages]
            if self._current_request is not None:
                bodies.append(self._current_request.content)
            for body in bodies:
                if not body.is_eof():
                    body.set_exception(error)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called by aiohttp for what is no HTTP, or for an exception that nobody foresaw."""
        return self._front.refuse(self, exc if isinstance(exc, HttpProcessingError) else None)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp; what clients do wrong is no fault of the router."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    def _collect(self, data: bytes, asked: ClientRequest | None, need: int) -> None:
        self._state = COLLECTING
        self._asked = asked
        self._need = need
        self._left = 0
        if not self._hold(data):
            self._no_room(need - len(data))

    def _hold(self, data: bytes) -> bool:
        """Keeps bytes; False if clients hold too many."""
        if self._client is None or not self._client.hold(len(data)):
            return False
        self._held.append(data)
        self._size += len(data)
        return True

    def _hold_back(self, data: bytes) -> None:
        """Holds what came behind a request that is not answered."""
        if not self._hold(data):
            self.force_close()
        elif self._size > HOLD_BYTES and self.transport is not None:
            self.transport.pause_reading()
            if self._size > HOLD_LIMIT:
                self.force_close()

    def _discard(self, size: int) -> None:
        """Has the next answer close the connection once so many bytes came, or LINGER_SECONDS passed."""
        self._state = DISCARDING
        self._left = size

    def _no_room(self, to_come: int) -> None:
        asked, self._asked = self._asked, None
        self._take_held()
        self._discard(to_come)
        self._front.no_room(self, asked)

    def hold_body(self, size: int) -> bool:
        """Counts a body that is held elsewhere, or more of it; False if clients hold too many bytes."""
        if self._client is None or not self._client.hold(size):
            return False
        self.body_size += size
        return True

    def release_body(self) -> None:
        """The body that is held elsewhere is no longer kept."""
        if self._client is not None:
            self._client.release(self.body_size)
        self.body_size = 0

    def _take_held(self) -> bytes:
        data = b"".join(self._held)
        self._held.clear()
        if self._client is not None:
            self._client.release(self._size)
        self._size = 0
        return data

    def answered(self, goes_on: bool) -> None:
        """The request's answer ended; ``goes_on``: the connection may carry another one."""
        self._rest()
        if goes_on:
            self._go_on()
        elif self._state != DISCARDING or self._left <= 0:
            self.force_close()

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Called by aiohttp as the last thing when it has answered a request."""
        self._rest()
        # Else aiohttp closes the connection, and what was held has nobody to answer it.
        if self._state == ASKED and response.keep_alive:
            self._go_on()

    def _rest(self) -> None:
        self.answering = False
        self.idle_since = clock.monotonic()
        if self.body_size:
            self.release_body()

    def _go_on(self) -> None:
        if self._left:
            self._state = SKIPPING
        elif self._held:
            self._loop.call_soon(self._next)
        else:
            self._state = FREE

    def _next(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._size > HOLD_BYTES:
            self.transport.resume_reading()
        self._begin(self._take_held())

    def check(self, now: float, idle_seconds: float) -> None:
        """Called now and then: requests that stay incomplete become aiohttp's, idle connections close."""
        if self._state == COLLECTING:
            asked, self._asked = self._asked, None
            data = self._take_held()
            if asked is None:
                self._hand_over(data)
            else:
                self._give(data, asked.head.start + asked.head.length)
        elif self._state == DISCARDING:
            if now - self.idle_since > LINGER_SECONDS:
                self.force_close()
        elif not self.answering and now - self.idle_since > idle_seconds:
            self.force_close()

    def pause_writing(self) -> None:
        """Called by the loop."""
        super().pause_writing()
        if self.relay is not None:
            self.relay.client_slow()

    def resume_writing(self) -> None:
        """Called by the loop."""
        super().resume_writing()
        if self.relay is not None:
            self.relay.client_ready()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the loop."""
        super().connection_lost(exc)
        self._take_held()
        self.release_body()
        if self._client is not None:
            self._front.clients.close(self._client)
            self._client = None
        if self.relay is not None:
            self.relay.client_gone()
