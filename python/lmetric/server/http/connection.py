"""A client's connection.

Plain requests for engines take a fast path, all others go through aiohttp.

The Rust reader (`rust/wire/src/request.rs`) reads each head and decides whether a request is plain.
The fast path needs no task and no future, unless it must first connect to an engine. aiohttp gets
the other requests, one at a time and only with a whole head. It gets a chunked body in new chunks,
one for all bytes that were read at once. So the time and the memory that aiohttp's parser needs
depend on the size of a request, not on its pieces.

Through aiohttp, a plain chat of 1 KB took 126,000 instructions more than on the fast path
(callgrind, 300 requests). tests/test_layers.py checks that aiohttp still has the undocumented
attributes used here.
"""

import asyncio
import time as clock
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, TransferEncodingError
from aiohttp.http_parser import RawRequestMessage

from lmetric._core import FULL_READ, MAX_REQUEST_FIELDS, Peer, RequestHead, WireError
from lmetric.config import Timeouts
from lmetric.server.api.request import LARGE_BODY, BodyParts
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.http.client_load import WRITE_MARK_BYTES
from lmetric.server.http.entrance import HEAD_SECONDS, Entrance
from lmetric.server.http.incoming import HOLD_BYTES, HOLD_LIMIT, BodyFeed, HeldBytes, NoRoomError, State
from lmetric.server.http.pacing import TOO_MANY_CONNECTIONS, PacedHandler
from lmetric.server.upstream.reading import COUNTED_READ, takes

FREE, COLLECTING, ASKED, SKIPPING, DISCARDING, AWAITING = State

# Complete requests up to this size do not count against the limits on body bytes: the limit on
# concurrent requests also limits them.
SMALL_BODY = 64 * 1024
# Heads up to this size without a body do not count either, so that pages such as /health answer
# while bodies use all that the limits allow.
SMALL_HEAD = 4 * 1024
# After refusing a body, a closing connection discards bytes for this long, so that its client can
# read the error.
LINGER_SECONDS = 1.0
# Turns off aiohttp's own idle timers, which do not see the fast path.
NEVER_SECONDS = 365.0 * 86_400
ENDLESS = 1 << 62  # bytes to discard until the connection closes


