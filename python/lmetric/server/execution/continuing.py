"""Another engine runs a request: after a failure, in a migration, or by a gateway's choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lmetric._core import NoInstanceError, TicketError, UnknownNameError
from lmetric.server.api.eligibility import NOT_PARSED, Ineligible, parsed_ineligibility
from lmetric.server.execution.plan import Ended, MergeError, OtherEngine, Write
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine

if TYPE_CHECKING:
    from lmetric.server.execution.transcript import Transcript
    from lmetric.server.fleet.transfer import KvTransfer

# The outcome of a failure after the first token. "continued": another engine continues. "complete":
# the client had the whole answer. The others end the answer with an error. "not_retried": by
# `retries`. "not_resumable": by its request or its engine. "not_mergeable": its text or tokens are
# not known. "no_engine": no other engine can continue it.
Outcome = Literal["continued", "complete", "not_retried", "not_resumable", "not_mergeable", "no_engine"]


def continuing(p: Progress) -> tuple[Outcome, str | None]:
    """Returns the outcome of a failure after the first token, and the engine that continues.

    That is the target of a running migration, or the core router's choice.
    """
    observing = p.observing
    if not p.resumes or p.unmergeable or (observing is None and not p.begun):
        return "not_resumable", None
    if observing is not None and observing.reader.unseen is not None:
        return "not_mergeable", None
    transcript = p.merged()
    try:
        p.observe()
        if transcript.over:
            _complete(p)
            return "complete", None
        if (why := _catch_up(p, transcript)) is not None:
            name_reason(p, why)
            return "not_resumable", None
    except MergeError as error:
        p.model.not_joinable(p.client_request.head.path, str(error))
        p.cancel_migration("not_joinable")
        return "not_mergeable", None
    moving_to = None if p.migration is None else p.migration.target
    try:  # in any case: the core notes that it may not choose the failed engine again
        chosen = p.model.engines.get(p.ticket.choose_failover())
    except (NoInstanceError, TicketError):
        chosen = None
    for target in dict.fromkeys((moving_to, chosen)):
        if target is not None and (following := _switch_now(p, target)):
            return "continued", following
    engines = p.model.engines.values()
    if transcript.parts is not None and any(each.in_service and not each.parses for each in engines):
        name_reason(p, NOT_PARSED)
    return "no_engine", None


def _catch_up(p: Progress, transcript: Transcript) -> Ineligible | None:
    """Prepares the recorded answer for another engine.

    Returns the reason why no engine can continue it; None: one can. Raises MergeError.
    """
    if not transcript.chat:
        if transcript.parts is not None:
            return NOT_PARSED
        transcript.catch_up()
        return None
    ineligible = parsed_ineligibility(p.request)
    if not transcript.needs_parser and (transcript.has_text or ineligible is not None):
        try:
            transcript.catch_up()
        except MergeError:
            pass  # a parser may have changed the text
        else:
            return None
    transcript.parse()
    return ineligible


def name_reason(p: Progress, why: Ineligible) -> None:
    """Names the reason why no engine continues the stream, for its client and in metrics."""
    p.client_request.not_resumable = why
    p.model.not_resumable[why.name] += 1


def _complete(p: Progress) -> None:
    """Ends a stream whose engine failed after the last token: only the end mark is missing."""
    transcript, answered = p.merged(), p.answered
    reader = None if (observing := p.observing) is None else observing.reader
    end = b""
    if reader is None or not reader.observed_done:
        end = transcript.closing(usage=reader is None or not reader.observed_usage)
    p.acts.append(Write(end, last=True))
    if answered is not None:
        answered.reader.finish_ticket()
    else:
        p.ticket.segment_done(
            prompt_tokens=len(transcript.prompt),
            output_tokens=len(transcript.output_ids),
            finish_reason=transcript.finish,
        )


def _switch_now(p: Progress, target: Engine) -> str | None:
    """Returns the engine that continues at once, because the source has failed; None: not this."""
    transcript = p.merged()
    if transcript.parts is not None:
        continues = target.parses
    else:  # from its token ids
        model = target.capabilities.base(p.model.name)
        context_tokens = model.max_model_len if model is not None else None
        continues = p.continues_at(target) and transcript.limit(context_tokens)
    if not continues:
        return None
    if p.migration is not None:
        p.migration.kv.forget("source_failed", "the engine that computed the tokens has failed")
    p.end_migration()
    try:
        p.ticket.cancel_migration()
        p.ticket.begin_migration(target.name, recompute=True)
    except TicketError:
        p.count_move("not_movable")
        return None
    except UnknownNameError:  # removed since the migration began
        p.count_move("target_gone")
        return None
    if not can_take(p, target):
        p.cancel_migration("target_gone")
        return None
    return switch(p, None, outcome="source_failed")


def can_take(p: Progress, target: Engine) -> bool:
    """Returns whether an engine may get a running request of the model now."""
    usable = target.model is p.model and target.in_service and not target.held
    return usable and not target.runs_halves_at_once


def switch(p: Progress, kv: KvTransfer | None, *, outcome: str = "migrated") -> str:
    """Stops the attempts. Returns the engine that continues the request.

    `kv`: the transfer to that engine. Raises Ended if no engine does.
    """
    transcript = p.merged()
    p.end_migration()
    p.drop_attempts()
    if p.answered is not None:
        # From now on, the router writes the answer.
        transcript.first_token_at = p.answered.reader.first_token_at
        p.answered = None
    p.kv = kv if kv is not None and kv.available else None
    if p.kv is not None:
        p.kv.tokens = p.total
    source = p.ticket.instance
    try:
        following = p.ticket.migrated()
    except NoInstanceError as error:
        p.count_move("no_instance")
        raise Ended(p.model.no_engine_error(error)) from None
    p.count_move(outcome)
    if outcome == "migrated":
        p.note("migration", source, following, outcome=outcome, moved=(p.total,))
    return following


def follow_gateway(p: Progress, other: OtherEngine) -> str:
    """Moves the request to the engine that answers the gateway. Returns its name.

    Only engines that refused the gateway are blamed. Raises Ended if the engine gets no new
    requests: the gateway forwards its answer, but the router's ledger does not count it.
    """
    p.abandon()
    engine, refused, tries = other.engine, other.refused, 0
    for each in refused:
        each.failed("refused", "the gateway got its answer from another engine")
        p.model.retried["refused"] += 1
    if p.ticket.has_next:  # the gateway chose the engine that decodes; the prefill stays
        p.next_segment()
    source = p.ticket.instance
    usable = engine.unusable is None and engine.role != "prefill"
    while usable and p.ticket.open and p.ticket.instance != engine.name:  # via those that the policy prefers
        tries += p.ticket.failed("refused") is not None
    p.model.hedging.uncounted["retries"] += tries - len(refused)
    if not usable or not p.ticket.open:
        raise Ended(None, "cancelled")
    if not p.ticket.from_token:
        p.gateway_tried = tuple(dict.fromkeys((source, *(each.name for each in refused), engine.name)))
    p.note("retry", source, engine.name, outcome="refused" if refused else "cancelled")
    return engine.name
