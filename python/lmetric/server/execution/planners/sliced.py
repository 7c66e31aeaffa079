"""Sliced decoding: the router runs a movable request in slices of its answer.

The client gets the tokens slice by slice. Between two slices no engine runs the request, so it can
continue on any engine, even without streaming. A slice prepares no KV transfer, because engines pin
an unfetched transfer for its lease. Only before a move, the router requests a transfer from the
engine's prefix cache (`migration`). The first slice of each segment has one token. So the client
gets it early, and the router measures the prefill time as with a stream.
"""

from __future__ import annotations

from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine

# Length of a segment's second slice, if slices have no fixed length.
FIRST_TOKENS = 8


def applies(p: Progress, engine: Engine) -> bool:
    """Returns whether the open segment runs in slices on this engine."""
    # Without a prefix cache, each slice would compute all earlier tokens again.
    cached = engine.capabilities.prefix_caching is not False
    return p.sliced and cached and not (p.unmergeable or p.inside)


def piece(p: Progress, engine: Engine, now: float) -> Step:
    """Returns the step for the next slice."""
    tokens = next_tokens(p) if p.has_tokens else 1
    target, request = p.merged().bounded(tokens)
    kv = p.transfer()
    fields = {}
    if kv.tokens:
        fields = kv.take(engine, now, goes_on=False, total=p.total)
        kv.tokens = 0  # the next slice finds it in its engine's own cache
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
    """Returns the length of a slice after the first, in tokens.

    Each slice costs at least the wait for a step, and a move waits for half a slice. Few requests
    move, so a slice takes the client's longest wait (`migration_max_gap_seconds`) at the rate of
    the last slice. It has at most twice the tokens of the last slice.
    """
    mover = p.mover
    assert mover is not None
    if mover.segment_tokens is not None:
        return mover.segment_tokens
    bound = int(mover.max_gap_seconds / p.slice_rate) if p.slice_rate > 0 else FIRST_TOKENS
    return max(1, min(bound, 2 * p.slice_tokens if p.slice_tokens > 1 else FIRST_TOKENS))
