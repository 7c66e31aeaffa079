"""Placement: from what a client asked to a decision, or to a place in a queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lmetric._core import NoInstanceError, Request
from lmetric.config import PoolSettings, ServerConfig, SloClass
from lmetric.server.api.caller import NOBODY
from lmetric.server.api.errors import ApiError
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import ClientRequest, Intent
from lmetric.server.execution.observers import failed
from lmetric.server.execution.plan import Hedge, Way
from lmetric.server.execution.runner import Runner
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.model import Model
from lmetric.server.http.running import RunningRequests
from lmetric.server.http.waiting import HeldRequest, refusal
from lmetric.server.observe.budgets import TenantBudgets
from lmetric.server.observe.trial_results import TrialResults

NO_SHARE = (1.0, 0.0)  # weight and handicap (s) of requests without a tenant


class Placement:
    """Places requests: routes and starts them, or holds or refuses them."""

    def __init__(self, config: ServerConfig, running: RunningRequests, budgets: TenantBudgets) -> None:
        self._running = running
        self._budgets = budgets
        self._trial_results: TrialResults | None = None  # an observer once a model has trials
        self._hedged: Callable[[Any, Engine], Way[str | None]] | None = None  # None: no hedges
        self.configure(config)

    def configure(self, config: ServerConfig) -> None:
        """Applies settings to new requests."""
        tenants = config.tenants
        if self._budgets.limited:
            self._running.observers.add(self._budgets)
        self._shares = {name: (each.weight, each.handicap_seconds) for name, each in tenants.items()}
        self._classes = {name: each.slo_class for name, each in tenants.items() if each.slo_class is not None}
        if self._hedged is None and any(map(_hedges, map(config.pool_settings, (None, *config.models)))):
            from lmetric.server.execution.ways.hedge import hedged

            self._hedged = hedged

    def place(self, intent: Intent, now: float) -> None:
        """Routes the request and starts its execution, or holds or refuses it. Raises ApiError."""
        client_request, call, model = intent.client_request, intent.call, intent.model
        head = client_request.head
        if call.path.prompt == "form" and model.disaggregates:
            raise ApiError(
                501,
                f"{model.name}: {head.path} is not possible with prefill/decode disaggregation",
                code="not_implemented",
            )
        client_request.prompt_bytes, prompt_tokens, extra_tokens = _size(model, call)
        client_request.prompt_tokens = prompt_tokens + extra_tokens
        joins = model.joins
        split_reason = model.split_reason(head.path, call) if joins else None
        fetch_reason = model.fetch_reason(head.path, call) if model.fetches_prefixes else None
        intent.moves = joins and split_reason is None
        intent.fetches = model.fetches_prefixes and fetch_reason is None
        if split_reason is not None or fetch_reason is not None:
            model.count_ineligible(split_reason, fetch_reason)
        if model.fails_over and call.stream:
            client_request.not_resumable = model.failover_reason(head.path, call)
            intent.resumes = client_request.not_resumable is None
        weight, handicap_seconds = self._shares.get(client_request.tenant, NO_SHARE)
        if handicap_seconds:
            client_request.handicap_seconds = handicap_seconds
        session = call.session_id or head.session or call.session
        if call.session_id is not None and head.session is None:
            client_request.session_line = _session_line(call.session_id)
        if session is not None:
            session = session_key(client_request.tenant, session)
        policies, held = model.policies, model.held
        slo = self._slo_class(client_request, model) if held.classes else None
        priority = None
        if policies.reads_priority:  # as in vLLM, the header precedes the field
            priority = call.priority if head.priority is None else head.priority
        # Positional, in the order of `Request`: keywords take 4% of a chat's instructions.
        images = call.images
        tokens = call.tokens if images is None else images.tokens
        intent.asked = asked = Request(
            tokens,
            call.text if tokens is None else None,
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
            _length_class(client_request) if model.splits or policies.reads_length_class else None,
            None,  # reasoning_tokens
            split_reason is None,
            split_reason,
            fetch_reason is None,
            fetch_reason,
            priority,
            None
            if model.names.uniform and client_request.pinned_to is None and client_request.subset is None
            else _instances(client_request, model),
            head.session_final,
            slo.ttft_seconds if slo is not None else None,
            not (call.stream and call.path.generates),  # whole_answer
            images.images if images is not None else (),
        )
        for arrived in self._running.observers.arrived:
            try:  # `guarded`, inline because each request runs it
                arrived(intent)
            except Exception:
                failed(arrived)
        if client_request.tenant in self._budgets.limited:
            self._reserve(intent, now)
        hedge_seconds = model.hedging.after_seconds
        if slo is not None and slo.hedge_after_seconds is not None:
            hedge_seconds = slo.hedge_after_seconds
        if hedge_seconds is not None:
            intent.hedge = self._hedge(intent, hedge_seconds)
        arrival = None
        if held.admits:
            tenant, slo_class = client_request.tenant, client_request.slo_class
            shed = client_request.sheddable
            arrival = held.arrive(asked, tenant, slo_class, now=now, sheddable=shed)
        if arrival is not None:
            intent.arrival = arrival
            verdict = arrival.verdict
            if verdict == "refused":
                reason = arrival.reason or ""
                client_request.refused_because = reason
                raise refusal(model.name, reason, arrival.retry_after_seconds or 1.0)
            if verdict == "held":
                client_request.was_held = True
                start = partial(self._start, intent)  # when the core router lets it run
                HeldRequest(intent, arrival, self._running, then=start, now=now)
                return
        self._start(intent, now)

    def _reserve(self, intent: Intent, now: float) -> None:
        """Reserves the budgets of the request's tenant. Raises ApiError (429)."""
        client_request, call, model = intent.client_request, intent.call, intent.model
        # An answer without a given length is charged when it ends, but for its first token.
        output_tokens = max(1, call.max_tokens or 0) if call.path.streams else 0
        try:
            self._budgets.reserve(client_request, model.name, output_tokens, now=now)
        except ApiError:
            client_request.refused_because = "budget"
            raise

    def _hedge(self, intent: Intent, seconds: float) -> Hedge | None:
        """Returns the hedge of a request after this time; None: only its own engine may answer it.

        Only a stream of choices shows when its first token comes.
        """
        call = intent.call
        if not call.stream or not call.path.generates or intent.client_request.pinned_to is not None:
            return None
        assert self._hedged is not None  # the configuration has a time
        return Hedge(seconds, intent.asked, way=self._hedged)

    def _slo_class(self, client_request: ClientRequest, model: Model) -> SloClass | None:
        """Returns the class of a request; None: it has none. Raises ApiError (400)."""
        classes, claimed = model.held.classes, client_request.caller.slo_class
        # If a token names the class, the header has no effect. An empty header names none.
        named = (client_request.head.field(b"x-slo-class") or None) if claimed is None else None
        name = claimed or self._classes.get(client_request.tenant, "")
        if named is not None:
            name = named.decode("latin-1")
        if name in classes:
            client_request.slo_class = name
            return classes[name]
        if named is None:
            return None
        raise ApiError(
            400,
            f"x-slo-class: {model.name} has no class {name[:64]!r}; known: {', '.join(classes)}",
            param="x-slo-class",
            code="unknown_slo_class",
        )

    def _start(self, intent: Intent, now: float) -> None:
        """Routes the request and starts its execution. Raises ApiError."""
        client_request, call, model, asked = intent.client_request, intent.call, intent.model, intent.asked
        client_request.decision_began = time.monotonic()
        try:
            if (trials := model.trials) is not None and trials.on:
                decision, ticket, trial = trials.route(asked, now, intent.arrival)
                routed = decision, ticket
                client_request.trial = trial
                if self._trial_results is None:
                    self._trial_results = TrialResults()
                    self._running.observers.add(self._trial_results)
                if intent.hedge is not None:
                    intent.hedge.canary = trial is not None and trial.canary
            else:
                routed = decision, ticket = model.router.route(asked, now=now, arrival=intent.arrival)
            client_request.decision_ended = time.monotonic()
            if (
                client_request.alias is not None
                or client_request.fallback is not None
                or client_request.caller is not NOBODY
            ):
                model.notes.keep(decision.id, client_request.notes)
            if model.changes is not None and call.tokens is not None and not asked.extra_tokens:
                model_name = asked.lora_name or model.name
                model.changes.note(ticket.prompt_key, call.tokens, str(model_name), salt=call.salt)
        except NoInstanceError as error:
            if client_request.subset is not None:
                raise client_request.subset.no_engine_error(model, str(error)) from None
            if client_request.pinned_to is not None:
                raise ApiError(
                    503,
                    f"{model.name}: the engine that holds previous_response_id accepts no request now",
                    engines=str(error),
                    code="no_engine",
                    headers={"retry-after": "2"},
                ) from None
            raise model.no_engine_error(error, call.model) from None
        if call.path.prompt != "form":  # engines may read the priority from a field of JSON
            client_request.priority = decision.priority
        relay = Runner(self._running.rules, intent, routed)
        self._running.start(client_request, relay, now)


