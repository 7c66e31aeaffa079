"""Traces: spans at a real OTLP receiver, W3C context, sampling, and a collector that is down."""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from lmetric.config import ServerConfig
from lmetric.server.observe.tracing.context import is_sampled, read_parent, without_parent
from lmetric.server.observe.tracing.spans import RequestTrace
from log_watch import MARKED_PROMPT
from otlp_world import receiver
from pd_world import nixl, pd
from server_world import FakeEngine, hang, plain, reset, says, world
from waiting import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
STREAM = {"prompt": MARKED_PROMPT, "stream": True, "max_tokens": 3}
SERVER, CLIENT, INTERNAL = 2, 3, 1


async def test_the_spans_of_a_request() -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url, "token": "secret"}) as w:
        began = time.time()
        status, headers, _ = await w.post(STREAM)
        assert status == 200
        found = await spans.trace(4)
        request, decision = found["POST"], found["lmetric.decision"]
        segment, attempt = found["lmetric.segment"], found["text_completion"]
        assert {span.trace for span in spans.spans} == {request.trace}
        assert [span.kind for span in (request, decision, segment, attempt)] == [
            SERVER,
            INTERNAL,
            INTERNAL,
            CLIENT,
        ]
        assert request.parent == ""
        assert {decision.parent, segment.parent} == {request.id}
        assert attempt.parent == segment.id
        assert request.service == "lmetric-router"
        assert spans.authorization == "Bearer secret"
        assert abs(request.start_seconds - began) < 5
        assert 0 < attempt.seconds <= request.seconds < 5
        assert request.attributes["http.response.status_code"] == 200
        assert request.attributes["gen_ai.request.model"] == "tiny"
        assert decision.attributes["lmetric.decision"] == headers["x-lmetric-decision"]
        expected = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.stream": True,
            "gen_ai.usage.input_tokens": 10,
            "gen_ai.usage.output_tokens": 3,
            "server.address": "127.0.0.1",
            "server.port": w.engines[0].port,
            "lmetric.engine": "e0",
            "http.response.status_code": 200,
        }
        assert expected.items() <= attempt.attributes.items()
        assert attempt.attributes["gen_ai.response.time_to_first_chunk"] > 0
        assert not any(span.error for span in spans.spans)
        # The engine continues the trace.
        given = w.engines[0].requests[-1].headers["traceparent"]
        assert given == f"00-{request.trace}-{attempt.id}-01"
        assert MARKED_PROMPT not in repr(spans.spans)


async def test_a_clients_context_is_continued() -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url}) as w:
        await w.post(STREAM, headers={"traceparent": PARENT, "tracestate": "vendor=1"})
        found = await spans.trace(4)
        assert {span.trace for span in spans.spans} == {TRACE}
        assert found["POST"].parent == "b7ad6b7169203331"
        assert found["POST"].state == "vendor=1"
        engine = w.engines[0].requests[-1].headers
        assert engine["traceparent"] == f"00-{TRACE}-{found['text_completion'].id}-01"
        assert engine["tracestate"] == "vendor=1"


@pytest.mark.parametrize(
    "field", ["00-0-0-01", f"ff-{TRACE}-b7ad6b7169203331-01", f"00-{'0' * 32}-b7ad6b7169203331-01"]
)
async def test_an_invalid_context_starts_a_new_trace(field: str) -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url}) as w:
        await w.post(STREAM, headers={"traceparent": field, "tracestate": "vendor=1"})
        found = await spans.trace(4)
        assert found["POST"].parent == ""
        engine = w.engines[0].requests[-1].headers
        assert engine["traceparent"].split("-")[1] == found["POST"].trace
        assert "tracestate" not in engine


async def test_sampling_is_respected() -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url, "sample_ratio": 0}) as w:
        await w.post(STREAM)
        own = w.engines[0].requests[-1].headers["traceparent"]
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", own)
        await w.post(STREAM, headers={"traceparent": PARENT[:-1] + "0"})
        assert w.engines[0].requests[-1].headers["traceparent"] == PARENT[:-1] + "0"
        await w.post(STREAM, headers={"traceparent": "broken", "tracestate": "vendor=1"})
        own = w.engines[0].requests[-1].headers
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", own["traceparent"])
        assert "tracestate" not in own
        await w.post(STREAM, headers={"traceparent": PARENT})
        await spans.trace(4)  # the last request alone
        assert {span.trace for span in spans.spans} == {TRACE}


async def test_without_the_setting_the_context_passes_unchanged() -> None:
    async with world(1) as w:
        await w.post(STREAM, headers={"traceparent": PARENT, "tracestate": "vendor=1"})
        engine = w.engines[0].requests[-1].headers
        assert (engine["traceparent"], engine["tracestate"]) == (PARENT, "vendor=1")
        assert w.server.front.running.tracing is None


