"""Split: a request split between `both` engines (Libra, section 3), which run one after the other.

The answers of all segments but the last go to the router. A stream never contains the KV transfer
fields, so the client gets a segment's tokens at its end. If the split lies in the prompt or at its
end, the last engine gets the client's own request (`plain`). If it lies in the answer, the answer
is merged (`chain`).

An engine transfers its cache with a last token whose KV it has not computed. The token counts if
the next engine can fetch a part of its prompt and compute the rest (bidirectional mode). Otherwise
the next engine produces the token again.
"""

from __future__ import annotations

from lmetric.engines.handover import dumps
from lmetric.server.execution.plan import Attempt, MergeError, Step, Way
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import Delta, object_of
from lmetric.server.execution.ways.abort import aborts_by_order
from lmetric.server.execution.ways.pair import fetching_fields, transfer, whole_answer
from lmetric.server.fleet.engine import Engine


def part(p: Progress, engine: Engine) -> Way[str | None]:
    """Runs a segment that another one follows. Returns its engine; None: the answer has ended."""
    ends_at = p.ticket.to_token
    assert ends_at is not None  # another segment follows
    following = p.model.engines.get(p.ticket.next_instance or "")
    transcript = p.merged()
    count = len(transcript.prompt)
    keeps_last = ends_at > count and _front_is_enough(engine, following)
    step, tokens = _part_step(p, engine, ends_at, keeps_last=keeps_last)
    attempt = yield from whole_answer(p, step)
    kv, reader, delta = transfer(p), attempt.reader, None
    prompt_tokens, cached_tokens = reader.prompt_tokens, reader.cached_tokens
    kv.begin(engine)
    kv.tokens = ends_at - keeps_last
    if ends_at > count:
        aborts = reader.aborted and (yield from aborts_by_order(p, engine))
        delta = _merge(p, attempt, tokens, whole=keeps_last, aborts=aborts)
        if delta is not None:
            p.accept(attempt)
        if delta is not None and delta.finish is not None:
            p.end_merged(delta, early=True)
            return None
    if not p.unmergeable and engine.connector is not None:
        # If the engine tokenized the prompt itself, its token count is not checked.
        told = None if ends_at == count else min(ends_at, p.total) - keeps_last
        kv.accept(engine, bytes(attempt.answer), tokens=told, now=p.now)
    if delta is not None:
        p.write(delta)
        if len(delta.ids) == len(transcript.output_ids) == 1:
            p.ticket.first_token(p.now)
    return p.next_segment(prompt_tokens, cached_tokens)


def _merge(p: Progress, attempt: Attempt, tokens: int, *, whole: bool, aborts: bool) -> Delta | None:
    """Adds a segment's tokens to the answer; None: they cannot be merged.

    Then the next engine computes the whole answer. Raises EngineLost if the client already has a
    part of the answer, or if the engine failed.
    """
    transcript, engine = p.merged(), attempt.step.engine
    try:
        answer = object_of(attempt.answer)
        usage = answer.get("usage") or {}
        transcript.cached = usage.get("prompt_tokens_details") or transcript.cached
        return transcript.take(answer, tokens, whole=whole, aborts=aborts)
    except MergeError as error:
        if p.committed or error.failed:
            p.has_tokens = p.committed  # then another engine must continue the client's part
            raise attempt.step.lost("reset", str(error)) from None
        p.unmergeable = True
        p.stop_moving()
        p.model.not_joinable(p.client_request.head.path, f"{engine.name}: {error}")
        return None


def _part_step(p: Progress, engine: Engine, to_token: int, *, keeps_last: bool) -> tuple[Step, int]:
    """Returns the step for the open segment, up to this token, and its requested tokens."""
    transcript = p.merged()
    target, request = transcript.segment(to_token - keeps_last)
    if keeps_last:
        request["return_token_ids"] = True
    kv, own_prompt = transfer(p), to_token >= len(transcript.prompt)
    fields, checks = fetching_fields(p, engine, kv, own_prompt=own_prompt)
    body, used = dumps(request | fields), kv if kv.used else None
    step = p.own_step(engine, body, target, side=False, counted=True, kv=used)
    step.limit_seconds, step.checks_prompt = p.rules.timeouts.answer, checks
    return step, request["max_tokens"]


def _front_is_enough(engine: Engine, following: Engine | None) -> bool:
    """Returns whether the next engine can compute the last token's KV cache.

    If so, the last token counts.
    """
    return (
        following is not None
        and following.connector is engine.connector
        and all(of.handover is not None and of.handover.bidirectional for of in (engine, following))
    )
