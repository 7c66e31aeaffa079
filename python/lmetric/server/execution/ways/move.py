"""Move: a running request migrates to another engine, at its present token (STAR, section 5.4).

vLLM cannot transfer the KV cache of a running stream, so the target computes prompt and answer
again (`recompute`). It computes them ahead, while the source still runs: it gets a request for one
more token after prompt and answer so far. After its answer, its prefix cache holds all but the last
tokens, and the stream switches. Earlier failures cost nothing, because the source still runs. An
engine without a prefix cache computes everything in the gap.

Alternatively the target fetches the KV cache (`fetch`). Then the source first prepares it (`copy`).
"""

from __future__ import annotations

import structlog

from lmetric._core import TicketError
from lmetric.engines.handover import COMPLETIONS, one_token
from lmetric.server.execution.continuing import can_take
from lmetric.server.execution.failures import blame, blame_status, transfer_broke
from lmetric.server.execution.plan import (
    Attempt,
    EngineLost,
    MergeError,
    Migration,
    NoTransfer,
    SwitchTo,
    Way,
)
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.ways.pair import new_transfer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.transfer import fetches, hold

log = structlog.get_logger("lmetric.relay")


def move(p: Progress, target: Engine) -> Way[SwitchTo | None]:
    """Moves a request, if it can move. Returns the switch to the target; None: it stays."""
    mover, attempt = p.mover, None
    assert mover is not None  # the rebalancer calls this
    if why := _why_not(p, target):
        p.count_move(why)
        return None
    migration = p.migration = Migration(target, new_transfer(p))
    mover.moves.add(migration)
    if _works_ahead(target):
        source = p.model.engines.get(p.ticket.instance)
        if source is not None and mover.by != "recompute" and fetches(source, target):
            yield from _hold(p, migration, source)
        attempt = yield from _warm(p, migration)
        if attempt is None:
            return None
    outcome = _why_ends(p, decodes=False)
    late = attempt is not None and _left_seconds(p, migration, attempt) > mover.max_gap_seconds
    if late and outcome != "not_joinable":
        outcome = "long_gap"
    elif not outcome:
        outcome = _why_ends(p) if can_take(p, target) else "target_gone"
    if outcome:
        p.cancel_migration(outcome)
        return None
    return SwitchTo(migration.kv)


def _why_not(p: Progress, target: Engine) -> str:
    """Returns the outcome if the request cannot move; empty: its ticket has a migration now."""
    assert p.mover is not None
    if p.done or not p.has_tokens:
        return "not_movable"
    if why := _why_ends(p, decodes=False):
        return why
    if target.runs_halves_at_once:
        return "not_movable"  # it serves only second segments
    gap_seconds = 0.0 if _works_ahead(target) else p.model.prefill_seconds(target, p.total)
    if gap_seconds > p.mover.max_gap_seconds:
        return "long_gap"
    if why := _why_ends(p):
        return why
    try:
        # Tokens computed ahead or fetched count as transferred.
        p.ticket.begin_migration(target.name, recompute=not _works_ahead(target))
    except TicketError as error:
        log.debug("cannot move", model=p.model.name, reason=str(error))
        return "not_movable"
    return ""


def _works_ahead(target: Engine) -> bool:
    """Whether the target computes or fetches while the source still runs."""
    return target.capabilities.prefix_caching is not False


def _why_ends(p: Progress, *, decodes: bool = True) -> str:
    """Adds the recorded tokens to the merged answer.

    Returns the outcome if no other engine can continue it; empty: one may. `decodes`: the text of
    the tokens must be the client's.
    """
    transcript = p.merged()
    try:
        p.observe()
        if transcript.over:
            return "ended"
        if decodes:
            transcript.catch_up()
    except MergeError as error:
        p.model.not_joinable(p.client_request.head.path, str(error))
        return "not_joinable"
    return ""


def _hold(p: Progress, migration: Migration, source: Engine) -> Way[None]:
    """Lets the source prepare its KV cache. If it cannot, the target computes the tokens."""
    kv, migration.sent_tokens = migration.kv, p.total
    body = hold(kv, source, p.request, tokens=p.merged().tokens(p.total))
    try:
        attempt, _ = yield p.own_step(source, body, COMPLETIONS)
    except EngineLost as lost:
        blame(p, lost)
        kv.recompute("missing", lost.reason)
        return
    if attempt.reader.status == 200:
        kv.accept(source, bytes(attempt.answer), tokens=migration.sent_tokens, now=p.now)
    else:
        kv.recompute("missing", f"status {attempt.reader.status}")


def _warm(p: Progress, migration: Migration) -> Way[Attempt | None]:
    """Lets the target fetch or compute the tokens so far. Returns its attempt; None: it cannot."""
    target, kv = migration.target, migration.kv
    while True:
        fields = {}
        if target.connector is not None and kv.source is not None:
            fields = kv.take(target, p.now, goes_on=False, total=0)
        # Fetch only the tokens that the source has prepared: with one token more, the target dies.
        if not fields:
            migration.sent_tokens = p.total
        body = one_token(p.request, p.merged().tokens(migration.sent_tokens), fields)
        try:
            attempt, _ = yield p.own_step(target, body, COMPLETIONS, kv=kv if kv.used else None)
        except NoTransfer:
            continue  # it computes them
        except EngineLost as lost:
            blame(p, lost)
            p.cancel_migration("target_failed")
            return None
        if attempt.reader.status == 200:
            return attempt
        if transfer_broke(p, attempt):
            continue
        blame_status(p, attempt)
        p.cancel_migration("target_refused")
        return None


def _left_seconds(p: Progress, migration: Migration, attempt: Attempt) -> float:
    """Returns the expected seconds of the target for the tokens that came since its step.

    The estimate scales the time of that step. Tokens beyond the step's computed tokens count at the
    measured prefill rate instead, because the step's time also contains its wait in the queue.
    """
    block, sent, target = p.model.block_size, migration.sent_tokens, migration.target
    left = p.total - sent // block * block
    if migration.kv.used:
        return p.model.prefill_seconds(target, left)
    computed = max(sent - (attempt.reader.cached_tokens or 0), block)
    more = p.model.prefill_seconds(target, max(left - computed, 0))
    return min(left / computed, 1.0) * (p.now - attempt.started) + more
