"""The front end: checks and routes requests, starts their execution, and counts them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from functools import partial
from math import ceil
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING, Any, TypeGuard

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lmetric._core import (
    Arrival,
    HeadTooLargeError,
    NoInstanceError,
    Request,
    RequestHead,
    RequestReader,
    WireError,
)
from lmetric.config import ServerConfig, SloClass
from lmetric.engines.handover import FirstSegment
from lmetric.server.api.auth import Keys, PageAccess
from lmetric.server.api.errors import ApiError, bad, whole_answer
from lmetric.server.api.form import parse_form
from lmetric.server.api.isolation import Isolation, not_isolated
from lmetric.server.api.paths import (
    CONFIGURED_PATH,
    RELAYED,
    RelayedPath,
    StoredResponsePath,
    stored_response,
)
from lmetric.server.api.request import LARGE_BODY, BodyParts, ParsedRequest, parse
from lmetric.server.api.stored import Holder, StoredResponses, assign_id, not_found, previous_id
from lmetric.server.background.replicas import Replicas
from lmetric.server.discovery import Discovery
from lmetric.server.execution import request_log
from lmetric.server.execution.direct import DirectRequest
from lmetric.server.execution.exchange import FAILED, STOPPING, ClientRequest, InFlightRequest, Rules
from lmetric.server.execution.execution import Execution
from lmetric.server.execution.intent import Intent
from lmetric.server.execution.observers import Observers, failed, guarded
from lmetric.server.execution.plan import Hedge
from lmetric.server.execution.runner import RequestRunner
from lmetric.server.fleet import priority
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.pool import Pool
from lmetric.server.http.client_load import ClientLoad
from lmetric.server.http.connection import (
    HEAD_SECONDS,
    SMALL_BODY,
    AlreadySentResponse,
    ClientConnection,
    NoRoomError,
)
from lmetric.server.http.cors import Cors
from lmetric.server.http.forwarding import UNIX, Forwarding
from lmetric.server.http.holding import HeldRequest, refusal
from lmetric.server.http.protocol import (
    content_coding,
    in_short,
    malformed_head,
    origin_form,
    unreadable,
    upgrade_required,
    violation,
    wants_websocket,
)
from lmetric.server.http.searching import PendingSearch
from lmetric.server.http.threads import PendingWork, WorkThreads
from lmetric.server.http.tls_listener import Handshakes
from lmetric.server.http.tokenizing import (
    RENDERED_BYTES,
    count_text_prompt,
    prompt_text,
    read_prompt,
)
from lmetric.server.http.unpacking import Unpacking
from lmetric.server.http.waiting import WaitingRequest
from lmetric.server.observe.access_log import AccessLog
from lmetric.server.observe.live import Live
from lmetric.server.observe.metrics import Metrics
from lmetric.server.observe.trials import TrialResults
from lmetric.server.tls.contexts import TlsContext
from lmetric.tokens import NotPredictable, Tokens

if TYPE_CHECKING:  # it needs the extra `otel`
    from lmetric.server.observe.tracing.export import Tracing

log = structlog.get_logger("lmetric.access")
log_tokens = structlog.get_logger("lmetric.tokens")


class Phase(IntEnum):
    """A phase of the server's life, in the order of its end."""

    SERVING = 0
    REPLACED = 1  # the next process accepts new connections; answers close the others
    DRAINING = 2  # /ready fails, so that load balancers send no more requests; answers close
    REFUSING = 3  # as DRAINING, and new requests get a 503


SERVING, REPLACED, DRAINING, REFUSING = Phase

# Most connections that one periodic check closes: each takes time of the event loop.
CLOSED_AT_ONCE = 256
NO_SHARE = (1.0, 0.0)  # weight and handicap (s) of requests without a tenant


