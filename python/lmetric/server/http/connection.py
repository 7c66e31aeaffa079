"""A client's connection.

Plain requests for engines take a fast path, all others go through aiohttp.

The Rust reader (`rust/wire/src/request.rs`) decides whether a request is plain. The fast path needs
no task and no future, unless it must first connect to an engine. aiohttp gets all other bytes
unchanged: one request at a time if its end is known, else everything that follows.

A plain chat of 1 KB takes 160,000 instructions on the fast path, and 286,000 through aiohttp
(callgrind, 300 requests). tests/test_layers.py checks that aiohttp still has the undocumented
attributes used here.
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

from lmetric._core import Peer, RequestHead, RequestReader, WireError
from lmetric.server.api.errors import ApiError, whole_answer
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.http.client_load import WRITE_MARK_BYTES, Client, ClientLoad
from lmetric.server.http.forwarding import Forwarding

# Bytes held of pipelined requests: reading pauses at HOLD_BYTES, and the connection closes at
# HOLD_LIMIT (aiohttp may resume reading).
HOLD_BYTES = 64 * 1024
HOLD_LIMIT = 64 * HOLD_BYTES
# Complete bodies up to this size do not count against the limits: the limit on concurrent requests
# also limits them.
SMALL_BODY = 64 * 1024
# After refusing a body, a closing connection reads on for this long, so that its client can read
# the error.
LINGER_SECONDS = 1.0
# Turns off aiohttp's own idle timers, which do not see the fast path.
NEVER_SECONDS = 365.0 * 86_400

TOO_MANY_CONNECTIONS = whole_answer(
    ApiError(503, "too many connections", code="too_many_connections", headers={"retry-after": "1"}), None
)


def in_short(error: Exception) -> str:
    """Returns aiohttp's message about malformed HTTP as one line, without the marker below it."""
    message = error.message if isinstance(error, HttpProcessingError) else str(error)
    said = " ".join(line.strip() for line in message.splitlines() if line.strip(" ^"))
    return f"invalid URL {said}" if isinstance(error, InvalidURLError) else said


class AlreadySentResponse(web.StreamResponse):
    """An answer that was already sent. aiohttp only reads whether the connection stays open."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._goes_on = keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self._goes_on

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Does nothing: the head was sent."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: the body was sent."""


class State(IntEnum):
    """The destination of the next bytes."""

    FREE = 0  # a new request
    COLLECTING = 1  # an incomplete request
    ASKED = 2  # the queue behind a request in flight
    SKIPPING = 3  # the rest of the body of a request that aiohttp has answered
    HANDED_OVER = 4  # aiohttp, for all further bytes
    DISCARDING = 5  # none: a refusal was sent, and the connection closes after the refused body


FREE, COLLECTING, ASKED, SKIPPING, HANDED_OVER, DISCARDING = State


class Server(Protocol):
    """The interface of the server for its connections."""

    requests: RequestReader
    clients: ClientLoad
    forwarding: Forwarding

    def takes(self, head: RequestHead) -> bool:
        """Returns whether the request can take the fast path."""

    def ask(self, client: "ClientConnection", head: RequestHead, body: bytes) -> None:
        """Answers a request, then calls ``client.answered``."""

    def admit(self, client: "ClientConnection", head: RequestHead) -> ClientRequest | None:
        """Admits a request before its body is complete.

        Returns None if it was refused; then ``client.answered`` was called.
        """

    def serve(self, client_request: ClientRequest, body: bytes) -> None:
        """Answers an admitted request, then calls ``client.answered``."""

    def no_room(self, client: "ClientConnection", client_request: ClientRequest | None) -> None:
        """Refuses a request at the limit on body bytes, then calls ``client.answered``."""

    def refuse(self, client: "ClientConnection", malformed: HttpProcessingError | None) -> web.StreamResponse:
        """Answers a request that aiohttp could not read, or (None) one with an internal error."""