class ClientConnection(PacedHandler):
    """One client's connection."""

    __slots__ = (
        "_client_request",
        "_entrance",
        "_feed",
        "_held",
        "_left",
        "_need",
        "_since",
        "_state",
        "answering",
        "idle_since",
        "peer",
        "relay",
    )

    def __init__(self, entrance: Entrance, manager: web.Server, **options: Any) -> None:
        # The Rust reader limits heads, so aiohttp must not be stricter.
        limit = entrance.requests.limit
        super().__init__(
            entrance.clients,
            manager,
            keepalive_timeout=NEVER_SECONDS,
            max_line_size=limit,
            max_field_size=limit,
            max_headers=MAX_REQUEST_FIELDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            **options,
        )
        self._entrance = entrance
        self.relay: InFlightRequest | None = None
        self.answering = False
        self.idle_since = clock.monotonic()
        self._state = FREE
        self.peer: Peer  # set when the connection is made
        self._client_request: ClientRequest | None = None  # the incomplete request, once its head is known
        self._held = HeldBytes()
        self._need = 0  # bytes to hold before the request is read again
        self._since = 0.0  # time of the first byte of an incomplete head or body; 0: there is none
        self._left = 0  # bytes to discard
        self._feed: BodyFeed | None = None  # an incomplete body in aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        super().connection_made(transport)
        secure = transport.get_extra_info("ssl_object") is not None
        if secure and self.transport is not None:
            self.transport.set_write_buffer_limits(WRITE_MARK_BYTES)
        self.peer = self._entrance.forwarding.peer(transport.get_extra_info("peername"), secure=secure)
        if self.client is None and not self.open_account(self.peer) and self.transport is not None:
            self._state = DISCARDING
            self.transport.write(TOO_MANY_CONNECTIONS)
            self.force_close()

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
        elif len(data) >= COUNTED_READ:
            # After a full read, uvloop would read up to 32 times before the next connection.
            if len(data) >= FULL_READ:
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
        elif state in (COLLECTING, AWAITING):
            held = self._held
            if not held.add(data):
                self._no_room(self._need - held.size - len(data))
            elif state == COLLECTING and (
                held.size >= self._need or (self._client_request is None and held.ends_head(data))
            ):
                self._collected()
        elif state == DISCARDING:
            self._left -= len(data)
            if self._left <= 0:
                self.force_close()
        else:
            if self._feed is not None:
                data = self._pass_body(self._feed, data)
            if not data:
                return
            if self._state == SKIPPING:
                self._state = FREE
                self._begin(data)
            elif self._state == ASKED:
                self._hold_back(data)

    def _begin(self, data: bytes) -> None:
        """Reads the request at the start of ``data``."""
        entrance = self._entrance
        try:
            head = entrance.requests.read(data)
        except WireError as error:
            self._discard(ENDLESS)
            entrance.unreadable(self, data, error)
            return
        if head is None:
            self._collect(data, None, entrance.requests.limit)
            return
        self._since = 0.0
        start, length = head.start, head.length
        if self.peer.trusted:
            sender = entrance.forwarding.client(self.peer.address, head.forwarded_for)
            self._name_sender(sender)
        if head.plain and head.relayed is not None and length <= entrance.body_limit:
            end = start + length
            if len(data) < end:
                self._discard(end - len(data))
                client_request = entrance.admit(self, head)
                if client_request is not None:
                    self._collect(data, client_request, end)
                return
            self._state = ASKED
            self.answering = True
            if len(data) > end:
                self._hold_back(data[end:])
            if end > SMALL_BODY and not self.hold_body(end):
                entrance.no_room(self, None)
            else:
                entrance.ask(self, head, data[start:end])
        else:
            self._give(data, head)

    def _collected(self) -> None:
        """Reads the request whose bytes were collected."""
        client_request, self._client_request = self._client_request, None
        if client_request is None:
            self._begin(self._held.take())
            return
        self._since = 0.0
        self._state = ASKED
        self.answering = True
        if self._need > LARGE_BODY:
            self._serve_large(client_request)
            return
        data, end = self._held.take(), self._need
        if len(data) > end:
            self._hold_back(data[end:])
        if end > SMALL_BODY and not self.hold_body(end):
            self._entrance.no_room(self, client_request)
        else:
            self._entrance.serve(client_request, data[client_request.head.start : end])

    def _serve_large(self, client_request: ClientRequest) -> None:
        """Serves the request whose pieces are held. A thread joins them."""
        head = client_request.head
        after, parts = self._held.size - self._need, self._held.take_parts()
        if after:
            last = parts[-1]
            parts[-1] = last[:-after]
            self._hold_back(bytes(last[-after:]))
        if self.hold_body(self._need):
            self._entrance.serve(client_request, BodyParts(parts, head.start, head.length))
        else:
            self._entrance.no_room(self, client_request)

    def _give(self, data: bytes, head: RequestHead) -> None:
        """Gives one request to aiohttp."""
        start = head.start
        if (start > SMALL_HEAD or head.length or head.chunked) and not self.hold_body(start):
            self._no_room(ENDLESS)
            return
        self.answering = True
        if head.chunked:
            self._state = ASKED
            self._feed = BodyFeed(None)
        elif head.framed:
            self._state = ASKED
            self._feed = BodyFeed(head.length) if head.length else None
        else:  # aiohttp refuses it, and the begin of the next request is unknown
            self._discard(ENDLESS)
        super().data_received(data[:start])
        if not self._messages:
            return  # the connection is closing
        message, body = self._messages[-1]
        if self._feed is not None:
            self._feed.reader = body
        if not isinstance(message, RawRequestMessage):  # aiohttp refuses it
            self._discard(ENDLESS)
        rest = data[start:]
        if rest and self._feed is not None and self._state == ASKED:
            rest = self._pass_body(self._feed, rest)
        if rest and self._state == ASKED:
            self._hold_back(rest)

    def _pass_body(self, feed: BodyFeed, data: bytes) -> bytes:
        """Gives aiohttp the next bytes of its request's body. Returns the bytes behind the body."""
        try:
            framed, size, rest = feed.frame(data)
        except WireError as error:
            self._entrance.clients.refused["chunks"] += 1
            self._break_body(feed, TransferEncodingError(str(error)))
            return b""
        if feed.is_whole:
            self._feed = None
        # After the answer, aiohttp discards the body.
        if self._state != SKIPPING and not self.hold_body(size):
            self._break_body(feed, NoRoomError())
            return b""
        if framed:
            super().data_received(framed)
        return rest

    def _break_body(self, feed: BodyFeed, error: HttpProcessingError) -> None:
        """Ends the request in aiohttp at a fault of its body. The connection closes."""
        answered = self._state == SKIPPING
        self._feed = None
        self._discard(ENDLESS)
        if feed.reader is not None and not feed.reader.is_eof():
            feed.reader.set_exception(error)
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
        return self._entrance.refuse(self, exc if isinstance(exc, HttpProcessingError) else None)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp. Clients' errors are not logged."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    @property
    def sender(self) -> str:
        """The address of the client of the request in flight; empty: of a unix socket."""
        sender = self._sender
        return self.peer.address if sender is None else sender.address

    def _collect(self, data: bytes, client_request: ClientRequest | None, need: int) -> None:
        self._state = COLLECTING
        self._client_request = client_request
        self._need = need
        self._left = 0
        if client_request is not None or not self._since:
            self._since = clock.monotonic()
        if not self._held.begin(self.payer, data):
            self._no_room(need - len(data))
        elif client_request is not None and client_request.unknown_key is not None:
            self._state = AWAITING
            self._pause_transport_reading()
            self._entrance.when_known(client_request, self._key_found)

    def _key_found(self) -> None:
        """Collects the rest of the request whose key is known now."""
        assert self._client_request is not None  # else it has ended
        self._client_request.keep_alive = self._client_request.head.keep_alive
        self._state = COLLECTING
        self._since = clock.monotonic()
        self._resume_transport_reading()
        if self._held.size >= self._need:
            self._collected()

    def _is_full(self) -> bool:
        """Returns whether reading stops: for a key, or until the request in flight has ended."""
        return self._state == AWAITING or (self._state == ASKED and self._held.size > HOLD_BYTES)

    def _hold_back(self, data: bytes) -> None:
        """Keeps bytes that follow a request in flight."""
        held = self._held
        if not (held.add(data) if held.parts else held.begin(self.client, data)):
            self.force_close()
        elif held.size > HOLD_BYTES:
            self._pause_transport_reading()
            if held.size > HOLD_LIMIT:
                self.force_close()

    def _discard(self, size: int) -> None:
        """Discards all further bytes.

        The connection closes after its answer and ``size`` more bytes, or LINGER_SECONDS later.
        """
        was, self._state = self._state, DISCARDING
        self._left = size
        if was == AWAITING:
            self._resume_transport_reading()

    def _no_room(self, to_come: int) -> None:
        client_request, self._client_request = self._client_request, None
        self._held.take_parts()
        self._discard(to_come)
        self._entrance.no_room(self, client_request)

    def answered(self, goes_on: bool) -> None:
        """Ends the request in flight. ``goes_on``: the connection may carry another request."""
        if self._state == AWAITING:  # its key is not valid
            self._client_request = None
            self._discard(self._need - self._held.size)
            self._held.take_parts()
        self._rest(goes_on)
        if not goes_on and (self._state != DISCARDING or self._left <= 0):
            self.force_close()

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Called by aiohttp at the end of each request."""
        if self._state == DISCARDING:
            # aiohttp waits LINGER_SECONDS for the rest of a body, but not for a broken one.
            request.content.set_exception(None)  # type: ignore[arg-type]
        # Otherwise aiohttp closes the connection, and held requests get no answer.
        self._rest(self._state == ASKED and bool(response.keep_alive))

    def _rest(self, goes_on: bool) -> None:
        """Waits for the next request. ``goes_on``: it may come."""
        self.answering = False
        self.idle_since = clock.monotonic()
        if self.body_size:
            self.release_body()
        if self._sender is not None:
            self._end_sender()
        if not goes_on:
            return
        if self._feed is not None:
            self._state = SKIPPING
        elif self._held.parts:
            self._loop.call_soon(self._next)
        else:
            self._state = FREE

    def _next(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._held.size > HOLD_BYTES:
            self._resume_transport_reading()
        self._begin(self._held.take())

    def check(self, now: float, timeouts: Timeouts) -> bool:
        """Called periodically: refuses requests that take too long, closes idle connections.

        Returns whether it did.
        """
        if self._state == COLLECTING:
            seconds = HEAD_SECONDS if self._client_request is None else timeouts.body
            if now - self._since > seconds:
                client_request, self._client_request = self._client_request, None
                received = self._held.size
                self._held.take_parts()
                self._discard(ENDLESS)
                self._entrance.late(self, client_request, received)
                return True
        elif not (self.answering or self._state == AWAITING) and now - self.idle_since > (
            LINGER_SECONDS if self._state == DISCARDING else timeouts.keep_alive
        ):
            self.force_close()
            return True
        return False

    def pause_writing(self) -> None:
        """Called by the loop."""
        super().pause_writing()
        self._entrance.clients.slow(self)
        if self.relay is not None:
            self.relay.client_slow(True)

    def resume_writing(self) -> None:
        """Called by the loop."""
        super().resume_writing()
        self._entrance.clients.caught_up(self)
        if self.relay is not None:
            self.relay.client_slow(False)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the loop."""
        super().connection_lost(exc)
        self._held.take_parts()
        self._drop_late()
        self.close_account()
        self._entrance.clients.caught_up(self)
        if self.relay is not None:
            self.relay.client_gone()
