"""A client's connection.

Plain requests for engines take a fast path, all others go through aiohttp.

The Rust reader (`rust/wire/src/request.rs`) reads each head and decides whether a request is plain.
The fast path needs no task and no future, unless it must first connect to an engine. aiohttp gets
the other requests, one at a time and only with a whole head. It gets a chunked body in new chunks,
one for all bytes that were read at once. So the time and the memory that aiohttp's parser needs
depend on the size of a request, not on its pieces.

A plain chat of 1 KB takes 160,000 instructions on the fast path, and 286,000 through aiohttp
(callgrind, 300 requests). tests/test_layers.py checks that aiohttp still has the undocumented
attributes used here.
"""

import asyncio
import time as clock
from enum import IntEnum
from typing import Any, Protocol

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError, TransferEncodingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from lmetric._core import MAX_REQUEST_FIELDS, ChunkedBody, Peer, RequestHead, RequestReader, WireError
from lmetric.config import Timeouts
from lmetric.server.api.errors import ApiError, whole_answer
from lmetric.server.api.request import LARGE_BODY, BodyParts, add_piece
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.http.client_load import WRITE_MARK_BYTES, Client, ClientLoad
from lmetric.server.http.forwarding import Forwarding
from lmetric.server.upstream.reading import COUNTED_READ, read_on_later, takes

# Bytes held of pipelined requests: reading pauses at HOLD_BYTES, and the connection closes at
# HOLD_LIMIT (aiohttp may resume reading).
HOLD_BYTES = 64 * 1024
HOLD_LIMIT = 64 * HOLD_BYTES
# Complete requests up to this size do not count against the limits on body bytes: the limit on
# concurrent requests also limits them.
SMALL_BODY = 64 * 1024
# Heads up to this size without a body do not count either, so that pages such as /health answer
# while bodies use all that the limits allow.
SMALL_HEAD = 4 * 1024
# Seconds from the first byte of a head to its last one. Heads are sent at once.
HEAD_SECONDS = 10.0
# After a read of this size, a connection reads on in a later turn of the loop
# (`upstream/reading.py`). uvloop would read it up to 32 times before the next connection. Smaller
# reads empty the socket.
LARGE_READ = 64 * 1024
# After refusing a body, a closing connection discards bytes for this long, so that its client can
# read the error.
LINGER_SECONDS = 1.0
# Turns off aiohttp's own idle timers, which do not see the fast path.
NEVER_SECONDS = 365.0 * 86_400
ENDLESS = 1 << 62  # bytes to discard until the connection closes

TOO_MANY_CONNECTIONS = whole_answer(
    ApiError(503, "too many connections", code="too_many_connections", headers={"retry-after": "1"}), None
)


class NoRoomError(HttpProcessingError):
    """A body has reached a limit on body bytes."""


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
    DISCARDING = 4  # none: the connection closes after its answer


FREE, COLLECTING, ASKED, SKIPPING, DISCARDING = State


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

    def serve(self, client_request: ClientRequest, body: bytes | BodyParts) -> None:
        """Answers an admitted request, then calls ``client.answered``."""

    def no_room(self, client: "ClientConnection", client_request: ClientRequest | None) -> None:
        """Refuses a request at the limit on body bytes, then calls ``client.answered``."""

    def unreadable(self, client: "ClientConnection", data: bytes, error: WireError) -> None:
        """Refuses a request whose head ``data`` begins with, then calls ``client.answered``."""

    def late(self, client: "ClientConnection", client_request: ClientRequest | None, received: int) -> None:
        """Refuses a request whose head (None) or body takes too long, then calls `answered`."""

    def refuse(self, client: "ClientConnection", malformed: HttpProcessingError | None) -> web.StreamResponse:
        """Answers a request that aiohttp could not read, or (None) one with an internal error."""


