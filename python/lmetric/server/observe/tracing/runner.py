"""A request and its attempts that record spans, and pass the trace context to engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from lmetric._core import RequestHead
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.attempt import EngineAttempt
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.execution import Execution
from lmetric.server.execution.plan import Act, AttemptEvent
from lmetric.server.execution.runner import OnEnd, RequestRunner
from lmetric.server.execution.trace import TraceContext
from lmetric.server.observe.request_log import in_request
from lmetric.server.observe.tracing.context import parent_line, with_context
from lmetric.server.observe.tracing.spans import (
    Attributes,
    RequestTrace,
    Span,
    Traces,
    operation,
    request_attributes,
)

CLIENT_LEFT = 499
_PORTS = {"http": 80, "https": 443}


class LoggedRunner(RequestRunner):
    """A routed request whose log lines have its ids."""

    def _on(self, event: Callable[..., list[Act]], *args: Any) -> None:
        in_request(self._client_request, super()._on, event, *args)

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Gives an event of an attempt to the request."""
        in_request(self._client_request, super().on_attempt_event, event, attempt, detail)

    def fail(self) -> None:
        """Ends the request after an unexpected exception."""
        in_request(self._client_request, super().fail)


class TracedAttempt(EngineAttempt):
    """An attempt with a span. The engine's spans become children of it."""

    _span: Span | None = None
    _reports_usage = True  # the span gets the tokens of the answer

    def go(self, now: float) -> None:
        """Starts the span, and sends the step."""
        runner = self._listener
        assert isinstance(runner, TracedRunner)
        step, engine = self.step, self.step.engine
        model = runner.execution.pool.name
        self._trace = trace = runner.trace
        self._span = span = runner.begin_attempt(self, now)
        span.attributes = {
            "gen_ai.operation.name": operation(trace.path),
            "gen_ai.provider.name": engine.capabilities.engine,
            "gen_ai.request.model": model,
            "gen_ai.request.stream": step.stream,
            **server_attributes(engine.upstream.url),
            "lmetric.engine": engine.name,
            "lmetric.for_client": step.for_client,
        }
        super().go(now)

    def _for_engine(self, head: RequestHead, first: bytes, *rest: Any) -> bytes:
        context, span = self._trace.context, self._span
        assert span is not None
        first += parent_line(context.trace_id, span.span_id, True)
        return with_context(head.for_engine(first, *rest), first, context)

    def outcome(self) -> str | None:
        """Returns the `error.type` of a whole answer; None: it is good."""
        reader = getattr(self, "reader", None)
        if reader is None:  # it was never sent
            return "cancelled"
        return "engine_error" if self.error else str(reader.status) if reader.status >= 500 else None

    def _close(self) -> None:
        self.end_span(self.outcome())
        super()._close()

    def fail(self, kind: str, reason: str) -> None:
        """Ends the attempt and its span with a failure."""
        if not self.over:
            self.end_span(kind)  # before `cancel`, which knows no reason
        super().fail(kind, reason)

    def cancel(self) -> None:
        """Ends the attempt and its span."""
        self.end_span("cancelled")
        super().cancel()

    def end_span(self, error: str | None) -> None:
        """Ends the span, unless it has ended."""
        span = self._span
        if span is None or span.end is not None:
            return
        span.finish(time.monotonic(), error)
        reader = getattr(self, "reader", None)  # None: it was never sent
        if reader is not None and reader.status:
            span.attributes["http.response.status_code"] = reader.status
            if self._reports_usage:
                span.attributes |= usage_attributes(reader, span.start)


@lru_cache(4096)
def server_attributes(url: str) -> Attributes:
    """Returns the attributes of an engine's address."""
    parts = urlsplit(url)
    if parts.hostname is None:
        return {"server.address": parts.path}
    return {"server.address": parts.hostname, "server.port": parts.port or _PORTS[parts.scheme]}


