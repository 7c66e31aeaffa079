"""Requests about stored responses with spans, and with the trace context for their engine."""

from __future__ import annotations

import time
from typing import Any

from lmetric._core import RequestHead
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.attempt import EngineAttempt
from lmetric.server.execution.direct import DirectRequest, OnEnd
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest, Rules
from lmetric.server.execution.plan import AttemptEvent
from lmetric.server.execution.trace import TraceContext
from lmetric.server.fleet.engine import Engine
from lmetric.server.observe.request_log import in_request
from lmetric.server.observe.tracing.context import parent_line, with_context
from lmetric.server.observe.tracing.runner import CLIENT_LEFT, TracedAttempt, server_attributes
from lmetric.server.observe.tracing.spans import RequestTrace, Traces, request_attributes


class LoggedDirect(DirectRequest):
    """A request to one engine whose log lines have its ids."""

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Forwards the engine's answer, or ends the request."""
        in_request(self._client_request, super().on_attempt_event, event, attempt, detail)

    def fail(self) -> None:
        """Ends the request after an unexpected exception."""
        in_request(self._client_request, super().fail)

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        in_request(self._client_request, super()._leave, reason, error)


class UnsampledDirectAttempt(EngineAttempt):
    """An attempt of a request that is not sampled. The engine learns that."""

    def _for_engine(self, head: RequestHead, first: bytes, *rest: Any) -> bytes:
        direct = self._listener
        assert isinstance(direct, UnsampledDirect)
        first += direct.line
        return with_context(head.for_engine(first, *rest), first, direct.context)


class UnsampledDirect(LoggedDirect):
    """A request without a client's context that is not sampled."""

    _attempt_class = UnsampledDirectAttempt
    context: TraceContext
    line: bytes  # its `traceparent` for engines


class TracedDirectAttempt(TracedAttempt):
    """The attempt of a sampled request. It computes nothing, so it has no attributes of GenAI."""

    _reports_usage = False

    def go(self, now: float) -> None:
        """Starts the span, and sends the step."""
        direct, engine = self._listener, self.step.engine
        assert isinstance(direct, TracedDirect)
        self._trace = trace = direct.trace
        self._span = span = trace.direct(now)
        span.attributes = {
            "http.request.method": trace.method,
            "url.template": trace.route,
            **server_attributes(engine.upstream.url),
            "lmetric.engine": engine.name,
        }
        EngineAttempt.go(self, now)


class TracedDirect(LoggedDirect):
    """A sampled request to one engine."""

    _attempt_class = TracedDirectAttempt
    trace: RequestTrace
    traces: Traces

    def begin(self, traces: Traces, context: TraceContext) -> None:
        """Starts the spans."""
        self.traces, self.trace = traces, traces.begin(self._client_request, context)
        self._report_end, self._on_end = self._on_end, self._end

    def _end(self, request: ClientRequest, relay: InFlightRequest, error: ApiError | None) -> None:
        """Ends the request, then its spans."""
        self._report_end(request, relay, error)
        attempt = self._attempt
        assert isinstance(attempt, TracedDirectAttempt)
        attempt.end_span(attempt.outcome())
        status = self.status if self.committed else error.status if error else CLIENT_LEFT
        trace, span = self.trace, self.trace.request
        span.attributes = request_attributes(request, status)
        span.attributes["lmetric.engine"] = self.instance
        now = time.monotonic()
        span.finish(now, str(status) if self.reason or status >= 500 else None)
        trace.finish(now)
        self.traces.ended(trace)
        self._on_end = self._report_end  # else the request refers to itself


def traced_direct(
    traces: Traces, rules: Rules, request: ClientRequest, engine: Engine, method: bytes, on_end: OnEnd
) -> DirectRequest:
    """Returns a request to one engine, with spans if its trace is sampled."""
    context = traces.context(request)
    direct: LoggedDirect
    if context.sampled:
        direct = TracedDirect(rules, request, engine, method, on_end)
        direct.begin(traces, context)
    elif context.parent_id:  # the client's fields, which the engine gets, say that it is not sampled
        direct = LoggedDirect(rules, request, engine, method, on_end)
    else:
        direct = UnsampledDirect(rules, request, engine, method, on_end)
        direct.context = context
        direct.line = parent_line(context.trace_id, traces.span_id(), False)
    direct.trace_id = context.hex_id
    return direct
