"""Hedge: a second attempt of a stream whose first token is late, on another engine.

The first engine with a token gives the whole answer. The request to the other engine is canceled,
and the other engine is not blamed. The second attempt has a decision and a ticket of its own, so
the router counts its load. It has no tenant and no session: the first attempt counts for them.
"""

from __future__ import annotations

from lmetric._core import ENGINE_ERROR, INCOMPLETE, NoInstanceError, Request
from lmetric.server.api.refusal import retry_after_seconds
from lmetric.server.execution.exchange import SATURATED, why_no_stream
from lmetric.server.execution.failures import add_failure, kind_of
from lmetric.server.execution.plan import Attempt, Cancel, EngineLost, Hedge, Step, TimeIsUp, Way, ticket_kind
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.ways.plain import check_beginning, own_request, pass_answer
from lmetric.server.fleet.engine import Engine


def hedged(p: Progress, engine: Engine) -> Way[str | None]:
    """Sends the request to an engine, as the plain way does, and after a time to a second one."""
    hedge = p.hedge
    assert hedge is not None  # Placement has set this way with it
    first = own_request(p, engine)
    p.wake(hedge.after_seconds)
    following: Step | None = first
    while True:
        step, following = following, None
        try:
            attempt, flags = yield step
            if p.hedge is not None and attempt.step is hedge.step:
                _check_hedge(p, attempt, flags)
                _promote(p, hedge, "cancelled")
            check_beginning(p, attempt, flags)
        except TimeIsUp:
            following = _second(p, hedge, engine)
        except EngineLost as lost:
            if p.hedge is None:
                raise  # no other attempt runs
            if lost.step is hedge.step:
                add_failure(p, lost)
                p.end_hedge("failed", lost.retried_kind)
            elif hedge.step is None:
                raise
            else:  # the first engine has failed; the hedge goes on
                add_failure(p, lost)
                _promote(p, hedge, lost.retried_kind)
        else:
            p.end_hedge("lost")
            break
    yield from pass_answer(p, attempt, flags)
    return None


def _promote(p: Progress, hedge: Hedge, kind: str) -> None:
    """Makes the hedge the only attempt of the request. `kind`: the failure of the first one."""
    p.drop_main()
    p.ticket.failed(ticket_kind(kind), retry=False)
    p.hedge = None
    p.ticket, p.decision, p.main = hedge.ticket, hedge.decision, hedge.step
    p.model.hedging.outcomes["won"] += 1


def _check_hedge(p: Progress, attempt: Attempt, flags: int) -> None:
    """Checks the beginning of the hedge's answer. Raises EngineLost if it cannot be used."""
    step, reader = attempt.step, attempt.reader
    if reader.status == 200 and reader.event_stream and not flags & (ENGINE_ERROR | INCOMPLETE):
        return
    code, reason = reader.status, f"status {reader.status}"
    if code == 200 and not reader.event_stream:
        code, reason = 400, why_no_stream(reader)
    elif code == 200:
        code, reason = reader.error_code or 500, "the stream ended with an error before a token"
    if code in SATURATED and (seconds := retry_after_seconds(reader.head_lines)):
        p.model.saturated(step.engine, seconds)
    p.acts.append(Cancel(step))
    # An engine is not to blame for a status below 500.
    raise step.lost(kind_of(code) if code >= 500 else "saturated", reason)


def _second(p: Progress, hedge: Hedge, first: Engine) -> Step | None:
    """Returns the step of the hedge, once its time has come; None: it is not sent."""
    p.hedge = None
    if p.stalled_at:
        return None
    p.tried_engines = (first.name,)
    engine = _place(p, hedge)
    if engine is None:
        return None
    p.model.hedging.budget.spend()
    others, own, second = p.model.hedging.others, p.decision.id, hedge.decision.id
    others.keep(own, second)
    others.keep(second, own)
    hedge.step = step = own_request(p, engine)
    p.hedge = hedge
    p.tried_engines += (engine.name,)
    return step


def _place(p: Progress, hedge: Hedge) -> Engine | None:
    """Returns the engine of the hedge, by its own decision; None: not allowed, or no engine."""
    hedging, model = p.model.hedging, p.model
    if not hedging.budget.allows(model.requests):
        hedging.unsent["budget"] += 1
        return None
    if model.held.admits and model.router.waiting:
        hedging.unsent["held"] += 1  # its queue might refuse a client's request
        return None
    again = _again(hedge.request)
    arrival = None
    if model.held.admits:
        tenant, slo_class = p.client_request.tenant, p.client_request.slo_class
        arrival = model.held.arrive(again, tenant, slo_class, now=p.now)
    if arrival is not None and arrival.verdict not in ("free", "run"):
        arrival.drop()
        hedging.unsent["held"] += 1
        return None
    try:
        hedge.decision, hedge.ticket = model.router.route(
            again, now=p.now, arrival=arrival, canary=hedge.canary
        )
    except NoInstanceError:
        hedging.unsent["no_engine"] += 1
        hedging.uncounted["no_instance"] += 1
        return None
    name: str | None = hedge.ticket.instance
    while name is not None and (name in p.tried_engines or name not in model.engines):
        # The policy still prefers that engine: take the best of the others.
        name = hedge.ticket.failed("refused")
        hedging.uncounted["refused" if name is None else "retries"] += 1
    if name is None:
        hedging.unsent["no_engine"] += 1
        return None
    return model.engines[name]


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
        images=request.images,
    )
