"""Where a request goes on when an engine failed it."""

from __future__ import annotations

from lmetric._core import NoInstanceError, TicketError
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine


def next_engine(p: Progress, engine: Engine, kind: str) -> str | None:
    """Where the open segment goes, which has told no token; None: nobody is left. The ticket is told."""
    ticket = p.ticket
    try:
        following = None
        if p.paired_body is not None and engine is not p.prefill_engine and ticket.has_next:
            # Both ran at once, and it is the second segment that failed: let it be the open one.
            following = ticket.segment_done()
            if following == engine.name:
                following = None
        if following is None:
            following = ticket.failed(kind)
        while following is not None and following not in p.pool.engines:
            following = ticket.failed("refused")  # removed since the decision
    except NoInstanceError:
        return None
    return following


def elsewhere(p: Progress) -> Engine | None:
    """Where a segment goes on that has told tokens; None: nowhere."""
    try:
        return p.pool.engines.get(p.ticket.choose_failover())
    except (NoInstanceError, TicketError):
        return None
