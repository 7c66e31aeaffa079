"""Hedge: a second attempt of a stream whose first token is late, on another engine.

The first engine with a token gives the whole answer. The request to the other engine is canceled,
and the other engine is not blamed. The second attempt has a decision and a ticket of its own, so
the router counts its load. It has no tenant and no session: the first attempt counts for them.
"""

from __future__ import annotations

from lmetric._core import Decision, NoInstanceError, Request, Ticket
from lmetric.server.execution.plan import Step
from lmetric.server.execution.planners import own_request
from lmetric.server.execution.progress import Progress


class Hedge:
    """The second attempt of one request: due after a time, then sent."""

    __slots__ = ("after_seconds", "canary", "decision", "request", "step", "ticket")

    # Set once it is sent.
    decision: Decision
    ticket: Ticket
    step: Step | None

    def __init__(self, after_seconds: float, request: Request) -> None:
        self.after_seconds = after_seconds
        self.request = request  # as routed first
        self.canary = False  # whether the canary's policy decides
        self.step = None

    def send(self, p: Progress, now: float) -> Step | None:
        """Returns the step of the second attempt; None: it is not allowed, or has no engine."""
        hedging, pool = p.pool.hedging, p.pool
        if not hedging.budget.allows(pool.requests):
            hedging.unsent["budget"] += 1
            return None
        if pool.held.admits and pool.router.waiting:
            hedging.unsent["held"] += 1  # its queue might refuse a client's request
            return None
        again = _again(self.request)
        arrival = pool.held.arrive(again, now) if pool.held.admits else None
        if arrival is not None and arrival.verdict not in ("free", "run"):
            arrival.drop()
            hedging.unsent["held"] += 1
            return None
        try:
            self.decision, self.ticket = pool.router.route(
                again, now=now, arrival=arrival, canary=self.canary
            )
        except NoInstanceError:
            hedging.unsent["no_engine"] += 1
            hedging.uncounted["no_instance"] += 1
            return None
        name: str | None = self.ticket.instance
        while name is not None and (name in p.tried_engines or name not in pool.engines):
            # The policy still prefers that engine: take the best of the others.
            name = self.ticket.failed("refused")
            hedging.uncounted["refused" if name is None else "retries"] += 1
        if name is None:
            hedging.unsent["no_engine"] += 1
            return None
        hedging.budget.spend()
        hedging.pair(p.decision.id, self.decision.id)
        self.step = own_request.step(p, pool.engines[name], now)
        self.step.refills = False  # the field depends on the first decision
        return self.step


def _again(request: Request) -> Request:
    """Returns the same request without tenant and session, to run whole on one engine."""
    return Request(
        request.token_ids,
        request.text,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        request_id=request.request_id,
        lora_name=request.lora_name,
        cache_salt=request.cache_salt,
        extra_tokens=request.extra_tokens,
        length_class=request.length_class,
        allow_split=False,
        split_reason=request.split_reason,
        allow_fetch=False,
        fetch_reason=request.fetch_reason,
        priority=request.priority,
        instances=request.instances,
    )
