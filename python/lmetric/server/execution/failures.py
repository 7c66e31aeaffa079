"""Failures of a request's engines: which engine is next, which is blamed, what the client gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import orjson

from lmetric._core import NoInstanceError
from lmetric.server.api.eligibility import Ineligible
from lmetric.server.api.errors import ApiError
from lmetric.server.api.refusal import EngineRefusal, retry_after_seconds
from lmetric.server.execution.continuing import Outcome, continuing, name_reason
from lmetric.server.execution.exchange import SATURATED, without_cors
from lmetric.server.execution.plan import (
    Attempt,
    Ended,
    EngineLost,
    NoTransfer,
    ticket_kind,
)
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.verdicts import Failure, Verdicts
from lmetric.server.upstream.connection import NOT_CONNECTED

if TYPE_CHECKING:
    from lmetric.server.execution.fallback import Fallback
    from lmetric.tokens.prompt import Tokens

# The status for the client by kind of failure, if no engine could answer.
STATUSES = {
    **dict.fromkeys(("refused", "dns", "tls", "unreachable", "reset", "engine_error"), 502),
    "timeout": 504,
    "status": 503,
    "resources": 503,
}
# Statuses of `retries.statuses` that may come from a failed KV transfer: the step is first resent.
TRANSFER_STATUSES = frozenset({500, 504})
MAX_RETRY_AFTER_SECONDS = 60  # longest Retry-After that clients get


# -- answers that cannot be used -------------------------------------------------------------------


def refuse(p: Progress, attempt: Attempt) -> NoReturn:
    """Handles an engine's whole error answer: raises what follows from it."""
    status = attempt.reader.status
    if status == 404 and not p.committed and lacks_model(p, attempt):
        raise declined(p, attempt, "not_served")
    if transfer_broke(p, attempt):
        raise NoTransfer
    if status in p.rules.statuses:
        raise declined(p, attempt, kind_of(status))
    if p.committed:
        raise _error_answer(attempt, kind_of(status))
    pass_refusal(p, attempt)


def transfer_broke(p: Progress, attempt: Attempt) -> bool:
    """Returns whether a whole error answer means that the step's KV transfer failed."""
    kv, status = attempt.step.kv, attempt.reader.status
    may_be = status not in p.rules.statuses or status in TRANSFER_STATUSES
    return may_be and kv is not None and kv.broke(status, None)


def kind_of(status: int) -> str:
    """Returns the kind of failure that a status of `retries.statuses` means."""
    return "saturated" if status in SATURATED else "status"


def _error_answer(attempt: Attempt, kind: str) -> EngineLost:
    """Returns the failure of an engine that gave an error answer."""
    return attempt.step.lost(kind, f"status {attempt.reader.status}", attempt.error_words)


def declined(p: Progress, attempt: Attempt, kind: str, *, whole: bool = True) -> EngineLost:
    """Keeps an engine's error answer, for the client if no other engine answers.

    A full engine gets no new requests for the time of its Retry-After. Returns its failure.
    """
    status = attempt.reader.status
    p.refusal = _refusal_of(p, attempt) if whole else None
    if status in SATURATED and (seconds := retry_after_seconds(attempt.reader.head_lines)):
        p.retry_after = max(p.retry_after, min(seconds, MAX_RETRY_AFTER_SECONDS))
        p.model.saturated(attempt.step.engine, seconds)
    return _error_answer(attempt, kind)


def discard_transfer(p: Progress, engine: Engine, why: str) -> NoReturn:
    """Marks the KV transfer as unusable: it is the cache of another prompt. Raises NoTransfer."""
    p.model.not_joinable(p.client_request.head.path, f"{engine.name}: {why}")
    kv = p.kv
    assert kv is not None  # only a step that fetches checks its prompt
    kv.useless("other_tokens", why)
    kv.tokens = 0
    raise NoTransfer


def fallback_after(p: Progress, attempt: Attempt) -> Fallback | None:
    """Returns the fallback after an error answer: if the request is too long for the model."""
    fallback = p.client_request.fallback
    if attempt.reader.status != 400 or fallback is None or not fallback.is_too_long(attempt.message):
        return None
    return fallback


def lacks_model(p: Progress, attempt: Attempt) -> bool:
    """Whether a 404 says that the engine does not serve the model that the router lists for it.

    vLLM: "The model `NAME` does not exist.", "LoRA adapter NAME does not exist". Dynamo, whose
    workers have left: "Model not found", or no body. If so, the engine's list of models is read
    again.
    """
    name, words = p.client_request.model_name, attempt.message
    empty = attempt.reader.coding is None and not attempt.answer and not attempt.reader.held
    named = name is not None and name in words and ("model" in words or "adapter" in words)
    if not (named or empty or words.lower().startswith("model not found")):
        return False
    p.model.look_again(attempt.step.engine)
    return True


