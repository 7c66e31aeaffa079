"""The front end: the requests of client connections go to admission, arrival, or the own pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from lmetric.config import ServerConfig
from lmetric.server.api.auth import PageAccess
from lmetric.server.api.caller import UnknownKeyError
from lmetric.server.api.errors import ApiError
from lmetric.server.api.identity import Identity
from lmetric.server.api.isolation import Isolation
from lmetric.server.api.issued import IssuedKey
from lmetric.server.api.paths import stored_response
from lmetric.server.api.replica_pages import ID_DIGITS
from lmetric.server.discovery.follow import Discovery
from lmetric.server.execution.exchange import FAILED, ClientRequest, InFlightRequest
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.http.admission import Admission
from lmetric.server.http.arrive import Arrivals
from lmetric.server.http.bodies import Bodies
from lmetric.server.http.client_load import ClientLoad
from lmetric.server.http.connection import ClientConnection
from lmetric.server.http.entrance import AlreadySentResponse, Entrance
from lmetric.server.http.handshakes import Handshakes
from lmetric.server.http.place import Placement
from lmetric.server.http.protocol import (
    origin_form,
    upgrade_required,
    violation,
    wants_websocket,
)
from lmetric.server.http.running import SERVING, RunningRequests
from lmetric.server.http.stored import StoredRequests
from lmetric.server.http.waiting import WorkThreads
from lmetric.server.observe.budgets import TenantBudgets, windows_of
from lmetric.server.observe.live import Live
from lmetric.server.observe.metrics import Metrics
from lmetric.server.observe.usage import Row, Usage

if TYPE_CHECKING:
    from lmetric.server.background.replicas import Replicas
    from lmetric.server.http.cors import Cors
    from lmetric.server.tls.contexts import TlsContext
    from lmetric.server.worker.worker import Worker

log = structlog.get_logger("lmetric.access")

# Most connections that one periodic check closes: each takes time of the event loop.
CLOSED_AT_ONCE = 256


class Frontend(web.Server):
    """Dispatches requests: to the engines, or to the router's own pages."""

    pages_only = False  # requests for engines come from elsewhere

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        identity: Identity,
        metrics: Metrics,
        pages: Callable[[Frontend, web.BaseRequest, str, str], Awaitable[web.StreamResponse]],
        worker: Worker | None = None,
    ) -> None:
        super().__init__(self.handle)
        self.fleet = fleet
        self.metrics = metrics
        self.pages = pages
        self.worker = worker  # this process as one of several
        self.discovery: Discovery  # set by the server
        # IDs of this start of the router, and of this process, for other routers.
        self.router = token_hex(ID_DIGITS // 2) if worker is None else worker.router
        self.process = self.router if worker is None else self.router + token_hex(ID_DIGITS // 2)
        self.replicas: Replicas | None = None  # set by the server if other routers share load or budgets
        self.tls: TlsContext | None = None  # set by the server
        # Returns records of issued API keys for another router; set by the server.
        self.keys_page: Callable[[str, int, int], Awaitable[bytes]]
        # Stores issued or revoked API keys in all workers and routers; set by the server.
        self.change_keys: Callable[[Sequence[IssuedKey]], Awaitable[object]]
        # Reloads the configuration; set by the server.
        self.reread: Callable[[], Awaitable[dict[str, Any]]] | None = None
        self._random_secret = token_bytes(32) if worker is None else worker.secret
        self.access = PageAccess(config, identity)
        self.clients = ClientLoad(config.limits)
        self.handshakes = Handshakes()
        self.running = RunningRequests(config)
        fleet.on_model_removed.append(self.running.refusals.forget)
        self.running.observers.add(metrics.requests)
        self.live = Live(fleet, self.relays, metrics.lateness) if config.ui.enabled else None
        if self.live is not None:
            self.running.observers.add(self.live)
        self._threads = WorkThreads()
        self.bodies = Bodies(self.running, self._threads)
        self.admission = Admission(config, identity, self.running, clients=self.clients)
        board = None if worker is None else worker.board
        self.stored = StoredRequests(config, fleet, self.admission, board=board)
        self.budgets = TenantBudgets(config.tenants, board)
        metrics.further.append(self.budgets.metrics)
        self.usage = Usage(fleet)
        self.running.observers.add(self.usage)
        metrics.further.append(self.usage.metrics)
        self.placement = Placement(config, self.running, self.budgets)
        self.arrivals = Arrivals(
            config,
            fleet,
            isolation=Isolation(config, self._random_secret),
            admission=self.admission,
            stored=self.stored,
            placement=self.placement,
            threads=self._threads,
        )
        self.entrance = Entrance(config, self.arrivals, self.clients, is_open=not self.pages_only)
        self._goes_on = AlreadySentResponse(True)
        self._ends = AlreadySentResponse(False)
        self._body_limit = config.limits.max_body_bytes

    @property
    def config(self) -> ServerConfig:
        """The configuration, which a reload replaces."""
        return self.fleet.config

    @property
    def relays(self) -> set[InFlightRequest]:
        """The requests in flight."""
        return self.running.relays

    def __call__(self) -> ClientConnection:
        """Returns the protocol of a new client connection."""
        return ClientConnection(self.entrance, self, loop=self._loop, access_log=None)

    def prepare(self, identity: Identity, config: ServerConfig) -> Callable[[], None]:
        """Returns the function that applies API keys and other settings to new requests.

        Raises ConfigError.
        """
        access, isolation = PageAccess(config, identity), Isolation(config, self._random_secret)
        windows = windows_of(config.tenants)

        def apply() -> None:
            self.access = access
            self._body_limit = config.limits.max_body_bytes
            self.running.configure(config)
            self.admission.configure(config, identity)
            self.budgets.configure(windows)
            self.placement.configure(config)
            self.arrivals.configure(config, isolation)
            self.entrance.configure(config, identity)
            self.clients.configure(config.limits)
            self.stored.responses.configure(config.limits)

        return apply

    async def usage_rows(self) -> list[Row]:
        """Returns the usage by day, tenant, API key and model, of all workers."""
        if self.worker is not None:
            return await self.worker.usage_rows()
        return await asyncio.to_thread(self.usage.table.rows)

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Closes the connections and stops the threads."""
        self._threads.close()
        self.bodies.close()
        await super().shutdown(timeout)

    def check(self, now: float) -> None:
        """Called periodically: ends requests and connections at their time limits.

        ``now``: seconds on the monotonic clock.
        """
        self.running.check(now)
        closed = 0
        for client in self.connections:
            if isinstance(client, ClientConnection) and client.check(now, self.running.rules.timeouts):
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
            return self.entrance.reject(client, request.raw_headers, broken)
        path, _, query = target.partition("?")
        relayed = path in self.arrivals.paths
        stored = None if relayed else stored_response(path)
        methods = ("POST",) if relayed else stored.methods if stored is not None else ("GET",)
        to_engine = relayed or stored is not None
        cors = self.admission.cors if to_engine or path.startswith("/v1/models") else None
        try:
            if cors is not None and request.method == "OPTIONS":
                answer = cors.preflight(request, ", ".join(methods))
                if answer is not None:
                    return answer
            if not to_engine:
                page = await self._page(request, path, query)
                if self.running.phase is not SERVING or client.closes:
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
        head = self.entrance.requests.sort(target.encode(), request.raw_headers)
        client_request = ClientRequest(client, request.transport, head)
        client_request.http11 = request.version >= (1, 1)
        # Engines' answers have no `connection: keep-alive`: clients of HTTP/1.0 wait for the end.
        keep_alive = request.keep_alive and client_request.http11
        # After a refusal, the body still comes.
        client_request.keep_alive = keep_alive and request.content.is_eof()
        client_request.done = lambda goes_on: None if ended.done() else ended.set_result(goes_on)
        client_request.method = request.method
        admitted = self.admission.admits(client_request)
        if client_request.unknown_key is not None:
            await client_request.unknown_key.read
            admitted = self.admission.admits_late(client_request)
        if admitted:
            client_request.keep_alive = keep_alive
            try:
                body = await self.bodies.read(request, self._body_limit)
            except ApiError as error:
                client_request.keep_alive = False  # the rest of the body may still come
                self.running.ended(client_request, None, error)
            else:
                client_request.started = time.monotonic()
                if client_request.transport.is_closing():
                    # Its client left while it had no relay, so nothing else would end it.
                    client_request.keep_alive = False
                    self.running.ended(client_request, None, None)
                elif stored is None:
                    self.arrivals.serve(client_request, body)
                else:
                    self.stored.serve(client_request, stored, request.method)
        try:
            return self._goes_on if await ended else self._ends
        except asyncio.CancelledError:
            if client.relay is not None:
                client.relay.client_gone()
            raise

    async def _page(self, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
        """Answers one of the router's own pages. Raises ApiError."""
        try:
            return await self.pages(self, request, path, query)
        except UnknownKeyError as unknown:
            await unknown.read
            unknown.finish()  # now it is known, or this raises why it is not
            return await self.pages(self, request, path, query)

    def _refuse(self, request: web.BaseRequest, error: ApiError, cors: Cors | None) -> web.Response:
        client = request.protocol
        assert isinstance(client, ClientConnection)  # as `handle` made sure
        if request.headers.get("x-request-id"):
            head = self.entrance.requests.sort(b"", request.raw_headers)
            error.headers.setdefault("x-request-id", head.request_id)
        if cors is not None:
            error.headers.update(cors.fields(request.headers.get("origin")))
        response = web.Response(
            status=error.status,
            body=error.body(self.running.rules.show_engines),
            content_type="application/json",
            headers=error.headers,
        )
        if self.running.phase is not SERVING or client.closes or "connection" in error.headers:
            response.force_close()
        return response
