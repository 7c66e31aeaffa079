"""Chain: a request split between `both` engines (Libra, section 3), which run one after the other.

The answers of all segments but the last go to the router. A stream never contains the KV transfer
fields, so the client gets a segment's tokens at its end. If the split lies in the prompt or at its
end, the last engine gets the client's own request (`plain`). If it lies in the answer, the answer
is merged (`transcript`). An answer that continues after a migration or a failure is merged, too.

An engine transfers its cache with a last token whose KV it has not computed. The token counts if
the next engine can fetch a part of its prompt and compute the rest (bidirectional mode). Otherwise
the next engine produces the token again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from lmetric.engines.handover import dumps
from lmetric.server.execution.failures import check_beginning, continued, refuse
from lmetric.server.execution.plan import (
    REPORTED_ERROR,
    Attempt,
    Commit,
    EngineLost,
    MergeError,
    Step,
    Way,
    Write,
)
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import UNBOUNDED, Delta, object_of
from lmetric.server.execution.ways.abort import Aborted, aborts_by_order
from lmetric.server.execution.ways.pair import fetching_fields, whole_answer
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
    kv, reader, delta = p.transfer(), attempt.reader, None
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


def rest(p: Progress, engine: Engine) -> Way[str | None]:
    """Runs the rest of an answer, after the tokens of earlier segments."""
    step = _rest_step(p, engine)
    attempt, flags = yield step
    ended = flags is None  # all of it has come
    if ended and attempt.reader.status != 200:
        refuse(p, attempt)
    if step.reader == "whole":
        aborts = attempt.reader.aborted and (yield from aborts_by_order(p, engine))
        try:
            delta = p.merged().take(object_of(attempt.answer), UNBOUNDED, aborts=aborts)
        except MergeError as error:
            raise step.lost("reset", str(error)) from None
        p.accept(attempt)
        p.end_merged(delta)
        return None
    if not ended:
        check_beginning(p, attempt, flags)
        p.acts.append(Commit(attempt))
    try:
        while not ended:
            _, events = yield None
            try:
                ended = events is None or _take(p, attempt, events)
            except Aborted as lost:
                if not (yield from aborts_by_order(p, engine)):
                    raise
                try:
                    delta = p.merged().more(lost.choice)
                    p.accept(attempt)
                    p.end_merged(delta)
                except MergeError:
                    raise lost from None
                return None  # its last tokens complete a stop string
    except EngineLost:
        p.has_tokens |= attempt.reader.tokens > 0  # the ticket has them: another engine must continue
        raise
    p.end_merged()
    return None


def _take(p: Progress, attempt: Attempt, events: list[bytes]) -> bool:
    """Writes the events of a merged stream for the client. Returns whether the answer has ended."""
    transcript = p.merged()
    try:
        for choice in choices_of(p, attempt.step, events):
            delta = transcript.more(choice)
            continued(p, attempt)
            p.write(delta)
            if transcript.stopped:
                return True
    except MergeError as error:
        raise attempt.step.lost("reset", str(error)) from None
    return False


def choices_of(p: Progress, step: Step, events: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the choices of a merged stream's events, and passes comments on.

    Raises MergeError, and EngineLost if an event reports an error.
    """
    for data in events:
        if data.startswith(b":"):
            p.begin_stream()
            p.acts.append(Write(data + b"\n\n"))
        else:
            yield from _choices(step, data)


def _choices(step: Step, data: bytes) -> list[dict[str, Any]]:
    try:
        event: dict[str, Any] = orjson.loads(data)
        if "error" in event:
            words = f": {step.engine.adapter.error(data)}"
            raise step.lost("engine_error", REPORTED_ERROR, words)
        choices: list[dict[str, Any]] = event["choices"]
        ends = [choice.get("finish_reason") for choice in choices]
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise MergeError(f"an event of the stream is not a completion's: {error}") from None
    for choice, end in zip(choices, ends, strict=True):
        if end == "abort":
            raise Aborted(step, choice)
        if end == "error":
            raise step.lost("engine_error", "it ended with finish_reason error")
    return choices


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
        p.model.not_joinable(p.client_request.path, f"{engine.name}: {error}")
        return None


def _part_step(p: Progress, engine: Engine, to_token: int, *, keeps_last: bool) -> tuple[Step, int]:
    """Returns the step for the open segment, up to this token, and its requested tokens."""
    transcript = p.merged()
    count = len(transcript.prompt)
    if keeps_last:
        target, request = transcript.bounded(to_token - count - len(transcript.output_ids))
    else:
        target, request = transcript.segment(to_token)
    kv = p.transfer()
    fields, checks = fetching_fields(p, engine, kv, own_prompt=to_token >= count)
    step = Step(
        engine,
        dumps(request | fields),
        "whole",
        limit_seconds=p.rules.timeouts.answer,
        target=target.encode(),
        for_client=False,
        kv=kv if kv.used else None,
        checks_prompt=checks,
    )
    return step, request["max_tokens"]


def _rest_step(p: Progress, engine: Engine) -> Step:
    target, request = p.merged().last()
    kv, fields = p.transfer(), {}
    if kv.tokens:
        fields = kv.take(engine, p.now, goes_on=False, total=p.total)
    return Step(
        engine,
        dumps(request | fields),
        "events" if p.stream else "whole",
        limit_seconds=p.limit_seconds,
        stream=p.stream,
        target=target.encode(),
        kv=kv if fields else None,
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