# -- the next engine -------------------------------------------------------------------------------


def next_engine(p: Progress, lost: EngineLost) -> str | None:
    """Returns the engine that gets the open segment after a failure.

    Returns None if the client has the whole answer. Raises Ended if no engine is left, or none may
    be tried.
    """
    if lost.kind == "answer_too_large":  # of each engine
        p.reason = lost.reason
        raise Ended(ApiError(502, lost.reason, engines=lost.engine.name, code="answer_too_large"))
    p.drop_main()
    if p.has_tokens:
        return _resume(p, lost)
    p.abandon()
    kind = lost.retried_kind
    allowed = _record(p, lost)
    if allowed and (following := _retry(p, lost)) is not None:
        p.model.retried[ticket_kind(kind)] += 1
        p.note("retry", lost.engine.name, following, outcome=kind)
        return following
    if p.committed:  # after the tokens of another engine
        p.model.failovers["no_engine" if allowed else "not_retried"] += 1
    raise _give_up(p, lost, kind)


def _retry(p: Progress, lost: EngineLost) -> str | None:
    """Returns the next engine for an open segment without tokens; None: no engine is left."""
    ticket, following = p.ticket, None
    try:
        if ticket.has_next and lost.step is not None and lost.step.for_client:
            # The second of two attempts at once failed: the second segment becomes the open one.
            following = ticket.segment_done()
        if following is None or following == lost.engine.name:
            following = ticket.failed(ticket_kind(lost.retried_kind))
        while following is not None and (following not in p.model.engines or following in p.tried_engines):
            following = ticket.failed("refused")  # removed since the decision, or it had a hedge
    except NoInstanceError:
        return None
    return following


def _resume(p: Progress, lost: EngineLost) -> str | None:
    """Returns the engine that continues a begun answer; None: the client has all of it."""
    following: str | None = None
    outcome: Outcome = "not_retried"
    if _record(p, lost):
        outcome, following = continuing(p)
    if outcome == "continued":
        p.fails_over = True  # it counts with the next engine's first part, or as the answer's end
        p.model.retried[ticket_kind(lost.retried_kind)] += 1
    else:
        p.model.failovers[outcome] += 1
    p.note("failover", lost.engine.name, p.ticket.instance, outcome=outcome)
    if outcome not in ("continued", "complete"):
        raise _give_up(p, lost, lost.kind)
    return following


def no_continuation(p: Progress, why: Ineligible) -> Ended:
    """Returns the end of a stream that no engine can continue after all."""
    name_reason(p, why)
    p.model.failovers["not_mergeable"] += 1
    return broken(p, p.tried[-1], "reset")


def continued(p: Progress, attempt: Attempt) -> None:
    """Records the first part that an engine adds to the answer."""
    if p.has_tokens:
        return
    p.has_tokens = True
    p.accept(attempt)
    if p.fails_over:
        p.fails_over = False
        p.model.failovers["continued"] += 1
    prove(p)


# -- blame -----------------------------------------------------------------------------------------


def _record(p: Progress, lost: EngineLost) -> bool:
    """Records a failed attempt. Returns whether another attempt is allowed."""
    p.reason, kind = lost.reason, lost.retried_kind
    engine_lost = add_failure(p, lost)
    if p.verdicts is not None and p.verdicts.final:
        return False  # perhaps the request is the cause
    if ticket_kind(kind) not in p.rules.failures or len(p.tried) >= p.rules.attempts:
        return False
    p.over_budget = not p.model.retry_budget.allows(p.model.requests, engine_lost, p.now)
    return not p.over_budget


def add_failure(p: Progress, lost: EngineLost) -> bool:
    """Records a failed attempt for the verdict. Returns whether its engine is lost."""
    engine, kind, reason = lost.engine, lost.retried_kind, lost.reason
    p.tried += (f"{engine.name}: {lost.client_reason}",)
    if not _accepted(lost):
        return kind == "refused"
    if p.verdicts is None:
        p.verdicts = Verdicts(p.model, p.client_request.client_key)
    p.verdicts.add(Failure(engine, kind, reason, tokens=p.known_tokens))
    return (kind == "reset" and engine.breaks.add(p.now)) or engine.lost


def blame(p: Progress, lost: EngineLost) -> None:
    """Records a failure of a step that no other engine repeats."""
    if _accepted(lost):
        p.model.blame(lost.engine, p.client_request.client_key, lost.reason, proven=False)


