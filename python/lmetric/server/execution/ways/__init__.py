"""The ways of running a request, one module each: generators without I/O.

A way yields the steps that engines shall run, and gets their answers: its place in the code is the
state of the request. ``attempt, flags = yield step`` sends a step, and goes on when its answer
begins; a step with the reader "whole" goes on at the end of its answer. ``yield None`` waits for
the next event. Failures are exceptions, raised where the way waits:

- `EngineLost`: the engine failed or declined. `run` sends the segment to the next engine.
- `NoTransfer`: the KV transfer of the step cannot be used. `_segment` runs the segment without it.
- `OtherEngine`: a gateway has the answer from another engine, which gets the segment.
- `SwitchTo`: a migration is ready, and its target takes over.
- `TimeIsUp`: the timer of the way is over (hedge, copy).
- `Ended`: the request ends with this error.
"""

from __future__ import annotations

from collections.abc import Callable

from lmetric.server.execution.continuing import follow_gateway, switch
from lmetric.server.execution.failures import next_engine
from lmetric.server.execution.plan import EngineLost, NoTransfer, OtherEngine, SwitchTo, Way
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.ways import chain, copy, encode, pair, parsed, plain
from lmetric.server.fleet.engine import Engine


def run(p: Progress) -> Way[None]:
    """Runs a request from its decision to its end, on as many engines as that needs."""
    name: str | None = p.decision.instance
    way = _segment if p.model.cuts else plain.plain
    while name is not None:
        try:
            engine = p.model.engines[name]
            if p.media is not None:
                yield from encode.encode(p, engine)
            name = yield from way(p, engine)
        except EngineLost as lost:
            name = next_engine(p, lost)
        except OtherEngine as other:
            name = follow_gateway(p, other)
        except SwitchTo as to:
            name = switch(p, to.kv)
        way = _segment


def _segment(p: Progress, engine: Engine) -> Way[str | None]:
    """Runs the open segment. Returns the engine of the next one; None: the answer is whole."""
    p.has_tokens = False
    if p.model.fetches_prefixes and not p.begun and p.ticket.fetch is not None:
        yield from copy.fetch_prefix(p, engine)
    while True:
        p.drop_attempts()
        if p.unmergeable and p.ticket.has_next:
            return p.next_segment()  # the last engine computes the whole answer
        if not p.ticket.from_token:
            p.prefill_engine = None
        try:
            return (yield from _way_of(p, engine)(p, engine))
        except NoTransfer:
            pass  # again, without it


def _way_of(p: Progress, engine: Engine) -> Callable[[Progress, Engine], Way[str | None]]:
    """Returns the way in which an engine runs the open segment."""
    if p.ticket.has_next:
        # Only requests that may be cut have a call, or tokens of their answer.
        if p.transcript is None and (p.call is None or engine.role == "prefill"):
            return pair.at_once if engine.runs_halves_at_once else pair.prefill
        return chain.part
    if engine.runs_halves_at_once:
        return pair.other_decode
    if p.begun and not p.unmergeable:
        return chain.rest if p.merged().parts is None else parsed.rest
    return plain.plain
