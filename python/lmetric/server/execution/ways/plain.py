"""Plain: the client's own request on one engine, whose answer goes to the client.

It runs alone, or after a prefill, a split in the prompt or a prefix fetch. In these cases the
engine fetches their KV cache.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import orjson

from lmetric._core import END, ENGINE_ERROR, INCOMPLETE, ResponseReader
from lmetric.engines.handover import dumps, with_fields
from lmetric.server.api.paths import MESSAGES
from lmetric.server.execution.attempt import ANSWER_BYTES
from lmetric.server.execution.exchange import why_no_stream
from lmetric.server.execution.failures import (
    TRANSFER_STATUSES,
    declined,
    discard_transfer,
    fallback_after,
    kind_of,
    lacks_model,
    other_tokens,
    pass_refusal,
    prove,
    refuse,
)
from lmetric.server.execution.plan import (
    Attempt,
    Ended,
    EngineLost,
    NoTransfer,
    Step,
    Way,
    ended_by_order,
)
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.ways import abort
from lmetric.server.fleet.engine import Engine

# On /v1/messages, the type of an error says whose fault it is. vLLM wraps each error of its chat as
# `internal_error`: the message quotes it.
_REQUESTS_FAULT = re.compile(rb"'code': 4\d\d\}\}|\"type\": ?\"invalid_request_error\"")


def plain(p: Progress, engine: Engine) -> Way[str | None]:
    """Sends the request to an engine, and passes its answer on to the client."""
    step = own_request(p, engine)
    if step.reader == "whole":
        yield from _rewritten(p, step)
        return None
    attempt, flags = yield step
    if flags & INCOMPLETE and not attempt.reader.tokens:
        yield from abort.end_early(p, attempt)
    check_beginning(p, attempt, flags)
    yield from pass_answer(p, attempt, flags)
    return None


def check_beginning(p: Progress, attempt: Attempt, flags: int) -> None:
    """Checks the beginning of an answer for the client. `flags`: of its reader.

    Raises EngineLost or NoTransfer if it cannot be used, and Ended if it is the client's error.
    """
    step, reader = attempt.step, attempt.reader
    status, opened = reader.status, p.client_request.opened
    failing = flags & (ENGINE_ERROR | INCOMPLETE)
    if status == 200 and not (failing or step.kv is not None or step.checks_prompt or opened):
        return
    statuses = p.rules.statuses
    failed = failing and stream_failed(reader, flags)
    code: int | None = status
    if failed and flags & ENGINE_ERROR:
        if p.client_request.head.path == MESSAGES and _REQUESTS_FAULT.search(reader.held):
            attempt.error_code = 400
        code = attempt.error_code or reader.error_code
    if code in TRANSFER_STATUSES and step.kv is not None and step.kv.broke(status, code):
        raise NoTransfer
    if status in statuses:
        if flags & END:
            attempt.answer = reader.payload()
        raise declined(p, attempt, kind_of(status), whole=bool(flags & END))
    if code in statuses:
        raise step.lost(kind_of(code or 500), f"error {code} as the first event")
    if failed and flags & INCOMPLETE and not reader.tokens:
        raise step.lost("reset", "the stream ended without a token")
    if status == 404 and flags & END and lacks_model(p, attempt):
        attempt.answer = reader.payload()
        raise declined(p, attempt, "not_served")
    if step.kv is not None and step.kv.broke(status, attempt.error_code or reader.error_code):
        raise NoTransfer
    if status == 400 and flags & END and fallback_after(p, attempt) is not None:
        _pass_refused_beginning(p, attempt, flags)
    if flags & ENGINE_ERROR and step.merges and not reader.tokens:
        raise step.lost("status", f"error {reader.error_code} as the first event")
    if step.checks_prompt and status == 200 and (why := other_tokens(p.prompt, reader.observed_prompt)):
        discard_transfer(p, step.engine, why)
    if opened and step.reader == "pass" and status != 200:
        _pass_refused_beginning(p, attempt, flags)
    if opened and not reader.event_stream:
        raise step.lost("reset", why_no_stream(reader))


def _pass_refused_beginning(p: Progress, attempt: Attempt, flags: int) -> NoReturn:
    """Ends the request with an error answer, as much of it as has come."""
    attempt.answer = attempt.reader.payload()
    if flags & END:  # the attempt closes itself, and counts a failure of the engine
        p.main = None
        attempt.committed = True
    pass_refusal(p, attempt)


def stream_failed(reader: ResponseReader, flags: int) -> bool:
    """Returns whether a stream begins with an error, or ends without a token."""
    return bool(flags & (ENGINE_ERROR | INCOMPLETE)) and reader.status == 200 and reader.event_stream


def pass_answer(p: Progress, attempt: Attempt, flags: int) -> Way[None]:
    """Passes an answer on to the client, to its end. `flags`: of its reader at its beginning.

    Raises Ended if it is an error, or holds one.
    """
    reader = attempt.reader
    aborted = bool(flags & END) and reader.aborted
    if aborted:
        yield from abort.end_whole(p, attempt)
    if p.verdicts is not None and reader.status < 500 and not stream_failed(reader, flags):
        prove(p)
    p.commit(attempt)
    if flags & END and not flags & ENGINE_ERROR:
        p.main = None
    else:
        try:
            yield None  # until the end of the answer
        except EngineLost as lost:
            yield from abort.end_begun(p, attempt, lost)
            raise
        aborted = reader.aborted
    if 400 <= p.status < 500:
        p.refused(attempt.step.engine)
    if attempt.error or p.status >= 400 or aborted:
        raise Ended(None)
    reader.finish_ticket()


def _rewritten(p: Progress, step: Step) -> Way[None]:
    """Sends a whole answer to the client, without fields that only the router requested."""
    attempt, _ = yield step
    if attempt.reader.status != 200:
        refuse(p, attempt)
    aborted, body = attempt.reader.aborted, attempt.answer
    if aborted or step.checks_prompt or not _remove_address(attempt):
        if len(body) > ANSWER_BYTES:
            raise step.lost("answer_too_large", f"the answer has more than {ANSWER_BYTES >> 20} MiB")
        answer, choices = abort.answer_of(step, body)
        if aborted:
            # Meanwhile, its connection may serve another request: its reader is not read again.
            yield from abort.check_order(p, step, choices)
        elif step.checks_prompt and (why := other_tokens(p.prompt, answer.get("prompt_token_ids"))):
            discard_transfer(p, step.engine, why)
        body = abort.stripped(answer, choices, step.hides_ids)
    p.accept(attempt)
    p.answered = None if aborted else attempt
    p.write_whole(body, step.engine.name)
    if aborted:
        raise ended_by_order()
    attempt.reader.finish_ticket()


def _remove_address(attempt: Attempt) -> bool:
    """Removes the address of the engine's cache from an answer, in place, as parsing takes seconds.

    If the rest from the field to the end is a list of members, the field is the answer's own.
    Returns False if the answer must be parsed.
    """
    answer = attempt.answer
    if attempt.reader.coding is not None or not isinstance(answer, bytearray):
        return False
    at = answer.rfind(b'"kv_transfer_params"')
    if at < 0:
        return True
    if len(answer) - at > ANSWER_BYTES:
        return False
    try:
        members = orjson.loads(b"{" + answer[at:])
    except orjson.JSONDecodeError:
        return False
    answer[at:] = dumps(members | {"kv_transfer_params": None})[1:]
    return True


def own_request(p: Progress, engine: Engine) -> Step:
    """Returns the step for the client's own request.

    An available KV transfer is fetched once, if the engine can.
    """
    kv = p.kv
    if p.call is None and kv is None:
        return Step(engine, p.body, "pass", limit_seconds=p.limit_seconds, stream=p.stream)
    inside, fields, checks, secret = False, {}, False, False
    if kv is not None and kv.tokens and not p.unmergeable:
        inside = p.inside
        fields = kv.take(engine, p.now, goes_on=False, total=p.total)
        if fields:
            # If a chat continues inside its prompt, the engine renders the chat again. Its tokens
            # must be those of the fetched cache, and the engine does not check that.
            checks = inside and p.chat
            # The answer may contain the engine's KV transfer fields, which must not reach the
            # client: of vLLM 0.33 also a stream's last chunk. vLLM reports its mode only in
            # development mode, so an unknown mode may be bidirectional.
            one_way = engine.handover is not None and engine.handover.bidirectional is False
            secret = inside or ("kv_transfer_params" in fields and not one_way)
        else:
            kv.tokens = 0  # no transfer: a second call must not count it again
    wants_ids = checks or (p.observed and p.continues_at(engine))
    return Step(
        engine,
        _body(p, inside, fields, wants_ids=wants_ids),
        "whole" if secret and not p.stream else "pass",
        limit_seconds=p.limit_seconds,
        stream=p.stream,
        kv=kv if fields else None,
        observed=p.stream and (wants_ids or secret),
        hides_ids=wants_ids and not p.request.get("return_token_ids"),
        checks_prompt=checks,
    )


def _body(p: Progress, inside: bool, fields: Any, *, wants_ids: bool) -> bytes:
    """Returns the client's body with the router's fields added.

    If a completion fetches a part of its prompt, its prompt becomes token ids.
    """
    if not wants_ids:
        more = fields
    elif "return_token_ids" in p.request:
        return dumps({**p.request, **fields, "return_token_ids": True})
    else:
        more = {**fields, "return_token_ids": True}
    body = p.body
    if inside and fields and not p.chat:
        body = dumps({**p.request, "prompt": p.prompt})
    return with_fields(body, more) if more else body
