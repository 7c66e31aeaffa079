"""A request to one given engine, which the router forwards without a routing decision."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from lmetric._core import END, ENGINE_ERROR
from lmetric.server.api.errors import ApiError
from lmetric.server.execution import request_log
from lmetric.server.execution.attempt import EngineAttempt
from lmetric.server.execution.exchange import FAILED, ClientRequest, InFlightRequest, Rules
from lmetric.server.execution.failures import NOT_ACCEPTED, STATUSES
from lmetric.server.execution.observers import guarded
from lmetric.server.execution.plan import AttemptEvent, Step
from lmetric.server.execution.progress import CORE_KINDS
from lmetric.server.fleet.engine import Engine

log = structlog.get_logger("lmetric.relay")

OnEnd = Callable[[ClientRequest, InFlightRequest, ApiError | None], None]


class DirectRequest(InFlightRequest):
    """A request without a prompt, for the engine that holds its subject.

    No other engine could answer it. After `start()`, callbacks advance it until it calls
    ``on_end``, once, with an ApiError if the client still needs an answer.
    """

    def __init__(
        self, rules: Rules, client_request: ClientRequest, engine: Engine, method: bytes, on_end: OnEnd
    ) -> None:
        self._rules = rules
        self._client_request = client_request
        self._engine = engine
        self._on_end = on_end
        self._over = False
        self._stalled_at = 0.0  # when the client became too slow; 0: it keeps up
        step = Step(
            engine,
            body=b"",
            reader="pass",
            limit_seconds=rules.timeouts.first_byte,
            method=method,
            advances_ticket=False,
            refills=False,
        )
        self._attempt = EngineAttempt(
            self, rules, client_request, ticket=None, step=step, require_finish=False
        )

    def start(self, now: float) -> None:
        """Sends the request. ``now``: seconds on the monotonic clock."""
        if self.trace is not None:
            self._attempt.trace = guarded(self.trace.sent, self._attempt, now)
        self._attempt.go(now)

    @property
    def instance(self) -> str:
        """The engine that answers."""
        return self._engine.name

    # -- events of the attempt ---------------------------------------------------------------------

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Forwards the engine's answer, or ends the request."""
        if self._client_request.trace is not None and request_log.current.request is not self._client_request:
            request_log.in_request(self._client_request, self.on_attempt_event, event, attempt, detail)
            return
        if self._over:
            return
        if event == "comments":
            self._commit(attempt)  # no other engine could answer, and later comments pass
        elif event == "ready":
            self._commit(attempt)
            if detail & END and not detail & ENGINE_ERROR:
                self._finish()
        elif event == "ended":
            self._finish()
        elif event == "failed":
            self._failed(*detail)

    def _commit(self, attempt: EngineAttempt) -> None:
        client_request, name = self._client_request, self._engine.name
        attempt.begun = self.committed = True
        self.status = attempt.reader.status
        lines = f"x-request-id: {client_request.head.request_id}\r\n"
        if self._rules.show_engines:
            lines += f"x-lmetric-instance: {name}\r\n"
        client_request.pass_on(attempt.reader, lines.encode("latin-1"), name)

    def _failed(self, kind: str, reason: str) -> None:
        self.reason = reason
        engines = f"{self._engine.name}: {reason}"
        model = self._engine.model
        if kind not in NOT_ACCEPTED and model is not None:
            model.blame(self._engine, self._client_request.client_key, reason, proven=False)
        elif kind != "saturated":
            self._engine.failed(kind, reason)
        if self.committed:
            error = ApiError(502, "the engine failed in the middle of its answer", engines=engines, code=kind)
            self._client_request.break_off(error.body(self._rules.show_engines))
            self._finish()
            return
        message = "the engine that holds the response did not answer"
        code, headers = CORE_KINDS.get(kind, kind), {"retry-after": "1"}
        self._finish(ApiError(STATUSES[code], message, engines=engines, code=code, headers=headers))

    def _finish(self, error: ApiError | None = None) -> None:
        if self._over:
            return
        self._over = True
        self.close_client = self._client_request.end() or self.close_client
        self._on_end(self._client_request, self, error)

    # -- events of the client and the server -------------------------------------------------------

    def client_slow(self) -> None:
        """Stops reading from the engine, because the client reads too slowly."""
        self._stalled_at = time.monotonic()
        self._attempt.pause(True)

    def client_ready(self) -> None:
        """Continues reading from the engine."""
        self._stalled_at = 0.0
        self._attempt.pause(False)

    def check(self, now: float) -> None:
        """Called periodically: ends the request at its time limits."""
        timeouts = self._rules.timeouts
        if reason := self._client_request.overdue(timeouts.request, now):
            self._leave(reason, None if self.committed else ApiError(504, reason, code="timeout"))
        elif self._stalled_at and now - self._stalled_at > timeouts.slow_client:
            self._client_request.transport.abort()
            self._leave("the client does not read")
        else:
            self._attempt.check(now)

    def fail(self) -> None:
        """Ends the request after an unexpected exception."""
        if self._client_request.trace is not None and request_log.current.request is not self._client_request:
            request_log.in_request(self._client_request, self.fail)
            return
        log.exception("a request failed with an internal error", path=self._client_request.path)
        self._leave("internal error", None if self.committed else ApiError(500, FAILED))

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        if self._client_request.trace is not None and request_log.current.request is not self._client_request:
            request_log.in_request(self._client_request, self._leave, reason, error)
            return
        if self._over:
            return
        self._attempt.cancel()
        self.reason = reason
        self.close_client = error is None
        self._finish(error)
