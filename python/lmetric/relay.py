"""Sends one request to an engine and updates the router, for your own gateway on aiohttp.

``async with Relay(...) as answer`` routes and sends the request. If an engine fails before its
answer begins, the next one is tried. `Relay` reports tokens and the end to the router, and always
closes the ticket.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from lmetric._core import (
    END,
    ENGINE_ERROR,
    INCOMPLETE,
    OUT,
    READY,
    BadValueError,
    Decision,
    LmetricError,
    Request,
    ResponseReader,
    Router,
    Ticket,
    WireError,
)
from lmetric.defaults import CLIENT_ANSWER_BYTES
from lmetric.options import Failure

_UNFINISHED = "the answer holds an error or ends without a finish_reason"
RETRY_STATUSES = frozenset({500, 502, 503, 504})
# Ends of paths whose streams are incomplete without a finish_reason, under any prefix.
COMPLETION_PATHS = ("/completions", "/completions/batch", "/inference/v1/generate")


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """The address of an instance: an engine, or one data-parallel rank of vLLM or SGLang.

    Each rank has its own queue and cache. Add an instance, an event subscription
    (`EventFeed.subscribe`) and load reports for each rank. Requests then go to the rank that the
    router chose.
    """

    url: str
    """Base URL of the engine, ``http://host:port``."""
    data_parallel_rank: int | None = None
    """Rank for the instance's requests (header ``X-data-parallel-rank``); None: the engine picks.
    vLLM counts from the first rank of the server."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Additional header fields for this engine, such as ``authorization``."""


class RelayError(LmetricError):
    """No engine answered, or an answer broke off.

    Attributes:
        failure: the kind of failure, as for `lmetric.Ticket.failed`.
        instance: the last instance tried.
        begun: whether the answer had begun, so that its start was already delivered.
    """

    def __init__(self, failure: Failure, instance: str, reason: str, *, begun: bool) -> None:
        super().__init__(f"instance {instance!r}: {failure}: {reason}")
        self.failure: Failure = failure
        self.instance = instance
        self.begun = begun


