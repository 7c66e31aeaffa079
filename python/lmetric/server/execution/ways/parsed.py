"""Parsed: the rest of a chat that engines parse into reasoning, content and tool calls.

The state of a parser cannot be transferred. So an engine with `--enable-scale-out` gets the token
ids: it renders the chat into sampling parameters, continues prompt and answer so far, and parses
the whole answer. Its parts up to the failure must be those that the client has (`Parts`). Some
parsers give other parts for tokens in other pieces. Then the parser reads the pieces of the failed
engine, and must give the last part again. From then on, the client gets the parts that each further
call of the parser adds.

A call takes longer as the answer grows. The tokens that come meanwhile wait for the next call, so
there are fewer calls. vLLM 0.32 parses an end token as text, unless it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import orjson

from lmetric.engines.handover import dumps
from lmetric.server.api.eligibility import Ineligible
from lmetric.server.api.parts import Parts, PartsDiffer
from lmetric.server.execution.failures import continued, no_continuation, refuse
from lmetric.server.execution.plan import (
    Attempt,
    Commit,
    EngineLost,
    MergeError,
    Step,
    Way,
    Write,
    ended_by_order,
)
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import object_of, token_ids
from lmetric.server.execution.ways.abort import Aborted, aborts_by_order
from lmetric.server.execution.ways.chain import choices_of
from lmetric.server.execution.ways.plain import check_beginning
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.parsing import DERENDER, GENERATE, RENDER

JSON = Mapping[str, Any]


@dataclass(slots=True)
class Rest:
    """The tokens of the rest, on their way through the parser."""

    main: Attempt  # generates them
    waiting: list[int]  # for the next call; at first all tokens before the failure
    known: int  # the number of waiting tokens that the transcript already has
    parts: Parts = field(default_factory=Parts)  # of all calls
    state: Any = None  # of the parser, after the last call
    step: Step | None = None  # the running call
    sent: list[int] = field(default_factory=list)  # in the running call
    finish: str | None = None
    stop: Any = None  # stop_reason
    generated: bool = False  # some tokens were generated
    ends: bool = False  # the running call has the end of the answer
    last: list[int] | None = None  # the last piece before the failure, in a call that only checks

    def add(self, choice: JSON) -> None:
        """Adds the tokens of a generated event."""
        self.generated = True
        if choice.get("token_ids"):
            self.waiting += token_ids(choice)
        self.finish = choice.get("finish_reason") or self.finish
        self.stop = choice.get("stop_reason", self.stop)

    def repeat_call(self) -> None:
        """Forgets the running call, which is abandoned. Its tokens wait for the next one."""
        if self.step is not None:
            self.step, self.waiting = None, self.sent + self.waiting


def rest(p: Progress, engine: Engine) -> Way[str | None]:
    """Runs the rest of a parsed chat."""
    p.stop_moving()
    p.mover = None
    transcript = p.merged()
    sampling = yield from _rendered(p, engine)
    attempt, flags = yield _generation(p, engine, sampling)
    if flags is None:  # it is an error answer
        refuse(p, attempt)
    check_beginning(p, attempt, flags)
    p.acts.append(Commit(attempt))
    it = Rest(attempt, list(transcript.output_ids), len(transcript.output_ids))
    try:
        yield from _parsed(p, engine, it)
    except EngineLost:
        p.has_tokens |= it.generated  # the ticket has tokens: another engine must continue
        raise
    return None


def _parsed(p: Progress, engine: Engine, it: Rest) -> Way[None]:
    """Lets the engine parse the tokens that it generates, to the end of the answer."""
    transcript = p.merged()
    call: Step | None = None  # nothing may follow the commit
    while True:
        attempt, events = yield call
        if attempt.step is it.step:
            _take(p, attempt, it)
            if transcript.over:
                p.end_merged()
                if it.finish == "abort":
                    raise ended_by_order()
                return
        elif events is not None:
            try:
                _collect(p, it, events)
            except Aborted as lost:
                it.repeat_call()
                if not (yield from aborts_by_order(p, engine)):
                    raise
                it.add(lost.choice)
        elif it.finish is None:
            raise it.main.step.lost("reset", "the stream ended without a finish_reason")
        call = _next_call(p, engine, it)


def _rendered(p: Progress, engine: Engine) -> Way[dict[str, Any]]:
    """Lets an engine render the chat. Returns the body that generates its answer."""
    step = p.own_step(engine, p.merged().chat, RENDER, side=False)
    attempt, _ = yield step
    _check(p, attempt)
    try:
        body = object_of(attempt.answer)
        sampling = body["sampling_params"]
        grammar = sampling.get("structured_outputs")
    except (MergeError, KeyError, AttributeError, TypeError) as error:
        why = f"{RENDER}: not a request to generate: {error}"
        raise step.lost("reset", why) from None
    if grammar is not None:
        why = "the state of a grammar cannot be transferred, and the engine has one for its tool calls"
        raise no_continuation(p, Ineligible("grammar", why))
    return body


def _generation(p: Progress, engine: Engine, body: dict[str, Any]) -> Step:
    """Returns the step that generates the rest. `body`: of the whole answer."""
    transcript = p.merged()
    prompt, begun = transcript.prompt, len(transcript.output_ids)
    sampling = body["sampling_params"]
    for name, least in (("max_tokens", 1), ("min_tokens", 0)):
        if isinstance(sampling.get(name), int):
            sampling[name] = max(least, sampling[name] - begun)
    sampling["seed"] = None  # it would restart its random numbers
    body |= {"token_ids": transcript.tokens(len(prompt) + begun), "stream": True, "stream_options": None}
    return Step(
        engine,
        dumps(body),
        "events",
        limit_seconds=p.limit_seconds,
        stream=True,
        target=GENERATE.encode(),
    )


def _collect(p: Progress, it: Rest, events: list[bytes]) -> None:
    """Adds the tokens of generated events. Passes comments on."""
    try:
        for choice in choices_of(p, it.main.step, events):
            it.add(choice)
    except (MergeError, TypeError) as error:
        raise it.main.step.lost("reset", str(error)) from None


def _next_call(p: Progress, engine: Engine, it: Rest) -> Step | None:
    """Returns the next call of the parser; None: one runs, or no tokens wait."""
    if it.step is not None or not (it.waiting or it.finish or it.last):
        return None
    transcript = p.merged()
    if it.last is not None:
        ids, finish = it.last, None
    else:
        ids, finish = it.waiting, it.finish
        it.sent, it.waiting, it.ends = ids, [], finish is not None
    if finish == "stop" and p.request.get("include_stop_str_in_output") is not True:
        ids = ids[:-1]
    choice = {"index": 0, "token_ids": ids, "finish_reason": finish}
    chunk = {"request_id": "rest", "choices": [choice]}
    body = {
        "stream": True,
        "generate_chunk": chunk,
        "stream_state": it.state,
        "prompt_token_ids": transcript.prompt,
        "chat_request": orjson.Fragment(transcript.chat),
    }
    it.step = p.own_step(engine, dumps(body), DERENDER)
    return it.step


def _take(p: Progress, attempt: Attempt, it: Rest) -> None:
    """Adds the parts of a call to the answer, and writes them for the client."""
    _check(p, attempt)
    transcript, engine = p.merged(), attempt.step.engine
    it.step = None
    if it.last is not None:
        _take_last(p, attempt, it)
        return
    try:
        for delta in _deltas(attempt, it):
            it.parts.add(delta)
    except PartsDiffer as error:
        raise attempt.step.lost("reset", f"{DERENDER}: {error}") from None
    finish = it.finish if it.ends else None
    if finish == "stop" and (it.parts.calls or (transcript.parts and transcript.parts.calls)):
        finish = "tool_calls"
    try:
        data = transcript.parsed_chunk(it.parts, it.sent[it.known :], finish=finish, stop=it.stop)
    except MergeError as error:
        why = Ineligible("not_mergeable", f"{engine.name}: {error}")
        if not it.known:
            raise no_continuation(p, why) from None
        _replay(p, it, why)
        return
    it.known = 0
    continued(p, it.main)
    if data:
        p.acts.append(Write(data))


def _deltas(attempt: Attempt, it: Rest) -> list[JSON]:
    """Returns the deltas of a call. Keeps the parser's state."""
    try:
        answer = object_of(attempt.answer)
        it.state = dict(answer["stream_state"])
        return [dict(choice["delta"]) for choice in answer["chunk"]["choices"]]
    except (MergeError, KeyError, TypeError, ValueError) as error:
        why = f"{DERENDER}: not an event of a chat: {error}"
        raise attempt.step.lost("reset", why) from None