async def test_each_attempt_has_a_span() -> None:
    """The first engine breaks the connection, and the second answers."""
    async with receiver() as spans, world(2, tracing={"endpoint": spans.url}) as w:
        w.engines[0].behave = reset
        assert (await w.post(STREAM))[0] == 200
        await until(lambda: len(spans.spans) == 5)
        attempts = [span for span in spans.spans if span.kind == CLIENT]
        assert [span.attributes["lmetric.engine"] for span in attempts] == ["e0", "e1"]
        assert [span.attributes.get("error.type") for span in attempts] == ["reset", None]
        assert [span.error for span in attempts] == [True, False]
        (segment,) = [span for span in spans.spans if span.name == "lmetric.segment"]
        assert {span.parent for span in attempts} == {segment.id}
        (server,) = [span for span in spans.spans if span.kind == SERVER]
        assert not server.error
        ids = [engine.requests[-1].headers["traceparent"].split("-")[2] for engine in w.engines]
        assert ids == [span.id for span in attempts]


async def test_an_attempt_without_a_connection_has_a_span() -> None:
    async with receiver() as spans, world(2, tracing={"endpoint": spans.url}) as w:
        await w.engines[0].stop()
        with capture_logs() as logs:
            assert (await w.post(STREAM))[0] == 200
            await until(lambda: len(spans.spans) == 5)
        attempts = [span for span in spans.spans if span.kind == CLIENT]
        assert [span.attributes.get("error.type") for span in attempts] == ["refused", None]
        assert [line for line in logs if "internal error" in line["event"]] == []


async def test_each_segment_has_a_span() -> None:
    """A prefill engine computes the prompt, and a decode engine answers."""
    engines = [nixl("prefill"), nixl("decode")]
    async with receiver() as spans, pd(*engines, tracing={"endpoint": spans.url}) as w:
        assert (await w.post())[0] == 200
        await until(lambda: len(spans.spans) == 6)
        ordered = sorted(spans.spans, key=lambda span: span.start_seconds)
        first, second = [span for span in ordered if span.name == "lmetric.segment"]
        assert first.attributes["lmetric.segment.from_token"] == 0
        assert second.attributes["lmetric.segment.from_token"] > 0
        attempts = [span for span in ordered if span.kind == CLIENT]
        assert [span.parent for span in attempts] == [first.id, second.id]
        assert [span.attributes["lmetric.engine"] for span in attempts] == ["p0", "d0"]
        assert [span.attributes["lmetric.for_client"] for span in attempts] == [False, True]
        assert not any(span.error for span in ordered)


async def test_errors_and_refusals() -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url}) as w:
        assert (await w.post({"model": "unknown", "prompt": "x"}))[0] == 404
        (refused,) = (await spans.trace(1)).values()
        assert (refused.name, refused.attributes["http.response.status_code"]) == (
            "POST /v1/completions",
            404,
        )
        assert not refused.error
        spans.spans.clear()
        w.engines[0].behave = says(plain(500, {"error": {"message": "broken"}}), then="keep")
        status = (await w.post({"prompt": "x"}))[0]
        assert status >= 500
        await until(lambda: len(spans.spans) >= 4)
        request = next(span for span in spans.spans if span.kind == SERVER)
        assert request.error
        assert request.attributes["error.type"] == str(status)


async def test_a_client_that_leaves() -> None:
    async with receiver() as spans, world([FakeEngine(behave=hang)], tracing={"endpoint": spans.url}) as w:
        task = asyncio.create_task(w.post(STREAM))
        await w.until(lambda: w.engines[0].requests)
        task.cancel()
        found = await spans.trace(4)
        assert found["POST"].attributes["http.response.status_code"] == 499
        assert found["text_completion"].attributes["error.type"] == "cancelled"


