"""One running request: its state, and what its ways can do. No I/O.

A way (`ways`) reads the state, and appends actions to `acts`. `execution` owns the ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmetric._core import Decision, NoInstanceError, Ticket, TokenEncoder
from lmetric.engines.handover import FirstSegment
from lmetric.server.api.errors import ApiError
from lmetric.server.api.refusal import EngineRefusal
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest, Rules, TokenUsage
from lmetric.server.execution.plan import (
    Act,
    Attempt,
    Begin,
    Cancel,
    Commit,
    Ended,
    Hedge,
    Migration,
    Step,
    SwitchTo,
    Wake,
    Way,
    Write,
    ended_by_order,
    ticket_kind,
)
from lmetric.server.execution.transcript import Delta, Transcript
from lmetric.server.fleet.activity import Kind
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.hedging import Outcome
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.verdicts import Verdicts

if TYPE_CHECKING:
    from lmetric.server.execution.trace import RequestTrace
    from lmetric.server.fleet.rebalancer import Rebalancer
    from lmetric.server.fleet.transfer import KvTransfer
    from lmetric.tokens.media import Media
    from lmetric.tokens.prompt import Tokens

OnEnd = Callable[[ClientRequest, InFlightRequest, ApiError | None], None]


@dataclass(slots=True, eq=False, repr=False)  # reading a default of a class costs as much as ten slots
class Progress(InFlightRequest):
    """One request: the client's request, its ticket, and the answers of its engines so far."""

    rules: Rules
    client_request: ClientRequest
    model: Model
    decision: Decision = field(init=False)
    ticket: Ticket = field(init=False)
    # The time limit of its client's answer: of a stream to its first byte, else to its end.
    limit_seconds: float = field(init=False)
    acts: list[Act] = field(default_factory=list)  # not carried out yet
    now: float = 0.0  # time of the present event, seconds on the monotonic clock
    main: Step | None = None  # runs the open segment
    side: Step | None = None  # beside it: a prefix fetch, a migration, or a prefill
    hedge: Hedge | None = None  # until a token came, or it has failed
    # Set if it may be split, move, continue after a failure, or get a prefix fetch; until a
    # transcript has its tokens.
    call: ParsedRequest | None = None
    first: FirstSegment | None = None  # the body for a prefill, once it is known
    body: bytes = b""  # as the client sent it, until a way commits to an answer
    stream: bool = False
    chat: bool = False  # engines render its prompt themselves
    encoder: TokenEncoder | None = None  # of the model's tokenizer
    mover: Rebalancer | None = None  # set if it may move
    migration: Migration | None = None
    resumes: bool = False  # after a failure, another engine may continue the answer
    timed: bool = False  # a timer is set
    transcript: Transcript | None = None  # set if several engines may give its answer
    unmergeable: bool = False  # engines' answers cannot be merged: one engine answers it
    media: Media | None = None  # to encode before the first engine gets the request
    encoding: Collection[Step] = ()  # steps that encode them, before `main`
    prefill_engine: Engine | None = None  # computes the prompt for another engine
    stalled_at: float = 0.0  # when the client became too slow; 0: it keeps up
    # The answer.
    kv: KvTransfer | None = None  # for the next step
    has_tokens: bool = False  # the answer of the open segment has begun to reach the client
    committed: bool = False  # the client has a part of an answer
    done: bool = False
    answered: Attempt | None = None  # the attempt that gives the client's whole answer
    status: int = 0
    usage: TokenUsage | None = None
    instance: str | None = None
    predicted_cached_tokens: int | None = None
    close_client: bool = False
    reason: str = ""
    trace: RequestTrace | None = None
    # Failures (`failures`).
    verdicts: Verdicts | None = None
    tried: tuple[str, ...] = ()
    tried_engines: tuple[str, ...] = ()  # engines with an attempt, once it is hedged
    gateway_tried: tuple[str, ...] = ()  # by its gateway; empty: as in the decision record
    refusal: EngineRefusal | None = None  # the last error answer of an engine, if it was whole
    retry_after: int = 0  # seconds, the longest Retry-After of engines that declined the request
    fails_over: bool = False  # an engine failed after its first token, and no other has continued
    over_budget: bool = False  # the retry budget forbade another attempt
    withheld: bytes = b""  # the error that ended the engine's stream; the client did not get it
    # Of `execution`: the ways that run the request and its migration.
    _run: Way[None] | None = None
    _migration_way: Way[SwitchTo | None] | None = None
    # Of `runner`.
    on_end: OnEnd | None = None  # None: it was called
    _attempts: dict[Step, Any] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None

    # -- what it is --------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The label of its routing decision."""
        return self.model.labels.label(self.decision.id, self.client_request.tenant)

    @property
    def observed(self) -> bool:
        """Whether the tokens of its stream must be recorded while they pass."""
        return self.resumes and self.stream and not self.unmergeable

    def continues_at(self, engine: Engine) -> bool:
        """Returns whether an engine reports token ids; with a rebalancer, whether it may."""
        reports = engine.capabilities.token_ids
        return self.mover is not None if reports is None else reports

    @property
    def begun(self) -> bool:
        """Whether some of its answer is known as tokens."""
        return self.transcript is not None and self.transcript.begun

    @property
    def request(self) -> Mapping[str, Any]:
        """The client's request; without the prompt once that is no longer needed."""
        if self.transcript is not None:
            return self.transcript.request
        assert self.call is not None  # set for all requests that use this
        return self.call.request

    @property
    def prompt(self) -> Tokens:
        """The tokens of the prompt."""
        if self.transcript is not None:
            return self.transcript.prompt
        assert self.call is not None
        return np.asarray(self.call.tokens, dtype=np.uint32)

    @property
    def total(self) -> int:
        """The number of tokens in the prompt and the answer so far; 0: not known."""
        if self.transcript is not None:
            return len(self.transcript.prompt) + len(self.transcript.output_ids)
        return len(self.call.tokens) if self.call is not None and self.call.tokens is not None else 0

    @property
    def observing(self) -> Attempt | None:
        """The attempt whose tokens are recorded as they pass to the client."""
        answered = self.answered
        return answered if answered is not None and answered.step.observed and self.observed else None

    @property
    def known_tokens(self) -> int:
        """The number of its known answer tokens."""
        if (observing := self.observing) is not None:
            return observing.reader.observed_tokens
        return len(self.transcript.output_ids) if self.transcript is not None else 0

    @property
    def inside(self) -> bool:
        """Whether the next step's KV transfer covers only a part of the prompt.

        Then its prompt must have the same tokens.
        """
        transferred = self.kv.tokens if self.kv is not None else 0
        return 0 < transferred < self.total and not self.begun

    @property
    def answering_engine_name(self) -> str:
        """The name of the engine that answers now, or next."""
        if self.main is not None and self.main.for_client:
            return self.main.engine.name
        if self.migration is not None:
            return self.ticket.instance
        return self.ticket.next_instance or self.ticket.instance

    def merged(self) -> Transcript:
        """Returns the merged answer; creates it on first use."""
        if self.transcript is None:
            call = self.call
            assert call is not None  # the request may be split or moved
            assert call.tokens is not None
            assert self.encoder is not None
            path, encoder = self.client_request.head.path, self.encoder
            self.transcript = Transcript(path, call.request, call.tokens, encoder=encoder)
            self.call = None
        return self.transcript

    # -- its segments ------------------------------------------------------------------------------

    def next_segment(self, prompt_tokens: int | None = None, cached_tokens: int | None = None) -> str:
        """Ends the open segment. Returns the engine of the next one. Raises Ended without one."""
        source = self.ticket.instance
        try:
            following = self.ticket.segment_done(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        except NoInstanceError as error:
            raise Ended(self.model.no_engine_error(error)) from None
        assert following is not None  # another segment follows
        if following != source:
            self.note("handoff", source, following, outcome="placed")
        return following

    def note(
        self, kind: Kind, source: str | None, target: str, *, outcome: str, moved: tuple[Any, ...] = ()
    ) -> None:
        """Adds an event to the model's activity. `moved`: tokens and seconds."""
        tenant = self.client_request.tenant
        event = self.now, kind, self.decision.id, tenant, source, target, outcome, *moved
        self.model.activity.note(*event)

    # -- its attempts ------------------------------------------------------------------------------

    def send(self, step: Step) -> None:
        """Starts an attempt.

        The rebalancer may then move a stream whose tokens are known. KV backfill changes the body.
        """
        refill = step.engine.refill if step.advances_ticket else None
        if step.side:
            self.side = step
        elif self.hedge is not None and step is self.hedge.step:
            refill = None  # its field depends on the first decision
        else:
            self.main = step
            if self.mover is not None and (step.merges or (step.observed and self.observed)):
                self.mover.running[self.ticket.id] = self
        if refill is not None:
            decision = self.decision
            on_gpu = decision.predicted_cached_tokens - decision.predicted_tier_tokens
            unknown = decision.prompt_tokens - on_gpu
            step.body = refill.body(self.client_request.head.path, step.body, unknown)
        self.acts.append(step)

    def own_step(
        self,
        engine: Engine,
        body: bytes,
        target: str | None = None,
        *,
        method: bytes = b"POST",
        side: bool = True,
        counted: bool = False,
        kv: KvTransfer | None = None,
    ) -> Step:
        """Returns a step for the router's own use.

        `target`: its path; None: the client's. `counted`: by the ticket. `kv`: what it fetches.
        """
        return Step(
            engine,
            body,
            "whole",
            limit_seconds=self.rules.timeouts.first_byte,
            target=None if target is None else target.encode(),
            method=method,
            side=side,
            for_client=False,
            advances_ticket=counted,
            kv=kv,
        )

    def drop_attempts(self) -> None:
        """Cancels the attempts of the open segment."""
        self.drop_main()
        self.drop_side()
        if self.encoding:
            self.acts.extend(map(Cancel, self.encoding))
            self.encoding = ()

    def drop_main(self) -> None:
        """Cancels the attempt that runs the open segment, if it still runs."""
        if self.main is not None:
            self.acts.append(Cancel(self.main))
            self.main = None

    def drop_side(self) -> None:
        """Cancels the attempt beside the open segment, if it still runs."""
        if self.side is not None:
            self.acts.append(Cancel(self.side))
            self.side = None

    def wake(self, seconds: float | None) -> None:
        """Sets the timer, after which the way gets `TimeIsUp`; None: stops it."""
        self.timed = seconds is not None
        self.acts.append(Wake(seconds))

    def end_hedge(self, outcome: Outcome, kind: str = "cancelled") -> None:
        """Ends the hedge. `kind`: the kind of failure for its ticket."""
        hedge, self.hedge = self.hedge, None
        if hedge is None:
            return
        if hedge.step is None:
            if self.timed:
                self.wake(None)
            return
        hedge.ticket.failed(ticket_kind(kind), retry=False)
        self.model.hedging.outcomes[outcome] += 1
        if outcome != "failed":
            self.acts.append(Cancel(hedge.step))

    def end_migration(self) -> None:
        """Ends the migration and its attempt."""
        migration, self.migration = self.migration, None
        if migration is not None and self.mover is not None:
            self.mover.moves.discard(migration)
        self.drop_side()

    def cancel_migration(self, outcome: str) -> None:
        """Ends the migration; the source continues."""
        self.end_migration()
        if self.ticket.open:
            self.ticket.cancel_migration()
        self.count_move(outcome)

    def abandon(self) -> None:
        """Cancels the attempts, the hedge and the migration."""
        self.stop_moving()
        if self.hedge is not None:
            self.end_hedge("ended")
        if self.migration is not None:
            self.cancel_migration("ended")
        self.drop_attempts()

    def move_to(self, target: Engine, now: float) -> None:
        """Starts a move to another engine, if the request can move."""
        raise NotImplementedError

    def stop_moving(self) -> None:
        """Hides the request from the rebalancer."""
        if self.mover is not None:
            self.mover.running.pop(self.ticket.id, None)

    def count_move(self, outcome: str) -> None:
        """Counts the outcome of a migration, if a rebalancer moves requests."""
        if self.mover is not None:
            self.mover.outcomes[outcome] += 1

    def observe(self) -> None:
        """Reads the recorded tokens of the forwarded stream. Raises MergeError."""
        if (observing := self.observing) is not None:
            self.merged().observe(observing.reader)

    # -- the client's answer -----------------------------------------------------------------------

    def accept(self, attempt: Attempt) -> None:
        """Records the version of the weights that gave a part of the client's answer."""
        if attempt.weights is not None:
            weights, decision = self.model.request_weights, self.decision.id
            versions = weights.get(decision, [])
            if attempt.weights not in versions:
                weights.keep(decision, [*versions, attempt.weights])

    def commit(self, attempt: Attempt) -> None:
        """Forwards an engine's answer to the client from now on."""
        if attempt.weights is not None:
            self.accept(attempt)
        self.committed = self.has_tokens = True
        self.status = attempt.reader.status
        body, self.body = self.body, b""
        self.first = None
        self.answered = attempt
        if self.resumes:
            if self.observing is not None:
                # The reader records the tokens that pass. The prompt's fields are no longer needed,
                # but an engine that parses needs the whole chat.
                transcript = self.merged()
                if self.chat and self.model.parses:
                    transcript.chat = body
                transcript.forget_prompt()
            elif self.status == 200:
                self.model.not_resumable["engine"] += 1
        self.call = None
        self.acts.append(Commit(attempt))

    def refused(self, engine: Engine) -> None:
        """Notes that an engine refused the prompt, and computed none of it."""
        decision = self.decision
        engine.refused_tokens += decision.prompt_tokens - decision.predicted_cached_tokens

    def write(self, delta: Delta, engine: str | None = None) -> None:
        """Sends new text to a streaming client. `engine`: the name for the head of a new answer."""
        if not self.stream:
            return
        transcript = self.merged()
        opening = b"" if self.committed else transcript.opening()
        self.begin_answer(engine)
        if delta.ids and transcript.first_token_at is None:
            transcript.first_token_at = self.now
        self.acts.append(Write(opening + transcript.chunk(delta)))

    def write_whole(self, body: bytes | bytearray, engine: str | None = None) -> None:
        """Sends the client's whole answer. `engine`: the name for its head."""
        self.begin_answer(engine, len(body))
        self.acts.append(Write(body, last=True))

    def begin_answer(self, engine: str | None = None, length: int | None = None) -> None:
        """Begins an answer of the router, unless it has begun. `length`: bytes; None: a stream."""
        if not self.committed:
            self.committed = True
            self.status = 200
            self.body = b""
            self.first = None
            self.acts.append(Begin(length, engine or self.answering_engine_name))

    def end_merged(self, delta: Delta | None = None, *, early: bool = False) -> None:
        """Ends the merged answer. `early`: inside its open segment, before the planned end.

        Raises Ended if its engine has aborted it by order.
        """
        transcript = self.merged()
        engine = self.ticket.instance if early else None
        if self.stream:
            if delta is not None:
                self.write(delta, engine)
            self.begin_answer(engine)
            self.acts.append(Write(transcript.closing(), last=True))
        else:
            assert delta is not None
            self.write_whole(transcript.answer(delta), engine)
        if delta is not None and delta.finish == "abort":
            raise ended_by_order()
        close = self.ticket.done if early else self.ticket.segment_done
        prompt_tokens, output_tokens = len(transcript.prompt), len(transcript.output_ids)
        close(prompt_tokens=prompt_tokens, output_tokens=output_tokens, finish_reason=transcript.finish)