def _replay(p: Progress, it: Rest, why: Ineligible) -> None:
    """Gives the parser all pieces of the failed engine; the next call has only the last one.

    `why`: the reason of the end if the pieces are not known.
    """
    transcript = p.merged()
    assert transcript.parts is not None
    ids, pieces = transcript.output_ids, transcript.pieces
    if sum(pieces) != len(ids):
        raise no_continuation(p, why)
    it.waiting, it.sent, it.known = it.sent[it.known :] + it.waiting, [], 0
    it.last = ids[-pieces[-1] :]
    it.state = {
        "role_sent": True,
        "output_token_ids": ids[: -len(it.last)],
        "output_chunk_lens": pieces[:-1],
        "tools_streamed": bool(transcript.parts.calls),
        "last_tool_call_ids": [call.id for call in transcript.parts.calls],
    }


def _take_last(p: Progress, attempt: Attempt, it: Rest) -> None:
    """Checks the part of the last piece: the client must have it."""
    transcript = p.merged()
    assert transcript.parts is not None
    deltas, it.last = _deltas(attempt, it), None
    parsed = it.state.get("output_token_ids") == transcript.output_ids
    if not parsed or not all(transcript.parts.ends_with(delta) for delta in deltas):
        why = f"{attempt.step.engine.name}: the answer's parts differ from those that the client has"
        raise no_continuation(p, Ineligible("not_mergeable", why))
    it.parts = deepcopy(transcript.parts)
    continued(p, it.main)


def _check(p: Progress, attempt: Attempt) -> None:
    """Handles an error answer of a call."""
    status = attempt.reader.status
    if status == 200:
        return
    if status < 500 and status not in p.rules.statuses:
        target = (attempt.step.target or b"").decode()
        why = f"{attempt.step.engine.name}: {target}: status {status}{attempt.error_words}"
        raise no_continuation(p, Ineligible("parser", why))
    refuse(p, attempt)
