"""Carries out the actions of a request: attempts at engines, the client's answer, timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog

from lmetric.server.api.errors import ApiError
from lmetric.server.execution import request_log
from lmetric.server.execution.attempt import EngineAttempt
from lmetric.server.execution.exchange import FAILED, ClientRequest, InFlightRequest
from lmetric.server.execution.execution import ENDS, Execution
from lmetric.server.execution.observers import guarded
from lmetric.server.execution.plan import (
    Act,
    Action,
    AttemptEvent,
    Begin,
    BreakOff,
    Cancel,
    Comment,
    Commit,
    Finish,
    Step,
    Wake,
    Write,
)
from lmetric.server.fleet.engine import Engine

log = structlog.get_logger("lmetric.relay")


OnEnd = Callable[[ClientRequest, InFlightRequest, ApiError | None], None]


class Runner(InFlightRequest):
    """One request. After `start()`, callbacks advance it until it calls ``on_end``, once.

    ``on_end`` gets the request, the runner, and an ApiError if the client still needs one. By then
    its ticket is closed, if it has one, and no attempt runs.
    """

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, execution: Execution, on_end: OnEnd) -> None:
        self.execution = execution
        self._client_request = execution.client_request
        self._on_end = on_end
        self._finished = False
        self._attempts: dict[Step, EngineAttempt] = {}  # without those that have ended
        if execution.mover is not None:
            execution.handle = self

    def start(self, now: float) -> None:
        """Sends the request to the engine of the decision.

        If this raises, the caller must call `fail`.

        ``now``: time of the decision.
        """
        for act in self.execution.placed(now):
            _DO[act.__class__](self, act)

    # -- events in, actions out --------------------------------------------------------------------

    # No action causes an event with further actions: `go` reports none, and `begin` is the last
    # action.

    def _on(self, event: Callable[..., list[Act]], *args: Any) -> None:
        """Gives an event to the request, and carries out the resulting actions."""
        if self._client_request.trace is not None and request_log.current.request is not self._client_request:
            request_log.in_request(self._client_request, self._on, event, *args)
            return
        try:
            for act in event(*args):
                _DO[act.__class__](self, act)
        except Exception:
            self.fail()

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Gives an event of an attempt to the request."""
        if self._client_request.trace is not None and request_log.current.request is not self._client_request:
            request_log.in_request(self._client_request, self.on_attempt_event, event, attempt, detail)
            return
        if event in ENDS:  # a chat that is parsed has a call for each event, with its whole prompt
            self._attempts.pop(attempt.step, None)
        try:  # the code of `_on`, inline because each request runs it
            for act in self.execution.attempt(event, attempt, time.monotonic(), detail):
                _DO[act.__class__](self, act)
        except Exception:
            self.fail()

    def _do(self, act: Action) -> None:
        if act == "abort_client":
            self._client_request.transport.abort()
            return
        for attempt in self._attempts.values():
            if attempt.step.for_client:
                attempt.pause(act == "pause")

    def _send(self, step: Step) -> None:
        execution, hedge = self.execution, self.execution.hedge
        self._attempts[step] = attempt = EngineAttempt(
            self,
            execution.rules,
            self._client_request,
            execution.ticket if hedge is None or step is not hedge.step else hedge.ticket,
            step,
        )
        if step.advances_ticket:
            attempt.weights = step.engine.weights
        if execution.stalled_at and step.for_client:
            attempt.pause(True)
        now = time.monotonic()
        if self.trace is not None:
            attempt.trace = guarded(self.trace.sent, attempt, now)
        attempt.go(now)

    def _commit(self, act: Commit) -> None:
        attempt, execution = self._attempts[act.attempt.step], self.execution
        if attempt.step.reader != "pass":
            attempt.begin()
            return
        attempt.committed = self.committed = True
        client = self._client_request.client
        transcript = execution.transcript
        if client.body_size and not (transcript is not None and transcript.chat):
            client.release_body()
        engine = attempt.step.engine.name
        self._client_request.pass_on(attempt.reader, execution.head_lines(engine), engine)
        execution.model.held.poke()  # the first token: the engine has room again

    def _comment(self, act: Comment) -> None:
        self._client_request.comment(act.lines)

    def _begin(self, act: Begin) -> None:
        execution = self.execution
        self.committed = True
        client = self._client_request.client
        if client.body_size:
            client.release_body()
        self._client_request.begin(act.length, execution.head_lines(act.engine))
        execution.model.held.poke()

    def _write(self, act: Write) -> None:
        self._client_request.write(act.data, last=act.last)

    def _break_off(self, act: BreakOff) -> None:
        self._client_request.break_off(act.error.body(self.execution.rules.show_engines))

    def _cancel(self, act: Cancel) -> None:
        attempt = self._attempts.pop(act.step, None)
        if attempt is not None:
            attempt.cancel()

    def _wake(self, act: Wake) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if act.seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(act.seconds, self._woken)

    def _woken(self) -> None:
        self._on(self.execution.woken, time.monotonic())

    def _finish(self, act: Finish) -> None:
        if self._finished:
            return
        self._finished = True
        execution = self.execution
        self.close_client = self._client_request.end() or execution.close_client
        self.reason = execution.reason
        self.status = execution.status
        answered = execution.answered
        if answered is not None:
            self.usage = answered.reader
            if answered.reader.implausible_usage:
                execution.model.ratio.implausible += 1
        elif execution.committed:
            self.usage = execution.transcript
        # Drops references to the runner, so that no garbage collection is needed.
        self._attempts.clear()
        execution.answered = None
        if execution.handle is not None:
            execution.handle = None
        execution.model.held.poke()
        self._on_end(self._client_request, self, act.error)

    # -- called by the client's connection and the server ------------------------------------------

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        self._on(self.execution.leave, reason, error)

    def client_slow(self, slow: bool) -> None:
        """Stops reading from the engine while the client reads too slowly."""
        self._on(self.execution.client_slow, slow, time.monotonic())

    def fail(self) -> None:
        """Ends the request after an unexpected exception."""
        if self._client_request.trace is not None and request_log.current.request is not self._client_request:
            request_log.in_request(self._client_request, self.fail)
            return
        execution = self.execution
        path = self._client_request.path
        log.exception("a request failed with an internal error", path=path, decision=self.decision)
        error = None if execution.committed else ApiError(500, FAILED)
        for act in execution.leave("internal error", error):
            _DO[act.__class__](self, act)
        if not self._finished:
            # The exception came while the request ended.
            execution.close_client = True
            for attempt in self._attempts.values():
                attempt.cancel()
            self._finish(Finish(error))

    def check(self, now: float) -> None:
        """Called periodically: ends the request or its attempts at their time limits."""
        self._on(self.execution.tick, now)
        for attempt in tuple(self._attempts.values()):
            attempt.check(now)

    # -- called by the rebalancer ------------------------------------------------------------------

    @property
    def instance(self) -> str:
        """The engine that answered, or was tried last."""
        return self.execution.instance

    @property
    def move(self) -> object | None:
        """Its migration in progress, or None."""
        return self.execution.migration

    @property
    def known_tokens(self) -> int:
        """The number of its known answer tokens."""
        return self.execution.known_tokens

    def move_to(self, target: Engine, now: float) -> None:
        """Starts a move to another engine, if the request can move."""
        self._on(self.execution.migrate, target, now)


class RequestRunner(Runner):
    """One routed request."""

    @property
    def decision(self) -> str:
        """The label of its routing decision."""
        return self.execution.label

    @property
    def instance(self) -> str:
        """The engine that answered, or was tried last."""
        return self.execution.ticket.instance

    @property
    def predicted_cached_tokens(self) -> int | None:
        """The prediction of its decision; None: after a retry or with a prefix fetch."""
        decision = self.execution.decision
        if decision.instance != self.execution.ticket.instance or decision.fetch is not None:
            return None
        return decision.predicted_cached_tokens


_DO: dict[type, Callable[[Runner, Any], None]] = {
    str: Runner._do,
    Step: Runner._send,
    Cancel: Runner._cancel,
    Comment: Runner._comment,
    Commit: Runner._commit,
    Begin: Runner._begin,
    Write: Runner._write,
    BreakOff: Runner._break_off,
    Wake: Runner._wake,
    Finish: Runner._finish,
}