def usage_attributes(usage: Any, started: float) -> Attributes:
    """Returns the attributes of an answer. ``started``: seconds on the monotonic clock."""
    attributes: Attributes = {}
    for name, value in (
        ("gen_ai.usage.input_tokens", usage.prompt_tokens),
        ("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens),
        ("gen_ai.usage.output_tokens", usage.output_tokens or None),
    ):
        if value is not None:
            attributes[name] = value
    if usage.first_token_at:
        attributes["gen_ai.response.time_to_first_chunk"] = max(usage.first_token_at - started, 0.0)
    return attributes


class UnsampledAttempt(EngineAttempt):
    """An attempt of a request that is not sampled. The engine learns that."""

    def _for_engine(self, head: RequestHead, first: bytes, *rest: Any) -> bytes:
        runner = self._listener
        assert isinstance(runner, UnsampledRunner)
        first += runner.line
        return with_context(head.for_engine(first, *rest), first, runner.context)


class UnsampledRunner(LoggedRunner):
    """A routed request without a client's context that is not sampled."""

    _attempt = UnsampledAttempt

    def __init__(
        self,
        execution: Execution,
        require_finish: bool,
        on_end: OnEnd,
        context: TraceContext,
        line: bytes,
    ) -> None:
        """``line``: its `traceparent` for engines."""
        super().__init__(execution, require_finish, on_end)
        self.context = context
        self.line = line


class TracedRunner(LoggedRunner):
    """A routed request with a trace."""

    _attempt = TracedAttempt

    def __init__(
        self,
        execution: Execution,
        require_finish: bool,
        on_end: OnEnd,
        traces: Traces,
        context: TraceContext,
        before: float,
        after: float,
    ) -> None:
        """``before`` and ``after`` the decision: seconds on the monotonic clock."""
        super().__init__(execution, require_finish, self._end)
        self._report_end = on_end
        self._attempts: list[TracedAttempt] = []
        self._traces = traces
        self.trace: RequestTrace = traces.begin(execution.client_request, context)
        decision = execution.decision
        self.trace_sampled = True
        attributes: Attributes = {
            "lmetric.decision": execution.label,
            "lmetric.instance": decision.instance,
            "lmetric.prompt_tokens": decision.prompt_tokens,
            "lmetric.predicted_cached_tokens": decision.predicted_cached_tokens,
        }
        if decision.decode_instance is not None:
            attributes["lmetric.decode_instance"] = decision.decode_instance
        if decision.fetch is not None:
            attributes["lmetric.fetch_instance"] = decision.fetch[0]
        self.trace.decided(before, after, attributes)

    def begin_attempt(self, attempt: TracedAttempt, now: float) -> Span:
        """Returns the span of an attempt that begins, and starts its segment."""
        step, execution = attempt.step, self.execution
        hedges = execution.hedge is not None and step is execution.hedge.step
        if not step.beside and not hedges:
            self.trace.enter_segment(execution.ticket.from_token, now)
        self._attempts.append(attempt)
        return self.trace.attempt(execution.pool.name, step.beside, now)

    def _end(self, request: ClientRequest, relay: InFlightRequest, error: ApiError | None) -> None:
        """Ends the request, then its spans."""
        self._report_end(request, relay, error)
        for attempt in self._attempts:
            attempt.end_span(attempt.outcome())
        self._attempts.clear()
        status = self.status if self.committed else error.status if error else CLIENT_LEFT
        trace, now = self.trace, time.monotonic()
        span = trace.request
        span.attributes = request_attributes(request, status)
        span.attributes["lmetric.engine"] = self.instance
        if self.usage is not None:
            span.attributes |= usage_attributes(self.usage, request.started)
        failed = bool(self.reason) or status >= 500
        span.finish(now, str(status) if failed else None)
        trace.finish(now)
        self._traces.ended(trace)
        self._on_end = self._report_end  # else the runner refers to itself