def _accepted(lost: EngineLost) -> bool:
    """Returns whether the engine had accepted the request, so that a client may be the cause.

    A failed connection counts against the engine at once.
    """
    if lost.kind in NOT_CONNECTED:
        lost.engine.failed(lost.kind, lost.reason)
    return lost.kind not in (*NOT_CONNECTED, "saturated", "not_served", "answer_too_large")


def blame_status(p: Progress, attempt: Attempt) -> None:
    """Records an error answer to a step that no other engine repeats."""
    status = attempt.reader.status
    if status >= 500:
        blame(p, attempt.step.lost(kind_of(status), f"status {status}"))


def prove(p: Progress) -> None:
    """Blames engines that failed before a token: another engine has produced one."""
    if p.verdicts is not None and not any(each.tokens for each in p.verdicts.failures):
        p.verdicts.blame(proven=True)


# -- errors for the client -------------------------------------------------------------------------


def _refusal_of(p: Progress, attempt: Attempt) -> EngineRefusal:
    """Returns an engine's whole error answer."""
    engine, lines = attempt.step.engine.name, attempt.reader.head_lines
    if p.client_request.cors:
        lines = without_cors(lines)
    return EngineRefusal(attempt.reader.status, lines, bytes(attempt.answer), engine=engine)


def pass_refusal(p: Progress, attempt: Attempt) -> NoReturn:
    """Ends the request with an engine's error answer."""
    refusal = _refusal_of(p, attempt)
    if refusal.status < 500:
        p.refused(attempt.step.engine)
    if (fallback := fallback_after(p, attempt)) is not None:
        refusal.code = fallback.too_long
    raise _refused(p, refusal, attempt.error_words)


def _refused(p: Progress, refusal: EngineRefusal, words: str, *, failure: str = "engine_error") -> Ended:
    """Returns the end with an engine's error answer. In an opened stream it must be JSON."""
    error: ApiError = refusal
    refusal.headers["x-lmetric-decision"] = p.label
    if p.rules.show_engines:
        refusal.headers["x-lmetric-instance"] = refusal.engine
    if p.client_request.opened and not _is_object(refusal.body()):
        said = f"the engine refused the request with status {refusal.status}"
        error = ApiError(refusal.status, said, engines=refusal.engine)
        error.words = words
    return Ended(error, failure)


def _give_up(p: Progress, lost: EngineLost, kind: str) -> Ended:
    """Returns the end with an error, because no engine is left, or none may be tried.

    `kind`: the kind of failure for the client.
    """
    code = ticket_kind(kind)
    if p.committed:
        return broken(p, f"{lost.engine.name}: {lost.client_reason}", kind)
    refusal = p.refusal
    if refusal is not None and (kind in ("status", "not_served") or refusal.status in SATURATED):
        if refusal.status in SATURATED:
            refusal.wait(_wait_seconds(p))
        return _refused(p, refusal, f": {lost.client_reason}", failure=kind)
    headers = {"x-lmetric-decision": p.label}
    status, message = 503 if p.over_budget else STATUSES[code], "no engine could answer"
    suspect = p.verdicts is not None and p.verdicts.suspect
    if status == 503 and not suspect:
        headers["retry-after"] = str(_wait_seconds(p))
    if suspect:
        message = "the request failed on two engines in the same way, and is not tried again"
        if kind != "timeout":
            status = 502
            code = "failed_twice"
    elif p.over_budget:
        code = "retry_budget"
        message = "the engine failed, and the retry budget is used up"
    elif kind == "resources":
        message = "the router cannot open a connection to an engine"
    return Ended(ApiError(status, message, engines="; ".join(p.tried), code=code, headers=headers), kind)


def broken(p: Progress, failure: str, kind: str) -> Ended:
    """Returns the end of a begun answer. `failure`: the engine's name and its failure."""
    broke, why = "the engine failed in the middle of its answer", p.client_request.not_resumable
    stays = "" if why is None else f"; no other engine can continue it: {why.why}"
    error = ApiError(502, broke, engines=f"{failure}{stays}", code=ticket_kind(kind))
    if p.withheld and why is None:
        error = EngineRefusal(502, b"", p.withheld, engine=failure.partition(": ")[0])
    return Ended(error, kind)


def _wait_seconds(p: Progress) -> int:
    """Returns the client's Retry-After: the engines' longest, else 1 to 3 s.

    It differs between clients, so that they do not return all at once.
    """
    return p.retry_after or 1 + p.decision.id % 3


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


def other_tokens(prompt: Tokens, reported: Any) -> str | None:
    """Returns the reason why a chat's prompt does not match the fetched KV cache, or None.

    `reported`: the prompt's token IDs in the engine's answer.
    """
    if not isinstance(reported, list | np.ndarray) or len(reported) == 0:
        return "it does not report a chat's token ids"
    return None if np.array_equal(prompt, reported) else "it tokenizes a chat differently from the router"
