"""A request split between `both` engines (Libra, section 3), which run one after the other.

The answers of all segments but the last go to the router. A stream never contains the KV transfer
fields, so the client gets a segment's tokens at its end. If the split lies in the prompt or at its
end, the last engine gets the client's own request (`own_request`). If it lies in the answer, the
answer is merged (`transcript`).

An engine transfers its cache with a last token whose KV it has not computed. The token counts if
the next engine can fetch a part of its prompt and compute the rest (bidirectional mode). Otherwise
the next engine produces the token again.
"""

from __future__ import annotations

from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine


def segment(p: Progress, engine: Engine, to_token: int, following: Engine | None, now: float) -> Step:
    """Returns the step for the open segment, up to this token.

    `following`: the engine of the next segment, None if it is not chosen yet.
    """
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
    checks = fetches_front and target == p.client_request.path and p.chat
    if checks:
        request["return_token_ids"] = True
    elif fetches_front and to_token >= count:
        request["prompt"] = transcript.prompt  # the tokens of the fetched cache
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
    """Returns the step for the rest of an answer, after the part that the client has."""
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
    """Returns whether the next engine can compute the last token's KV cache.

    If so, the last token counts.
    """
    return (
        following is not None
        and following.connector is engine.connector
        and all(of.handover is not None and of.handover.bidirectional for of in (engine, following))
    )
