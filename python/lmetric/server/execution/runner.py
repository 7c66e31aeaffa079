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
from lmetric.server.execution.exchange import FAILED, TokenUsage
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


class Runner(Execution):
    """A request that carries out its actions. After `start()`, callbacks advance it.

    At its end, it calls `on_end` once, with the client's request, itself, and an ApiError if the
    client still needs one. By then its ticket is closed, if it has one, and no attempt runs.
    """

    __slots__ = ()

    _attempts: dict[Step, EngineAttempt]  # without those that have ended

    def start(self, now: float) -> None:
        """Sends the request to the engine of the decision, made at the time ``now``.

        Set `on_end` before. If this raises, the caller must call `fail`.
        """
        for act in self.placed(now):
            _DO[act.__class__](self, act)

    # -- events in, actions out --------------------------------------------------------------------

    # No action causes an event with further actions: `go` reports none, and `begin` is the last
    # action.

    def _on(self, event: Callable[..., list[Act]], *args: Any) -> None:
        """Gives an event to the request, and carries out the resulting actions."""
        if self.client_request.trace is not None and request_log.current.request is not self.client_request:
            request_log.in_request(self.client_request, self._on, event, *args)
            return
        try:
            for act in event(*args):
                _DO[act.__class__](self, act)
        except Exception:
            self.fail()

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Gives an event of an attempt to the request."""
        if self.client_request.trace is not None and request_log.current.request is not self.client_request:
            request_log.in_request(self.client_request, self.on_attempt_event, event, attempt, detail)
            return
        if event in ENDS:  # a chat that is parsed has a call for each event, with its whole prompt
            self._attempts.pop(attempt.step, None)
        try:  # the code of `_on`, inline because each request runs it
            for act in self.attempt(event, attempt, time.monotonic(), detail):
                _DO[act.__class__](self, act)
        except Exception:
            self.fail()

    def _do(self, act: Action) -> None:
        if act == "abort_client":
            self.client_request.transport.abort()
            return
        for attempt in self._attempts.values():
            if attempt.step.for_client:
                attempt.pause(act == "pause")

    def _do_step(self, step: Step) -> None:
        hedge = self.hedge
        self._attempts[step] = attempt = EngineAttempt(
            step,
            self,
            self.rules,
            self.client_request,
            self.ticket if hedge is None or step is not hedge.step else hedge.ticket,
        )
        if step.advances_ticket:
            attempt.weights = step.engine.weights
        if self.stalled_at and step.for_client:
            attempt.pause(True)
        now = time.monotonic()
        if self.trace is not None:
            attempt.trace = guarded(self.trace.sent, attempt, now)
        attempt.go(now)

    def _do_commit(self, act: Commit) -> None:
        attempt, client_request = self._attempts[act.attempt.step], self.client_request
        if attempt.step.reader != "pass":
            attempt.begin()
            return
        attempt.committed = True
        client = client_request.client
        if client.body_size and (self.transcript is None or not self.transcript.chat):
            client.release_body()
        engine = attempt.step.engine.name
        client_request.pass_on(attempt.reader, self.head_lines(engine), engine)
        if (held := self.model.held).requests:
            held.poke()  # the first token: the engine has room again

    def _do_begin(self, act: Begin) -> None:
        client = self.client_request.client
        if client.body_size:
            client.release_body()
        self.client_request.begin(act.length, self.head_lines(act.engine))
        self.model.held.poke()

    def _do_cancel(self, act: Cancel) -> None:
        attempt = self._attempts.pop(act.step, None)
        if attempt is not None:
            attempt.cancel()

    def _do_wake(self, act: Wake) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if act.seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(act.seconds, self._woken)

    def _woken(self) -> None:
        self._on(self.woken, time.monotonic())

    def _do_finish(self, act: Finish) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is None:
            return
        if self.client_request.end():
            self.close_client = True
        # Drops references to itself, so that no garbage collection is needed.
        answered, self.answered = self.answered, None
        self._attempts.clear()
        if answered is not None:
            self.usage = usage = TokenUsage(*answered.reader.usage)
            if usage.implausible:
                self.model.ratio.implausible += 1
        elif self.committed and self.transcript is not None:
            self.usage = self.transcript.usage
        if self.ticket is not None:  # else it is about a stored response
            self.instance, decision = self.ticket.instance, self.decision
            reported = None if self.usage is None else self.usage.cached_tokens
            if reported is not None and decision.instance == self.instance and decision.fetch is None:
                self.predicted_cached_tokens = decision.predicted_cached_tokens
        if (held := self.model.held).requests:
            held.poke()
        on_end(self.client_request, self, act.error)

    # -- called by the client's connection and the server ------------------------------------------

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        self._on(self.leave, reason, error)

    def client_slow(self, slow: bool) -> None:
        """Stops reading from the engine while the client reads too slowly."""
        self._on(self.stall, slow, time.monotonic())

    def fail(self) -> None:
        """Ends the request after an unexpected exception."""
        if self.client_request.trace is not None and request_log.current.request is not self.client_request:
            request_log.in_request(self.client_request, self.fail)
            return
        path = self.client_request.head.path
        log.exception("a request failed with an internal error", path=path, decision=self.label)
        error = None if self.committed else ApiError(500, FAILED)
        for act in self.leave("internal error", error):
            _DO[act.__class__](self, act)
        if self.on_end is not None:
            # The exception came while the request ended.
            self.close_client = True
            for attempt in self._attempts.values():
                attempt.cancel()
            self._do_finish(Finish(error))

    def check(self, now: float) -> None:
        """Called periodically: ends the request or its attempts at their time limits."""
        self._on(self.tick, now)
        for attempt in tuple(self._attempts.values()):
            attempt.check(now)

    # -- called by the rebalancer ------------------------------------------------------------------

    def move_to(self, target: Engine, now: float) -> None:
        """Starts a move to another engine, if the request can move."""
        self._on(self.migrate, target, now)


_DO: dict[type, Callable[[Any, Any], None]] = {
    str: Runner._do,
    Step: Runner._do_step,
    Cancel: Runner._do_cancel,
    Comment: lambda it, act: it.client_request.comment(act.lines),
    Commit: Runner._do_commit,
    Begin: Runner._do_begin,
    Write: lambda it, act: it.client_request.write(act.data, last=act.last),
    BreakOff: lambda it, act: it.client_request.break_off(act.error.body(it.rules.show_engines)),
    Wake: Runner._do_wake,
    Finish: Runner._do_finish,
}
