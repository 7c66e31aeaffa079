"""Sends spans to a collector with OpenTelemetry's SDK, in a thread with a bounded queue.

Requests never wait for the collector. Spans that find the queue full are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque

import structlog

from lmetric._core import __version__
from lmetric.config import ConfigError, TracingConfig, read_secret
from lmetric.extras import install
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.execution import Execution
from lmetric.server.execution.observers import Observer
from lmetric.server.execution.progress import Progress
from lmetric.server.observe.tracing.requests import SampledRequest, UnsampledRequest
from lmetric.server.observe.tracing.spans import RequestTrace, Span, Traces

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
    from opentelemetry.trace.span import TraceState
except ImportError as missing:
    raise ConfigError(f"tracing needs another package ({missing}): {install('otel')}") from None

PATH = "/v1/traces"
BATCH_SPANS = 512
PERIOD_SECONDS = 0.5  # time between two batches that are not full
STOP_SECONDS = 2.0  # for the last spans, at the end

_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT}
_SCOPE = InstrumentationScope("lmetric-router", __version__)

log = structlog.get_logger("lmetric.tracing")


class SpanQueue:
    """The spans that wait for the collector, and the thread that sends them."""

    def __init__(
        self, exporter: SpanExporter, resource: Resource, limit: int, outcomes: Counter[str]
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._limit = limit
        self._traces: deque[RequestTrace] = deque()
        self._waiting = 0  # spans in `_traces`
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._reachable = True
        self._outcomes = outcomes
        outcomes.update(exported=0, dropped=0, failed=0)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, trace: RequestTrace) -> None:
        """Adds the spans of a trace, or drops them if the queue is full. Never waits."""
        count = len(trace.spans)
        with self._lock:
            if self._waiting + count > self._limit:
                self._outcomes["dropped"] += count
                return
            self._waiting += count
            self._traces.append(trace)
            full = self._waiting >= BATCH_SPANS
        if full:
            self._wake.set()

    def _take(self) -> list[RequestTrace]:
        taken: list[RequestTrace] = []
        spans = 0
        with self._lock:
            while self._traces and spans < BATCH_SPANS:
                trace = self._traces.popleft()
                spans += len(trace.spans)
                taken.append(trace)
            self._waiting -= spans
        return taken

    def _run(self) -> None:
        while True:
            self._wake.wait(PERIOD_SECONDS)
            self._wake.clear()
            while batch := self._take():
                self._send(batch)
            if self._stopped:
                return

    def _send(self, batch: list[RequestTrace]) -> None:
        # The wall clock minus the monotonic clock, ns.
        offset = time.time_ns() - int(time.monotonic() * 1e9)
        count = sum(len(trace.spans) for trace in batch)
        try:  # nothing may end the thread: further spans would be dropped
            spans = [self._readable(trace, span, offset) for trace in batch for span in trace.spans]
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("spans could not be sent")
            done = False
        self._outcomes["exported" if done else "failed"] += count
        if done != self._reachable:
            self._reachable = done
            if done:
                log.info("the trace collector takes spans again")
            else:
                log.warning("the trace collector does not take spans; they are dropped and counted")

    def _readable(self, trace: RequestTrace, span: Span, offset: int) -> ReadableSpan:
        """Returns an OpenTelemetry span. ``offset``: from the monotonic to the wall clock, ns."""
        state = TraceState.from_header([trace.context.state.decode("latin-1")] if trace.context.state else [])
        flags = TraceFlags(TraceFlags.SAMPLED)

        def context(span_id: int, remote: bool) -> SpanContext:
            return SpanContext(trace.context.trace_id, span_id, remote, flags, state)

        parent = None
        if span.parent_id:
            parent = context(span.parent_id, span is trace.request)
        attributes = dict(span.attributes)
        status = Status(StatusCode.UNSET)
        if span.error is not None:
            attributes["error.type"] = span.error
            status = Status(StatusCode.ERROR)
        end = span.end if span.end is not None else span.start
        return ReadableSpan(
            span.name,
            context=context(span.span_id, False),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=_KINDS[span.kind],
            status=status,
            start_time=int(span.start * 1e9) + offset,
            end_time=int(end * 1e9) + offset,
            instrumentation_scope=_SCOPE,
        )

    def stop(self) -> None:
        """Sends the last spans for at most `STOP_SECONDS`. Blocks."""
        self._stopped = True
        self._wake.set()
        self._thread.join(STOP_SECONDS)
        self._exporter.shutdown()


class Tracing(Traces, Observer):
    """The traces of a router, and their way to the collector."""

    def __init__(self, config: TracingConfig, outcomes: Counter[str]) -> None:
        """Raises ConfigError if `token_file` cannot be read. ``outcomes``: of the spans."""
        # The exporter would log each failure. `SpanQueue` logs once, and counts.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        token = read_secret(config.token, config.token_file)
        exporter = OTLPSpanExporter(
            endpoint=config.endpoint.rstrip("/") + PATH,
            headers=None if token is None else {"authorization": f"Bearer {token}"},
            timeout=config.timeout,
        )
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "lmetric-router"),
                "service.version": __version__,
            }
        )
        self.queue = SpanQueue(exporter, resource, config.queue_spans, outcomes=outcomes)
        super().__init__(config.sample_ratio, self.queue.add)

    def placed(self, request: ClientRequest, relay: Progress) -> None:
        """Starts the trace of a request."""
        context = self.context(request)
        # A request about a stored response has no decision.
        execution = relay if isinstance(relay, Execution) and relay.decision is not None else None
        if execution is not None:
            self.remember(execution.model.index, execution.decision.id, context.hex_id)
        if context.sampled:
            spans = _earlier(request) or self.begin(request, context)
            relay.trace = trace = SampledRequest(spans, execution)
            if execution is not None:
                trace.decided(execution, request)
        elif not context.parent_id:  # else the client's fields, which engines get, say the same
            relay.trace = UnsampledRequest(context, self.span_id())

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Ends the trace of a request, or records that the router refused it."""
        if relay is not None and isinstance(relay.trace, SampledRequest):
            self.export(relay.trace.ended(request, relay))
        elif (earlier := _earlier(request)) is not None or request.error is not None:
            self.refused(request, earlier)

    def stop(self) -> None:
        """Sends the last spans for at most `STOP_SECONDS`. Blocks."""
        self.queue.stop()


def _earlier(request: ClientRequest) -> RequestTrace | None:
    """Returns the spans of a request from before its last fallback; None: it has none."""
    trace = None if request.fallback is None else request.fallback.trace
    return trace.fell_back() if isinstance(trace, SampledRequest) else None
