"""A receiver of OTLP/HTTP, which reads spans with OpenTelemetry's own messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from waiting import until


@dataclass
class Span:
    """A span as a receiver got it. ``parent``: empty without one."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    seconds: float
    start_seconds: float  # since 1970
    attributes: dict[str, Any]
    error: bool
    state: str
    service: str


@dataclass
class Receiver:
    """The spans that arrived. ``status``: of its answers."""

    status: int = 200
    spans: list[Span] = field(default_factory=list)
    authorization: str | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.authorization = request.headers.get("authorization")
        if self.status != 200:
            return web.Response(status=self.status)
        if request.content_type == "application/json":
            values = orjson.loads(body)
            for spans in values["resourceSpans"]:
                for scope in spans["scopeSpans"]:
                    for span in scope["spans"]:
                        _base64_ids(span)
            message = ParseDict(values, ExportTraceServiceRequest())
        else:
            message = ExportTraceServiceRequest.FromString(body)
        for spans in message.resource_spans:
            service = {pair.key: pair.value.string_value for pair in spans.resource.attributes}[
                "service.name"
            ]
            for scope in spans.scope_spans:
                self.spans += [_span(each, service) for each in scope.spans]
        return web.Response(body=b"", content_type="application/x-protobuf")

    async def trace(self, count: int) -> dict[str, Span]:
        """Waits until this many spans arrived. Returns them by the first word of their names."""
        await until(lambda: len(self.spans) >= count, seen=lambda: [span.name for span in self.spans])
        assert len(self.spans) == count
        return {span.name.split()[0]: span for span in self.spans}


def _base64_ids(span: dict[str, Any]) -> None:
    """OTLP's JSON has hex ids, where protobuf's JSON has base64."""
    from base64 import b64encode

    for name in ("traceId", "spanId", "parentSpanId"):
        if name in span:
            span[name] = b64encode(bytes.fromhex(span[name])).decode()


def _span(each: Any, service: str) -> Span:
    attributes = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in each.attributes}
    return Span(
        each.name,
        each.trace_id.hex(),
        each.span_id.hex(),
        each.parent_span_id.hex(),
        each.kind,
        (each.end_time_unix_nano - each.start_time_unix_nano) / 1e9,
        each.start_time_unix_nano / 1e9,
        attributes,
        each.status.code == 2,
        each.trace_state,
        service,
    )


@contextlib.asynccontextmanager
async def receiver(port: int = 0) -> AsyncIterator[Receiver]:
    """Runs a receiver."""
    it = Receiver()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", it.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    it.port = runner.addresses[0][1]
    try:
        yield it
    finally:
        await runner.cleanup()
