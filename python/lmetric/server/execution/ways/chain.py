"""Chain: the rest of an answer, after its tokens from other engines.

It follows the segments of a request split in its answer (`split`), a migration (`move`), or a
failure. The client gets one answer, merged from the tokens of all engines (`transcript`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from lmetric.engines.handover import dumps
from lmetric.server.execution.failures import continued, refuse
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
from lmetric.server.execution.transcript import UNBOUNDED, object_of
from lmetric.server.execution.ways.abort import Aborted, aborts_by_order
from lmetric.server.execution.ways.plain import check_beginning
from lmetric.server.fleet.engine import Engine


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
            p.begin_answer()
            p.acts.append(Write(data + b"\n\n"))
            continue
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
        yield from choices


def _rest_step(p: Progress, engine: Engine) -> Step:
    target, request = p.merged().last()
    kv, fields = p.kv, {}
    if kv is not None and kv.tokens:
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
