"""Fallback of a request to another model: it is renamed and served again, before any token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import fields

from lmetric.server.api.errors import ApiError
from lmetric.server.api.refusal import EngineRefusal
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import PER_MODEL, SATURATED, ClientRequest, InFlightRequest, Intent
from lmetric.server.execution.fallback import CONTEXT, Fallback, FallbackStep
from lmetric.server.fleet.catalog import Catalog
from lmetric.server.fleet.model import Model
from lmetric.server.http.running import RunningRequests
from lmetric.server.http.waiting import PendingWork, WorkThreads

# Reasons by the code of the router's own error. Errors of an engine that has begun to work on the
# request are no reason: the request may be their cause.
_REASONS = {
    **dict.fromkeys(("no_engine", "model_not_found"), "no_engine"),
    **dict.fromkeys(("refused", "dns", "tls", "unreachable"), "no_engine"),
    **{code: code for code in ("queue_full", "deadline", "caches_full", CONTEXT)},
}
# The fields that each model sets again, and their values before.
_PER_MODEL = {each.name: each.default for each in fields(ClientRequest) if each.metadata == PER_MODEL}


class FallingBack:
    """Serves requests again with their next model.

    ``names``: the names that engines serve. ``serve``: serves a request whose body was read.
    ``place``: places a request whose prompt was read.
    """

    def __init__(
        self,
        names: Container[str],
        running: RunningRequests,
        threads: WorkThreads,
        serve: Callable[[ClientRequest, ParsedRequest, float], None],
        place: Callable[[Intent, float], None],
    ) -> None:
        self._names = names
        self._running = running
        self._threads = threads
        self._serve = serve
        self._place = place
        running.fall_back = self.begin

    def add(self, client_request: ClientRequest, call: ParsedRequest, catalog: Catalog) -> None:
        """Notes the models that may serve the request in place of its own.

        Token IDs of a prompt, or as an answer, mean nothing to another model.
        """
        models = catalog.fallbacks(call.model or "", client_request.alias, client_request.caller)
        if models and call.tokens is None and call.path.prompt != "nothing":
            client_request.fallback = Fallback(call, models)

    def begin(self, client_request: ClientRequest, relay: InFlightRequest | None, error: ApiError) -> bool:
        """Returns whether the request goes on with another model, in place of an error."""
        fallback, reason = client_request.fallback, _reason_of(error)
        if fallback is None or reason is None or (relay is not None and relay.committed):
            return False
        if client_request.pinned_to is not None or client_request.transport.is_closing():
            return False
        following = self._next(fallback)
        if following is None:
            return False
        fallback.steps.append(FallbackStep(fallback.call.model or "", following, reason))
        for name, default in _PER_MODEL.items():
            setattr(client_request, name, default)
        if relay is not None:
            self._running.relays.discard(relay)
            fallback.trace = relay.trace or fallback.trace

        def then(work: asyncio.Future[None], now: float) -> None:
            work.result()
            self._serve(client_request, fallback.call, now)

        work = self._threads.begin(lambda: _rename(fallback.call, following))
        PendingWork(client_request, self._running, work, then=then)
        return True

    def place(self, intent: Intent, now: float) -> None:
        """Places a request whose prompt was read.

        Raises ApiError (400) if the prompt is too long for the model, and there is another one.
        Without another model, the engine answers. Only a known number of tokens counts.
        """
        self._check_length(intent)
        self._place(intent, now)

    def _check_length(self, intent: Intent) -> None:
        client_request, tokens = intent.client_request, intent.call.tokens
        fallback = client_request.fallback
        if fallback is None or tokens is None or client_request.pinned_to is not None:
            return
        if not any(name in self._names for name in fallback.models):
            return
        limit = _context_tokens(intent.model)
        if limit is not None and len(tokens) >= limit:
            message = f"the prompt has {len(tokens)} tokens; {intent.model.name} takes {limit}"
            raise ApiError(400, message, param="prompt", code=CONTEXT)

    def _next(self, fallback: Fallback) -> str | None:
        while fallback.models:
            name = fallback.models.pop(0)
            if name in self._names:
                return name
        return None


def _reason_of(error: ApiError) -> str | None:
    """Returns the reason of a fallback after an error; None: the client gets the error."""
    if isinstance(error, EngineRefusal) and error.status in SATURATED:
        return "engine_full"
    return _REASONS.get(error.code or "")


def _rename(call: ParsedRequest, model: str) -> None:
    """Gives a request another model. A body may be large: it changes in a thread."""
    if call.text is not None:
        call.tokens = call.images = None  # of the model before
    call.first = None
    call.rename(model)
    if call.changes:
        call.apply_changes()


def _context_tokens(model: Model) -> int | None:
    """The longest `max_model_len` of a model's engines; None: an engine does not report it."""
    placed = (engine for engine in model.engines.values() if not engine.encodes)
    cards = [engine.capabilities.base(model.name) for engine in placed]
    lengths = [card.max_model_len if card is not None else None for card in cards]
    known = [length for length in lengths if length is not None]
    return max(known) if known and len(known) == len(lengths) else None
