"""The state machine of one request: it receives events and returns actions.

No I/O, no timer, no task.

The executor owns the ticket, the attempts, retries, KV transfers and the end of the request. `plan`
has its states and their transitions, `planners` define the steps, and `runner` carries out the
actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import structlog

from lmetric._core import (
    END,
    ENGINE_ERROR,
    INCOMPLETE,
    Decision,
    NoInstanceError,
    Ticket,
    TicketError,
    UnknownNameError,
)
from lmetric.engines.handover import HandoverError
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import (
    FAILED,
    SATURATED,
    STOPPING,
    ClientRequest,
    Rules,
    why_no_stream,
    without_cors,
)
from lmetric.server.execution.plan import (
    FOLLOWING,
    Act,
    Attempt,
    AttemptEvent,
    Begin,
    BreakOff,
    Comment,
    Commit,
    Event,
    Finish,
    State,
    Step,
    Wake,
    Write,
)
from lmetric.server.execution.planners import failover, own_request, prefill_decode, split
from lmetric.server.execution.planners.hedge import Hedge
from lmetric.server.execution.planners.migration import Migration
from lmetric.server.execution.planners.prefix_fetch import PrefixFetch
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.refusal import EngineRefusal, retry_after_seconds
from lmetric.server.execution.transcript import (
    UNBOUNDED,
    Delta,
    MergeError,
    cached_of,
    object_of,
    other_tokens,
)
from lmetric.server.execution.transfer import WHOLE_PROMPT, KvTransfer
from lmetric.server.execution.verdicts import Failure, Verdicts
from lmetric.server.fleet.activity import Kind
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.hedging import Outcome
from lmetric.server.fleet.pool import Pool
from lmetric.server.fleet.rebalancer import Movable

# The status for the client by kind of failure, if no engine could answer.
STATUSES = {
    **dict.fromkeys(("refused", "dns", "tls", "unreachable", "reset", "engine_error"), 502),
    "timeout": 504,
    "status": 503,
    "resources": 503,
}
# Statuses of `retries.statuses` that may come from a failed KV transfer: the step is first resent.
TRANSFER_STATUSES = frozenset({500, 504})
# Kinds of failure that the core router knows by another name.
CORE_KINDS = {"saturated": "status", "not_served": "status"}
MAX_RETRY_AFTER_SECONDS = 60  # longest Retry-After that clients get
# Failures before an engine accepted the request. No client can cause them.
NOT_ACCEPTED = frozenset({"refused", "dns", "tls", "unreachable", "resources", "saturated", "not_served"})
# Of these, failures that say nothing about the engine's health.
HEALTHY_KINDS = frozenset({"saturated", "not_served"})

COMMIT, FINISH = Commit(), Finish()

log = structlog.get_logger("lmetric.relay")


class RequestExecution(Progress):
    """One request, from its decision to its end.

    Each event returns the resulting actions, in order. No action follows `Finish`. `moves`: the
    request may be split or moved. `fetches`: it may get a prefix fetch. `resumes`: after a failure,
    another engine may continue its stream. `hedge`: another engine may get it, too, if its first
    token is late.
    """

    migration: Migration | None = None
    hedge: Hedge | None = None  # until a token came, or it has failed
    handle: Movable | None = None  # the rebalancer's access to the request
    observing: Attempt | None = None  # the attempt whose tokens are recorded while they pass
    _withheld: bytes = b""  # the error that ended the engine's stream; the client did not get it
    _tried: tuple[str, ...] = ()
    _verdicts: Verdicts | None = None  # set after a failure
    _refusal: EngineRefusal | None = None  # the last error answer of an engine, if it was whole
    _retry_after = 0  # seconds, the longest Retry-After of engines that declined the request
    _over_budget = False  # the retry budget forbade another attempt

    def __init__(
        self,
        rules: Rules,
        client_request: ClientRequest,
        pool: Pool,
        decision: Decision,
        ticket: Ticket,
        call: ParsedRequest,
        *,
        moves: bool,
        fetches: bool,
        resumes: bool = False,
        hedge: Hedge | None = None,
    ) -> None:
        self.rules = rules
        self.client_request = client_request
        self.pool = pool
        self.decision = decision
        self.ticket = ticket
        self.body = call.body
        self.first = call.first
        self.stream = call.stream
        self.state: State = "ADMITTED"
        self.main: Step | None = None  # runs the open segment
        self.side: Step | None = None  # runs beside it: a prefix fetch, a migration, or a prefill
        self.answered: Attempt | None = None  # the attempt that gives the client's whole answer
        self.committed = self.close_client = False  # committed: the client has a part of an answer
        self.status = 0
        self.reason = ""  # the reason of an end with an error
        self.stalled_at = 0.0  # when the client became too slow; 0: it keeps up
        self.fetch: PrefixFetch | None = None
        self.call = self.mover = self.kv = self.prefill_engine = self.paired_body = None
        self._acts: list[Act] = []
        if hedge is not None and client_request.gateway is None:  # a gateway sends one copy
            self.hedge = hedge
        if moves or fetches or resumes:
            self.call = call
            self.encoder = pool.tokenizer.encoder if pool.tokenizer is not None else None
            self.mover = pool.mover if moves and call.stream else None
            # A held request may outlive the model's tokenizer.
            self.resumes = (resumes and self.encoder is not None) or self.mover is not None

    # -- events of the router ----------------------------------------------------------------------

    def placed(self, now: float) -> list[Act]:
        """Starts the request at the instance of its decision."""
        name = self.decision.instance
        self.pool.requests += 1
        if self.pool.cuts:
            self.hedge = None
            self._start_segment(name, now, "PLACED")
        else:
            self._send(own_request.step(self, self.pool.engines[name], now), "PLACED")
            if self.hedge is not None:
                self._acts.append(Wake(self.hedge.after_seconds))
        acts, self._acts = self._acts, []
        return acts

    def migrate(self, target: Engine, now: float) -> tuple[bool, list[Act]]:
        """Starts a migration for the rebalancer.

        Returns whether it began or is done, and the actions.
        """
        began = self._migrate(target, now)
        return began, self._out()

    def tick(self, now: float) -> list[Act]:
        """Ends the request at its time limits. Attempts have their own deadlines."""
        if self.state == "DONE":
            return []
        limits = self.rules.timeouts
        if reason := self.client_request.overdue(limits.request, now):
            # The engine did not fail.
            self.reason = reason
            self._finish("ABORTED", "timeout", ApiError(504, reason, code="timeout"))
        elif self.main is None and self.side is None:
            log.error("a request was left without an engine", decision=self.label)
            self.reason = "no engine worked on it"
            self._finish("ABORTED", "engine_error", ApiError(500, FAILED))
        elif self.stalled_at and now - self.stalled_at > limits.slow_client:
            self._leave("the client does not read")
            self._acts.append("abort_client")
        return self._out()

    def woken(self, now: float) -> list[Act]:
        """Handles the timer of `Wake`: stops waiting for a prefix fetch, or sends the hedge."""
        if self.fetch is not None:
            self._acts.append("cancel_side")
            self._fetched(self.fetch, "late", now)
        elif self.hedge is not None:
            self._send_hedge(self.hedge, now)
        return self._out()

    # -- events of attempts ------------------------------------------------------------------------

    def attempt(self, event: AttemptEvent, attempt: Attempt, now: float, detail: Any = None) -> list[Act]:
        """Handles an event of an attempt."""
        step = attempt.step
        if step is self.main:
            _OF_MAIN[event](self, attempt, now, detail)
        elif step is self.side:
            _OF_SIDE[event](self, attempt, now, detail)
        elif self.hedge is not None and step is self.hedge.step:
            _OF_HEDGE[event](self, attempt, now, detail)
        acts, self._acts = self._acts, []
        return acts

    def _sent(self, attempt: Attempt, now: float, _: None) -> None:
        migration = self.migration
        kv = migration.kv if attempt.step is self.side and migration is not None else self.transfer()
        kv.sent()

    def _comments(self, attempt: Attempt, now: float, comments: bytes) -> None:
        """Passes an engine's comments on to a client that waits for a token."""
        if self.client_request.gateway is not None:
            return  # the client has the engine's own bytes
        if self.committed:  # its engine failed, and this one continues
            self._acts.append(Write(b"".join(b": %b\n" % line for line in comments.splitlines()) + b"\n"))
        else:
            self._acts.append(Comment(comments))

    def _ready(self, attempt: Attempt, now: float, flags: int) -> None:
        step, reader = attempt.step, attempt.reader
        status, statuses = reader.status, self.rules.statuses
        stream_failed = flags & (ENGINE_ERROR | INCOMPLETE) and status == 200 and reader.event_stream
        code = reader.error_code if stream_failed and flags & ENGINE_ERROR else status
        if code in TRANSFER_STATUSES and step.carries_kv and self.transfer().broke(status, code):
            self._resend(step.engine, now)
        elif status in statuses:
            if flags & END:
                attempt.answer = reader.payload()
            self._declined(attempt, status, whole=bool(flags & END))
            self._drop_and_fail(step, _kind(status), f"status {status}{attempt.error_words()}", now)
        elif code in statuses:
            self._drop_and_fail(step, _kind(code or 500), f"error {code} as the first event", now)
        elif stream_failed and flags & INCOMPLETE and not reader.tokens:
            self._drop_and_fail(step, "reset", "the stream ended without a token", now)
        elif status == 404 and flags & END and self._lacks_model(attempt):
            attempt.answer = reader.payload()
            self._declined(attempt, status, whole=True)
            self._drop_and_fail(step, "not_served", f"status 404{attempt.error_words()}", now)
        elif step.carries_kv and self.transfer().broke(status, reader.error_code):
            self._resend(step.engine, now)
        elif flags & ENGINE_ERROR and step.merges and not reader.tokens:
            self._drop_and_fail(step, "status", f"error {reader.error_code} as the first event", now)
        elif (
            step.checks_prompt
            and status == 200
            and (why := other_tokens(self.prompt, reader.observed_prompt))
        ):
            self._discard_transfer(step.engine, why)
            self._resend(step.engine, now)
        elif self.client_request.opened and step.reader == "pass" and status != 200:
            attempt.answer = reader.payload()
            if flags & END:  # the attempt closes itself, and counts a failure of the engine
                self.main = None
                attempt.begun = True
            self._pass_refusal(attempt)
        elif self.client_request.opened and not reader.event_stream:
            self._drop_and_fail(step, "reset", why_no_stream(reader), now)
        elif step.reader == "pass":
            if self.paired_body is not None and not self._second_begins(step, now):
                return
            if self._verdicts is not None and status < 500 and not stream_failed:
                self._prove()
            self._commit(attempt, status)
            if flags & END and not flags & ENGINE_ERROR:
                self.main = None
                self._passed(attempt)
        else:
            self._acts.append(COMMIT)

    def _events(self, attempt: Attempt, now: float, events: list[bytes]) -> None:
        step = attempt.step
        try:
            for data in events:
                if step is not self.main:
                    break
                if data.startswith(b":"):
                    self._begin_stream()
                    self._acts.append(Write(data + b"\n\n"))
                else:
                    self._take_event(step, data, now)
        except MergeError as error:
            self._drop_and_fail(step, "reset", str(error), now)

    def _unseen(self, attempt: Attempt, now: float, _: None) -> None:
        """Handles lost tokens of a forwarded stream: the request can no longer move."""
        self.pool.not_joinable(
            self.client_request.path, f"{attempt.step.engine.name}: {attempt.reader.unseen}"
        )
        self._stop_moving()

    def _ended(self, attempt: Attempt, now: float, _: None) -> None:
        self.main = None
        if not attempt.step.for_client:
            self._answered(attempt, now)
        elif attempt.step.reader == "pass":
            self._passed(attempt)
        else:
            self._whole(attempt, now)

    def _side_ended(self, attempt: Attempt, now: float, _: None) -> None:
        self.side = None
        if self.fetch is not None:
            self._fetch_answered(self.fetch, attempt, now)
        elif self.migration is not None:
            self._migration_answered(self.migration, attempt, now)
        else:
            self._paired_prefill_ended(attempt, now)

    def _main_failed(self, attempt: Attempt, now: float, detail: tuple[str, str]) -> None:
        self._withheld = b""
        if self.observing is attempt and not attempt.reader.aborted:
            self._withheld = attempt.reader.withheld
        self._failed(attempt.step.engine, *detail, now)

    def _side_failed(self, attempt: Attempt, now: float, detail: tuple[str, str]) -> None:
        kind, reason = detail
        self.side, engine = None, attempt.step.engine
        if self.fetch is not None:
            self._blame(engine, kind, reason)
            self._fetched(self.fetch, "holder_failed", now)
        elif self.migration is not None:
            self._migration_failed(self.migration, engine, kind, reason, now)
        elif not self.committed:
            self._retry(engine, kind, reason, now)

    def _stale(self, attempt: Attempt, now: float, late: bool) -> None:
        self.transfer().stale(late=late)
        self._resend(attempt.step.engine, now)

    def _side_stale(self, attempt: Attempt, now: float, late: bool) -> None:
        migration = self.migration
        assert migration is not None  # of the side steps, only a migration's carry a KV transfer
        migration.kv.stale(late=late)
        self._send_beside(migration.warm(now))

    # -- events of the client and the server -------------------------------------------------------

    def client_slow(self, now: float) -> list[Act]:
        """Handles a client that reads too slowly."""
        self.stalled_at = now
        self._acts.append("pause")
        return self._out()

    def client_ready(self, now: float) -> list[Act]:
        """Handles a client that has caught up."""
        self.stalled_at = 0.0
        self._acts.append("resume")
        return self._out()

    def leave(self, reason: str, error: ApiError | None = None) -> list[Act]:
        """Ends the request early, unless it has ended. `error`: for its client."""
        self._leave(reason, error)
        return self._out()

    def stop(self) -> list[Act]:
        """Ends the request because the server stops."""
        return self.leave(
            STOPPING, ApiError(503, STOPPING, code="shutting_down", headers={"retry-after": "5"})
        )

    # -- properties --------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The label of its routing decision."""
        return self.pool.labels.label(self.decision.id, self.client_request.tenant)

    def head_lines(self, engine: str) -> bytes:
        """Returns the router's own lines in the head of an answer.

        `engine`: the answering engine.
        """
        client_request, labels, decision = self.client_request, self.pool.labels, self.decision.id
        if not self.rules.show_engines:
            return labels.answer_lines(client_request.head, decision, client_request.tenant)
        first = self.prefill_engine or (self.kv.source if self.kv is not None else None)
        prefill = None if first is None else first.name
        return labels.answer_lines(client_request.head, decision, client_request.tenant, engine, prefill)

    @property
    def answering_engine_name(self) -> str:
        """The name of the engine that answers now, or next."""
        if self.main is not None and self.main.for_client:
            return self.main.engine.name
        if self.migration is not None:
            return self.ticket.instance
        return self.ticket.next_instance or self.ticket.instance

    # -- segments ----------------------------------------------------------------------------------

    def _start_segment(self, name: str, now: float, event: Event) -> None:
        """Sends the ticket's open segment to its engine, after a prefix fetch if one is planned."""
        engine = self.pool.engines[name]
        self.has_tokens = False
        if not self.pool.fetches_prefixes or self.begun or self.ticket.fetch is None:
            self._send_segment(engine, now, event)
        elif (why := (fetch := PrefixFetch(self, engine, now)).why_not()) is not None:
            self._fetch_over(fetch, why, now)
            self._send_segment(engine, now, event)
        else:
            self.fetch = fetch
            self._enter(event, "FETCHING")
            self._send_beside(fetch.step(self))
            self._acts.append(Wake(fetch.patience_seconds(self)))

    def _send_segment(self, engine: Engine, now: float, event: Event) -> None:
        """Sends the open segment; also used to resend it."""
        ticket = self.ticket
        if ticket.has_next:
            if self.unmergeable:
                self._next_segment(None, None, now, event)
            elif self.transcript is None and (self.call is None or engine.role == "prefill"):
                self._send_prefill(engine, now, event)
            else:
                to_token, following = ticket.to_token, self.pool.engines.get(ticket.next_instance or "")
                assert to_token is not None  # another segment follows
                self._send(split.segment(self, engine, to_token, following, now), event)
        elif self.main is not None and self.main.engine is engine:
            pass  # the second of two steps that run at once: it runs already
        elif engine.runs_halves_at_once:
            self._send_second(engine, event)
        else:
            self._drop_attempts()  # of a pair whose second step ran on another engine
            if not ticket.from_token:
                self.prefill_engine = self.paired_body = None
            if self.begun and not self.unmergeable:
                step = split.rest(self, engine, now)
            else:
                step = own_request.step(self, engine, now)
            self._send(step, event)

    def _send_prefill(self, engine: Engine, now: float, event: Event) -> None:
        self.prefill_engine, self.paired_body = engine, None
        at_once = engine.runs_halves_at_once
        try:
            if not at_once:
                self._send(prefill_decode.prefill(self, engine, now), event)
                return
            body = prefill_decode.first_body(self, engine)
        except HandoverError as error:
            if at_once:
                what = f"{self.pool.name} is served by prefill and decode engines: {error}"
                self._finish(event, "engine_error", bad(what))
            else:
                self.prefill_engine = None  # it computes nothing
                self.transfer().recompute("not_cut", str(error))
                self._next_segment(None, None, now, event)
            return
        self.paired_body = body
        second = self.pool.engines.get(self.ticket.next_instance or "")
        if second is None:
            self._next_segment(None, None, now, event)
        else:
            self._send_pair(engine, second, body, event, opens=True)

    def _send_second(self, engine: Engine, event: Event) -> None:
        """Sends the second of two steps that run at once to another engine."""
        first = self.prefill_engine
        if first is None or not self.ticket.from_token or self.begun:
            why = "only prefill engines or only decode engines are usable"
            message = f"{self.pool.name}: {why}"
            self._finish(event, "engine_error", ApiError(503, message, engines=engine.name, code="no_engine"))
            return
        # The other engine needs a new prefill.
        self._drop_attempts()
        try:
            self.paired_body = prefill_decode.first_body(self, first)
        except HandoverError:
            self._finish(event, "engine_error", ApiError(502, "no engine could answer", code="reset"))
            return
        self._send_pair(first, engine, self.paired_body, event, opens=False)

    def _send_pair(self, first: Engine, second: Engine, body: bytes, event: Event, *, opens: bool) -> None:
        prefill, decode = prefill_decode.pair(self, first, second, body, opens=opens)
        self._send_beside(prefill)
        self._send(decode, event)

    def _send(self, step: Step, event: Event) -> None:
        """Sends a step that runs the open segment."""
        self.main = step
        state: State = "AWAITING" if step.for_client else "INTERNAL"
        if (event == "FAILED" and (self.begun or self.state == "STREAMING")) or (
            event == "RESENT" and self.state == "RESUMING"
        ):
            state = "RESUMING"
        self._enter(event, state)
        if self.mover is not None and self.handle is not None and (step.observed or step.merges):
            self.mover.running[self.ticket.id] = self.handle
        self._ask(step)

    def _send_beside(self, step: Step) -> None:
        self.side = step
        self._ask(step)

    def _ask(self, step: Step) -> None:
        refill, decision = step.engine.refill, self.decision
        if refill is not None and step.refills:
            on_gpu = decision.predicted_cached_tokens - decision.predicted_tier_tokens
            unknown = decision.prompt_tokens - on_gpu
            step.body = refill.body(self.client_request.path, step.body, unknown)
        self._acts.append(step)

    def _resend(self, engine: Engine, now: float) -> None:
        """Sends the open segment to its engine again, without the KV transfer."""
        self._drop_attempts()
        self._send_segment(engine, now, "RESENT")

    def _next_segment(self, prompt: int | None, cached: int | None, now: float, event: Event) -> None:
        """Ends the open segment and starts the next."""
        source = self.ticket.instance
        try:
            following = self.ticket.segment_done(prompt_tokens=prompt, cached_tokens=cached)
        except NoInstanceError as error:
            self._finish(event, "engine_error", self.pool.no_engine_error(error))
            return
        assert following is not None  # another segment follows
        if following != source:
            self._note("handoff", source, following, "placed", now)
        self._start_segment(following, now, event)

    def _note(
        self, kind: Kind, source: str | None, target: str, outcome: str, now: float, *more: Any
    ) -> None:
        """Adds an event to the model's activity. `more`: tokens and seconds."""
        tenant = self.client_request.tenant
        self.pool.activity.note(now, kind, self.decision.id, tenant, source, target, outcome, *more)

    # -- prefix fetch ------------------------------------------------------------------------------

    def _fetch_answered(self, fetch: PrefixFetch, attempt: Attempt, now: float) -> None:
        if (status := attempt.reader.status) != 200:
            if status >= 500:
                self._blame(attempt.step.engine, _kind(status), f"status {status}")
            outcome = "refused"
        else:
            fetch.kv.accept(attempt.step.engine, bytes(attempt.answer), fetch.tokens, now)
            outcome = "fetched" if fetch.kv.available else "missing"
        self._fetched(fetch, outcome, now)

    def _fetched(self, fetch: PrefixFetch, outcome: str, now: float) -> None:
        """Ends the prefix fetch and sends the request to its engine."""
        self._acts.append(Wake(None))
        self.side = None
        self._fetch_over(fetch, outcome, now)
        if fetch.target.pool is self.pool:
            self._send_segment(fetch.target, now, "FETCHED")
        else:
            self._retry(fetch.target, "refused", "it was removed", now)

    def _fetch_over(self, fetch: PrefixFetch, outcome: str, now: float) -> None:
        """Reports the result of the prefix fetch to the core router."""
        self.fetch = None
        came = fetch.tokens - fetch.from_token if outcome == "fetched" else 0
        # No engine reports its transfer time, so that is configured; the time until now is
        # measured.
        seconds = now - fetch.began + came * self.pool.transfer_seconds_per_token
        self.ticket.fetched(came, seconds, now)
        self.kv = None
        if came:
            self.kv = fetch.kv
            self.kv.tokens = fetch.tokens
        self.pool.fetch_outcomes[outcome] += 1
        holder = fetch.holder.name if fetch.holder else None
        self._note("fetch", holder, fetch.target.name, outcome, now, came, seconds)
        if not came:
            log.debug("no prefix was fetched", model=self.pool.name, holder=holder, why=outcome)

    # -- hedging -----------------------------------------------------------------------------------

    def _send_hedge(self, hedge: Hedge, now: float) -> None:
        """Sends the request to a second engine: no token has come in time."""
        main, self.hedge = self.main, None
        if main is None or self.stalled_at:
            return
        self.tried_engines = (main.engine.name,)
        step = hedge.send(self, now)
        if step is not None:
            self.hedge = hedge
            self.tried_engines += (step.engine.name,)
            self._acts.append(step)

    def _hedge_ready(self, attempt: Attempt, now: float, flags: int) -> None:
        """Takes the second engine's answer if it begins well."""
        step, reader = attempt.step, attempt.reader
        if reader.status == 200 and reader.event_stream and not flags & (ENGINE_ERROR | INCOMPLETE):
            self._acts.append("cancel_main")
            self.ticket.failed("cancelled", retry=False)
            self._promote_hedge()
            self._ready(attempt, now, flags)
            return
        code, reason = reader.status, f"status {reader.status}"
        if code == 200 and not reader.event_stream:
            code, reason = 400, why_no_stream(reader)
        elif code == 200:
            code, reason = reader.error_code or 500, "the stream ended with an error before a token"
        if code in SATURATED and (seconds := retry_after_seconds(reader.head_lines)):
            self.pool.saturated(step.engine, seconds)
        self._acts.append("cancel_hedge")
        # An engine is not to blame for a status below 500.
        self._hedge_failed(attempt, now, (_kind(code) if code >= 500 else "saturated", reason))

    def _hedge_failed(self, attempt: Attempt, now: float, detail: tuple[str, str]) -> None:
        kind, reason = detail
        kind = "reset" if kind == "engine_error" else kind
        self._add_failure(attempt.step.engine, kind, reason, now)
        self._end_hedge("failed", kind)

    def _take_over(self, engine: Engine, kind: str, reason: str, now: float) -> None:
        """Continues with the hedge, because the first engine has failed."""
        self._add_failure(engine, kind, reason, now)
        self.ticket.failed(CORE_KINDS.get(kind, kind), retry=False)
        self._promote_hedge()
        self._enter("FAILED", "AWAITING")

    def _promote_hedge(self) -> None:
        """Makes the hedge the only attempt of the request."""
        hedge, self.hedge = self.hedge, None
        assert hedge is not None
        self.ticket, self.decision, self.main = hedge.ticket, hedge.decision, hedge.step
        self.pool.hedging.outcomes["won"] += 1
        self._acts.append("promote_hedge")

    def _end_hedge(self, outcome: Outcome, kind: str = "cancelled") -> None:
        """Ends the hedge. `kind`: the kind of failure for its ticket."""
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return
        if hedge.step is None:
            self._acts.append(Wake(None))
            return
        hedge.ticket.failed(CORE_KINDS.get(kind, kind), retry=False)
        self.pool.hedging.outcomes[outcome] += 1
        if outcome != "failed":
            self._acts.append("cancel_hedge")

    # -- answers for the router --------------------------------------------------------------------

    def _answered(self, attempt: Attempt, now: float) -> None:
        """Handles a whole answer for the router."""
        step, engine, body = attempt.step, attempt.step.engine, bytes(attempt.answer)
        if attempt.reader.status != 200:
            self._refused(attempt, now)
        elif step.checks_prompt and (why := self._answer_differs(body)):
            self._discard_transfer(engine, why)
            self._resend(engine, now)
        else:
            self._segment_answered(attempt, body, now)

    def _segment_answered(self, attempt: Attempt, body: bytes, now: float) -> None:
        step, engine, reader = attempt.step, attempt.step.engine, attempt.reader
        kv, delta = self.transfer(), None
        kv.begin(engine)
        kv.tokens = step.ends_at - step.keeps_last if step.ends_at else WHOLE_PROMPT
        transcript = self.transcript
        told_tokens: int | None = None
        if step.ends_at and transcript is not None:
            # If the engine tokenized the prompt itself, its token count is not checked.
            counted = step.ends_at != len(transcript.prompt)
            if step.ends_at > len(transcript.prompt):
                try:
                    answer = object_of(body)
                    transcript.cached = cached_of(answer) or transcript.cached
                    delta = transcript.take(answer, step.tokens, whole=step.keeps_last)
                except MergeError as error:
                    if not self._disable_merging(engine, error, now):
                        return
            if delta is not None and delta.finish is not None:
                self._end_merged(delta, now, "ANSWERED", ended=True)
                return
            tokens = min(step.ends_at, len(transcript.prompt) + len(transcript.output_ids)) - step.keeps_last
            told_tokens = tokens if counted else None
        if not self.unmergeable and (not step.ends_at or engine.connector is not None):
            kv.accept(engine, body, told_tokens, now)
        if delta is not None:
            self._write_delta(delta, now)
            if transcript is not None and len(delta.ids) == len(transcript.output_ids) == 1:
                self.ticket.first_token(now)
        self._next_segment(reader.prompt_tokens, reader.cached_tokens, now, "ANSWERED")

    def _paired_prefill_ended(self, attempt: Attempt, now: float) -> None:
        """Handles the answer of the first of two steps that run at once."""
        if self.committed:
            return  # the client's answer has begun
        if attempt.reader.status != 200:
            self._refused(attempt, now)
        elif self.ticket.has_next:  # false for a repeated prefill, for another decode engine
            reader = attempt.reader
            self._next_segment(reader.prompt_tokens, reader.cached_tokens, now, "ANSWERED")

    def _second_begins(self, step: Step, now: float) -> bool:
        """Handles the start of the second step's answer, which also ends the first step.

        Returns whether the answer is usable: the core router may have chosen another engine, or
        none.
        """
        if self.ticket.has_next:
            self._next_segment(None, None, now, "ANSWERED")
        return self.main is step

    def _disable_merging(self, engine: Engine, error: MergeError, now: float) -> bool:
        """Handles a segment whose answer cannot be merged.

        Returns whether the next engine shall compute the whole answer. It cannot if the client has
        a part of the answer, or if the engine failed.
        """
        if self.committed:
            self._resume(engine, "reset", str(error), now)
        elif error.failed:
            self._retry(engine, "reset", str(error), now)
        else:
            self.unmergeable = True
            self._stop_moving()
            if self.migration is not None:
                self._cancel_migration("not_joinable")
            self.pool.not_joinable(self.client_request.path, f"{engine.name}: {error}")
        return self.unmergeable

    def _answer_differs(self, body: bytes) -> str | None:
        try:
            return other_tokens(self.prompt, object_of(body).get("prompt_token_ids"))
        except MergeError as error:
            return str(error)

    def _discard_transfer(self, engine: Engine, why: str) -> None:
        """Marks the KV transfer as unusable: it is the cache of another prompt."""
        self.pool.not_joinable(self.client_request.path, f"{engine.name}: {why}")
        kv = self.transfer()
        kv.useless("other_tokens", why)
        kv.tokens = 0

    # -- answers for the client --------------------------------------------------------------------

    def _commit(self, attempt: Attempt, status: int) -> None:
        """Forwards an engine's answer to the client from now on."""
        self._enter("READY", "STREAMING")
        if self.hedge is not None:
            self._end_hedge("lost")
        self.committed = self.has_tokens = True
        self.status = status
        self.body = b""
        self.first = None
        self.answered = attempt
        self.observing = None
        if attempt.step.observed and self.observed:
            # The reader records the tokens that pass. The prompt's fields are no longer needed.
            self.merged().forget_prompt()
            self.observing = attempt
        elif self.resumes and status == 200:
            self.pool.not_resumable["engine"] += 1
        self.call = None
        self._acts.append(COMMIT)

    def _passed(self, attempt: Attempt) -> None:
        """Handles the end of a forwarded answer."""
        if attempt.error or self.status >= 400 or attempt.reader.aborted:
            self._finish("ENDED", "engine_error")
            return
        attempt.reader.finish_ticket()
        self._finish("ENDED")

    def _whole(self, attempt: Attempt, now: float) -> None:
        """Handles the end of an answer for the client that was not forwarded."""
        step, engine = attempt.step, attempt.step.engine
        if attempt.reader.status != 200:
            self._refused(attempt, now)
        elif step.reader == "events":
            self._end_merged(None, now, "ENDED", ended=False)
        elif step.merges:
            try:
                delta = self.merged().take(object_of(bytes(attempt.answer)), UNBOUNDED)
            except MergeError as error:
                self._retry(engine, "reset", str(error), now)
            else:
                self._end_merged(delta, now, "ENDED", ended=False)
        else:
            self._forward(attempt, now)

    def _forward(self, attempt: Attempt, now: float) -> None:
        """Sends a whole answer to the client, without fields that only the router requested."""
        step, engine = attempt.step, attempt.step.engine
        try:
            answer = orjson.loads(attempt.answer)
            choices = answer["choices"]
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            self._retry(engine, "reset", f"its answer has no choices: {error}", now)
            return
        if attempt.reader.aborted:
            self._retry(engine, "reset", "its answer was aborted", now)
        elif step.checks_prompt and (why := other_tokens(self.prompt, answer.get("prompt_token_ids"))):
            self._discard_transfer(engine, why)
            self._resend(engine, now)
        else:
            self.answered = attempt
            body = own_request.stripped(answer, choices, step.hides_ids)
            self._begin(b"application/json", len(body), engine.name)
            self._acts.append(Write(body, last=True))
            attempt.reader.finish_ticket()
            self._finish("ENDED")

    def _take_event(self, step: Step, data: bytes, now: float) -> None:
        """Handles an event of a merged stream. Raises MergeError."""
        try:
            event: dict[str, Any] = orjson.loads(data)
            if "error" in event:
                said = (event["error"] or {}).get("message", "an error without a message")
                self._drop_and_fail(step, "engine_error", str(said), now)
                return
            choices = event["choices"]
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise MergeError(f"an event of the stream is not a completion's: {error}") from None
        for choice in choices:
            finish = choice.get("finish_reason")
            if finish in ("abort", "error"):
                self._drop_and_fail(step, "engine_error", f"it ended with finish_reason {finish}", now)
                return
        for choice in choices:
            delta = self.merged().more(choice)
            if not self.has_tokens:
                self.has_tokens = True
                self._enter("READY", "STREAMING")
                if self._verdicts is not None:
                    self._prove()
            self._write_delta(delta, now)
            if self.merged().stopped:
                self._end_merged(None, now, "ENDED", ended=False)
                return

    def _write_delta(self, delta: Delta, now: float, engine: str | None = None) -> None:
        """Sends new text to a streaming client. `engine`: the name for the head of a new answer."""
        if not self.stream:
            return
        transcript = self.merged()
        opening = b"" if self.committed else transcript.opening()
        self._begin_stream(engine)
        if delta.ids and transcript.first_token_at is None:
            transcript.first_token_at = now
        self._acts.append(Write(opening + transcript.chunk(delta)))

    def _begin_stream(self, engine: str | None = None) -> None:
        if not self.committed:
            self._begin(b"text/event-stream; charset=utf-8", None, engine or self.answering_engine_name)

    def _begin(self, kind: bytes, length: int | None, engine: str) -> None:
        self.committed = True
        self.status = 200
        self.body = b""
        self.first = None
        self._acts.append(Begin(kind, length, engine))

    def _end_merged(self, delta: Delta | None, now: float, event: Event, *, ended: bool) -> None:
        """Ends the merged answer.

        `ended`: it ended inside its open segment, before the planned end.
        """
        transcript = self.merged()
        engine = self.ticket.instance if ended else self.answering_engine_name
        if self.stream:
            if delta is not None:
                self._write_delta(delta, now, engine)
            self._begin_stream(engine)
            self._acts.append(Write(transcript.closing(), last=True))
        else:
            assert delta is not None
            answer = transcript.answer(delta)
            self._begin(b"application/json", len(answer), engine)
            self._acts.append(Write(answer, last=True))
        close = self.ticket.done if ended else self.ticket.segment_done
        close(prompt_tokens=len(transcript.prompt), output_tokens=len(transcript.output_ids))
        self._finish(event)

    # -- migration ---------------------------------------------------------------------------------

    def _migrate(self, target: Engine, now: float) -> bool:
        mover = self.mover
        assert mover is not None  # the rebalancer calls this
        if self.state != "STREAMING":
            return self._count("not_movable")
        migration, transcript = Migration(self, mover, target), self.merged()
        try:
            self._observe()
            if transcript.over:
                return self._count("ended")
            if target.runs_halves_at_once:
                return self._count("not_movable")  # it serves only second segments
            if migration.gap_too_long():
                return self._count("long_gap")
            transcript.catch_up()
            self.ticket.begin_migration(target.name, recompute=migration.recomputes)
        except MergeError as error:
            self.pool.not_joinable(self.client_request.path, str(error))
            return self._count("not_joinable")
        except TicketError as error:
            log.debug("cannot move", model=self.pool.name, reason=str(error))
            return self._count("not_movable")
        self.migration = migration
        mover.moves.add(migration)
        if not migration.ahead:
            return self._switch_over(target, migration.kv, now, "MOVED")
        self._send_beside(migration.hold() if migration.fetches else migration.warm(now))
        return True

    def _migration_answered(self, migration: Migration, attempt: Attempt, now: float) -> None:
        """Handles an engine's answer to a step of a migration."""
        engine, status = attempt.step.engine, attempt.reader.status
        if migration.phase == "holding":
            if status == 200:
                migration.kv.accept(engine, bytes(attempt.answer), migration.sent_tokens, now)
            else:
                migration.kv.recompute("missing", f"status {status}")
            self._send_beside(migration.warm(now))
        elif (
            status != 200
            and (status not in self.rules.statuses or status in TRANSFER_STATUSES)
            and migration.kv.broke(status, None)
        ):
            self._send_beside(migration.warm(now))
        elif status != 200:
            if status >= 500:
                self._blame(engine, _kind(status), f"status {status}")
            self._cancel_migration("target_refused")
        else:
            try:
                self._observe()
            except MergeError as error:
                self.pool.not_joinable(self.client_request.path, str(error))
                self._cancel_migration("not_joinable")
                return
            cached = attempt.reader.cached_tokens or 0
            if migration.left_seconds(cached, now - attempt.started) > migration.mover.max_gap_seconds:
                self._cancel_migration("long_gap")
            else:
                self._switch_over(migration.target, migration.kv, now, "MOVED")

    def _migration_failed(
        self, migration: Migration, engine: Engine, kind: str, reason: str, now: float
    ) -> None:
        """Handles a failed step of a migration. A running stream continues."""
        self._blame(engine, kind, reason)
        if migration.phase == "holding":
            migration.kv.recompute("missing", reason)
            self._send_beside(migration.warm(now))
        else:
            self._cancel_migration("target_failed")

    def _observe(self) -> None:
        """Reads the recorded tokens of the forwarded stream. Raises MergeError."""
        if self.observing is not None:
            self.merged().observe(self.observing.reader)

    def _switch_over(
        self, target: Engine, kv: KvTransfer | None, now: float, event: Event, outcome: str = "migrated"
    ) -> bool:
        """Stops the running attempts and continues the request on another engine.

        Returns whether it did so, or the request has ended. `kv`: the transfer to that engine.
        """
        transcript = self.merged()
        try:
            self._observe()
            if transcript.over:
                return self._cancel_migration("ended")
            gone = target.pool is not self.pool or not target.in_service or target.held
            if gone or target.runs_halves_at_once:
                return self._cancel_migration("target_gone")
            transcript.catch_up()
        except MergeError as error:
            self.pool.not_joinable(self.client_request.path, str(error))
            return self._cancel_migration("not_joinable")
        self._end_migration()
        self._drop_attempts()
        if self.answered is not None:
            # From now on, the router writes the answer.
            transcript.first_token_at = self.answered.reader.first_token_at
            self.answered = self.observing = None
        self.kv = kv if kv is not None and kv.available else None
        if self.kv is not None:
            self.kv.tokens = self.total
        source = self.ticket.instance
        try:
            following = self.ticket.migrated()
        except NoInstanceError as error:
            self._count("no_instance")
            self._finish(event, "engine_error", self.pool.no_engine_error(error))
            return True
        self._start_segment(following, now, event)
        self._count(outcome)
        if outcome == "migrated":
            self._note("migration", source, following, outcome, now, self.total)
        return True

    def _switch_now(self, target: Engine, now: float) -> bool:
        """Continues on the target at once, because the source has failed.

        Returns whether it could.
        """
        if self.migration is not None:
            self.migration.kv.forget("source_failed", "the engine that computed the tokens has failed")
        self._end_migration()
        try:
            self.ticket.cancel_migration()
            self.ticket.begin_migration(target.name, recompute=True)
        except TicketError:
            return self._count("not_movable")
        except UnknownNameError:  # removed since the migration began
            return self._count("target_gone")
        return self._switch_over(target, None, now, "FAILED", "source_failed")

    def _cancel_migration(self, outcome: str) -> bool:
        """Cancels a migration; the source continues. Returns False."""
        self._end_migration()
        if self.ticket.open:
            self.ticket.cancel_migration()
        return self._count(outcome)

    def _end_migration(self) -> None:
        migration, self.migration = self.migration, None
        if migration is not None:
            migration.mover.moves.discard(migration)
        if self.side is not None:
            self.side = None
            self._acts.append("cancel_side")

    def _stop_moving(self) -> None:
        """Hides the request from the rebalancer."""
        if self.mover is not None:
            self.mover.running.pop(self.ticket.id, None)

    def _count(self, outcome: str) -> bool:
        """Counts the outcome of a migration. Returns False, because most callers report no move.

        Without a rebalancer, only `Pool.failovers` counts.
        """
        if self.mover is not None:
            self.mover.outcomes[outcome] += 1
        return False

    # -- failures ----------------------------------------------------------------------------------

    def _drop_and_fail(self, step: Step, kind: str, reason: str, now: float) -> None:
        """Cancels the main attempt and handles its failure."""
        self._acts.append("cancel_main")
        self._failed(step.engine, kind, reason, now)

    def _failed(self, engine: Engine, kind: str, reason: str, now: float) -> None:
        """Handles a failed attempt of the open segment."""
        self.main = None
        if self.has_tokens:
            self._resume(engine, kind, reason, now)
        elif self.hedge is not None and self.hedge.step is not None:
            self._take_over(engine, "reset" if kind == "engine_error" else kind, reason, now)
        else:
            self._retry(engine, "reset" if kind == "engine_error" else kind, reason, now)

    def _retry(self, engine: Engine, kind: str, reason: str, now: float) -> None:
        """Sends an open segment without tokens to the next engine, or gives up if none is left."""
        self._abandon()
        if self._record(engine, kind, reason, now):
            following = failover.next_engine(self, engine, kind)
            if following is not None:
                self.pool.retried[CORE_KINDS.get(kind, kind)] += 1
                self._note("retry", engine.name, following, kind, now)
                self._start_segment(following, now, "FAILED")
                return
        self._give_up(engine, kind, reason)

    def _resume(self, engine: Engine, kind: str, reason: str, now: float) -> None:
        """Continues on another engine after a failure after the first token."""
        allowed = self._record(engine, "reset" if kind == "engine_error" else kind, reason, now)
        outcome = self._continued(now) if allowed else "not_retried"
        self.pool.failovers[outcome] += 1
        if outcome == "continued":
            self.pool.retried["reset" if kind == "engine_error" else CORE_KINDS.get(kind, kind)] += 1
        self._note("failover", engine.name, self.ticket.instance, outcome, now)
        if outcome not in ("continued", "complete"):
            self._give_up(engine, kind, reason)

    def _continued(self, now: float) -> failover.Outcome:
        """Continues on the target of a running migration, or on the core router's choice.

        Returns the outcome; the client's answer is over unless the stream continues.
        """
        if why := failover.obstacle(self, self.observing):
            return why
        transcript, migration = self.merged(), self.migration
        try:
            self._observe()
            if transcript.over:
                self._end_complete()
                return "complete"
            transcript.catch_up()
        except MergeError as error:
            self.pool.not_joinable(self.client_request.path, str(error))
            self._count("not_joinable")
            return "not_mergeable"
        other = failover.elsewhere(self)
        for target in (migration.target if migration is not None else None, other):
            if target is None or not failover.can_continue(self, target):
                continue
            if self._switch_now(target, now):
                return "continued"
        return "no_engine"

    def _end_complete(self) -> None:
        """Ends a stream whose engine failed after the last token: only the end mark is missing."""
        transcript, answered = self.merged(), self.answered
        usage_sent = self.observing is not None and self.observing.reader.observed_usage
        self._acts.append(Write(transcript.closing(usage=not usage_sent), last=True))
        if answered is not None:
            answered.reader.finish_ticket()
        else:
            self.ticket.segment_done(
                prompt_tokens=len(transcript.prompt), output_tokens=len(transcript.output_ids)
            )
        self._finish("FAILED")

    def _record(self, engine: Engine, kind: str, reason: str, now: float) -> bool:
        """Records a failed attempt. Returns whether another attempt is allowed."""
        self.reason = reason
        lost = self._add_failure(engine, kind, reason, now)
        if self._verdicts is not None and self._verdicts.final:
            return False  # perhaps the request is the cause
        if CORE_KINDS.get(kind, kind) not in self.rules.failures or len(self._tried) >= self.rules.attempts:
            return False
        self._over_budget = not self.pool.retry_budget.allows(self.pool.requests, lost, now)
        return not self._over_budget

    def _add_failure(self, engine: Engine, kind: str, reason: str, now: float) -> bool:
        """Records a failed attempt for the verdict. Returns whether its engine is lost."""
        self._tried += (f"{engine.name}: {reason}",)
        if kind in NOT_ACCEPTED:
            if kind not in HEALTHY_KINDS:
                engine.failed(kind, reason)
            return kind == "refused"
        if self._verdicts is None:
            self._verdicts = Verdicts(self.pool, self.client_request.client_key)
        self._verdicts.add(Failure(engine, kind, reason, self.known_tokens))
        return (kind == "reset" and engine.breaks.add(now)) or engine.lost

    def _blame(self, engine: Engine, kind: str, reason: str) -> None:
        """Records a failure of a step that no other engine repeats."""
        if kind not in NOT_ACCEPTED:
            self.pool.blame(engine, self.client_request.client_key, reason, proven=False)
        elif kind not in HEALTHY_KINDS:
            engine.failed(kind, reason)

    def _prove(self) -> None:
        """Blames engines that failed before a token: another engine has produced one."""
        if self._verdicts is not None and self._verdicts.only_before_tokens:
            self._verdicts.succeeded()

    @property
    def known_tokens(self) -> int:
        """The number of its known answer tokens."""
        if self.observing is not None:
            return self.observing.reader.observed_tokens
        return len(self.transcript.output_ids) if self.transcript is not None else 0

    def _declined(self, attempt: Attempt, status: int, *, whole: bool) -> None:
        """Keeps an engine's error answer, for the client if no other engine answers.

        A full engine gets no new requests for the time of its Retry-After.
        """
        self._refusal = self._refusal_of(attempt) if whole else None
        if status in SATURATED and (seconds := retry_after_seconds(attempt.reader.head_lines)):
            self._retry_after = max(self._retry_after, min(seconds, MAX_RETRY_AFTER_SECONDS))
            self.pool.saturated(attempt.step.engine, seconds)

    def _lacks_model(self, attempt: Attempt) -> bool:
        """Whether a 404 says that the engine does not serve the model that the router lists for it.

        vLLM: "The model `NAME` does not exist.", "LoRA adapter NAME does not exist". If so, the
        engine is asked for its models again.
        """
        name = self.client_request.model
        words = attempt.step.engine.adapter.error(bytes(attempt.answer) or attempt.reader.held)
        if name is None or name not in words or not ("model" in words or "adapter" in words):
            return False
        self.pool.look_again(attempt.step.engine)
        return True

    def _refused(self, attempt: Attempt, now: float) -> None:
        """Handles an engine's error answer."""
        engine, status = attempt.step.engine, attempt.reader.status
        if status == 404 and not self.committed and self._lacks_model(attempt):
            self._declined(attempt, status, whole=True)
            self._retry(engine, "not_served", f"status 404{attempt.error_words()}", now)
            return
        retried = status in self.rules.statuses
        reason = f"status {status}{attempt.error_words()}"
        transfer = not retried or status in TRANSFER_STATUSES
        if transfer and attempt.step.carries_kv and self.transfer().broke(status, None):
            self._resend(engine, now)
            return
        if retried:
            self._declined(attempt, status, whole=True)
        if retried and self.has_tokens:
            self._failed(engine, _kind(status), reason, now)
        elif retried or self.committed:
            self._retry(engine, _kind(status), reason, now)
        else:
            self._pass_refusal(attempt)

    def _refusal_of(self, attempt: Attempt) -> EngineRefusal:
        """Returns an engine's whole error answer."""
        engine, lines = attempt.step.engine.name, attempt.reader.head_lines
        if self.client_request.cors:
            lines = without_cors(lines)
        return EngineRefusal(attempt.reader.status, lines, bytes(attempt.answer), engine)

    def _pass_refusal(self, attempt: Attempt) -> None:
        """Ends the request with an engine's error answer."""
        self._end_refused(self._refusal_of(attempt), attempt.error_words())

    def _end_refused(self, refusal: EngineRefusal, words: str, failure: str = "engine_error") -> None:
        """Ends the request with an engine's error answer. In an opened stream it must be JSON."""
        error: ApiError = refusal
        refusal.headers["x-lmetric-decision"] = self.label
        if self.rules.show_engines:
            refusal.headers["x-lmetric-instance"] = refusal.engine
        if self.client_request.opened and not _is_object(refusal.body()):
            said = f"the engine refused the request with status {refusal.status}{words}"
            error = ApiError(refusal.status, said, engines=refusal.engine)
        self._finish("FAILED", failure, error)

    def _give_up(self, engine: Engine, kind: str, reason: str) -> None:
        """Ends the request with an error, because no engine is left, or none may be tried."""
        self.reason = reason
        if self.committed:
            broke, why = "the engine failed in the middle of its answer", self.client_request.not_resumable
            stays = "" if why is None else f"; no other engine can continue it: {why.why}"
            code = CORE_KINDS.get(kind, kind)
            error = ApiError(502, broke, engines=f"{engine.name}: {reason}{stays}", code=code)
            if self._withheld:
                error = EngineRefusal(502, b"", self._withheld, engine.name)
            self._finish("FAILED", kind, error)
            return
        headers = {"x-lmetric-decision": self.label}
        suspect = self._verdicts is not None and self._verdicts.suspect
        refusal = self._refusal
        if refusal is not None and (kind in ("status", "not_served") or refusal.status in SATURATED):
            if refusal.status in SATURATED:
                refusal.wait(self._wait_seconds())
            self._end_refused(refusal, f": {reason}", kind)
            return
        code, tried = CORE_KINDS.get(kind, kind), "; ".join(self._tried)
        status = 503 if self._over_budget else STATUSES[code]
        if status == 503 and not suspect:
            headers["retry-after"] = str(self._wait_seconds())
        if suspect:
            message = "the request failed on two engines in the same way, and is not tried again"
            error = ApiError(502, message, engines=tried, code="failed_twice", headers=headers)
            if kind == "timeout":
                error.status, error.code = status, code
        elif self._over_budget:
            message = "the engine failed, and the retry budget is used up"
            error = ApiError(503, message, engines=tried, code="retry_budget", headers=headers)
        else:
            message = "no engine could answer"
            if kind == "resources":
                message = "the router cannot open a connection to an engine"
            error = ApiError(status, message, engines=tried, code=code, headers=headers)
        self._finish("FAILED", kind, error)

    def _wait_seconds(self) -> int:
        """Returns the client's Retry-After: the engines' longest, else 1 to 3 s.

        It differs between clients, so that they do not return all at once.
        """
        return self._retry_after or 1 + self.decision.id % 3

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        if self.state == "DONE":
            return
        self.reason = reason
        self.close_client = True
        self._finish("ABORTED", "cancelled", error)

    def _finish(self, event: Event, failure: str | None = None, error: ApiError | None = None) -> None:
        """Ends the request, once: closes all attempts and an open ticket.

        `failure`: the failure kind for an open ticket. `error`: for the client, as the end of a
        started answer or as its whole answer.
        """
        self._enter(event, "DONE")
        if failure is None and error is None and event != "ABORTED":
            self.reason = ""  # another engine has answered
        if error is not None and self.committed:
            self._acts.append(BreakOff(error))
            error = None
        if self.main or self.side or self.mover or self.fetch or self.hedge:
            self._abandon()
        if failure is not None and self.ticket.open:
            self.ticket.failed(CORE_KINDS.get(failure, failure), retry=False)
        if self._verdicts is not None:
            if failure is None and event != "ABORTED":
                self._verdicts.succeeded()
            else:
                self._verdicts.ended()
        self._acts.append(FINISH if error is None else Finish(error))

    def _abandon(self) -> None:
        """Cancels the attempts, the migration and the prefix fetch."""
        self._stop_moving()
        if self.hedge is not None:
            self._end_hedge("ended")
        if self.migration is not None:
            self._cancel_migration("ended")
        if self.fetch is not None:
            self.fetch = None
            self.pool.fetch_outcomes["ended"] += 1
            self._acts.append(Wake(None))
        self._drop_attempts()

    def _drop_attempts(self) -> None:
        if self.main is not None or self.side is not None:
            self.main = self.side = None
            self._acts.append("cancel")

    def _enter(self, event: Event, state: State) -> None:
        try:
            self.state = FOLLOWING[self.state][event][state]
        except KeyError:
            raise AssertionError(f"{event} in {self.state} does not lead to {state}") from None

    def _out(self) -> list[Act]:
        # `placed` and `attempt`, which every request calls, have this code inline.
        acts, self._acts = self._acts, []
        return acts


def _kind(status: int) -> str:
    """Returns the kind of failure that a status of `retries.statuses` means."""
    return "saturated" if status in SATURATED else "status"


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


_OF_MAIN: dict[AttemptEvent, Callable[..., None]] = {
    "sent": RequestExecution._sent,
    "comments": RequestExecution._comments,
    "ready": RequestExecution._ready,
    "events": RequestExecution._events,
    "unseen": RequestExecution._unseen,
    "ended": RequestExecution._ended,
    "failed": RequestExecution._main_failed,
    "stale": RequestExecution._stale,
}
_OF_SIDE: dict[AttemptEvent, Callable[..., None]] = {
    "sent": RequestExecution._sent,
    "ended": RequestExecution._side_ended,
    "failed": RequestExecution._side_failed,
    "stale": RequestExecution._side_stale,
}
_OF_HEDGE: dict[AttemptEvent, Callable[..., None]] = {
    "comments": RequestExecution._comments,
    "ready": RequestExecution._hedge_ready,
    "unseen": RequestExecution._unseen,
    "failed": RequestExecution._hedge_failed,
}
