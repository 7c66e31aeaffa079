"""One request as a machine without I/O: events in, actions out.

A generator (`run`) runs the request; its place in the code is the state. A migration has a second
one (`ways.move`), beside it. The class keeps the generators, gives each the events of its attempts,
and ends the request. It has no timer and no task: its subclass `Runner` carries out the actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from lmetric._core import Decision, Ticket
from lmetric.engines.handover import CHAT
from lmetric.server.api.eligibility import PARSED
from lmetric.server.api.errors import ApiError
from lmetric.server.execution import ways
from lmetric.server.execution.continuing import follow_gateway, switch
from lmetric.server.execution.exchange import FAILED, Intent, Rules, sse_comments
from lmetric.server.execution.failures import next_engine
from lmetric.server.execution.plan import (
    Act,
    Attempt,
    AttemptEvent,
    BreakOff,
    Comment,
    Ended,
    EngineLost,
    Finish,
    NoTransfer,
    OtherEngine,
    Step,
    SwitchTo,
    TimeIsUp,
    Way,
    Write,
    ticket_kind,
)
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.ways import chain, plain
from lmetric.server.fleet.engine import Engine

FINISH = Finish()

log = structlog.get_logger("lmetric.relay")


class Execution(Progress):
    """One request, from its decision to its end.

    Each event returns the resulting actions, in order. Only "abort_client" may follow `Finish`.
    """

    __slots__ = ()

    def __init__(self, rules: Rules, intent: Intent, routed: tuple[Decision, Ticket]) -> None:
        call, model = intent.call, intent.model
        Progress.__init__(self, rules, intent.client_request, model=model)
        self.decision, self.ticket = routed
        self.body = call.body
        self.stream = call.stream
        self.limit_seconds = rules.timeouts.first_byte if call.stream else rules.timeouts.answer
        if call.first is not None:
            self.first = call.first
        if call.media is not None and intent.client_request.gateway is None:
            self.media = call.media
            if call.images is not None:
                self.media.places = call.images.images
        if intent.client_request.gateway is None and not model.cuts:  # a gateway sends one copy
            self.hedge = intent.hedge
        if intent.moves or intent.fetches or intent.resumes:
            self.call = call
            self.chat = intent.client_request.head.path == CHAT
            self.encoder = model.tokenizers.current.encoder if model.tokenizers.current is not None else None
            if self.encoder is None:  # a held request may outlive the model's tokenizer
                self.unmergeable = intent.moves
            else:
                self.mover = model.mover if intent.moves and call.stream else None
                self.resumes = intent.resumes or self.mover is not None
        model.requests += 1
        self._run = run(self)

    # -- events of the router ----------------------------------------------------------------------

    def placed(self, now: float) -> list[Act]:
        """Starts the request at its first engine."""
        assert self._run is not None  # set when it was made
        self.now = now
        self._go(self._run.send, None)
        acts, self.acts = self.acts, []
        return acts

    def migrate(self, target: Engine, now: float) -> list[Act]:
        """Starts a migration for the rebalancer, if the request can move."""
        self.now = now
        self._migration_way = way = ways.move.move(self, target)
        self._go_migration(way.send, None)
        return self._out()

    def tick(self, now: float) -> list[Act]:
        """Ends the request at its time limits. Attempts have their own deadlines."""
        if self.done:
            return []
        self.now = now
        limits = self.rules.timeouts
        if reason := self.client_request.overdue(limits.request, now):
            # The engine did not fail.
            self._abort(reason, "timeout", ApiError(504, reason, code="timeout"))
        elif self.main is None and self.side is None and not self.encoding:
            log.error("a request was left without an engine", decision=self.label)
            self._abort("no engine worked on it", "engine_error", ApiError(500, FAILED))
        elif self.stalled_at and now - self.stalled_at > limits.slow_client:
            return [*self.leave("the client does not read"), "abort_client"]
        return self._out()

    def woken(self, now: float) -> list[Act]:
        """Handles the end of the timer that `Wake` has set."""
        if self.timed and self._run is not None:
            self.now = now
            self.timed = False
            self._go(self._run.throw, TimeIsUp())
        return self._out()

    # -- events of attempts ------------------------------------------------------------------------

    def attempt(self, event: AttemptEvent, attempt: Attempt, now: float, detail: Any = None) -> list[Act]:
        """Handles an event of an attempt."""
        step = attempt.step
        way: Way[Any] | None = self._run
        self.now = now
        go: Callable[[Callable[[Any], Step | None], Any], object] = self._go
        if step is self.main:
            if event in ENDS:
                self.main = None
        elif step is self.side:
            if event in ENDS:
                self.side = None
            if self.migration is not None:
                way, go = self._migration_way, self._go_migration
            elif self.committed and step.target is None:
                return []  # a prefill; the other engine has answered
        elif step not in self.encoding and (self.hedge is None or step is not self.hedge.step):
            return []  # a late event of a canceled attempt
        if way is None:
            return []
        if event == "ready" or event == "ended" or event == "events":
            go(way.send, (attempt, detail))
        elif event == "comments":
            self._comment(attempt, detail)
        elif event == "unseen":
            # The request can no longer move: its tokens are lost, or the engine parses them into
            # more than text.
            why = f"{attempt.step.engine.name}: {attempt.reader.unseen or PARSED}"
            self.model.not_joinable(self.client_request.head.path, why)
            self.stop_moving()
        elif event == "failed":
            kind, reason, words = detail
            if kind == "cancelled":  # perhaps by no fault of the engine
                return self.leave(reason)
            self.withheld = b""
            if attempt is self.observing and not attempt.reader.aborted:
                self.withheld = attempt.reader.withheld
            go(way.throw, step.lost(kind, reason, words))
        elif event == "elsewhere":
            go(way.throw, detail)
        else:
            assert step.kv is not None  # only steps that carry a KV transfer become stale
            step.kv.stale(late=detail)
            go(way.throw, NoTransfer())
        acts, self.acts = self.acts, []
        return acts

    def _comment(self, attempt: Attempt, comments: bytes) -> None:
        """Passes an engine's comments on to a client that waits for a token."""
        if self.client_request.gateway is not None:
            return  # the client has the engine's own bytes
        if self.committed:  # its engine failed, and this one continues
            self.acts.append(Write(sse_comments(comments)))
        else:
            self.acts.append(Comment(comments))

    # -- events of the client and the server -------------------------------------------------------

    def stall(self, slow: bool, now: float) -> list[Act]:
        """Handles a client that reads too slowly, or has caught up."""
        self.stalled_at = now if slow else 0.0
        self.acts.append("pause" if slow else "resume")
        return self._out()

    def leave(self, reason: str, error: ApiError | None = None) -> list[Act]:
        """Ends the request early, unless it has ended. `error`: for its client."""
        if not self.done:
            self.close_client = True
            self._abort(reason, "cancelled", error)
        return self._out()

    # -- the ways ----------------------------------------------------------------------------------

    def _go(self, resume: Callable[[Any], Step | None], heard: object) -> None:
        """Resumes the generator that runs the request."""
        try:
            step = resume(heard)
        except StopIteration:
            self.reason = ""  # another engine has answered
            self._finish(None, None)
        except Ended as end:
            self._finish(end.failure, end.error)
        else:
            if step is not None:
                self.send(step)

    def _go_migration(self, resume: Callable[[Any], Step | None], heard: object) -> None:
        """Resumes the way of the migration. At its end, the request may switch to its target."""
        try:
            step = resume(heard)
        except StopIteration as over:
            self._migration_way = None
            if over.value is not None and self._run is not None:
                self._go(self._run.throw, over.value)
        else:
            if step is not None:
                self.send(step)

    # -- the end -----------------------------------------------------------------------------------

    def _abort(self, reason: str, failure: str, error: ApiError | None) -> None:
        """Ends the request, whatever its way waits for."""
        self.reason = reason
        if self._run is not None:
            self._run.close()
        self._finish(failure, error)

    def _finish(self, failure: str | None, error: ApiError | None) -> None:
        """Ends the request, once: closes all attempts and an open ticket.

        `failure`: the failure kind for an open ticket. `error`: for the client, as the end of a
        started answer or as its whole answer.
        """
        self.done = True
        self._run = None
        self._migration_way = None
        if error is not None and self.committed:
            self.acts.append(BreakOff(error))
            error = None
        if self.timed:
            self.wake(None)
        if self.main or self.side or self.mover or self.hedge or self.encoding:
            self.abandon()
        if failure is not None and self.ticket.open:
            self.ticket.failed(ticket_kind(failure), retry=False)
        if self.verdicts is not None:
            if failure is None:
                self.verdicts.blame(proven=True)
            else:
                self.verdicts.ended()
        self.acts.append(FINISH if error is None else Finish(error))

    def _out(self) -> list[Act]:
        # `placed` and `attempt`, which every request calls, have this code inline.
        acts, self.acts = self.acts, []
        return acts

    def head_lines(self, engine: str) -> bytes:
        """Returns the router's own lines in the head of an answer.

        `engine`: the answering engine.
        """
        client_request, labels, decision = self.client_request, self.model.labels, self.decision.id
        head, tenant, limits = client_request.head, client_request.tenant, client_request.limit_lines
        if not self.rules.show_engines:
            lines = labels.answer_lines(head, decision, tenant)
        else:
            first = self.prefill_engine or (self.kv.source if self.kv is not None else None)
            prefill = None if first is None else first.name
            lines = labels.answer_lines(head, decision, tenant, engine, prefill)
        if (versions := self.model.request_weights.get(decision)) is not None:
            lines += b"x-lmetric-weights: %b\r\n" % versions[0].encode()  # with which the answer began
        return lines + limits if limits else lines


