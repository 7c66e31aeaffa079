"""Requests about stored responses, and requests that continue one: they go to its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from lmetric._core import Board
from lmetric.config import ServerConfig
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.paths import StoredResponsePath
from lmetric.server.api.request import ParsedRequest
from lmetric.server.api.stored import Holder, StoredResponses, assign_id, id_in, not_found, previous_id
from lmetric.server.execution import request_log
from lmetric.server.execution.direct import DirectRunner
from lmetric.server.execution.exchange import FAILED, ClientRequest
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.server.http.admission import Admission
from lmetric.server.http.waiting import PendingWork

if TYPE_CHECKING:
    from lmetric.server.background.stored_search import StoredSearch

log = structlog.get_logger("lmetric.access")


class StoredRequests:
    """Finds the engines of stored responses, and sends requests there."""

    def __init__(
        self, config: ServerConfig, fleet: Fleet, admission: Admission, board: Board | None = None
    ) -> None:
        self.responses = StoredResponses(config.limits)
        self._board = board  # shared with the other workers
        self.others: StoredSearch | None = None  # set by the server if there are other routers
        self._fleet = fleet
        self._admission = admission
        self._running = admission.running

    def continued(self, tenant: str, call: ParsedRequest) -> asyncio.Task[Holder | None] | None:
        """Begins to search the response that a request continues; None: it waits for none."""
        previous = previous_id(call)
        return None if previous is None else self._search(tenant, previous)

    def _search(self, tenant: str, response_id: str) -> asyncio.Task[Holder | None] | None:
        if self.others is None or not self.others.on or self.known(tenant, response_id) is not None:
            return None
        search = self.others.begin(tenant, response_id)

        def note(done: asyncio.Task[Holder | None]) -> None:
            if not (done.cancelled() or done.exception()) and (holder := done.result()) is not None:
                self._add(tenant, response_id, holder)

        if search is not None:
            search.add_done_callback(note)
        return search

    def known(self, tenant: str, response_id: str) -> Holder | None:
        """Returns the holder of a response that this router knows."""
        return self._found(tenant, response_id) or self.responses.get(tenant, response_id)

    def follow(self, client_request: ClientRequest, call: ParsedRequest, model: Model) -> None:
        """Pins a request to the engine of the response that it continues, and follows its own.

        Raises ApiError (400, 404).
        """
        tenant = client_request.tenant
        if (previous := previous_id(call)) is not None:
            home, engine = self._holder(tenant, previous)
            if home is not model:
                raise bad(
                    f"previous_response_id: the model of that response is {home.name!r}, not {model.name!r}",
                    "previous_response_id",
                )
            client_request.pinned_to = engine.name
        tenants = self._admission.identity.on or bool(self._admission.tenants)
        own = assign_id(call, tenants=tenants)
        if own is not None:
            # An engine may repeat IDs that it chooses: a tenant could read another one's response.
            client_request.on_answer = lambda engine, begun: self._add(
                tenant, own if tenants else id_in(begun, own), Holder(model.name, engine)
            )

    def _holder(self, tenant: str, response_id: str) -> tuple[Model, Engine]:
        """Returns the model and the engine of a stored response. Raises ApiError (404)."""
        holder = self.known(tenant, response_id)
        if holder is None:
            raise not_found(
                response_id,
                "is unknown to this router: you did not create it through this router or its replicas, or it "
                "is older than the responses that a router remembers (the newest 100,000)",
            )
        model = next((model for model in self._fleet.models if model.name == holder.model), None)
        engine = model.engines.get(holder.engine) if model is not None else None
        if model is None or engine is None:
            error = not_found(response_id, "is lost: the engine that held it was removed")
            error.engines = holder.engine
            raise error
        return model, engine

    def _add(self, tenant: str, response_id: str, holder: Holder) -> None:
        self.responses.add(tenant, response_id, holder)
        if self._board is not None:
            self._board.note(_key(tenant, response_id), _place(holder))

    def _forget(self, tenant: str, response_id: str) -> None:
        self.responses.forget(tenant, response_id)
        if self._board is not None:
            self._board.note(_key(tenant, response_id), None)

    def _found(self, tenant: str, response_id: str) -> Holder | None:
        """Returns the holder of a response that any worker has noted."""
        noted = None if self._board is None else self._board.noted(_key(tenant, response_id))
        if noted is None or self._board is None:
            return None
        holders = (Holder(model.name, engine) for model in self._fleet.models for engine in model.engines)
        return next((each for each in holders if self._board.hash(_place(each)) == noted), None)

    def serve(self, client_request: ClientRequest, target: StoredResponsePath, method: str) -> None:
        """Forwards a request about a stored response to its engine. Calls `ended` at its end."""
        if client_request.trace is not None and request_log.current.request is not client_request:
            request_log.in_request(client_request, self.serve, client_request, target, method)
            return
        self._running.count(client_request)
        search = self._search(client_request.tenant, target.response_id)
        if search is None:
            self._serve(client_request, target, method)
            return

        self.wait(client_request, search, lambda _: self._serve(client_request, target, method))

    def wait(
        self,
        client_request: ClientRequest,
        search: asyncio.Task[Holder | None],
        then: Callable[[float], None],
    ) -> None:
        """Has a request wait for a search of a stored response, whose error ends both."""

        def found(search: asyncio.Future[Holder | None], now: float) -> None:
            search.result()
            then(now)

        why = "; other routers were asked for the stored response"
        PendingWork(client_request, self._running, search, then=found, why=why)

    def _serve(self, client_request: ClientRequest, target: StoredResponsePath, method: str) -> None:
        tenant, response_id = client_request.tenant, target.response_id
        try:
            model, engine = self._holder(tenant, response_id)
            caller = client_request.caller
            if not any(self._fleet.catalog.allows(caller, name) for name in model.names.known):
                raise not_found(response_id, "is of a model that this tenant may not use")
            client_request.model = model
            if client_request.subset is not None and engine not in client_request.subset:
                raise client_request.subset.no_engine_error(model, f"the response is on {engine.name}")
            if method == "DELETE":
                client_request.on_answer = lambda *_: self._forget(tenant, response_id)
            rules = self._running.rules
            relay = DirectRunner(rules, client_request, model, engine=engine, method=method.encode())
        except ApiError as error:
            self._running.ended(client_request, None, error)
        except Exception:
            log.exception("a request failed with an internal error", path=client_request.head.path)
            self._running.ended(client_request, None, ApiError(500, FAILED))
        else:
            self._running.start(client_request, relay, time.monotonic())


def _key(tenant: str, response_id: str) -> str:
    """Returns the key of a response's note."""
    return f"{tenant}\0{response_id}"


def _place(holder: Holder) -> str:
    """Returns an engine as the text of a note."""
    return f"{holder.model}\0{holder.engine}"
