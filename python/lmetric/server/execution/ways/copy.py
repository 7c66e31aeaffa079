"""Copy: an engine prepares the KV cache of some tokens, and another engine fetches it.

`fleet/transfer` has the requests, and their rules: a prefix fetch, a migration and a warm fleet
change (`fleet/changes`) copy alike. A failure only costs time: the other engine computes the tokens
itself.
"""

from __future__ import annotations

from math import inf

import structlog

from lmetric.engines.handover import COMPLETIONS
from lmetric.server.execution.failures import blame, blame_status
from lmetric.server.execution.plan import EngineLost, TimeIsUp, Way
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.ways.pair import new_transfer
from lmetric.server.fleet.engine import Engine, blocks_differ
from lmetric.server.fleet.transfer import KvTransfer, hold, serves

MIN_FETCH_SECONDS = 0.02  # shortest wait for a holder, even if computing is faster

log = structlog.get_logger("lmetric.relay")


def fetch_prefix(p: Progress, target: Engine) -> Way[None]:
    """Fetches the start of a prompt from an engine that has it cached, as the ticket plans.

    Then the request continues as after a split inside the prompt, or unchanged without the prefix.
    """
    planned = p.ticket.fetch
    assert planned is not None  # the ticket plans a fetch
    name, from_token, to_token = planned
    holder = p.model.engines.get(name)
    tokens = to_token - to_token % p.model.block_size  # holders have only whole blocks
    missing = tokens - from_token
    kv, began = new_transfer(p), p.now
    outcome = _why_not(holder, target, missing)
    if holder is not None and not outcome:
        p.wake(_patience(p, target, missing))
        outcome = yield from _prefix(p, kv, holder, tokens=tokens)
    came = missing if outcome == "fetched" else 0
    # No engine reports its transfer time, so that is configured; the time until now is measured.
    seconds = p.now - began + came * p.model.transfer_seconds_per_token
    p.ticket.fetched(came, seconds, p.now, late=outcome == "late")
    p.kv = kv if came else None
    kv.tokens = tokens
    p.model.fetch_outcomes[outcome] += 1
    source = holder.name if holder else None
    p.note("fetch", source, target.name, outcome=outcome, moved=(came, seconds))
    if not came:
        log.debug("no prefix was fetched", model=p.model.name, holder=source, why=outcome)
    if target.model is not p.model:
        raise EngineLost(target, "refused", "it was removed")


def _why_not(holder: Engine | None, target: Engine, tokens: int) -> str:
    """Returns the outcome if the holder cannot be asked; empty: it can."""
    if holder is None or not holder.in_service:
        return "holder_gone"
    if not serves(holder, target):
        return "no_connector"
    if blocks_differ(holder, target):
        return "other_blocks"
    return "" if tokens > 0 else "no_block"


def _patience(p: Progress, target: Engine, tokens: int) -> float:
    """Returns the longest wait for the holder, in seconds."""
    given = p.model.settings.prefix_fetch_timeout_seconds
    if given is not None:
        return given
    return max(p.model.prefill_seconds(target, tokens), MIN_FETCH_SECONDS)


def _prefix(p: Progress, kv: KvTransfer, holder: Engine, *, tokens: int) -> Way[str]:
    """Lets the holder prepare the prefix. Returns the outcome."""
    step = p.own_step(holder, hold(kv, holder, p.request, tokens=p.prompt[:tokens]), COMPLETIONS)
    step.limit_seconds = inf  # the timer ends it
    try:
        attempt, _ = yield step
    except TimeIsUp:
        p.drop_side()
        return "late"
    except EngineLost as lost:
        blame(p, lost)
        outcome = "holder_failed"
    except GeneratorExit:
        p.model.fetch_outcomes["ended"] += 1
        raise
    else:
        if attempt.reader.status == 200:
            kv.accept(holder, bytes(attempt.answer), tokens=tokens, now=p.now)
            outcome = "fetched" if kv.available else "missing"
        else:
            blame_status(p, attempt)
            outcome = "refused"
    p.wake(None)
    return outcome