# Events after which nothing follows from an attempt.
ENDS = frozenset({"ended", "failed", "stale", "elsewhere"})


# -- the loop of the ways --------------------------------------------------------------------------


def run(p: Progress) -> Way[None]:
    """Runs a request from its decision to its end, on as many engines as that needs."""
    name: str | None = p.decision.instance
    way: Callable[[Progress, Engine], Way[str | None]] = _segment if p.model.cuts else plain.plain
    if p.hedge is not None:  # never with several segments
        way = p.hedge.way
    while name is not None:
        try:
            engine = p.model.engines[name]
            if p.media is not None:
                yield from ways.encode.encode(p, engine)
            name = yield from way(p, engine)
        except EngineLost as lost:
            name = next_engine(p, lost)
        except OtherEngine as other:
            name = follow_gateway(p, other)
        except SwitchTo as to:
            name = switch(p, to.kv)
        way = _segment


def _segment(p: Progress, engine: Engine) -> Way[str | None]:
    """Runs the open segment. Returns the engine of the next one; None: the answer is whole."""
    p.has_tokens = False
    if p.model.fetches_prefixes and not p.begun and p.ticket.fetch is not None:
        yield from ways.copy.fetch_prefix(p, engine)
    while True:
        if p.unmergeable and p.ticket.has_next:
            return p.next_segment()  # the last engine computes the whole answer
        if not p.ticket.from_token:
            p.prefill_engine = None
        try:
            return (yield from _way_of(p, engine)(p, engine))
        except NoTransfer:
            p.drop_attempts()  # again, without it


def _way_of(p: Progress, engine: Engine) -> Callable[[Progress, Engine], Way[str | None]]:
    """Returns the way in which an engine runs the open segment."""
    if p.ticket.has_next:
        # Only requests that may be cut have a call, or tokens of their answer.
        if p.transcript is None and (p.call is None or engine.role == "prefill"):
            return ways.pair.at_once if engine.runs_halves_at_once else ways.pair.prefill
        return ways.split.part
    if engine.runs_halves_at_once:
        return ways.pair.other_decode
    if p.begun and not p.unmergeable:
        return chain.rest if p.merged().parts is None else ways.parsed.rest
    return plain.plain
