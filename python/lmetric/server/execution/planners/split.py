"""A request that is cut between equals (Libra, section 3): one engine after the other, one answer of all.

All segments but the last are the router's: a stream never tells what its engine would hand over, so the
client gets a segment's tokens when it ends. Where the cut lies in the prompt or at its end, the last engine
is sent the client's own request (`own_request`); behind that, the answer is merged (`transcript`).

An engine hands over with a token whose KV it has not computed. It counts where the next engine can fetch the
front of its prompt and compute the rest (bidirectional mode); else it is made again there.
"""

from __future__ import annotations

from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine


def segment(p: Progress, engine: Engine, to_token: int, following: Engine | None, now: float) -> Step:
    """The open segment, up to this token; `following`: the engine that goes on behind it, as far as bound."""
    transcript = p.merged()
    count = len(transcript.prompt)
    keeps = to_token > count and _front_is_enough(engine, following)
    if keeps:
        target, request = transcript.bounded(to_token - count - len(transcript.output_ids))
    else:
        target, request = transcript.segment(to_token)
    inside, kv = p.inside, p.transfer()
    fields = kv.take(engine, now, goes_on=True, total=p.total)
    fetches_front = inside and kv.used
    checks = fetches_front and target == p.asked.path and p.chat
    if checks:
        request["return_token_ids"] = True
    elif fetches_front and to_token >= count:
        request["prompt"] = transcript.prompt  # the very tokens whose cache it fetches
    return Step(
        engine,
        dumps(request | fields),
        "whole",
        p.rules.timeouts.answer,
        target=target.encode(),
        for_client=False,
        carries_kv=kv.used,
        kv_until=kv.until,
        checks_prompt=checks,
        tokens=request["max_tokens"],
        ends_at=to_token,
        keeps_last=keeps,
    )


def rest(p: Progress, engine: Engine, now: float) -> Step:
    """All that is left of an answer, behind what the client has."""
    target, request = p.merged().last()
    kv, fields = p.transfer(), {}
    if kv.tokens:
        fields = kv.take(engine, now, goes_on=False, total=p.total)
    return Step(
        engine,
        dumps(request | fields),
        "events" if p.stream else "whole",
        p.limit_seconds,
        p.stream,
        target.encode(),
        carries_kv=bool(fields),
        kv_until=kv.until,
        merges=True,
    )


def _front_is_enough(engine: Engine, following: Engine | None) -> bool:
    """Whether who goes on behind this engine can compute the last token's KV cache: then the token counts
    that an engine makes when it hands over, which has none yet."""
    return (
        following is not None
        and following.connector is engine.connector
        and all(of.handover is not None and of.handover.bidirectional for of in (engine, following))
    )