class Relay:
    """One request to an engine, from the decision to the closed ticket.

    >>> async with Relay(router, request, http, engines, body, path="/v1/completions") as answer:
    ...     async for piece in answer:  # bytes of the engine's answer
    ...         await response.write(piece)  # doctest: +SKIP

    Entering the block routes the request. It waits for the complete answer, or for the first token
    or error of an event stream. After a failure before that, the next instance of the ranking gets
    the request. Redirects are answers; they are not followed. Leaving the block early, by an
    exception or a canceled task, closes the connection. The engine then stops, and the request
    counts as ``cancelled``.

    Args:
        router: the router; its requests must run whole (no roles, or ``allow_split=False``).
        request: the request for the router.
        http: the HTTP client, with its timeouts.
        engines: base URL of each instance, ``{"gpu-0": "http://10.0.0.1:8000"}``, or its
        `EngineTarget`.
        body: the JSON body for the engine, as bytes or as a mapping.
        path: path of the engine's API. Streams of chats and completions need a finish_reason.
        headers: additional header fields for the engine.
        retry_statuses: HTTP statuses that count as a failure of the instance. They are also codes
        of errors that begin a stream.

    Raises (on entering and while the answer is read):
        RelayError: no engine answered, or the answer broke off.
        NoInstanceError: the router has no instance for the request.
        BadValueError: an instance has no URL, or the router split the request.
    """

    decision: Decision
    """The router's decision."""
    instance: str
    """The instance that answers."""
    status: int
    """HTTP status of the answer."""
    content_type: str
    """Content type of the answer."""

    def __init__(
        self,
        router: Router,
        request: Request,
        http: aiohttp.ClientSession,
        engines: Mapping[str, str | EngineTarget],
        body: bytes | Mapping[str, Any],
        *,
        path: str = "/v1/chat/completions",
        headers: Mapping[str, str] | None = None,
        retry_statuses: Collection[int] = RETRY_STATUSES,
    ) -> None:
        self._router, self._request, self._http, self._engines = router, request, http, engines
        self._body = body if isinstance(body, bytes) else orjson.dumps(body)
        self._path = path
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._retry_statuses = retry_statuses
        self._ticket: Ticket | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._reader = ResponseReader()
        self._held: list[bytes] = []
        self._flags = 0

    async def __aenter__(self) -> Self:
        self.decision, self._ticket = self._router.route(self._request)
        try:
            await self._begin(self._ticket)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._close()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces()

    async def read(self) -> bytes:
        """The whole answer, at most 64 MiB. Iterate over larger answers."""
        pieces, size = [], 0
        async for piece in self:
            pieces.append(piece)
            if (size := size + len(piece)) > CLIENT_ANSWER_BYTES:
                if self._ticket is not None and self._ticket.open:
                    self._ticket.failed("engine_error", retry=False)
                reason = f"the answer has more than {CLIENT_ANSWER_BYTES >> 20} MiB"
                raise RelayError("engine_error", self.instance, reason, begun=True)
        return b"".join(pieces)

    async def _begin(self, ticket: Ticket) -> None:
        instance: str | None = self.decision.instance
        while instance is not None:
            self.instance = instance
            if ticket.has_next:
                raise BadValueError(
                    f"request: the router split it between {instance!r} and another instance; Relay sends "
                    "requests whole: set allow_split=False, or use a router without roles"
                )
            if instance not in self._engines:
                known = ", ".join(map(repr, self._engines)) or "none"
                raise BadValueError(f"engines: no URL for instance {instance!r}; known instances: {known}")
            if ticket.fetch is not None:
                ticket.fetched(0, 0.0)  # nothing is fetched: the instance computes the prefix
            try:
                await self._send(ticket, self._engines[instance])
                return
            except _FAILURES as error:
                failure, reason = _failure_of(error)
            self._drop()
            instance = ticket.failed(failure)
        raise RelayError(failure, self.instance, reason, begun=False)

    async def _send(self, ticket: Ticket, engine: str | EngineTarget) -> None:
        """Sends the request and reads its answer up to the first token or the end."""
        ticket.sent()
        self._held, self._flags = [], 0
        target = EngineTarget(engine) if isinstance(engine, str) else engine
        headers = {**self._headers, **target.headers}
        if target.data_parallel_rank is not None:
            headers["x-data-parallel-rank"] = str(target.data_parallel_rank)
        url = target.url.rstrip("/") + self._path
        # Redirects reach the caller as statuses: prompt and headers are for this engine alone.
        response = self._response = await self._http.post(
            url, data=self._body, headers=headers, allow_redirects=False
        )
        self.status, self.content_type = response.status, response.content_type
        if response.status in self._retry_statuses:
            raise _EngineFailedError("status", f"status {response.status}")
        # The reader expects HTTP; aiohttp has already decoded transfer and content encodings.
        self._reader.begin(self, ticket, False, url.partition("?")[0].endswith(COMPLETION_PATHS))
        head = f"HTTP/1.1 {response.status} \r\ncontent-type: {response.content_type}\r\nconnection: close"
        self._reader.data_received(head.encode() + b"\r\n\r\n")
        async for piece in response.content.iter_any():
            self._held.append(piece)
            self._reader.data_received(piece)
            if self._flags & READY:
                break
        else:
            self._flags |= self._reader.eof()
        self._raise_early()
        self._raise_errors()
        self._reader.commit(b"", True)
        self._flags &= ~READY

    async def _pieces(self) -> AsyncIterator[bytes]:
        ticket, response = self._ticket, self._response
        if ticket is None or response is None:
            raise RuntimeError("read a Relay inside its `async with` block")
        try:
            while self._held:
                yield self._held.pop(0)
            async for piece in response.content.iter_any():
                self._reader.data_received(piece)
                yield piece
                self._raise_errors()
            self._flags |= self._reader.eof()
            self._raise_errors()
        except _FAILURES as error:
            failure, reason = _failure_of(error)
            if ticket.open:
                ticket.failed(failure, retry=False)
            raise RelayError(failure, self.instance, reason, begun=True) from error
        if not ticket.open:
            return
        if self.status >= 300:
            ticket.failed("engine_error", retry=False)
        else:
            self._reader.finish_ticket()

    def _raise_early(self) -> None:
        """Raises the failure of a stream without a token. Another instance may still answer."""
        reader = self._reader
        if self.status != 200 or not reader.event_stream or reader.tokens:
            return
        if self._flags & INCOMPLETE:
            raise _EngineFailedError("reset", "the stream ended without a token")
        if self._flags & ENGINE_ERROR and reader.error_code in self._retry_statuses:
            raise _EngineFailedError("status", f"error {reader.error_code} as the first event")

    def _raise_errors(self) -> None:
        if self._flags & (ENGINE_ERROR | INCOMPLETE) and self.status == 200:
            raise _EngineFailedError("engine_error", _UNFINISHED)

    def received(self, flags: int, _data: bytes) -> None:
        """Called by the reader with the content of a piece of the answer."""
        self._flags |= flags & (READY | END | ENGINE_ERROR | INCOMPLETE)
        if flags & OUT:
            self._reader.take()  # the client gets the unchanged bytes of the engine

    def failed(self, error: Exception) -> None:
        """Called by the reader if the answer is malformed."""
        raise error

    def _drop(self) -> None:
        """Closes the connection to the engine, which then stops."""
        self._reader.detach()
        if self._response is not None:
            self._response.close()
            self._response = None

    def _close(self) -> None:
        self._drop()
        if self._ticket is not None and self._ticket.open:
            self._ticket.failed("cancelled", retry=False)


class _EngineFailedError(Exception):
    """The engine returned a failure."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure: Failure = failure


_FAILURES = (aiohttp.ClientError, TimeoutError, WireError, _EngineFailedError)


def _failure_of(error: Exception) -> tuple[Failure, str]:
    """Returns the kind of a failure, and its reason."""
    kind: Failure = "reset"
    match error:
        case _EngineFailedError():
            kind = error.failure
        case TimeoutError():
            kind = "timeout"
        case aiohttp.ClientConnectorDNSError():
            kind = "dns"
        case aiohttp.ClientSSLError():
            kind = "tls"
        case aiohttp.ClientConnectorError():
            kind = "refused" if error.os_error.errno == errno.ECONNREFUSED else "unreachable"
    return kind, str(error) or type(error).__name__


__all__ = ["RETRY_STATUSES", "EngineTarget", "Relay", "RelayError"]
