"""Pair: prefill/decode disaggregation. One engine computes the prompt, another decodes.

The prefill's answer is for the router. The decode engine gets the client's own request (`plain`)
and fetches the prefill's KV cache. If it cannot, it computes the prompt itself, which costs time
but gives the same answer. If a connector runs both halves at once, both engines get the same body
together.
"""

from __future__ import annotations

from typing import Any

import orjson

from lmetric.engines.handover import FirstSegment, HandoverError, dumps
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.execution.failures import discard_transfer, other_tokens, refuse
from lmetric.server.execution.plan import Attempt, Ended, MergeError, Step, Way
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import object_of
from lmetric.server.execution.ways.plain import check_beginning, pass_answer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.transfer import WHOLE_PROMPT, KvTransfer


def prefill(p: Progress, engine: Engine) -> Way[str | None]:
    """Computes the prompt. Returns the engine that decodes."""
    p.prefill_engine = engine
    try:
        body = _first_body(p, engine)
    except HandoverError as error:
        p.prefill_engine = None  # it computes nothing
        transfer(p).recompute("not_cut", str(error))
        return p.next_segment()
    fetched, checks = p.kv, False
    if fetched is not None:
        # A prefix fetch may have prepared a part of the prompt.
        fields, checks = fetching_fields(p, engine, fetched)
        if fetched.used:
            body = dumps(orjson.loads(body) | fields)
        else:
            fetched = None
    step = p.own_step(engine, body, side=False, counted=True, kv=fetched)
    step.checks_prompt = checks
    attempt = yield from whole_answer(p, step)
    kv, reader = transfer(p), attempt.reader
    kv.begin(engine)
    kv.tokens = WHOLE_PROMPT
    if not p.unmergeable:
        kv.accept(engine, bytes(attempt.answer), tokens=None, now=p.now)
    return p.next_segment(reader.prompt_tokens, reader.cached_tokens)


def transfer(p: Progress) -> KvTransfer:
    """Returns the KV transfer to the next step; creates it on first use."""
    if p.kv is None:
        p.kv = new_transfer(p)
    return p.kv


def new_transfer(p: Progress) -> KvTransfer:
    """Returns a KV transfer between engines of the model."""
    return KvTransfer(p.model.name, p.model.kv_transfers, p.model.settings.handover_seconds)


def whole_answer(p: Progress, step: Step) -> Way[Attempt]:
    """Sends a step whose answer is for the router. Returns its attempt after a good answer."""
    attempt, _ = yield step
    if attempt.reader.status != 200:
        refuse(p, attempt)
    if step.checks_prompt:
        try:
            told = object_of(attempt.answer).get("prompt_token_ids")
            why = other_tokens(p.prompt, told)
        except MergeError as error:
            why = str(error)
        if why:
            discard_transfer(p, step.engine, why)
    return attempt


def at_once(p: Progress, first: Engine) -> Way[str | None]:
    """Computes the prompt on one engine while another already waits for it, to decode."""
    p.prefill_engine = first
    try:
        body = _first_body(p, first)
    except HandoverError as error:
        what = f"{p.model.name} is served by prefill and decode engines: {error}"
        raise Ended(bad(what)) from None
    second = p.model.engines.get(p.ticket.next_instance or "")
    if second is None:
        return p.next_segment()
    return (yield from _both(p, first, second, body=body, opens=True))


def other_decode(p: Progress, second: Engine) -> Way[str | None]:
    """Sends both halves again, to another engine that decodes: it needs a new prefill."""
    first = p.prefill_engine
    if first is None or not p.ticket.from_token or p.begun:
        why = f"{p.model.name}: only prefill engines or only decode engines are usable"
        raise Ended(ApiError(503, why, engines=second.name, code="no_engine"))
    try:
        body = _first_body(p, first)
    except HandoverError:
        raise Ended(ApiError(502, "no engine could answer", code="reset")) from None
    return (yield from _both(p, first, second, body=body, opens=False))


def _both(p: Progress, first: Engine, second: Engine, *, body: bytes, opens: bool) -> Way[str | None]:
    """Runs both halves. Returns another engine for the second one; None: the answer is whole.

    `opens`: the first one is the open segment.
    """
    prefill = p.own_step(first, body, counted=opens)
    decode = Step(second, body, "pass", limit_seconds=p.limit_seconds, stream=p.stream)
    p.send(prefill)
    attempt, flags = yield decode
    if attempt.step is prefill:
        if attempt.reader.status != 200:
            refuse(p, attempt)
        if p.ticket.has_next:  # not if the prefill was repeated
            following = p.next_segment(attempt.reader.prompt_tokens, attempt.reader.cached_tokens)
            if following != second.name:
                p.drop_attempts()
                return following
        attempt, flags = yield None
    check_beginning(p, attempt, flags)
    if p.ticket.has_next:  # the second half answers before the first has ended
        following = p.next_segment()
        if following != second.name:
            p.drop_attempts()
            return following
    yield from pass_answer(p, attempt, flags)
    return None


def fetching_fields(
    p: Progress, engine: Engine, kv: KvTransfer, *, own_prompt: bool = True
) -> tuple[dict[str, Any], bool]:
    """Returns the fields of a step that another one follows, and whether to check its prompt.

    With a fetched part of its prompt, a completion gets the prompt as the tokens of that cache. A
    chat must report its tokens. `own_prompt`: it has the client's whole prompt.
    """
    inside, fields = p.inside, kv.take(engine, p.now, goes_on=True, total=p.total)
    if not (inside and own_prompt and kv.used):
        return fields, False
    return ({"return_token_ids": True} if p.chat else {"prompt": p.prompt}) | fields, p.chat


def _first_body(p: Progress, engine: Engine) -> bytes:
    """Returns the body of the prefill, or of both halves. Raises HandoverError."""
    connector, handover = engine.connector, engine.handover
    if connector is None or handover is None:
        raise HandoverError(f"{engine.name} has no KV transfer")
    if p.first is None:
        p.first = FirstSegment(p.client_request.head.path, p.body)
    return connector.first(p.first, engine.host, handover)
