"""Abort: an engine ends an answer early, with finish_reason `abort`.

An engine aborts by order of a trainer or an operator (vLLM: `/pause`, `/sleep`, `/abort_requests`),
and when it shuts down. An ordered abort is the client's answer. After any other, another engine
continues. vLLM in development mode shows the difference: it reports whether it is paused, but not
while it shuts down.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lmetric.engines.handover import dumps
from lmetric.server.api.paths import MESSAGES
from lmetric.server.execution.plan import Attempt, EngineLost, MergeError, Step, Way, Write, ended_by_order
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import object_of
from lmetric.server.fleet.engine import Engine

# The last events of a message. The first one says how it ended.
_MESSAGE_END = b'event: message_delta\ndata: %b\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'


class Aborted(EngineLost):
    """An engine ended a merged stream with this choice, whose finish_reason is `abort`."""

    def __init__(self, step: Step, choice: dict[str, Any]) -> None:
        super().__init__(step.engine, "engine_error", "it ended with finish_reason abort", step=step)
        self.choice = choice


def aborts_by_order(p: Progress, engine: Engine) -> Way[bool]:
    """Returns whether an engine that aborted an answer did so by order.

    Then it still reports whether it is paused: after a long `/sleep`, late.
    """
    p.abandon()
    pages = engine.capabilities.pause_pages
    if not pages or p.client_request.gateway is not None:
        return False
    step = p.own_step(engine, b"", pages[0], method=b"GET", side=False)
    step.limit_seconds = p.rules.timeouts.between_chunks
    try:
        attempt, _ = yield step
    except EngineLost:
        return False
    return attempt.reader.status == 200


def check_order(p: Progress, step: Step, choices: list[Any] | None = None) -> Way[None]:
    """Raises EngineLost unless an engine aborted an answer by order.

    `choices`: of a whole answer, which shows an abort by itself; None: it is not whole, or a
    message.
    """
    aborted = choices is None or any(choice.get("finish_reason") == "abort" for choice in choices)
    if not (aborted and (yield from aborts_by_order(p, step.engine))):
        raise step.lost("reset", "its answer was aborted")


def end_whole(p: Progress, attempt: Attempt) -> Way[None]:
    """Ends the request with a whole answer that its engine aborted by order.

    Raises EngineLost if the engine aborted it for another reason. Does nothing if no other engine
    may repeat an aborted answer.
    """
    step = attempt.step
    if not step.engine.shows_orders or attempt.reader.status != 200 or p.client_request.gateway is not None:
        return
    body = attempt.reader.payload()
    # On /v1/messages, vLLM answers a failure with the status 500.
    choices = None if p.client_request.head.path == MESSAGES else answer_of(step, body)[1]
    yield from check_order(p, step, choices)
    p.accept(attempt)
    p.answered = attempt  # it was canceled, so its reader still has the usage
    p.write_whole(body, step.engine.name)
    raise ended_by_order()


def end_early(p: Progress, attempt: Attempt) -> Way[None]:
    """Ends the request if its engine aborted the stream of a message by order before a token.

    Raises EngineLost if the engine aborted it for another reason.
    """
    if (event := _event_of(p, attempt)) is None:
        return
    begun, step = attempt.reader.payload(), attempt.step
    yield from check_order(p, step)
    p.accept(attempt)
    p.answered = attempt
    p.begin_answer(step.engine.name)
    p.acts.append(Write(begun))
    _end_stream(p, attempt, event)


def end_begun(p: Progress, attempt: Attempt, lost: EngineLost) -> Way[None]:
    """Ends a forwarded stream that its engine aborted by order.

    Does nothing if the engine aborted it for another reason, or not at all: the caller raises its
    failure again. Raised here, it would be in a cycle with this frame.
    """
    event = _event_of(p, attempt) if lost.step is attempt.step else None
    if event is not None and (yield from aborts_by_order(p, lost.engine)):
        _end_stream(p, attempt, event)


def _event_of(p: Progress, attempt: Attempt) -> dict[str, Any] | None:
    """Returns the withheld event with which the engine aborted its stream; None: it did not."""
    withheld = attempt.reader.withheld
    if not (attempt.reader.aborted and withheld):
        return None
    try:
        if p.client_request.head.path == MESSAGES:
            return object_of(withheld)
        event, choices = answer_of(attempt.step, withheld)
    except (EngineLost, MergeError):
        return None  # malformed: another engine continues
    lists = all(isinstance(choice.get("token_ids") or [], list) for choice in choices)
    return event if lists and choices and choices[0].get("finish_reason") == "abort" else None


def _end_stream(p: Progress, attempt: Attempt, event: dict[str, Any]) -> NoReturn:
    """Ends a forwarded stream with the event that aborted it."""
    if p.client_request.head.path == MESSAGES:
        p.acts.append(Write(_MESSAGE_END % dumps(event), last=True))
        raise ended_by_order()
    transcript, recorded = p.merged(), True
    try:
        p.observe()
    except MergeError:
        recorded = False
    for choice in event["choices"]:
        transcript.output_ids += choice.get("token_ids") or ()
    if p.rules.answers_asked_name and (names := p.client_request.renamed) is not None:
        event["model"] = names[1]
    p.acts.append(Write(b"data: %b\n\n" % stripped(event, event["choices"], attempt.step.hides_ids)))
    p.acts.append(Write(transcript.closing(usage=recorded), last=True))
    raise ended_by_order()


# -- an engine's answer, or an event of its stream -------------------------------------------------


def answer_of(step: Step, body: bytes | bytearray) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns an answer or a stream's event, and its choices. Raises EngineLost without any."""
    try:
        answer = object_of(body)
    except MergeError as error:
        raise step.lost("reset", str(error)) from None
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise step.lost("reset", "its answer has no choices")
    return answer, choices


def stripped(answer: dict[str, Any], choices: list[Any], hides_ids: bool) -> bytes:
    """Returns an answer without fields that only the router requested: null, as vLLM's default."""
    if hides_ids:
        names = ("prompt_token_ids", "token_ids")
        for part in (answer, *choices):
            part |= {name: None for name in names if name in part}
    if "kv_transfer_params" in answer:
        answer["kv_transfer_params"] = None
    return dumps(answer)