class ClientConnection(RequestHandler):
    """One client's connection."""

    __slots__ = (
        "_client",
        "_client_request",
        "_front",
        "_held",
        "_holder",
        "_left",
        "_need",
        "_sender",
        "_size",
        "_state",
        "answering",
        "body_size",
        "idle_since",
        "peer",
        "relay",
    )

    def __init__(self, front: Server, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, keepalive_timeout=NEVER_SECONDS, **options)
        self._front = front
        self.relay: InFlightRequest | None = None
        self.answering = False
        self.idle_since = clock.monotonic()
        self._state = FREE
        self.peer: Peer  # set when the connection is made
        self._client: Client | None = None  # None: not connected, or over the limit
        # The client that a trusted proxy names as the sender of the request in flight.
        self._sender: Client | None = None
        self._holder: Client | None = None  # the client that pays for the bytes held
        self._client_request: ClientRequest | None = None  # the incomplete request, once its head is known
        self._held: list[bytes] = []
        self._size = 0  # bytes held
        self.body_size = 0  # counted bytes of a body outside `_held`
        self._need = 0  # bytes to hold before the request is read again
        self._left = 0  # bytes still to come of a request in aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        super().connection_made(transport)
        secure = transport.get_extra_info("ssl_object") is not None
        if secure and self.transport is not None:
            self.transport.set_write_buffer_limits(WRITE_MARK_BYTES)
        self.peer = self._front.forwarding.peer(transport.get_extra_info("peername"), secure=secure)
        if self._client is None and not self.count(self.peer) and self.transport is not None:
            self._state = DISCARDING
            self.transport.write(TOO_MANY_CONNECTIONS)
            self.force_close()

    def count(self, peer: Peer) -> bool:
        """Counts the connection against the limits on clients. Returns False beyond one.

        A TLS listener calls this before the handshake.
        """
        self._client = self._front.clients.open(peer.address, peer.trusted or not peer.address)
        return self._client is not None

    def uncount(self) -> None:
        """Takes the connection off the counts."""
        client, self._client = self._client, None
        if client is not None:
            self._front.clients.close(client)

    def data_received(self, data: bytes) -> None:
        """Called by the loop with data.

        aiohttp calls it without data to resume its parser, which stops while its reader is full.
        """
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
        client_request, self._client_request = self._client_request, None
        try:
            head = self._front.requests.read(data) if client_request is None else client_request.head
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
                if client_request is None:
                    if self.peer.trusted:
                        self.name_sender(head)
                    self._discard(end - len(data))
                    client_request = self._front.admit(self, head)
                if client_request is not None:
                    self._collect(data, client_request, end)
                return
            if self.peer.trusted and client_request is None:
                self.name_sender(head)
            self._state = ASKED
            self.answering = True
            if len(data) > end:
                self._hold_back(data[end:])
            if length > SMALL_BODY and not self.hold_body(length):
                self._front.no_room(self, client_request)
            elif client_request is None:
                self._front.ask(self, head, data[start:end])
            else:
                self._front.serve(client_request, data[start:end])
        elif head.framed:
            self._give(data, end)
        else:
            self._hand_over(data)

    def _give(self, data: bytes, end: int) -> None:
        """Gives one request of ``end`` bytes to aiohttp."""
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
        # For a broken body, aiohttp queues an error, but its request would still wait for the rest.
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
        """Called by aiohttp for malformed HTTP, or for an unexpected exception."""
        return self._front.refuse(self, exc if isinstance(exc, HttpProcessingError) else None)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp. Clients' errors are not logged."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    def name_sender(self, head: RequestHead) -> None:
        """Charges the request to the client that its trusted proxy names."""
        clients = self._front.clients
        if self._sender is not None:
            clients.end(self._sender)
        self._sender = clients.begin(self._front.forwarding.client(self.peer.address, head.forwarded_for))

    @property
    def sender(self) -> str:
        """The address of the client of the request in flight; empty: of a unix socket."""
        return self.peer.address if self._sender is None else self._sender.address

    def _collect(self, data: bytes, client_request: ClientRequest | None, need: int) -> None:
        self._state = COLLECTING
        self._client_request = client_request
        self._need = need
        self._left = 0
        self._holder = self._sender or self._client
        if not self._hold(data):
            self._no_room(need - len(data))

    def _hold(self, data: bytes) -> bool:
        """Keeps bytes. Returns False beyond a limit on body bytes."""
        if self._holder is None or not self._holder.hold(len(data)):
            return False
        self._held.append(data)
        self._size += len(data)
        return True

    def _hold_back(self, data: bytes) -> None:
        """Keeps bytes that follow a request in flight."""
        if not self._held:
            self._holder = self._client
        if not self._hold(data):
            self.force_close()
        elif self._size > HOLD_BYTES and self.transport is not None:
            self.transport.pause_reading()
            if self._size > HOLD_LIMIT:
                self.force_close()

    def _discard(self, size: int) -> None:
        """Discards the rest of a refused body.

        The connection closes after ``size`` more bytes, or after LINGER_SECONDS.
        """
        self._state = DISCARDING
        self._left = size

    def _no_room(self, to_come: int) -> None:
        client_request, self._client_request = self._client_request, None
        self._take_held()
        self._discard(to_come)
        self._front.no_room(self, client_request)

    def hold_body(self, size: int) -> bool:
        """Counts bytes of a body outside `_held`. Returns False beyond a limit on body bytes."""
        payer = self._sender or self._client
        if payer is None or not payer.hold(size):
            return False
        self.body_size += size
        return True

    def release_body(self) -> None:
        """Releases the counted bytes of the body outside `_held`."""
        payer = self._sender or self._client
        if payer is not None:
            payer.release(self.body_size)
        self.body_size = 0

    def _take_held(self) -> bytes:
        data = b"".join(self._held)
        self._held.clear()
        if self._holder is not None:
            self._holder.release(self._size)
        self._size = 0
        return data

    def answered(self, goes_on: bool) -> None:
        """Ends the request in flight. ``goes_on``: the connection may carry another request."""
        self._rest()
        if goes_on:
            self._go_on()
        elif self._state != DISCARDING or self._left <= 0:
            self.force_close()

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Called by aiohttp at the end of each request."""
        self._rest()
        # Otherwise aiohttp closes the connection, and held requests get no answer.
        if self._state == ASKED and response.keep_alive:
            self._go_on()

    def _rest(self) -> None:
        self.answering = False
        self.idle_since = clock.monotonic()
        if self.body_size:
            self.release_body()
        if self._sender is not None:
            self._end_sender()

    def _end_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            self._front.clients.end(sender)

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
        """Called periodically: gives incomplete requests to aiohttp, closes idle connections."""
        if self._state == COLLECTING:
            client_request, self._client_request = self._client_request, None
            data = self._take_held()
            if client_request is None:
                self._hand_over(data)
            else:
                self._give(data, client_request.head.start + client_request.head.length)
        elif self._state == DISCARDING:
            if now - self.idle_since > LINGER_SECONDS:
                self.force_close()
        elif not self.answering and now - self.idle_since > idle_seconds:
            self.force_close()

    def pause_writing(self) -> None:
        """Called by the loop."""
        super().pause_writing()
        self._front.clients.slow(self)
        if self.relay is not None:
            self.relay.client_slow()

    def resume_writing(self) -> None:
        """Called by the loop."""
        super().resume_writing()
        self._front.clients.caught_up(self)
        if self.relay is not None:
            self.relay.client_ready()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the loop."""
        super().connection_lost(exc)
        self._take_held()
        self.release_body()
        self._end_sender()
        self.uncount()
        self._front.clients.caught_up(self)
        if self.relay is not None:
            self.relay.client_gone()
