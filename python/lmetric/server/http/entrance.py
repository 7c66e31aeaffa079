"""The entrance of requests from their connections: the fast path, and early refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_hex

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from lmetric._core import HeadTooLargeError, RequestHead, RequestReader, WireError
from lmetric.config import ServerConfig
from lmetric.server.api.errors import ApiError
from lmetric.server.api.identity import Identity
from lmetric.server.api.request import BodyParts
from lmetric.server.execution.exchange import FAILED, ClientPort, ClientRequest
from lmetric.server.http.arrive import Arrivals
from lmetric.server.http.client_load import ClientLoad
from lmetric.server.http.forwarding import Forwarding
from lmetric.server.http.protocol import late_body, malformed_head, no_room_error, unreadable
from lmetric.server.http.running import RunningRequests

# Seconds from the first byte of a head to its last one. Heads are sent at once.
HEAD_SECONDS = 10.0

log = structlog.get_logger("lmetric.access")


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


class Entrance:
    """Takes plain requests from connections, and answers those that cannot be read.

    ``is_open``: plain requests may take the fast path.
    """

    forwarding: Forwarding
    requests: RequestReader

    def __init__(
        self, config: ServerConfig, arrivals: Arrivals, clients: ClientLoad, *, is_open: bool = True
    ) -> None:
        self.clients = clients
        self._arrivals = arrivals
        self._admission = arrivals.admission
        self._running: RunningRequests = arrivals.admission.running
        self._is_open = is_open
        self._ends = AlreadySentResponse(False)
        self.configure(config, self._admission.identity)

    def configure(self, config: ServerConfig, identity: Identity) -> None:
        """Applies settings to new requests."""
        limit = config.limits.max_head_bytes
        self.requests = RequestReader(identity.on, token_hex(6), limit, self._arrivals.paths)
        self.forwarding = Forwarding(config.forwarded.trusted_proxies)
        # Longest body of a plain request for an engine on the fast path, in bytes.
        self.body_limit = config.limits.max_body_bytes if self._is_open else -1

    def ask(self, client: ClientPort, head: RequestHead, body: bytes) -> None:
        """Answers a plain request, then calls ``client.answered``."""
        transport = client.transport
        if transport is not None:
            client_request = ClientRequest(client, transport, head)
            client_request.keep_alive = head.keep_alive
            if self._admission.admits(client_request):
                self._arrivals.serve(client_request, body)
            elif client_request.unknown_key is not None:
                self.when_known(client_request, partial(self._arrivals.serve, client_request, body))

    def admit(self, client: ClientPort, head: RequestHead) -> ClientRequest | None:
        """Admits a request before its body is complete.

        Returns None if it was refused; then ``client.answered`` was called. If its key is unknown
        yet, the client must call ``when_known`` before it reads further.
        """
        transport = client.transport
        if transport is None:
            return None
        client_request = ClientRequest(client, transport, head)  # it closes: the body still comes
        if self._admission.admits(client_request):
            client_request.keep_alive = head.keep_alive
        elif client_request.unknown_key is None:
            return None
        return client_request

    def serve(self, client_request: ClientRequest, body: bytes | BodyParts) -> None:
        """Answers an admitted request, then calls ``client.answered``."""
        client_request.started = time.monotonic()
        if self._admission.has_room(client_request):
            self._arrivals.serve(client_request, body)

    def when_known(self, client_request: ClientRequest, serve: Callable[[], None]) -> None:
        """Calls ``serve`` after the issuer's keys have been read, if the token is valid then.

        Otherwise it refuses the request, unless that has ended.
        """
        unknown = client_request.unknown_key
        assert unknown is not None  # as the caller made sure

        def then(_: object) -> None:
            has_ended = client_request.transport.is_closing() or client_request.ended_at
            if not has_ended and self._admission.admits_late(client_request):
                serve()

        unknown.read.add_done_callback(then)

    def no_room(self, client: ClientPort, client_request: ClientRequest | None) -> None:
        """Refuses a request at the limit on body bytes, then calls ``client.answered``."""
        if client_request is None:
            self._refuse_early(client, no_room_error())
        elif client.transport is not None:
            client_request.keep_alive = False
            self._running.ended(client_request, None, no_room_error())

    def unreadable(self, client: ClientPort, data: bytes, error: WireError) -> None:
        """Refuses a request whose head ``data`` begins with, then calls ``client.answered``."""
        if isinstance(error, HeadTooLargeError):
            self.clients.refused["head_size"] += 1
        self._refuse_early(client, malformed_head(data, error))

    def late(self, client: ClientPort, client_request: ClientRequest | None, received: int) -> None:
        """Refuses a request whose head (None) or body takes too long, then calls `answered`."""
        if client_request is None:
            self.clients.refused["head_time"] += 1
            error = ApiError(
                408, f"the head is incomplete after {HEAD_SECONDS:g} s: {received} bytes received"
            )
            self._refuse_early(client, error)
        else:
            head = client_request.head
            client_request.keep_alive = False
            self._running.ended(
                client_request,
                None,
                late_body(received - head.start, head.length, self._running.rules.timeouts.body),
            )

    def _refuse_early(
        self,
        client: ClientPort,
        error: ApiError,
        fields: Sequence[tuple[bytes, bytes]] = (),
        done: Callable[[bool], None] | None = None,
    ) -> None:
        """Answers a request without a usable head, then calls ``done`` or ``client.answered``."""
        if client.transport is not None:
            head = self.requests.sort(b"", fields)
            self._running.ended(ClientRequest(client, client.transport, head, done), None, error)

    def refuse(self, client: ClientPort, malformed: HttpProcessingError | None) -> web.StreamResponse:
        """Answers a request that aiohttp could not read, or (None) one with an internal error."""
        if malformed is None:
            log.exception("a request failed with an internal error")
            error = ApiError(500, FAILED)
        else:
            error = unreadable(malformed)
        return self.reject(client, (), error)

    def reject(
        self, client: ClientPort, fields: Sequence[tuple[bytes, bytes]], error: ApiError
    ) -> web.StreamResponse:
        """Answers a request with an error and closes the connection."""
        self._refuse_early(client, error, fields, done=lambda _: None)
        return self._ends
