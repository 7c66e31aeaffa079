"""The traces of requests that the router sends to engines: their spans, or the context alone."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.execution import Execution
from lmetric.server.execution.plan import Attempt, Step
from lmetric.server.execution.trace import TraceContext
from lmetric.server.observe.tracing.context import parent_line, with_context
from lmetric.server.observe.tracing.spans import (
    Attributes,
    RequestTrace,
    Span,
    operation,
    request_attributes,
)

CLIENT_LEFT = 499
_PORTS = {"http": 80, "https": 443}


class UnsampledRequest:
    """The trace of a request without spans, and of its attempts. Its engines learn that."""

    __slots__ = ("_context", "line")

    def __init__(self, context: TraceContext, span_id: int) -> None:
        self._context = context
        self.line = parent_line(context.trace_id, span_id, False)

    def sent(self, attempt: Attempt, now: float) -> UnsampledRequest:
        """Returns itself, because all attempts have one context."""
        return self

    def head(self, head: bytes, own: bytes) -> bytes:
        """Returns the head for the engine without the client's context."""
        return with_context(head, own, self._context)

    def answered(self, attempt: Attempt) -> None:
        """Does nothing."""

    def failed(self, attempt: Attempt, reason: str) -> None:
        """Does nothing."""


class AttemptSpan:
    """The span of an attempt. The engine's spans become children of it."""

    __slots__ = ("_context", "_reports_usage", "_span", "line")

    def __init__(self, context: TraceContext, span: Span, reports_usage: bool) -> None:
        """``reports_usage``: the span gets the tokens of the answer."""
        self._context = context
        self._span = span
        self._reports_usage = reports_usage
        self.line = parent_line(context.trace_id, span.span_id, True)

    @property
    def is_open(self) -> bool:
        """Whether the span has not ended."""
        return self._span.end is None

    def head(self, head: bytes, own: bytes) -> bytes:
        """Returns the head for the engine without the client's context."""
        return with_context(head, own, self._context)

    def answered(self, attempt: Attempt) -> None:
        """Ends the span, unless it has ended."""
        if not self.is_open:
            return
        reader = getattr(attempt, "reader", None)
        if reader is None:  # it was never sent
            self._end(reader, "cancelled")
        else:
            failed = str(reader.status) if reader.status >= 500 else None
            self._end(reader, "engine_error" if attempt.error else failed)

    def failed(self, attempt: Attempt, reason: str) -> None:
        """Ends the span with a failure, unless it has ended."""
        if not self.is_open:
            return
        reader = getattr(attempt, "reader", None)
        if reason == "cancelled" and reader is not None and reader.status >= 400:
            self.answered(attempt)  # the router needs no more of an error than its status
        else:
            self._end(reader, reason)

    def _end(self, reader: Any, error: str | None) -> None:
        """Ends the span. ``reader``: of the answer; None: the attempt was never sent."""
        span = self._span
        span.finish(time.monotonic(), error)
        if reader is not None and reader.status:
            span.attributes["http.response.status_code"] = reader.status
            if self._reports_usage:
                span.attributes |= usage_attributes(reader, span.start)


class SampledRequest:
    """The trace of a request with spans.

    ``execution``: None: the request is about a stored response. Its engine computes nothing, so its
    spans have no attributes of GenAI.
    """

    __slots__ = ("_attempts", "_execution", "_spans")

    def __init__(self, spans: RequestTrace, execution: Execution | None) -> None:
        self._spans = spans
        self._execution = execution
        self._attempts: list[tuple[Attempt, AttemptSpan]] = []  # the running ones, and the last one

    def sent(self, attempt: Attempt, now: float) -> AttemptSpan:
        """Starts the span of an attempt, and the span of its segment."""
        step, execution, spans = attempt.step, self._execution, self._spans
        engine = step.engine
        if execution is None:
            span = spans.direct(now)
            span.attributes = {
                "http.request.method": spans.method,
                "url.template": spans.route,
                **server_attributes(engine.upstream.url),
                "lmetric.engine": engine.name,
            }
        else:
            span = self._segment_span(execution, step, now)
            span.attributes = {
                "gen_ai.operation.name": operation(spans.path),
                "gen_ai.provider.name": engine.capabilities.engine,
                "gen_ai.request.model": execution.model.name,
                "gen_ai.request.stream": step.stream,
                **server_attributes(engine.upstream.url),
                "lmetric.engine": engine.name,
                "lmetric.for_client": step.for_client,
            }
        trace = AttemptSpan(spans.context, span, execution is not None)
        # A chat that is parsed has a call for each event, with its whole prompt.
        self._attempts = [(earlier, its) for earlier, its in self._attempts if its.is_open]
        self._attempts.append((attempt, trace))
        return trace

    def _segment_span(self, execution: Execution, step: Step, now: float) -> Span:
        hedges = execution.hedge is not None and step is execution.hedge.step
        if not step.side and not hedges:
            self._spans.enter_segment(execution.ticket.from_token, now)
        return self._spans.attempt(execution.model.name, step.side, now)

    def decided(self, execution: Execution, request: ClientRequest) -> None:
        """Adds the span of the decision."""
        decision = execution.decision
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
        self._spans.decided(request.decision_began, request.decision_ended, attributes)

    def fell_back(self) -> RequestTrace:
        """Ends the spans of this model's attempts. Returns the spans, for the next model."""
        for attempt, trace in self._attempts:
            trace.answered(attempt)
        self._attempts.clear()
        self._execution = None  # it refers to this trace: no garbage collection is needed
        self._spans.leave_segment(time.monotonic())
        return self._spans

    def ended(self, request: ClientRequest, relay: InFlightRequest) -> RequestTrace:
        """Ends the spans, and returns them."""
        self.fell_back()
        error, now = request.error, time.monotonic()  # not before the ends of the attempts
        status = relay.status if relay.committed else error.status if error else CLIENT_LEFT
        spans, span = self._spans, self._spans.request
        span.attributes = request_attributes(request, status)
        if relay.instance is not None:
            span.attributes["lmetric.engine"] = relay.instance
        if relay.usage is not None:
            span.attributes |= usage_attributes(relay.usage, request.started)
        failed = bool(relay.reason) or status >= 500
        span.finish(now, str(status) if failed else None)
        spans.finish(now)
        return spans


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
