"""Carries out what the executor of a request decides: engines' connections, the client's answer, timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog

from lmetric.server.api.errors import ApiError
from lmetric.server.execution.attempt import EngineAttempt
from lmetric.server.execution.exchange import FAILED, ClientRequest, InFlightRequest
from lmetric.server.execution.executor import RequestExecution
from lmetric.server.execution.plan import (
    Act,
    Action,
    AttemptEvent,
    Begin,
    BreakOff,
    Commit,
    Finish,
    Step,
    Wake,
    Write,
)
from lmetric.server.fleet.engine import Engine

log = structlog.get_logger("lmetric.relay")


OnEnd = Callable[[ClientRequest, InFlightRequest, ApiError | None], None]


class RequestRunner(InFlightRequest):
    """One routed request: `start()`, then callbacks move it on until it tells ``on_end``, once.

    ``on_end`` gets the request, the runner, and an ApiError where the client has nothing yet. By then the
    ticket is closed, and no attempt runs.
    """

    _main: EngineAttempt | None = None
    _side: EngineAttempt | None = None
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, execution: RequestExecution, require_finish: bool, on_end: OnEnd) -> None:
        self.execution = execution
        self._asked = execution.asked
        self._require_finish = require_finish
        self._on_end = on_end
        self._finished = False
        if execution.mover is not None:
            execution.handle = self

    def start(self, now: float) -> None:
        """Sends the request to the engine of the decision, which was made at ``now``. Its caller calls `fail`
        where that raises."""
        for act in self.execution.placed(now):
            _DO[act.__class__](self, act)

    # -- events in, actions out ------------------------------------------------------------------------------

    # While actions are carried out, no event comes from which others follow: `go` reports only "sent", and
    # `begin` comes behind all other actions.

    def _on(self, event: Callable[..., list[Act]], *args: Any) -> None:
        """Gives the executor an event, and carries out what follows."""
        try:
            for act in event(*args):
                _DO[act.__class__](self, act)
        except Exception:
            self.fail()

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Something happened to an attempt."""
        try:  # as `_on`: each request passes here
            for act in self.execution.attempt(event, attempt, time.monotonic(), detail):
                _DO[act.__class__](self, act)
        except Exception:
            self.fail()

    def _do(self, act: Action) -> None:
        _ACTIONS[act](self)

    def _send(self, step: Step) -> None:
        execution = self.execution
        attempt = EngineAttempt(
            self, execution.rules, self._asked, execution.ticket, step, self._require_finish
        )
        if not step.beside:
            self._main = attempt
        else:
            self._side = attempt
        if execution.stalled_at and step.for_client:
            attempt.pause(True)
        attempt.go(time.monotonic())

    def _commit(self, _: Commit) -> None:
        attempt, execution = self._main, self.execution
        if attempt is None:
            return
        if attempt.step.reader != "pass":
            attempt.begin()
            return
        attempt.begun = self.committed = True
        client = self._asked.client
        if client.body_size:
            client.release_body()
        self._asked.pass_on(attempt.reader, execution.head_lines(attempt.step.engine.name))

    def _begin(self, act: Begin) -> None:
        execution = self.execution
        self.committed = True
        client = self._asked.client
        if client.body_size:
            client.release_body()
        self._asked.begin(act.kind, act.length, execution.head_lines(act.engine))

    def _write(self, act: Write) -> None:
        self._asked.write(act.data, last=act.last)

    def _break_off(self, act: BreakOff) -> None:
        self._asked.break_off(act.error.body(self.execution.rules.show_engines))

    def _cancel(self) -> None:
        self._cancel_main()
        self._cancel_side()

    def _cancel_main(self) -> None:
        if self._main is not None:
            self._main.cancel()
            self._main = None

    def _cancel_side(self) -> None:
        if self._side is not None:
            self._side.cancel()
            self._side = None

    def _wake(self, act: Wake) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if act.seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(act.seconds, self._woken)

    def _woken(self) -> None:
        self._on(self.execution.woken, time.monotonic())

    def _pause(self, paused: bool = True) -> None:
        if self._main is not None and self._main.step.for_client:
            self._main.pause(paused)

    def _abort_client(self) -> None:
        self._asked.transport.abort()

    def _finish(self, act: Finish) -> None:
        if self._finished:
            return
        self._finished = True
        execution = self.execution
        self.close_client = self._asked.end() or execution.close_client
        self.reason = execution.reason
        answered, transcript = execution.answered, execution.transcript
        if answered is not None:
            self.status, self.usage = execution.status, answered.reader
            if answered.reader.implausible_usage:
                execution.pool.ratio.implausible += 1
        elif execution.committed and transcript is not None:
            self.status = execution.status
            self.usage = transcript
        # What refers to the runner lets go of it here, so that no collector has to.
        self._main = self._side = execution.answered = execution.observing = execution.handle = None
        self._on_end(self._asked, self, act.error)

    # -- what the client's connection and the server call ----------------------------------------------------

    @property
    def decision(self) -> str:
        """Label of its routing decision."""
        return self.execution.label

    @property
    def instance(self) -> str:
        """The engine that answered, or was tried last."""
        return self.execution.ticket.instance

    def client_gone(self) -> None:
        """The client left."""
        self._on(self.execution.leave, "the client left")

    def client_slow(self) -> None:
        """The client does not keep up: stop reading from the engine."""
        self._on(self.execution.client_slow, time.monotonic())

    def client_ready(self) -> None:
        """The client caught up."""
        self._on(self.execution.client_ready, time.monotonic())

    def stop(self) -> None:
        """The server stops: ends the answer with an error."""
        self._on(self.execution.stop)

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""
        execution = self.execution
        log.exception("a request could not be relayed", decision=execution.label)
        error = None if execution.committed else ApiError(500, FAILED)
        for act in execution.leave("internal error", error):
            _DO[act.__class__](self, act)
        if not self._finished:
            # The exception came while the request ended.
            execution.close_client = True
            self._cancel()
            self._finish(Finish(error))

    def check(self, now: float) -> None:
        """Called now and then: ends what takes too long."""
        self._on(self.execution.tick, now)
        for attempt in (self._main, self._side):
            if attempt is not None:
                attempt.check(now)

    # -- what a rebalancer calls -----------------------------------------------------------------------------

    @property
    def move(self) -> object | None:
        """Its migration that is on its way."""
        return self.execution.migration

    @property
    def known_tokens(self) -> int:
        """Tokens of its answer that are known."""
        execution = self.execution
        if execution.observing is not None:
            return execution.observing.reader.observed_tokens
        return len(execution.transcript.output_ids) if execution.transcript is not None else 0

    def move_to(self, target: Engine, now: float) -> bool:
        """Begins to move it to another engine; whether it did."""
        began = False

        def migrate() -> list[Act]:
            nonlocal began
            began, acts = self.execution.migrate(target, now)
            return acts

        self._on(migrate)
        return began


_ACTIONS: dict[Action, Callable[[RequestRunner], None]] = {
    "cancel": RequestRunner._cancel,
    "cancel_main": RequestRunner._cancel_main,
    "cancel_side": RequestRunner._cancel_side,
    "pause": RequestRunner._pause,
    "resume": lambda runner: runner._pause(False),
    "abort_client": RequestRunner._abort_client,
}
_DO: dict[type, Callable[[RequestRunner, Any], None]] = {
    str: RequestRunner._do,
    Step: RequestRunner._send,
    Commit: RequestRunner._commit,
    Begin: RequestRunner._begin,
    Write: RequestRunner._write,
    BreakOff: RequestRunner._break_off,
    Wake: RequestRunner._wake,
    Finish: RequestRunner._finish,
}
