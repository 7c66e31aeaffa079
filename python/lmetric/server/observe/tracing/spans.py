"""The spans of a request, recorded as plain data; `export.py` makes OpenTelemetry spans of them.

Names follow OpenTelemetry's conventions for HTTP and GenAI
(https://github.com/open-telemetry/semantic-conventions-genai). Attributes of the router itself
start with `lmetric.`. No attribute has text of a prompt or an answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from random import Random, SystemRandom
from typing import Literal

from lmetric._core import RequestHead
from lmetric.server.api.paths import route
from lmetric.server.execution.exchange import ClientRequest
from lmetric.server.execution.trace import TraceContext
from lmetric.server.observe.tracing.context import is_sampled, read_parent

Attributes = dict[str, str | int | float | bool]
Kind = Literal["server", "internal", "client"]
# Decisions whose trace is remembered, for decision records.
REMEMBERED = 4096

# A method or path that the router could not read, by the conventions for HTTP.
UNREAD_NAME, UNREAD_METHOD = "HTTP", "_OTHER"
# `gen_ai.operation.name` by path; other paths have their last part.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


def operation(path: str) -> str:
    """Returns the GenAI operation of a path on which engines compute."""
    return _OPERATIONS.get(path) or path.rsplit("/", 1)[-1]


class Span:
    """One span. Times: seconds on the monotonic clock."""

    __slots__ = ("attributes", "end", "error", "kind", "name", "parent_id", "span_id", "start")

    def __init__(self, name: str, kind: Kind, span_id: int, parent_id: int, start: float) -> None:
        self.name = name
        self.kind = kind
        self.span_id = span_id
        self.parent_id = parent_id  # 0: none
        self.start = start
        self.end: float | None = None
        self.attributes: Attributes = {}
        self.error: str | None = None  # `error.type`

    def finish(self, now: float, error: str | None = None) -> None:
        """Ends the span, unless it has ended."""
        if self.end is None:
            self.end = now
            self.error = error


class RequestTrace:
    """The spans of a sampled request."""

    __slots__ = ("_ids", "context", "method", "path", "request", "route", "segment", "spans")

    def __init__(self, request: ClientRequest, context: TraceContext, ids: Random) -> None:
        self._ids = ids
        self.context = context
        self.path = request.head.path
        self.route = route(self.path)
        self.method = request.method
        self.spans: list[Span] = []
        self.request = self._span(
            server_name(request), "server", parent_id=context.parent_id, start=request.started
        )
        self.segment: Span | None = None

    def _span(self, name: str, kind: Kind, *, parent_id: int, start: float) -> Span:
        span = Span(name, kind, self._ids.getrandbits(64) or 1, parent_id=parent_id, start=start)
        self.spans.append(span)
        return span

    def decided(self, before: float, after: float, attributes: Attributes) -> None:
        """Adds the span of the routing decision."""
        span = self._span("lmetric.decision", "internal", parent_id=self.request.span_id, start=before)
        span.attributes = attributes
        span.end = after

    def enter_segment(self, from_token: int, now: float) -> None:
        """Starts the span of a segment, and ends the one before."""
        if self.segment is not None:
            if self.segment.attributes["lmetric.segment.from_token"] == from_token:
                return
            self.leave_segment(now)
        self.segment = self._span("lmetric.segment", "internal", parent_id=self.request.span_id, start=now)
        self.segment.attributes["lmetric.segment.from_token"] = from_token

    def leave_segment(self, now: float) -> None:
        """Ends the span of the segment, if there is one. The next segment has a span of its own."""
        if self.segment is not None:
            self.segment.finish(now)
            self.segment = None

    def attempt(self, model: str, beside: bool, now: float) -> Span:
        """Returns the span of an attempt at an engine. ``beside``: beside the open segment."""
        parent = self.request if beside or self.segment is None else self.segment
        return self._span(f"{operation(self.path)} {model}", "client", parent_id=parent.span_id, start=now)

    def direct(self, now: float) -> Span:
        """Returns the span of a request to an engine that computes nothing."""
        return self._span(f"{self.method} {self.route}", "client", parent_id=self.request.span_id, start=now)

    def finish(self, now: float) -> None:
        """Ends all spans that have not ended."""
        for span in self.spans:
            span.finish(now)


class Traces:
    """Starts the traces of sampled requests, and passes them on when they end."""

    def __init__(self, ratio: float, export: Callable[[RequestTrace], None]) -> None:
        self._ratio = ratio
        self.export = export  # takes a trace that ended
        self._random = Random(SystemRandom().getrandbits(256))
        self._decisions: OrderedDict[tuple[int, int], str] = OrderedDict()

    def context(self, request: ClientRequest) -> TraceContext:
        """Returns the context of a request: the first call reads it from the head or makes it."""
        if request.trace is None:
            request.trace = self._context(request.head)
        return request.trace

    def _context(self, head: RequestHead) -> TraceContext:
        parent = read_parent(head.field(b"traceparent"))
        if parent is not None:
            return TraceContext(*parent, head.field(b"tracestate") or b"")
        trace_id = self._random.getrandbits(128) or 1
        return TraceContext(trace_id, 0, is_sampled(trace_id, self._ratio), state=b"")

    def span_id(self) -> int:
        """Returns an id for a span that is not recorded."""
        return self._random.getrandbits(64) or 1

    def begin(self, request: ClientRequest, context: TraceContext) -> RequestTrace:
        """Returns the trace of a sampled request."""
        return RequestTrace(request, context, self._random)

    def remember(self, model: int, decision: int, trace_id: str) -> None:
        """Remembers the trace of a decision. ``model``: the index of its model."""
        self._decisions[model, decision] = trace_id
        if len(self._decisions) > REMEMBERED:
            self._decisions.popitem(last=False)

    def of_decision(self, model: int, decision: int) -> str | None:
        """Returns the trace id of a decision; None: unknown, or too old."""
        return self._decisions.get((model, decision))

    def refused(self, request: ClientRequest, earlier: RequestTrace | None) -> None:
        """Records a request that the router answered without a decision of its last model.

        ``earlier``: its spans so far; None: it has none.
        """
        context, status = self.context(request), request.status
        if context.sampled:
            trace = earlier or self.begin(request, context)
            trace.request.attributes = request_attributes(request, status)
            trace.request.finish(time.monotonic(), str(status) if status >= 500 else None)
            self.export(trace)


def server_name(request: ClientRequest) -> str:
    """Returns the name of the span of a request: few values, as the conventions for HTTP ask."""
    path = request.head.path
    return f"{request.method} {route(path)}" if path else UNREAD_NAME


def request_attributes(request: ClientRequest, status: int) -> Attributes:
    """Returns the attributes of the span of a request."""
    path = request.head.path
    attributes: Attributes = {
        "http.request.method": request.method if path else UNREAD_METHOD,
        "url.path": path,
        "http.response.status_code": status,
        "lmetric.request_id": request.head.request_id,
    }
    if path:
        attributes["http.route"] = route(path)
        if route(path) == path:  # requests about a stored response are no operation of GenAI
            attributes["gen_ai.operation.name"] = operation(path)
    if request.model is not None:
        attributes["gen_ai.request.model"] = request.model.name
    attributes |= {f"lmetric.{key}": name for key, name in request.earlier_names.items()}
    if request.tenant:
        attributes["lmetric.tenant"] = request.tenant
    if request.slo_class:
        attributes["lmetric.slo_class"] = request.slo_class
    return attributes
