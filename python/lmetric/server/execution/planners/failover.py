"""Failover: the next engine of a request after a failure."""

from __future__ import annotations

from lmetric._core import NoInstanceError, TicketError
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine


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
            following = ticket.failed("status" if kind == "saturated" else kind)
        while following is not None and following not in p.pool.engines:
            following = ticket.failed("refused")  # removed since the decision
    except NoInstanceError:
        return None
    return following


def elsewhere(p: Progress) -> Engine | None:
    """Returns the engine that continues a segment with tokens; None: no engine can."""
    try:
        return p.pool.engines.get(p.ticket.choose_failover())
    except (NoInstanceError, TicketError):
        return None