class Frontend(web.Server):
    """Dispatches requests: to the engines, or to the router's own pages."""

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        keys: Keys,
        metrics: Metrics,
        pages: Callable[[Frontend, web.BaseRequest, str, str], Awaitable[web.StreamResponse]],
    ) -> None:
        super().__init__(self.handle)
        self.fleet = fleet
        self.keys = keys
        self.access = PageAccess(config, keys)
        self._random_secret = token_bytes(32)
        self.isolation = Isolation(config, self._random_secret)
        self.metrics = metrics
        self.discovery: Discovery  # set by the server
        self.replicas: Replicas  # set by the server
        self.tls: TlsContext | None = None  # set by the server
        self.tracing: Tracing | None = None  # set by the server
        # Reloads the configuration; set by the server.
        self.reread: Callable[[], Awaitable[dict[str, Any]]] | None = None
        self.pages = pages
        self.relays: set[InFlightRequest] = set()
        self.observers = Observers()
        self.observers.add(metrics.requests)
        self._trial_results = TrialResults()  # an observer once a model has trials
        self.live = Live(fleet, self.relays) if config.ui.enabled else None
        if self.live is not None:
            self.observers.add(self.live)
        self._access_log = AccessLog()
        self.clients = ClientLoad(config.limits)
        self.handshakes = Handshakes()
        self._threads = WorkThreads()
        self._unpacking = Unpacking()
        self._tenant_requests: Counter[str] = Counter()  # running requests
        self._idle = asyncio.Event()
        self.phase = SERVING
        self._goes_on = AlreadySentResponse(True)
        self._ends = AlreadySentResponse(False)
        self.stored = StoredResponses(config.limits)
        self.requests = _reader(keys, config)
        self._configure(config)

    @property
    def config(self) -> ServerConfig:
        """The configuration, which a reload replaces."""
        return self.fleet.config

    def _configure(self, config: ServerConfig) -> None:
        """Copies the settings that requests read: reading a pydantic model takes longer."""
        self.forwarding = Forwarding(config.forwarded.trusted_proxies)
        self.paths = {**dict.fromkeys(config.paths, CONFIGURED_PATH), **RELAYED}
        self._access = config.log.access
        (self.observers.add if self._access else self.observers.remove)(self._access_log)
        self._show_engines = config.errors.show_engines
        self._cors = Cors(config.cors.origins) if config.cors.origins else None
        self._body_limit = config.limits.max_body_bytes
        self._request_limit = config.limits.max_concurrent_requests
        self._share_limit = ceil(self._request_limit * config.limits.max_client_share)
        self._rules = Rules.of(config)
        self._shares = _shares(config)
        self._tenant_classes = {
            name: tenant.slo_class for name, tenant in config.tenants.items() if tenant.slo_class is not None
        }

    def __call__(self) -> ClientConnection:
        """Returns the protocol of a new client connection."""
        return ClientConnection(self, self, loop=self._loop, access_log=None)

    def prepare(self, keys: Keys, config: ServerConfig) -> Callable[[], None]:
        """Returns the function that applies API keys and other settings to new requests.

        Raises ConfigError.
        """
        access, isolation = PageAccess(config, keys), Isolation(config, self._random_secret)

        def apply() -> None:
            if keys.on != self.keys.on or config.limits.max_head_bytes != self.requests.limit:
                self.requests = _reader(keys, config)
            self.keys, self.access, self.isolation = keys, access, isolation
            self._configure(config)
            self.clients.configure(config.limits)
            self.stored.configure(config.limits)

        return apply

    async def idle_or(self, hurry: asyncio.Event) -> None:
        """Waits until no request is in flight, or ``hurry`` is set."""
        self._idle.clear()
        if self.relays:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, hurry)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Closes the connections and stops the threads."""
        self._threads.close()
        self._unpacking.close()
        await super().shutdown(timeout)

    def check(self, now: float) -> None:
        """Called periodically: ends requests and connections at their time limits.

        ``now``: seconds on the monotonic clock.
        """
        for relay in list(self.relays):
            try:
                relay.check(now)
            except Exception:
                relay.fail()
        closed = 0
        for client in self.connections:
            if isinstance(client, ClientConnection) and client.check(now, self._rules.timeouts):
                closed += 1
                if closed == CLOSED_AT_ONCE:
                    break

    def close_idle(self) -> None:
        """Closes the connections without a request in flight."""
        for client in self.connections:
            if isinstance(client, ClientConnection) and not client.answering:
                client.force_close()

    # The path through aiohttp.

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request that aiohttp has read."""
        client = request.protocol
        if not isinstance(client, ClientConnection) or request.transport is None:
            return self._ends
        client.answering = True
        target = origin_form(request.raw_path)
        if (broken := violation(request, target)) is not None:
            return self._reject(client, request.raw_headers, broken)
        path, _, query = target.partition("?")
        relayed = path in self.paths
        stored = None if relayed else stored_response(path)
        methods = ("POST",) if relayed else stored.methods if stored is not None else ("GET",)
        to_engine = relayed or stored is not None
        cors = self._cors if to_engine or path.startswith("/v1/models") else None
        try:
            if cors is not None and request.method == "OPTIONS":
                answer = cors.preflight(request, ", ".join(methods))
                if answer is not None:
                    return answer
            if not to_engine:
                page = await self.pages(self, request, path, query)
                if self.phase is not SERVING or client.closes:
                    page.force_close()
                if cors is not None:
                    page.headers.update(cors.fields(request.headers.get("origin")))
                return page
            if wants_websocket(request.headers):
                raise upgrade_required(path)
            if request.method not in methods:
                raise ApiError(
                    405,
                    f"{request.method} is not allowed on {path}; use {' or '.join(methods)}",
                    headers={"allow": ", ".join(methods)},
                )
        except ApiError as error:
            return self._refuse(request, error, cors)
        except Exception:
            log.exception("a request failed with an internal error", path=path)
            return self._refuse(request, ApiError(500, FAILED), cors)
        ended: asyncio.Future[bool] = self._loop.create_future()
        head = self.requests.sort(target.encode(), request.raw_headers)
        client_request = ClientRequest(
            client,
            request.transport,
            head,
        )
        client_request.http11 = request.version >= (1, 1)
        # After a refusal, the body still comes.
        client_request.keep_alive = request.keep_alive and request.content.is_eof()
        client_request.done = lambda goes_on: None if ended.done() else ended.set_result(goes_on)
        client_request.method = request.method
        if self.admits(client_request):
            client_request.keep_alive = request.keep_alive
            try:
                body = await self.read_body(request, self._body_limit)
            except ApiError as error:
                client_request.keep_alive = False  # the rest of the body may still come
                self._ended(client_request, None, error)
            else:
                client_request.started = time.monotonic()
                if stored is None:
                    self._serve(client_request, body)
                else:
                    self.serve_stored(client_request, stored, request.method)
        try:
            return self._goes_on if await ended else self._ends
        except asyncio.CancelledError:
            if client.relay is not None:
                client.relay.client_gone()
            raise

    def refuse(self, client: ClientConnection, malformed: HttpProcessingError | None) -> web.StreamResponse:
        """Answers a request that aiohttp could not read, or (None) one with an internal error."""
        if malformed is None:
            log.exception("a request failed with an internal error")
            error = ApiError(500, FAILED)
        else:
            error = unreadable(malformed)
        return self._reject(client, [], error)

    def unreadable(self, client: ClientConnection, data: bytes, error: WireError) -> None:
        """Refuses a request whose head ``data`` begins with, then calls ``client.answered``."""
        if isinstance(error, HeadTooLargeError):
            self.clients.refused["head_size"] += 1
        self._refuse_early(client, malformed_head(data, error))

    def late(self, client: ClientConnection, client_request: ClientRequest | None, received: int) -> None:
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
            self._ended(client_request, None, self._late_body(received - head.start, head.length))

    def _late_body(self, received: int, length: int) -> ApiError:
        of = f" of {length}" if length else ""
        seconds = self._rules.timeouts.body
        return ApiError(408, f"the body is incomplete after {seconds:g} s: {received}{of} bytes received")

    def _refuse_early(self, client: ClientConnection, error: ApiError) -> None:
        """Answers a request without a usable head, then calls ``client.answered``."""
        if client.transport is not None:
            head = self.requests.sort(b"", [])
            self._ended(ClientRequest(client, client.transport, head), None, error)

    def _reject(
        self, client: ClientConnection, fields: Sequence[tuple[bytes, bytes]], error: ApiError
    ) -> web.StreamResponse:
        """Answers a request with an error and closes the connection."""
        if client.transport is not None:
            head = self.requests.sort(b"", fields)
            client_request = ClientRequest(client, client.transport, head)
            client_request.done = lambda _: None
            self._ended(client_request, None, error)
        return self._ends

    def _refuse(self, request: web.BaseRequest, error: ApiError, cors: Cors | None) -> web.Response:
        client = request.protocol
        assert isinstance(client, ClientConnection)  # as `handle` made sure
        if request.headers.get("x-request-id"):
            head = self.requests.sort(b"", request.raw_headers)
            error.headers.setdefault("x-request-id", head.request_id)
        if cors is not None:
            error.headers.update(cors.fields(request.headers.get("origin")))
        response = web.Response(
            status=error.status,
            body=error.body(self._show_engines),
            content_type="application/json",
            headers=error.headers,
        )
        if self.phase is not SERVING or client.closes or "connection" in error.headers:
            response.force_close()
        return response

    async def read_body(self, request: web.BaseRequest, limit: int) -> bytes:
        """Returns the body of a request whose head aiohttp has read.

        The caller has checked the request's credential: before, no byte is unpacked.

        Raises ApiError: 400 if the body is malformed, 408 if it takes longer than timeouts.body,
        413 above ``limit`` bytes, 503 at a limit on body bytes.
        """
        client = request.protocol
        assert isinstance(client, ClientConnection)  # as `handle` made sure
        body = await self._receive_body(request, limit)
        if body and (coding := content_coding(request.headers)) is not None:
            unpacked = await self._unpacking.unpack(coding, body, limit, account=client)
            if unpacked is None:
                raise no_room_error()
            body = unpacked
            if len(body) > limit:
                raise _too_long(limit)
            client.keep_body(min(len(body), client.body_size))
        if client.body_size <= SMALL_BODY:
            client.release_body()
        return body

    async def _receive_body(self, request: web.BaseRequest, limit: int) -> bytes:
        """Returns the body as the client sent it. Raises ApiError."""
        content = request.content
        if content.is_eof() and content.exception() is None:
            body = content.read_nowait()
            if len(body) > limit:
                raise _too_long(limit)
            return body
        headers = request.headers
        try:
            length = int(headers.get("content-length", 0))
        except ValueError:
            length = 0
        if length > limit:
            raise _too_long(limit)
        transport = request.transport
        if headers.get("expect", "").lower() == "100-continue" and _writable(transport):
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        received = BodyParts()
        try:
            async with asyncio.timeout(self._rules.timeouts.body):
                while not content.at_eof():
                    received.add(await content.readany())
                    if received.size > limit:
                        raise _too_long(limit)
        except TimeoutError:
            raise self._late_body(content.total_raw_bytes, length) from None
        except NoRoomError:
            raise no_room_error() from None
        except ApiError:
            raise
        except Exception as error:
            # aiohttp has many exceptions for a broken body (bad chunk, client gone).
            raise bad(f"the body could not be read: {in_short(error)}") from None
        if received.size > LARGE_BODY:
            return await self._threads.begin(received.joined)
        return received.joined()

    # The fast path.

    def takes(self, head: RequestHead) -> bool:
        """Returns whether a plain request is for an engine and its body within the limit."""
        return head.path in self.paths and head.length <= self._body_limit

    def ask(self, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        """Answers a plain request, then calls ``client.answered``."""
        transport = client.transport
        if transport is not None:
            client_request = ClientRequest(client, transport, head)
            client_request.keep_alive = head.keep_alive
            if self.admits(client_request):
                self._serve(client_request, body)

    def admit(self, client: ClientConnection, head: RequestHead) -> ClientRequest | None:
        """Admits a request before its body is complete.

        Returns None if it was refused; then ``client.answered`` was called.
        """
        transport = client.transport
        if transport is None:
            return None
        client_request = ClientRequest(client, transport, head)  # it closes: the body still comes
        if not self.admits(client_request):
            return None
        client_request.keep_alive = head.keep_alive
        return client_request

    def serve(self, client_request: ClientRequest, body: bytes | BodyParts) -> None:
        """Answers an admitted request, then calls ``client.answered``."""
        client_request.started = time.monotonic()
        try:
            if len(self.relays) >= self._share_limit or self.phase is REFUSING:
                self._check_room(client_request)
        except ApiError as error:
            self._ended(client_request, None, error)
        else:
            self._serve(client_request, body)

    def no_room(self, client: ClientConnection, client_request: ClientRequest | None) -> None:
        """Refuses a request at the limit on body bytes, then calls ``client.answered``."""
        if client.transport is not None:
            if client_request is None:
                head = self.requests.sort(b"", [])
                client_request = ClientRequest(client, client.transport, head)
            client_request.keep_alive = False
            self._ended(client_request, None, no_room_error())

    def refuse_request(self, client_request: ClientRequest, error: ApiError) -> None:
        """Answers an admitted request with an error, before it is routed."""
        self._ended(client_request, None, error)

    # Both paths.

    def admits(self, client_request: ClientRequest) -> bool:
        """Returns whether the request may be served; otherwise answers it with an error."""
        if self.tracing is not None and request_log.is_outside(client_request):
            guarded(self.tracing.context, client_request)
            return request_log.in_request(client_request, self.admits, client_request)
        if self._access:
            client_request.address = _address(client_request)
        if self._cors is not None:
            client_request.cors = self._cors.lines(client_request.head)
        try:
            if self.keys.on:
                head = client_request.head
                client_request.tenant = self.keys.tenant(
                    _text(head.authorization), _text(head.x_api_key), _text(head.api_key)
                )
            elif self._shares and (named := client_request.head.tenant) in self._shares:
                client_request.tenant = named or ""  # without keys, the header is trusted
            if len(self.relays) >= self._share_limit or self.phase is REFUSING:
                self._check_room(client_request)
        except ApiError as error:
            self._ended(client_request, None, error)
            return False
        return True

    def _check_room(self, client_request: ClientRequest) -> None:
        """Raises ApiError (503) if the request may not start."""
        if self.phase is REFUSING:
            raise ApiError(503, STOPPING, code="shutting_down", headers={"retry-after": "5"})
        if len(self.relays) >= self._request_limit:
            raise _too_many("")
        payer = client_request.client.payer
        if payer is not None and payer.running >= self._share_limit and not payer.is_gateway:
            self.clients.refused["requests_per_client"] += 1
            raise _too_many(" of this client address")
        tenant = client_request.tenant
        if tenant and self._tenant_requests[tenant] >= self._share_limit:
            self.clients.refused["requests_per_tenant"] += 1
            raise _too_many(" of this tenant")

    def _serve(self, client_request: ClientRequest, body: bytes | BodyParts) -> None:
        """Starts the request. `_ended` is called at its end."""
        if client_request.trace is not None and request_log.is_outside(client_request):
            request_log.in_request(client_request, self._serve, client_request, body)
            return
        payer = client_request.payer = client_request.client.payer
        if payer is not None:  # it counts until `_ended`
            payer.running += 1
            if client_request.tenant:
                self._tenant_requests[client_request.tenant] += 1
        try:
            path = self.paths[client_request.path]
            if len(body) > LARGE_BODY or isinstance(body, BodyParts):
                self._read_in_thread(client_request, path, body)
                return
            call = _read_call(client_request, path, self.isolation, body=body)
            self._serve_call(client_request, call, client_request.started)
        except ApiError as error:
            self._ended(client_request, None, error)
        except Exception:
            log.exception("a request failed with an internal error", path=client_request.path)
            self._ended(client_request, None, ApiError(500, FAILED))

    def _read_in_thread(
        self, client_request: ClientRequest, path: RelayedPath, body: bytes | BodyParts
    ) -> None:
        """Reads a large body in a thread. Then its request goes on."""

        def then(read: asyncio.Future[ParsedRequest], waiting: WaitingRequest) -> None:
            def serve(now: float) -> None:
                self._serve_call(client_request, read.result(), now)

            self._go_on(client_request, waiting, serve, now=time.monotonic())

        work = self._threads.begin(partial(_read_large_call, client_request, path, self.isolation, body))
        limit = self._rules.timeouts.request
        self._wait(
            client_request, PendingWork(client_request, work, then, ended=self._ended, limit_seconds=limit)
        )

    def _serve_call(self, client_request: ClientRequest, call: ParsedRequest, now: float) -> None:
        """Serves a request whose body was read. Raises ApiError."""
        if call.model not in self.fleet.names and self._search(client_request, call):
            return
        self._serve_model(client_request, call, now)

    def _serve_model(self, client_request: ClientRequest, call: ParsedRequest, now: float) -> None:
        """Finds the request's model, reads its prompt, and places it. Raises ApiError."""
        pool, adapter = self.fleet.find(call.model)
        client_request.pool, client_request.model = pool, call.model
        if call.scope and call.path.isolated_by == "salt_by_kind" and not pool.salts_messages:
            raise not_isolated(client_request.tenant, client_request.path)
        if call.path.stores:
            self._follow_response(client_request, call, pool)
        if pool.orders or self.keys.on:
            # Otherwise clients could delay the requests of others.
            client_request.drops_priority = True
            if call.priority is not None:
                priority.remove(call)
        in_thread = self._read_prompt(call, pool)
        splits = len(call.body) > LARGE_BODY and pool.cuts
        intent = Intent(client_request, call, pool, adapter=adapter)
        if in_thread is None and not call.changes and not splits:
            self._place(intent, now)
        else:
            if splits:
                in_thread = partial(_read_first, intent, in_thread)
            self._prepare_in_thread(intent, in_thread)

    def _search(self, client_request: ClientRequest, call: ParsedRequest) -> bool:
        """Asks the engines for an unknown model: one may have loaded it a moment ago.

        Returns whether the request waits for their answers.
        """
        found = self.fleet.seek(call.model)
        if found is None:
            return False

        def then(_: asyncio.Future[None], waiting: WaitingRequest) -> None:
            serve = partial(self._serve_model, client_request, call)
            self._go_on(client_request, waiting, serve, now=time.monotonic())

        limit = self._rules.timeouts.request
        self._wait(
            client_request, PendingSearch(client_request, found, then, ended=self._ended, limit_seconds=limit)
        )
        return True

    # Stored responses.

    def _follow_response(self, client_request: ClientRequest, call: ParsedRequest, pool: Pool) -> None:
        """Pins a request to the engine of the response that it continues, and follows its own.

        Raises ApiError (400, 404).
        """
        tenant, stored = client_request.tenant, self.stored
        if (previous := previous_id(call)) is not None:
            home, engine = self._holder(tenant, previous)
            if home is not pool:
                raise bad(
                    f"previous_response_id: the model of that response is {home.name!r}, not {pool.name!r}",
                    "previous_response_id",
                )
            client_request.pinned_to = engine.name
        own = assign_id(call, tenants=self.keys.on or bool(self._shares))
        if own is not None:
            client_request.on_answer = lambda engine: stored.add(tenant, own, Holder(pool.name, engine))

    def _holder(self, tenant: str, response_id: str) -> tuple[Pool, Engine]:
        """Returns the model and the engine of a stored response. Raises ApiError (404)."""
        holder = self.stored.find(tenant, response_id)
        pool = next((pool for pool in self.fleet.pools if pool.name == holder.model), None)
        engine = pool.engines.get(holder.engine) if pool is not None else None
        if pool is None or engine is None:
            error = not_found(response_id, "is lost: the engine that held it was removed")
            error.engines = holder.engine
            raise error
        return pool, engine

    def serve_stored(self, client_request: ClientRequest, target: StoredResponsePath, method: str) -> None:
        """Forwards a request about a stored response to its engine. Calls `_ended` at its end."""
        if client_request.trace is not None and request_log.is_outside(client_request):
            request_log.in_request(client_request, self.serve_stored, client_request, target, method)
            return
        tenant, response_id = client_request.tenant, target.response_id
        relay: DirectRequest | None = None
        payer = client_request.payer = client_request.client.payer
        if payer is not None:
            payer.running += 1
            if tenant:
                self._tenant_requests[tenant] += 1
        try:
            pool, engine = self._holder(tenant, response_id)
            client_request.pool = pool
            if client_request.subset is not None and engine not in client_request.subset:
                raise client_request.subset.no_engine_error(pool, f"the response is on {engine.name}")
            if method == "DELETE":
                client_request.on_answer = lambda _: self.stored.forget(tenant, response_id)
            client_request.keep_alive &= self.phase is SERVING
            relay = DirectRequest(
                self._rules, client_request, engine, method=method.encode(), on_end=self._ended
            )
            client_request.client.relay = relay
            self.relays.add(relay)
            if client_request.client.writing_paused:
                relay.client_slow()
            now = time.monotonic()
            for hook in self.observers.placed:
                guarded(hook, client_request, relay)
            relay.start(now)
        except ApiError as error:
            self._ended(client_request, None, error)
        except Exception:
            log.exception("a request failed with an internal error", path=client_request.path)
            if relay is None:
                self._ended(client_request, None, ApiError(500, FAILED))
            else:
                relay.fail()

    # Placement.

    def _read_prompt(self, call: ParsedRequest, pool: Pool) -> Callable[[], Tokens | None] | None:
        """Tokenizes the prompt if its pool matches tokens.

        Returns long work as a function, for a thread.
        """
        tokenizer = pool.tokenizer
        if tokenizer is None or call.text is None or not call.path.tokenized:
            return None
        if len(call.body) > RENDERED_BYTES:
            return partial(read_prompt, tokenizer, call)
        try:
            text = prompt_text(tokenizer, call)
            call.tokens = tokenizer.encode(text, tokenizer.at_once_bytes)
        except NotPredictable as error:
            count_text_prompt(pool, error)
            return None
        return partial(tokenizer.encode, text) if call.tokens is None else None

    def _prepare_in_thread(
        self,
        intent: Intent,
        read: Callable[[], Tokens | None] | None,
    ) -> None:
        """Changes the body in a thread, and renders or tokenizes its prompt; then places it.

        It is not placed if it has ended by then.
        """
        client_request, call, pool = intent.request, intent.call, intent.pool

        def then(work: asyncio.Future[Tokens | None], waiting: WaitingRequest) -> None:
            error = work.exception()
            if error is None:
                if read is not None:
                    call.tokens = work.result()
            elif isinstance(error, NotPredictable):
                count_text_prompt(pool, error)
            else:
                log_tokens.error(
                    "cannot tokenize a prompt", exc_info=error, **request_log.request_ids(client_request)
                )
                count_text_prompt(pool, NotPredictable("tokenizer", str(error)))
            self._go_on(client_request, waiting, partial(self._place, intent), now=time.monotonic())

        work = self._threads.begin(partial(_prepare, call, read))
        limit = self._rules.timeouts.request
        self._wait(
            client_request, PendingWork(client_request, work, then, ended=self._ended, limit_seconds=limit)
        )

    def _wait(self, client_request: ClientRequest, waiting: WaitingRequest) -> None:
        client_request.client.relay = waiting
        self.relays.add(waiting)

    def _go_on(
        self,
        client_request: ClientRequest,
        waiting: WaitingRequest,
        then: Callable[[float], None],
        now: float,
    ) -> None:
        """Continues a request that waited before routing; `then` replaces `waiting`."""
        if client_request.trace is not None and request_log.is_outside(client_request):
            request_log.in_request(client_request, self._go_on, client_request, waiting, then, now)
            return
        try:
            then(now)
        except ApiError as error:
            self._ended(client_request, waiting, error)
        except Exception:
            log.exception("a request failed with an internal error", path=client_request.path)
            self._ended(client_request, waiting, ApiError(500, FAILED))
        else:
            self.relays.discard(waiting)

    def _place(
        self,
        intent: Intent,
        now: float,
    ) -> None:
        """Routes the request and starts its execution, or holds or refuses it. Raises ApiError."""
        client_request, call, pool = intent.request, intent.call, intent.pool
        if call.path.prompt == "form" and pool.disaggregates:
            raise ApiError(
                501,
                f"{pool.name}: {client_request.path} is not possible with prefill/decode disaggregation",
                code="not_implemented",
            )
        client_request.prompt_bytes, prompt_tokens, extra_tokens = _size(pool, call)
        head = client_request.head
        joins = pool.joins
        split_reason = pool.split_reason(client_request.path, call) if joins else None
        fetch_reason = pool.fetch_reason(client_request.path, call) if pool.fetches_prefixes else None
        intent.moves = joins and split_reason is None
        intent.fetches = pool.fetches_prefixes and fetch_reason is None
        if split_reason is not None or fetch_reason is not None:
            pool.count_ineligible(split_reason, fetch_reason)
        if pool.fails_over and call.stream:
            client_request.not_resumable = pool.failover_reason(client_request.path, call)
            intent.resumes = client_request.not_resumable is None
        weight, handicap_seconds = self._shares.get(client_request.tenant, NO_SHARE)
        session = call.session_id or head.session or call.session
        if call.session_id is not None and head.session is None:
            client_request.session_line = _session_line(call.session_id)
        if client_request.tenant and session is not None:
            session = _session(client_request.tenant, session)
        policies, held = pool.policies, pool.held
        slo = self._slo_class(client_request, pool) if held.classes else None
        # Positional, in the order of `Request`: keywords take 4% of a chat's instructions.
        intent.asked = asked = Request(
            call.tokens,
            call.text if call.tokens is None else None,
            None,  # block_hashes
            prompt_tokens,
            call.max_tokens,
            session,
            head.request_id,
            intent.adapter,
            call.salt,
            extra_tokens,
            client_request.tenant or None,
            weight,
            handicap_seconds,
            # Output lengths are learned per path and tenant.
            _length_class(client_request) if pool.splits or policies.reads_length_class else None,
            None,  # reasoning_tokens
            split_reason is None,
            split_reason,
            fetch_reason is None,
            fetch_reason,
            _priority(head, call) if policies.reads_priority else None,
            None
            if pool.names.uniform and client_request.pinned_to is None and client_request.subset is None
            else _instances(client_request, pool),
            head.session_final,
            slo.ttft_seconds if slo is not None else None,
            not (call.stream and call.path.generates),  # whole_answer
        )
        for hook in self.observers.arrived:
            guarded(hook, intent)
        hedge_seconds = pool.hedging.after_seconds
        if slo is not None and slo.hedge_after_seconds is not None:
            hedge_seconds = slo.hedge_after_seconds
        if hedge_seconds is not None:
            intent.hedge = _hedge(intent, hedge_seconds)
        if held.admits and (arrival := held.arrive(asked, now)) is not None:
            intent.arrival = arrival
            if arrival.verdict == "refused":
                reason = arrival.reason or ""
                held.count_refused(client_request.tenant, reason)
                raise refusal(pool.name, reason, arrival.retry_after_seconds or 1.0)
            if arrival.verdict == "held":
                client_request.was_held = True
                self._hold(intent, arrival, now)
                return
        self._start(intent, now)

    def _slo_class(self, client_request: ClientRequest, pool: Pool) -> SloClass | None:
        """Returns the class of a request; None: it has none. Raises ApiError (400)."""
        classes, named = pool.held.classes, client_request.head.field(b"x-slo-class")
        if named is None:
            name = self._tenant_classes.get(client_request.tenant, "")
        else:
            name = named.decode("latin-1")
        if name in classes:
            client_request.slo_class = name
            return classes[name]
        if named is None:
            return None
        raise ApiError(
            400,
            f"x-slo-class: {pool.name} has no class {name[:64]!r}; known: {', '.join(classes)}",
            param="x-slo-class",
            code="unknown_slo_class",
        )

    def _hold(
        self,
        intent: Intent,
        arrival: Arrival,
        now: float,
    ) -> None:
        """Starts the request when the core router lets it run."""
        client_request, pool = intent.request, intent.pool

        def then(now: float, held: WaitingRequest) -> None:
            self._go_on(client_request, held, partial(self._start, intent), now=now)

        limit = self._rules.timeouts.request
        if client_request.sheddable:
            arrival.drop()
            pool.held.count_refused(client_request.tenant, "queue")
            raise refusal(pool.name, "queue", 1.0)
        held = HeldRequest(intent, arrival, then, ended=self._ended, limit_seconds=limit, now=now)
        self._wait(client_request, held)

    def _start(
        self,
        intent: Intent,
        now: float,
    ) -> None:
        """Routes the request and starts its execution. Raises ApiError."""
        client_request, call, pool, asked = intent.request, intent.call, intent.pool, intent.asked
        relay: RequestRunner | None = None
        client_request.decision_began = time.monotonic()
        try:
            if pool.trials.on:
                decision, ticket, trial = pool.trials.route(asked, now, intent.arrival)
                routed = decision, ticket
                client_request.trial = trial
                self.observers.add(self._trial_results)
                if intent.hedge is not None:
                    intent.hedge.canary = trial is not None and trial.canary
            else:
                routed = decision, ticket = pool.router.route(asked, now=now, arrival=intent.arrival)
            client_request.decision_ended = time.monotonic()
            if pool.changes is not None and call.tokens is not None and not asked.extra_tokens:
                model = asked.lora_name or pool.name
                pool.changes.note(ticket.prompt_key, call.tokens, str(model), salt=call.salt)
        except NoInstanceError as error:
            if client_request.subset is not None:
                raise client_request.subset.no_engine_error(pool, str(error)) from None
            if client_request.pinned_to is not None:
                raise ApiError(
                    503,
                    f"{pool.name}: the engine that holds previous_response_id accepts no request now",
                    engines=str(error),
                    code="no_engine",
                    headers={"retry-after": "2"},
                ) from None
            raise pool.no_engine_error(error, call.model) from None
        if call.path.prompt != "form":  # engines may read the priority from a field of JSON
            client_request.priority = decision.priority
        try:
            client_request.keep_alive &= self.phase is SERVING
            execution = Execution(self._rules, intent, routed)
            relay = RequestRunner(execution, call.path.generates, self._ended)
            client_request.client.relay = relay
            self.relays.add(relay)
            if client_request.client.writing_paused:
                relay.client_slow()
            for hook in self.observers.placed:
                guarded(hook, client_request, relay)
            relay.start(now)
            for hook in self.observers.sent:
                try:  # `guarded`, inline because each request runs it
                    hook(client_request, relay)
                except Exception:
                    failed(hook)
        except Exception:
            if relay is None:
                raise
            relay.fail()

    def _ended(
        self, client_request: ClientRequest, relay: InFlightRequest | None, error: ApiError | None
    ) -> None:
        """Ends the request: sends ``error``, if any, to its client, and reports the end."""
        if self.tracing is not None and request_log.is_outside(client_request):
            guarded(self.tracing.context, client_request)
            request_log.in_request(client_request, self._ended, client_request, relay, error)
            return
        # The head of the answer may have kept the connection open. Closing it would then lose the
        # client's next request.
        goes_on = client_request.keep_alive
        payer = client_request.payer
        if payer is not None:
            client_request.payer = None
            payer.running -= 1
            if client_request.tenant:
                self._tenant_requests[client_request.tenant] -= 1
        if relay is not None:
            client_request.client.relay = None
            self.relays.discard(relay)
            if self.phase is not SERVING and not self.relays:
                self._idle.set()
            goes_on = goes_on and not relay.close_client
            if relay.committed:
                client_request.status = relay.status
            usage = relay.usage
            if usage is not None and client_request.prompt_bytes and client_request.pool is not None:
                prompt_tokens = usage.prompt_tokens
                if prompt_tokens:
                    client_request.pool.ratio.learn(client_request.prompt_bytes, prompt_tokens)
        if error is not None:
            client_request.error, client_request.status = error, error.status
            goes_on = goes_on and client_request.http11 and self.phase is SERVING
            if client_request.transport.is_closing():
                client_request.status = 499  # the client left before the router refused its request
            elif client_request.opened:
                client_request.break_off(error.body(self._show_engines))
            else:
                client_request.transport.write(
                    whole_answer(
                        error,
                        client_request.head.request_id,
                        goes_on,
                        show_engines=self._show_engines,
                        more_fields=client_request.cors,
                    )
                )
        client_request.ended_at = time.monotonic()
        for hook in self.observers.ended:
            try:  # `guarded`, inline because each request runs it
                hook(client_request, relay)
            except Exception:
                failed(hook)
        client_request.done(goes_on)


def _read_call(
    client_request: ClientRequest, path: RelayedPath, isolation: Isolation, body: bytes
) -> ParsedRequest:
    """Reads a body. Raises ApiError."""
    if path.prompt == "form":
        call = parse_form(path, client_request.head.field(b"content-type"), body)
    else:
        call = parse(path, body)
    if client_request.tenant and client_request.tenant in isolation.tenants:
        isolation.apply(client_request.tenant, client_request.path, call)
    return call


def _read_large_call(
    client_request: ClientRequest, path: RelayedPath, isolation: Isolation, body: bytes | BodyParts
) -> ParsedRequest:
    """Reads a large body, with all work that the event loop must not do. Raises ApiError."""
    if isinstance(body, BodyParts):
        body = body.joined()
    call = _read_call(client_request, path, isolation, body=body)
    if call.changes:
        call.apply_changes()
    if path.stores:
        call.read_brief()
    return call


def _prepare(call: ParsedRequest, read: Callable[[], Tokens | None] | None) -> Tokens | None:
    """Changes a body, and returns its prompt's tokens. Raises NotPredictable."""
    if call.changes:
        call.apply_changes()
    return None if read is None else read()


def _read_first(intent: Intent, read: Callable[[], Tokens | None] | None) -> Tokens | None:
    """Prepares the body for a prefill, and returns the prompt's tokens. Raises NotPredictable."""
    call = intent.call
    call.first = FirstSegment(intent.request.path, call.body)
    if intent.pool.prefills_apart and not call.first.why_whole:  # the prefill has a body of its own
        call.first.for_one_token()
    return call.tokens if read is None else read()


def _hedge(intent: Intent, seconds: float) -> Hedge | None:
    """Returns the hedge of a request after this time; None: only its own engine may answer it.

    Only a stream of choices shows when its first token comes.
    """
    call = intent.call
    if not call.stream or not call.path.generates or intent.request.pinned_to is not None:
        return None
    return Hedge(seconds, intent.asked)


def _reader(keys: Keys, config: ServerConfig) -> RequestReader:
    return RequestReader(keys.on, token_hex(6), config.limits.max_head_bytes)


def _shares(config: ServerConfig) -> dict[str, tuple[float, float]]:
    """Returns the weight and the handicap (s) of each tenant."""
    return {name: (tenant.weight, tenant.handicap_seconds) for name, tenant in config.tenants.items()}


def _instances(client_request: ClientRequest, pool: Pool) -> list[str] | None:
    """Returns the names of the only engines that may take a request; None: all may."""
    pinned, subset = client_request.pinned_to, client_request.subset
    listing = pool.names.engines_of(client_request.model)
    if pinned is None and subset is None:
        return None if listing is None else list(listing)
    names = pool.engines if pinned is None else (pinned,)
    return [
        name
        for name in names
        if (subset is None or (name in pool.engines and pool.engines[name] in subset))
        and (listing is None or name in listing)
    ]


def _length_class(client_request: ClientRequest) -> str:
    """Returns the class for learned output lengths: the path, and the tenant if there is one."""
    return f"{client_request.path} {client_request.tenant}" if client_request.tenant else client_request.path


def _priority(head: RequestHead, call: ParsedRequest) -> float | None:
    """Returns the client's priority. As in vLLM, the header precedes the field."""
    return call.priority if head.priority is None else head.priority


def _text(field: bytes | None) -> str | None:
    return None if field is None else field.decode("utf-8", "surrogateescape")


def _too_many(whose: str) -> ApiError:
    return ApiError(
        503, f"too many concurrent requests{whose}", code="too_many", headers={"retry-after": "1"}
    )


def no_room_error() -> ApiError:
    return ApiError(
        503,
        "the request bodies in flight exceed the router's limit; try again",
        code="too_many_bytes",
        headers={"retry-after": "1"},
    )


def _address(client_request: ClientRequest) -> str | None:
    """Returns HOST:PORT of a client, the HOST that a trusted proxy names, or `unix`.

    None: the client has disconnected.
    """
    client = client_request.client
    if client.sender != client.peer.address:
        return client.sender
    peer = client_request.transport.get_extra_info("peername")
    if not peer:
        return None if client.peer.address else UNIX
    host, port = peer[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _writable(transport: asyncio.Transport | None) -> TypeGuard[asyncio.Transport]:
    return transport is not None and not transport.is_closing()


def _session_line(session: str) -> bytes:
    """Returns the head line with which engines read the session on every path.

    vLLM ignores the body's field on some paths. Empty if the session cannot be in a head.
    """
    sendable = session.isascii() and session.isprintable() and " " not in session
    return b"x-session-id: %s\r\n" % session.encode() if sendable else b""


def _session(tenant: str, session: str) -> str:
    """Returns the key for session affinity. Sessions of different tenants have different keys."""
    return f"{len(tenant)}:{tenant}{session}"


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")


def _size(pool: Pool, call: ParsedRequest) -> tuple[int, int, int]:
    """Returns the sizes of a request's prompts.

    They are: bytes of the prompt for the tokens-per-byte estimate (0: not used for it), tokens of
    the prompt (estimated for text), and tokens of the further prompts.
    """
    more = call.more_tokens + (pool.ratio.tokens_of(call.more_bytes) if call.more_bytes else 0)
    if call.tokens is not None:
        return 0, len(call.tokens), more
    text = call.text
    if text is None:
        return 0, 1, more
    if more:
        return 0, pool.ratio.tokens_of(len(text)), more
    return len(text), pool.ratio.tokens_of(len(text)), 0
