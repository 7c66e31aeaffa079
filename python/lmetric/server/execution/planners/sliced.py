"""Sliced decoding: a request that may move, run from its start in slices of its answer, which are the
router's.

Its client gets its tokens slice by slice. Between two slices it is nowhere, so it may go on anywhere: an
answer that is not streamed, too. A slice hands nothing over, as an engine pins for its lease what nobody
fetches; only where the request is to move, the engine is asked for what it then has in its prefix cache
(`migration`). The first slice of each segment has one token: its client does not wait for more, and the
router learns what a prefill costs as from a stream.
"""

from __future__ import annotations

from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine

# The second slice of a segment, where slices have no fixed length.
FIRST_TOKENS = 8


def applies(p: Progress, engine: Engine) -> bool:
    """Whether the open segment runs in slices there."""
    # Without a prefix cache, each slice would compute all that came before.
    cached = engine.capabilities.prefix_caching is not False
    return p.sliced and cached and not (p.unmergeable or p.inside)


def piece(p: Progress, engine: Engine, now: float) -> Step:
    """The next slice."""
    tokens = next_tokens(p) if p.has_tokens else 1
    target, request = p.merged().bounded(tokens)
    kv = p.transfer()
    fields = {}
    if kv.tokens:
        fields = kv.take(engine, now, goes_on=False, total=p.total)
        kv.tokens = 0  # the slice behind has it in its engine's own cache
    return Step(
        engine,
        dumps(request | fields),
        "whole",
        p.rules.timeouts.answer,
        target=target.encode(),
        for_client=False,
        carries_kv=bool(fields),
        kv_until=kv.until,
        tokens=request["max_tokens"],
        keeps_last=True,
    )


def next_tokens(p: Progress) -> int:
    """Of a slice behind the first. Each slice costs a step's wait or more, and a move waits for half a slice.
    Few requests move, so a slice is as long as its client may wait (`migration_max_gap_seconds`), going by
    the last, and at most twice as long as that."""
    mover = p.mover
    assert mover is not None
    if mover.leg_tokens is not None:
        return mover.leg_tokens
    bound = int(mover.max_gap_seconds / p.slice_rate) if p.slice_rate > 0 else FIRST_TOKENS
    return max(1, min(bound, 2 * p.slice_tokens if p.slice_tokens > 1 else FIRST_TOKENS))