async def test_trace_ids_in_logs_records_and_exemplars() -> None:
    async with (
        receiver() as spans,
        world(1, tracing={"endpoint": spans.url}, log={"access": True}) as w,
    ):
        with capture_logs() as lines:
            _, headers, _ = await w.post(STREAM, headers={"traceparent": PARENT})
        (line,) = [line for line in lines if line["event"] == "request"]
        assert line["trace_id"] == TRACE
        record = orjson.loads((await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}"))[1])
        assert record["trace_id"] == TRACE
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        text = (await w.get("/metrics", accept))[1].decode()
        (example,) = [line for line in text.splitlines() if "# {" in line and not line.startswith("#")]
        assert example.startswith('lmetric_time_to_first_token_seconds_bucket{le="')
        assert f'# {{trace_id="{TRACE}"}} ' in example
        assert "# {" not in (await w.get("/metrics"))[1].decode()
        await spans.trace(4)


async def test_a_collector_that_is_down_delays_nothing() -> None:
    """Its port takes connections and never answers, so the queue fills and spans are dropped."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with world(1, tracing={"endpoint": url, "queue_spans": 20, "timeout": 0.2}) as w:
            for _ in range(20):
                assert (await w.post({"prompt": "x"}))[0] == 200
            assert w.server.metrics.spans["dropped"] > 0
            await until(lambda: w.server.metrics.spans["failed"] > 0)
            text = (await w.get("/metrics"))[1].decode()
            assert 'lmetric_trace_spans_total{outcome="exported"} 0.0' in text


async def test_spans_wait_until_the_collector_is_back() -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url}) as w:
        spans.status = 503
        await w.post({"prompt": "x"})
        await asyncio.sleep(0.6)
        spans.status = 200
        await spans.trace(4)
        await until(lambda: w.server.metrics.spans["exported"] == 4)


async def test_a_span_that_cannot_be_made_ends_no_export() -> None:
    async with receiver() as spans, world(1, tracing={"endpoint": spans.url}) as w:
        tracing = w.server.front.running.tracing
        assert tracing is not None
        sound = tracing.export

        def broken(trace: RequestTrace) -> None:
            trace.request.end = math.nan
            sound(trace)

        tracing.export = broken
        await w.post({"prompt": "x"})
        await until(lambda: w.server.metrics.spans["failed"] == 4)
        assert not spans.spans
        tracing.export = sound
        await w.post({"prompt": "x"})
        await spans.trace(4)


# Parts.


@given(st.binary(max_size=80))
def test_no_field_breaks_the_reader(field: bytes) -> None:
    parent = read_parent(field)
    assert parent is None or parent.trace_id


def test_only_the_context_is_removed_from_a_head() -> None:
    fields = b"\r\nTraceParent: a\r\nx-traceparent: b\r\ntracestate: c\r\nhost: d\r\n\r\n"
    assert (
        without_parent(fields, keep_state=True) == b"\r\nx-traceparent: b\r\ntracestate: c\r\nhost: d\r\n\r\n"
    )
    assert without_parent(fields, keep_state=False) == b"\r\nx-traceparent: b\r\nhost: d\r\n\r\n"


@given(st.integers(0, 2**128 - 1), st.floats(0, 1))
def test_the_ratio_is_that_of_opentelemetry(trace_id: int, ratio: float) -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    wanted = (
        TraceIdRatioBased(ratio).should_sample(None, trace_id, "x").decision is Decision.RECORD_AND_SAMPLE
    )
    assert is_sampled(trace_id, ratio) == wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpoint": "127.0.0.1:4318"}, "http://host:port"),
        ({"sample_ratio": 2}, "less than or equal to 1"),
        ({"token": "a", "token_file": "b"}, "token_file"),
    ],
)
def test_bad_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ServerConfig.model_validate({"tracing": values})


def test_opentelemetry_is_imported_by_routers_with_traces_only() -> None:
    """Without the packages, the setting is an error that names the extra."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from lmetric.config import ConfigError, ServerConfig\n"
        "from lmetric.server import Server\n"
        "Server(ServerConfig(engines=[{'url': 'http://127.0.0.1:9'}])).build()\n"
        "loaded = [name for name, module in sys.modules.items() if module is not None]\n"
        "assert not any(name.startswith('opentelemetry') for name in loaded)\n"
        "try:\n"
        "    Server(ServerConfig(engines=[{'url': 'http://127.0.0.1:9'}], tracing={})).build()\n"
        "except ConfigError as error:\n"
        '    assert "pip install \'opentelemetry-exporter-otlp-proto-http>=" in str(error), error\n'
        "else:\n"
        "    raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.nightly
async def test_a_real_collector_takes_the_spans(tmp_path: Path) -> None:
    """Router to collector to receiver: the collector parses the spans and sends them on as JSON."""
    program = os.environ.get("TEST_OTELCOL")
    if program is None:
        pytest.skip("no OpenTelemetry collector: run scripts/nightly, or set TEST_OTELCOL to its path")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with receiver() as spans:
        config = {
            "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{port}"}}}},
            "exporters": {
                "otlp_http": {"endpoint": spans.url, "encoding": "json", "compression": "none"},
            },
            "service": {
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
                "telemetry": {"metrics": {"level": "none"}},
            },
        }
        file = tmp_path / "collector.yaml"
        file.write_text(yaml.safe_dump(config))
        process = await asyncio.create_subprocess_exec(program, f"--config={file}")
        try:
            async with world(1, tracing={"endpoint": f"http://127.0.0.1:{port}"}) as w:
                await w.post(STREAM, headers={"traceparent": PARENT})
                found = await spans.trace(4)
                assert {span.trace for span in spans.spans} == {TRACE}
                assert found["text_completion"].parent == found["lmetric.segment"].id
                assert found["text_completion"].attributes["gen_ai.usage.output_tokens"] == 3
        finally:
            process.terminate()
            await process.wait()
