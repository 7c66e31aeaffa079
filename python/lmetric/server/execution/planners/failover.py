"""Failover: the next engine of a request after a failure."""

from __future__ import annotations

from typing import Literal

from lmetric._core import NoInstanceError, TicketError
from lmetric.server.execution.plan import Attempt
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine

# The outcome of a failure after the first token. "continued": another engine continues. "complete":
# the client had the whole answer. The others end the answer with an error. "not_retried": by
# `retries`. "not_resumable": by its request or its engine. "not_mergeable": its text or tokens are
# not known. "no_engine": no other engine can continue it.
Outcome = Literal["continued", "complete", "not_retried", "not_resumable", "not_mergeable", "no_engine"]


def next_engine(p: Progress, engine: Engine, kind: str) -> str | None:
    """Returns the next instance for an open segment without tokens; None: no instance is left.

    Reports the failure to the ticket. `kind`: the kind of failure.
    """
    ticket = p.ticket
    try:
        following = None
        if p.paired_body is not None and engine is not p.prefill_engine and ticket.has_next:
            # Both steps ran at once and the second failed: the second segment becomes the open one.
            following = ticket.segment_done()
            if following == engine.name:
                following = None
        if following is None:
            following = ticket.failed("status" if kind in ("saturated", "not_served") else kind)
        while following is not None and (following not in p.pool.engines or following in p.tried_engines):
            following = ticket.failed("refused")  # removed since the decision, or it had a hedge
    except NoInstanceError:
        return None
    return following


def obstacle(p: Progress, observing: Attempt | None) -> Outcome | None:
    """Returns the outcome if no engine can continue the answer; None: one may.

    `observing`: the attempt whose tokens are recorded while they pass, if there is one.
    """
    if not p.resumes or p.unmergeable:
        return "not_resumable"
    if observing is None:
        return None if p.begun else "not_resumable"
    return "not_mergeable" if observing.reader.unseen is not None else None


def can_continue(p: Progress, target: Engine) -> bool:
    """Returns whether an engine can continue the recorded answer from its token ids."""
    model = target.capabilities.base(p.pool.name)
    context_tokens = model.max_model_len if model is not None else None
    return p.continues_at(target) and p.merged().limit(context_tokens)


def elsewhere(p: Progress) -> Engine | None:
    """Returns the engine that continues a segment with tokens; None: no engine can."""
    try:
        return p.pool.engines.get(p.ticket.choose_failover())
    except (NoInstanceError, TicketError):
        return None