class ClientConnection(RequestHandler):
    """One client's connection."""

    __slots__ = (
        "_body",
        "_chunks",
        "_client",
        "_client_request",
        "_front",
        "_held",
        "_holder",
        "_late",
        "_left",
        "_need",
        "_resting",
        "_sender",
        "_since",
        "_size",
        "_state",
        "_tail",
        "answering",
        "body_size",
        "idle_since",
        "payer",
        "peer",
        "relay",
    )

    def __init__(self, front: Server, manager: web.Server, **options: Any) -> None:
        # The Rust reader limits heads, so aiohttp must not be stricter.
        limit = front.requests.limit
        super().__init__(
            manager,
            keepalive_timeout=NEVER_SECONDS,
            max_line_size=limit,
            max_field_size=limit,
            max_headers=MAX_REQUEST_FIELDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            **options,
        )
        self._front = front
        self.relay: InFlightRequest | None = None
        self.answering = False
        self.idle_since = clock.monotonic()
        self._state = FREE
        self.peer: Peer  # set when the connection is made
        self._client: Client | None = None  # None: not connected, or over the limit
        # The client that pays for the request in flight; None: it has disconnected.
        self.payer: Client | None = None
        # The client that a trusted proxy names as the sender of the request in flight.
        self._sender: Client | None = None
        self._holder: Client | None = None  # the client that pays for the bytes held
        self._client_request: ClientRequest | None = None  # the incomplete request, once its head is known
        self._held: list[bytes | bytearray] = []
        self._size = 0  # bytes held
        self._tail = b""  # the last bytes held of an incomplete head
        self.body_size = 0  # counted bytes of a request outside `_held`
        self._need = 0  # bytes to hold before the request is read again
        self._since = 0.0  # time of the first byte of an incomplete head or body; 0: there is none
        self._left = 0  # bytes still to come of a body with a length in aiohttp, or to discard
        self._body: StreamReader | None = None  # the body of the request in aiohttp
        self._chunks: ChunkedBody | None = None  # an incomplete chunked body in aiohttp
        self._late: list[bytes] = []  # reads that a later turn processes
        self._resting = False  # reading is paused until the next turn of the loop

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
        self.payer = self._client
        return self._client is not None

    def uncount(self) -> None:
        """Takes the connection off the counts."""
        client, self._client = self._client, None
        self.payer = None
        if client is not None:
            self._front.clients.close(client)

    @property
    def closes(self) -> bool:
        """Whether the connection closes after the answer."""
        return self._state == DISCARDING

    def data_received(self, data: bytes) -> None:
        """Called by the loop with data.

        aiohttp calls it without data to resume its parser, which stops while its reader is full.
        """
        if not data:
            super().data_received(data)
            return
        if len(data) >= COUNTED_READ:
            if len(data) >= LARGE_READ:
                self._rest_reading()
            if self._late or not takes(self._loop, len(data)):
                self._rest_reading()
                self._keep_late(data)
            else:
                self._received(data)
        elif self._late:
            self._keep_late(data)
        elif self._state == FREE:
            self._begin(data)
        else:
            self._received(data)

    def _received(self, data: bytes) -> None:
        state = self._state
        if state == FREE:
            self._begin(data)
        elif state == COLLECTING:
            if not self._hold(data):
                self._no_room(self._need - self._size - len(data))
            elif self._size >= self._need or (self._client_request is None and self._ends_head(data)):
                if self._client_request is not None and self._need > LARGE_BODY:
                    self._serve_large(self._client_request)
                else:
                    self._begin(self._take_held())
        elif state == DISCARDING:
            self._left -= len(data)
            if self._left <= 0:
                self.force_close()
        else:
            if self._left or self._chunks is not None:
                data = self._feed(data)
            if not data:
                return
            if self._state == SKIPPING:
                self._state = FREE
                self._begin(data)
            elif self._state == ASKED:
                self._hold_back(data)

    def _rest_reading(self) -> None:
        """Leaves the rest of the loop's turn to other connections."""
        if not self._resting:
            self._resting = True
            self._pause_transport_reading()
            read_on_later(self._loop, self._read_on)

    def _keep_late(self, data: bytes) -> None:
        """Keeps a read for a later turn."""
        client = self._client
        if client is None or not client.hold(len(data)):
            self.force_close()
        else:
            self._late.append(data)

    def _resume_transport_reading(self) -> None:
        if not self._resting:  # else `_read_on` resumes
            super()._resume_transport_reading()

    def _read_on(self) -> None:
        if self._late:
            read_on_later(self._loop, self._read_on)
            data = self._late.pop(0)
            if self._client is not None:
                self._client.release(len(data))
            if self.transport is not None and not self.transport.is_closing():
                self._received(data)
            return
        self._resting = False
        full = self._state == ASKED and self._size > HOLD_BYTES
        if not full and not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _ends_head(self, data: bytes) -> bool:
        """Returns whether a head may end in ``data``, which was held last.

        Reading an incomplete head again for each of its pieces would take quadratic time.
        """
        data = self._tail + data
        self._tail = data[-2:]
        return b"\n\r\n" in data or b"\n\n" in data

    def _begin(self, data: bytes) -> None:
        """Reads the request at the start of ``data``."""
        client_request, self._client_request = self._client_request, None
        try:
            head = self._front.requests.read(data) if client_request is None else client_request.head
        except WireError as error:
            self._discard(ENDLESS)
            self._front.unreadable(self, data, error)
            return
        if head is None:
            self._collect(data, None, self._front.requests.limit)
            return
        self._since = 0.0
        start, length = head.start, head.length
        end = start + length
        if self.peer.trusted and client_request is None:
            self.name_sender(head)
        if head.plain and self._front.takes(head):
            if len(data) < end:
                if client_request is None:
                    self._discard(end - len(data))
                    client_request = self._front.admit(self, head)
                if client_request is not None:
                    self._collect(data, client_request, end)
                return
            self._state = ASKED
            self.answering = True
            if len(data) > end:
                self._hold_back(data[end:])
            if end > SMALL_BODY and not self.hold_body(end):
                self._front.no_room(self, client_request)
            elif client_request is None:
                self._front.ask(self, head, data[start:end])
            else:
                self._front.serve(client_request, data[start:end])
        else:
            self._give(data, head)

    def _serve_large(self, client_request: ClientRequest) -> None:
        """Serves the request whose pieces are held. A thread joins them."""
        self._client_request = None
        head = client_request.head
        after, parts = self._size - self._need, self._take_parts()
        self._since = 0.0
        self._state = ASKED
        self.answering = True
        if after:
            last = parts[-1]
            parts[-1] = last[:-after]
            self._hold_back(bytes(last[-after:]))
        if self.hold_body(self._need):
            self._front.serve(client_request, BodyParts(parts, head.start, head.length))
        else:
            self._front.no_room(self, client_request)

    def _give(self, data: bytes, head: RequestHead) -> None:
        """Gives one request to aiohttp."""
        start = head.start
        if (start > SMALL_HEAD or head.length or head.chunked) and not self.hold_body(start):
            self._no_room(ENDLESS)
            return
        self.answering = True
        if head.chunked:
            self._state = ASKED
            self._chunks = ChunkedBody()
        elif head.framed:
            self._state = ASKED
            self._left = head.length
        else:  # aiohttp refuses it, and the begin of the next request is unknown
            self._discard(ENDLESS)
        super().data_received(data[:start])
        if not self._messages:
            return  # the connection is closing
        message, self._body = self._messages[-1]
        if not isinstance(message, RawRequestMessage):  # aiohttp refuses it
            self._discard(ENDLESS)
        rest = data[start:]
        if rest and (self._left or self._chunks is not None) and self._state == ASKED:
            rest = self._feed(rest)
        if rest and self._state == ASKED:
            self._hold_back(rest)

    def _feed(self, data: bytes) -> bytes:
        """Gives aiohttp the next bytes of its request's body. Returns the bytes behind the body."""
        if self._chunks is None:
            body, rest = data[: self._left], data[self._left :]
            self._left -= len(body)
            framed = body
        else:
            try:
                body, used = self._chunks.read(data)
            except WireError as error:
                self._front.clients.refused["chunks"] += 1
                self._break_body(TransferEncodingError(str(error)))
                return b""
            rest = data[used:]
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if self._chunks.done:
                self._chunks = None
                framed += b"0\r\n\r\n"
        # After the answer, aiohttp discards the body.
        if self._state != SKIPPING and not self.hold_body(len(body)):
            self._break_body(NoRoomError())
            return b""
        if framed:
            super().data_received(framed)
        return rest

    def _break_body(self, error: HttpProcessingError) -> None:
        """Ends the request in aiohttp at a fault of its body. The connection closes."""
        answered = self._state == SKIPPING
        self._chunks = None
        self._discard(ENDLESS)
        if self._body is not None and not self._body.is_eof():
            self._body.set_exception(error)
        if answered:
            self.force_close()

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
        self.payer = self._sender

    @property
    def sender(self) -> str:
        """The address of the client of the request in flight; empty: of a unix socket."""
        return self.peer.address if self._sender is None else self._sender.address

    def _collect(self, data: bytes, client_request: ClientRequest | None, need: int) -> None:
        self._state = COLLECTING
        self._client_request = client_request
        self._need = need
        self._left = 0
        if client_request is not None or not self._since:
            self._since = clock.monotonic()
        if client_request is None:
            self._tail = data[-2:]
        self._holder = self.payer
        if not self._hold(data):
            self._no_room(need - len(data))

    def _hold(self, data: bytes) -> bool:
        """Keeps bytes. Returns False beyond a limit on body bytes."""
        if self._holder is None or not self._holder.hold(len(data)):
            return False
        add_piece(self._held, data)
        self._size += len(data)
        return True

    def _hold_back(self, data: bytes) -> None:
        """Keeps bytes that follow a request in flight."""
        if not self._held:
            self._holder = self._client
        if not self._hold(data):
            self.force_close()
        elif self._size > HOLD_BYTES:
            self._pause_transport_reading()
            if self._size > HOLD_LIMIT:
                self.force_close()

    def _discard(self, size: int) -> None:
        """Discards all further bytes.

        The connection closes after its answer and ``size`` more bytes, or LINGER_SECONDS later.
        """
        self._state = DISCARDING
        self._left = size

    def _no_room(self, to_come: int) -> None:
        client_request, self._client_request = self._client_request, None
        self._take_held()
        self._discard(to_come)
        self._front.no_room(self, client_request)

    def hold_body(self, size: int) -> bool:
        """Counts bytes of a request outside `_held`. Returns False beyond a limit on body bytes."""
        payer = self.payer
        if payer is None or not payer.hold(size):
            return False
        self.body_size += size
        return True

    def release_body(self) -> None:
        """Releases the counted bytes of the request outside `_held`."""
        self.keep_body(0)

    def keep_body(self, size: int) -> None:
        """Counts only ``size`` of the counted bytes of the request outside `_held`."""
        payer = self.payer
        if payer is not None:
            payer.release(self.body_size - size)
        self.body_size = size

    def _take_held(self) -> bytes:
        return b"".join(self._take_parts())

    def _take_parts(self) -> list[bytes | bytearray]:
        parts, self._held = self._held, []
        if self._holder is not None:
            self._holder.release(self._size)
        self._size = 0
        return parts

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
        if self._state == DISCARDING:
            # aiohttp waits LINGER_SECONDS for the rest of a body, but not for a broken one.
            request.content.set_exception(None)  # type: ignore[arg-type]
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
        self.payer = self._client
        if sender is not None:
            self._front.clients.end(sender)

    def _go_on(self) -> None:
        if self._left or self._chunks is not None:
            self._state = SKIPPING
        elif self._held:
            self._loop.call_soon(self._next)
        else:
            self._state = FREE

    def _next(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._size > HOLD_BYTES:
            self._resume_transport_reading()
        self._begin(self._take_held())

    def check(self, now: float, timeouts: Timeouts) -> bool:
        """Called periodically: refuses requests that take too long, closes idle connections.

        Returns whether it did.
        """
        if self._state == COLLECTING:
            seconds = HEAD_SECONDS if self._client_request is None else timeouts.body
            if now - self._since > seconds:
                client_request, self._client_request = self._client_request, None
                received = len(self._take_held())
                self._discard(ENDLESS)
                self._front.late(self, client_request, received)
                return True
        elif not self.answering and now - self.idle_since > (
            LINGER_SECONDS if self._state == DISCARDING else timeouts.keep_alive
        ):
            self.force_close()
            return True
        return False

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
        if self._client is not None:
            self._client.release(sum(map(len, self._late)))
        self._late.clear()
        self.release_body()
        self._end_sender()
        self.uncount()
        self._front.clients.caught_up(self)
        if self.relay is not None:
            self.relay.client_gone()