def _hedges(settings: PoolSettings) -> bool:
    """Returns whether some requests of a model are hedged."""
    classes = settings.admission.classes.values() if settings.admission is not None else ()
    times = (settings.hedging.after_seconds, *(each.hedge_after_seconds for each in classes))
    return any(seconds is not None for seconds in times)


def _instances(client_request: ClientRequest, model: Model) -> list[str] | None:
    """Returns the names of the only engines that may take a request; None: all may."""
    pinned, subset, name = client_request.pinned_to, client_request.subset, client_request.model_name
    engines: Iterable[str]
    if pinned is None:
        if subset is None:
            listing = model.names.engines_of(name)
            return None if listing is None else list(listing)
        engines = subset.names_in(model)
    elif subset is None or (pinned in model.engines and model.engines[pinned] in subset):
        engines = (pinned,)
    else:
        engines = ()
    return [each for each in engines if model.names.serves(each, name)]


def _length_class(client_request: ClientRequest) -> str:
    """Returns the class for learned output lengths: the path, and the tenant if there is one."""
    path, tenant = client_request.head.path, client_request.tenant
    return f"{path} {tenant}" if tenant else path


def _session_line(session: str) -> bytes:
    """Returns the head line with which engines read the session on every path.

    vLLM ignores the body's field on some paths. Empty if the session cannot be in a head.
    """
    sendable = session.isascii() and session.isprintable() and " " not in session
    return b"x-session-id: %s\r\n" % session.encode() if sendable else b""


def session_key(tenant: str, session: str) -> str:
    """Returns the key of a session for the core. It differs between tenants."""
    return f"{len(tenant)}:{tenant}{session}" if tenant else session


def _size(model: Model, call: ParsedRequest) -> tuple[int, int, int]:
    """Returns the sizes of a request's prompts.

    They are: bytes of the prompt for the tokens-per-byte estimate (0: not used for it), tokens of
    the prompt (estimated for text), and tokens of the further prompts.
    """
    more = call.more_tokens + (model.ratio.tokens_of(call.more_bytes) if call.more_bytes else 0)
    if call.tokens is not None:
        return 0, len(call.tokens), more
    if call.images is not None and call.images.tokens is not None:
        return 0, call.images.total_tokens, more
    text = call.text
    if text is None:
        return 0, 1, more
    if more:
        return 0, model.ratio.tokens_of(len(text)), more
    return len(text), model.ratio.tokens_of(len(text)), 0
