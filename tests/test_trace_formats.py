"""Readers of public trace formats: columns of small files, errors for each field, and simulations.

The files in tests/data/traces are made up; its README names the sources of the formats.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric_lab.sim.programs import program_figures
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, TraceError, load_trace, recognise, write_trace
from lmetric_lab.sim.traces.calls import Agent, Call
from lmetric_lab.sim.traces.fields import Row

DATA = Path(__file__).parent / "data" / "traces"
FORMATS = {
    "mooncake_toolagent.jsonl": "mooncake",
    "qwen_bailian.jsonl": "qwen-bailian",
    "aiperf_sessions.jsonl": "aiperf",
    "weka.jsonl": "weka",
    "weka_document.json": "weka",
    "otel_spans.jsonl": "otel",
    "otel_document.json": "otel",
}


def lists(trace: Trace) -> dict[str, Any]:
    """The columns of a trace as lists."""
    names = ("input_tokens", "output_tokens", "sessions", "previous", "finish", "joins")
    columns = {name: getattr(trace, name) for name in names}
    return {name: column.tolist() for name, column in columns.items() if column is not None} | {
        "blocks": [trace.blocks(i).tolist() for i in range(len(trace))]
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_format_is_detected_and_its_programs_are_simulated(name: str, packed: bool, tmp_path: Path) -> None:
    path = DATA / name
    if packed:
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress((DATA / name).read_bytes()))
    assert recognise(path)[0] == FORMATS[name]
    trace = load_trace(path, closed_loop=True)
    np.testing.assert_array_equal(
        trace.input_tokens, load_trace(path, format=FORMATS[name], closed_loop=True).input_tokens
    )
    assert trace.previous is not None
    run = simulate(trace, profile="qwen3-32b-2xh20", instances=1, admission="vllm", cached_answers=True)
    figures = program_figures(run, (0, 1))
    assert figures is not None
    assert figures.failed == 0
    assert trace.program_of is not None
    assert figures.programs == len(np.unique(trace.program_of[trace.program_of >= 0]))
    assert figures.jct_mean_seconds is not None
    assert run.hit_tokens.sum() > 0
    for i, awaited in trace.awaited().items():
        gap = run.arrival_seconds[i] - run.finished_seconds[awaited].max()
        think = 0.0 if trace.think_seconds is None else trace.think_seconds[i]
        assert gap >= think - 1e-9
    write_trace(trace, tmp_path / "again.jsonl")
    again = load_trace(tmp_path / "again.jsonl", bucket_seconds=0)
    np.testing.assert_allclose(again.arrival_seconds, trace.arrival_seconds, atol=1e-6)
    assert lists(again) == lists(trace)


def test_mooncake_conversations_are_found_by_prefix() -> None:
    path = DATA / "mooncake_toolagent.jsonl"
    open_loop = load_trace(path)
    assert (open_loop.sessions, open_loop.previous) == (None, None)
    trace = load_trace(path, closed_loop=True)
    assert trace.previous is not None
    assert trace.sessions is not None
    # Requests 0 and 1 share a system prompt only, so 1 follows nothing.
    assert trace.previous.tolist() == [-1, -1, 0, 1, -1, 2]
    assert trace.sessions.tolist() == [0, 1, 0, 1, 2, 0]
    np.testing.assert_allclose(trace.arrival_seconds, open_loop.arrival_seconds)


def test_aiperf_turns_extend_the_session() -> None:
    trace = load_trace(DATA / "aiperf_sessions.jsonl")
    new = 2**63
    assert trace.block_tokens == 512
    np.testing.assert_allclose(trace.arrival_seconds, [0, 0.5005, 0.9, 2, 2.0005, 3])
    assert lists(trace) == {
        # Turn 2 of s1: 1100 + 40 + 500 tokens.
        "input_tokens": [1100, 300, 1024, 1640, 1120, 1770],
        "output_tokens": [40, 20, 5, 30, 10, 15],
        "sessions": [0, 1, -1, 0, 1, 0],
        "previous": [-1, -1, -1, 0, 1, 3],
        "blocks": [[5, 6, 7], [], [5, 6], [5, 6, new], [new + 1, new + 2], [5, 6, new]],
    }
    assert trace.think_seconds is not None
    assert trace.think_seconds.tolist() == [0, 0, 0, 2, 1.5, 1]


@pytest.mark.parametrize(
    ("mode", "tokens", "ids"),
    [
        ("deltas_with_responses", 1600, [5, 6, 2**63]),
        ("message_array_with_responses", 500, [9]),
        ("deltas_without_responses", 1640, [5, 6, 2**63]),
    ],
)
def test_aiperf_context_modes(mode: str, tokens: int, ids: list[int], tmp_path: Path) -> None:
    first = {"session_id": "a", "input_length": 1100, "output_length": 40, "hash_ids": [5, 6, 7]}
    second = {"session_id": "a", "delay": 10, "input_length": 500, "output_length": 3, "hash_ids": [9]}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row | {"context_mode": mode}) + "\n" for row in (first, second)))
    trace = load_trace(path)
    assert trace.input_tokens.tolist() == [1100, tokens]
    assert trace.blocks(1).tolist() == ids


def test_weka_subagents_are_joined() -> None:
    trace = load_trace(DATA / "weka.jsonl")
    assert trace.block_tokens == 64
    # Main agent at 0-4 and 6-11 s; subagents at 12-14, 15-21 and 12.5-15 s; main agent at 24 s.
    # The earliest arrivals keep the gaps: 2 s, then 1 and 1.5 s, then 1 s, then 3 s.
    np.testing.assert_allclose(trace.arrival_seconds, [0, 0, 2, 3, 3.5, 4, 7, 8.5])
    assert lists(trace) == {
        "input_tokens": [300, 130, 420, 200, 260, 270, 640, 200],
        "output_tokens": [30, 10, 80, 20, 40, 40, 100, 10],
        "sessions": [0, 1, 0, 0, 0, 0, 0, 1],
        "previous": [-1, -1, 0, 2, 2, 3, 5, 1],
        "finish": [1, 1, 1, 1, 0, 0, 0, 0],
        "joins": [[6, 4]],
        # IDs of the second conversation are local: moved behind those of the first.
        "blocks": [
            [1, 2, 3, 4],
            [45, 46],
            [1, 2, 3, 4, 5, 6],
            [20, 21, 22],
            [30, 31, 32, 33],
            [20, 21, 22, 23],
            [1, 2, 3, 4, 5, 6, 40, 41, 42, 43],
            [45, 46, 47],
        ],
    }
    assert trace.think_seconds is not None
    assert trace.think_seconds.tolist() == [0, 0, 2, 1, 1.5, 1, 3, 8.5]
    recorded = load_trace(DATA / "weka.jsonl", closed_loop=False)
    assert recorded.previous is None
    np.testing.assert_allclose(recorded.arrival_seconds, [0, 0, 6, 10, 12, 12.5, 15, 24])


def test_global_ids_are_shared(tmp_path: Path) -> None:
    conversations = [json.loads(line) for line in (DATA / "weka.jsonl").read_text().splitlines()]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(each | {"hash_id_scope": "global"}) + "\n" for each in conversations))
    assert load_trace(path).blocks(1).tolist() == [1, 2]


def test_hash_ids_are_equal_if_a_json_parser_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    conversations = [json.loads(line) for line in (DATA / "weka.jsonl").read_text().splitlines()]
    # A backslash anywhere in a line leaves its hash IDs to the parser: a key may be escaped.
    for marks in (("", ""), ("\n", ""), ("", "\n"), ("\n", "\n")):
        marked = zip(conversations, marks, strict=True)
        path.write_text("".join(json.dumps(each | {"id": mark}) + "\n" for each, mark in marked))
        assert lists(load_trace(path)) == lists(load_trace(DATA / "weka.jsonl"))
    escaped = path.read_text().replace("hash_ids", "hash\\u005fids")
    path.write_text(escaped)
    assert lists(load_trace(path)) == lists(load_trace(DATA / "weka.jsonl"))


def test_a_turn_after_an_unknown_end_keeps_its_recorded_arrival(tmp_path: Path) -> None:
    conversation = json.loads((DATA / "weka_document.json").read_text())
    del conversation["requests"][0]["api_time"]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(conversation))
    trace = load_trace(path)
    np.testing.assert_allclose(trace.arrival_seconds[:2], [0, 6])
    assert trace.previous is not None
    assert trace.think_seconds is not None
    assert (trace.previous[1], trace.think_seconds[1]) == (0, 0)


def test_otel_conversations_and_subagents() -> None:
    trace = load_trace(DATA / "otel_spans.jsonl")
    assert trace.block_tokens == 64
    # The planner runs at 0-4 s, and the researcher at 5-7 s. The writer runs at 5.5-6 s.
    # The planner goes on at 9-12 s, and at 40 s in another trace of the same conversation.
    np.testing.assert_allclose(trace.arrival_seconds, [0, 1, 1.5, 2, 3.5, 31.5], atol=1e-5)
    columns = lists(trace)
    blocks = columns.pop("blocks")
    assert columns == {
        "input_tokens": [1000, 400, 300, 128, 1250, 1500],
        "output_tokens": [50, 40, 20, 9, 60, 100],
        "sessions": [0, 0, 0, 1, 0, 0],
        "previous": [-1, 0, 0, -1, 1, 4],
        "finish": [1, 0, 0, 2, 0, 0],
        "joins": [[4, 2]],
    }
    assert [len(each) for each in blocks] == [15, 6, 4, 2, 19, 23]
    assert blocks[4][:15] == blocks[0]  # 1000 + 50 tokens are shared: 16 blocks, 15 with an ID
    assert blocks[5][:19] == blocks[4]
    assert len({each[0] for each in blocks}) == 4  # subagents and other conversations begin anew
    assert trace.think_tokens is not None
    assert trace.think_tokens.tolist() == [0, 0, 0, 0, 0, 30]
    document = load_trace(DATA / "otel_document.json")
    assert lists(document) == lists(trace)


def test_a_call_recorded_twice_counts_once(tmp_path: Path) -> None:
    export = json.loads((DATA / "otel_spans.jsonl").read_text().splitlines()[0])
    spans = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans.append(spans[0])  # sent twice
    inner = {**spans[0], "spanId": "99" * 8, "parentSpanId": spans[0]["spanId"]}
    spans.append(inner)  # by a framework, and by its client library
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(export) + "\n")
    assert len(load_trace(path)) == 3


@pytest.mark.parametrize(
    ("last", "tokens", "shared"),
    [
        ((1000, 100, 0), 1200, 1100),  # prompt, answer, and new tokens
        ((1000, 100, 0), 1050, 1050),  # a part of the answer
        ((1000, 100, 60), 1200, 1000),  # reasoning is not part of later prompts
        ((1000, 100, 0), 999, 0),  # a shorter prompt begins anew
    ],
)
def test_otel_prompts_grow_as_far_as_their_length_allows(
    last: tuple[int, int, int], tokens: int, shared: int, tmp_path: Path
) -> None:
    export = json.loads((DATA / "otel_spans.jsonl").read_text().splitlines()[0])
    first = export["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    values = {"input_tokens": last[0], "output_tokens": last[1], "reasoning.output_tokens": last[2]}
    first["attributes"] = [first["attributes"][0]] + [
        {"key": f"gen_ai.usage.{key}", "value": {"intValue": str(value)}} for key, value in values.items()
    ]
    second = copy.deepcopy(first) | {"spanId": "77" * 8, "startTimeUnixNano": first["endTimeUnixNano"]}
    second["endTimeUnixNano"] = str(int(first["endTimeUnixNano"]) + 10**9)
    second["attributes"][1]["value"] = {"intValue": tokens}
    export["resourceSpans"][0]["scopeSpans"][0]["spans"] = [first, second]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(export) + "\n")
    trace = load_trace(path, block_tokens=1)
    common = np.intersect1d(trace.blocks(0), trace.blocks(1))
    assert len(common) == min(shared, last[0])
    assert len(trace.blocks(1)) == tokens


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    """Sets (or with `...` deletes) a value of a JSON document."""

    def change(row: Any) -> None:
        for key in keys[:-1]:
            row = row[key]
        if value is ...:
            del row[keys[-1]]
        else:
            row[keys[-1]] = value

    return change


SPAN = ("resourceSpans", 0, "scopeSpans", 0, "spans", 0)
BAD = [
    ("aiperf_sessions.jsonl", put("session_id", value=7), "session_id must be a string, got 7"),
    (
        "aiperf_sessions.jsonl",
        put("timestamp", value="now"),
        "timestamp must be a number of at least 0, got 'now'",
    ),
    ("aiperf_sessions.jsonl", put("delay", value=-1), "delay must be a number of at least 0, got -1"),
    ("aiperf_sessions.jsonl", put("output_length", value=...), "output_length must be a whole .* got None"),
    ("aiperf_sessions.jsonl", put("input_length", value=0), "input_length must be .* at least 1, got 0"),
    ("aiperf_sessions.jsonl", put("hash_ids", value=[2**63]), f"hash_ids must be below {2**63}, got {2**63}"),
    (
        "aiperf_sessions.jsonl",
        put("hash_ids", value=[1] * 4),
        "4 hash_ids for 1100 tokens: at most 3 of 512 fit",
    ),
    (
        "aiperf_sessions.jsonl",
        put("context_mode", value="live"),
        "context_mode must be one of .*, got 'live'",
    ),
    ("weka.jsonl", put("block_size", value=0), "block_size must be a whole number of at least 1, got 0"),
    ("weka.jsonl", put("block_size", value=32), "block_size is 32, read with blocks of 64 tokens"),
    ("weka.jsonl", put("hash_id_scope", value="file"), "hash_id_scope must be local, got 'file'"),
    ("weka.jsonl", put("requests", value=None), "requests must be a list, got None"),
    ("weka.jsonl", put("requests", value=[]), "requests has no request"),
    ("weka.jsonl", put("requests", 0, value=3), r"requests\[0\] must be an object, got 3"),
    ("weka.jsonl", put("requests", 0, "t", value=None), r"requests\[0\].t must be a number .* got None"),
    (
        "weka.jsonl",
        put("requests", 0, "t", value=1e6),
        r"requests\[1\].t is .*, below 1e\+06 of the request before it",
    ),
    (
        "weka.jsonl",
        put("requests", 1, "type", value="x"),
        r"requests\[1\].type must be n, s or subagent, got 'x'",
    ),
    ("weka.jsonl", put("requests", 1, "in", value="9"), r"requests\[1\].in must be a whole .* got '9'"),
    ("weka.jsonl", put("requests", 0, "out", value=-1), r"requests\[0\].out must be a whole .* got -1"),
    ("weka.jsonl", put("requests", 0, "api_time", value="1"), r"requests\[0\].api_time must be a number"),
    (
        "weka.jsonl",
        put("requests", 0, "hash_ids", value=[-1]),
        r"requests\[0\].hash_ids must be a list of whole",
    ),
    (
        "weka.jsonl",
        put("requests", 0, "hash_ids", value=0),
        r"requests\[0\].hash_ids must be a list of whole .* got 0",
    ),
    (
        "weka.jsonl",
        put("requests", 0, "hash_ids", value=[1] * 9),
        r"requests\[0\].9 hash_ids for 300 tokens: at most 5 of 64 fit",
    ),
    (
        "weka.jsonl",
        put("requests", 0, "hash_ids", value=[1 << 40]),
        r"requests\[0\].hash_ids must be below 1099511627776, got 1099511627776",
    ),
    (
        "weka.jsonl",
        put("requests", value={"hash_ids": [7, 8]}),
        r"requests must be a list, got \{'hash_ids': \[7, 8\]\}",
    ),
    (
        "weka.jsonl",
        put("requests", 2, "requests", 1, "in", value=0),
        r"requests\[2\].requests\[1\].in must be",
    ),
    ("otel_spans.jsonl", put("resourceSpans", value={}), "resourceSpans must be a list of objects, got {}"),
    (
        "otel_spans.jsonl",
        put(*SPAN, "traceId", value="zz"),
        "traceId must be 32 hexadecimal digits, got 'zz'",
    ),
    (
        "otel_spans.jsonl",
        put(*SPAN, "spanId", value=...),
        "span None: spanId must be 16 hexadecimal digits, got None",
    ),
    ("otel_spans.jsonl", put(*SPAN, "parentSpanId", value="1"), "parentSpanId must be 16 hexadecimal digits"),
    (
        "otel_spans.jsonl",
        put(*SPAN, "startTimeUnixNano", value="x"),
        "startTimeUnixNano must be nanoseconds .* 'x'",
    ),
    (
        "otel_spans.jsonl",
        put(*SPAN, "endTimeUnixNano", value="5"),
        "endTimeUnixNano must be at least start.* '5'",
    ),
    (
        "otel_spans.jsonl",
        put(*SPAN, "attributes", 1, value={}),
        "gen_ai.usage.input_tokens must be .* got None",
    ),
    (
        "otel_spans.jsonl",
        put(*SPAN, "attributes", 2, "value", value={"stringValue": "50"}),
        "span '0101010101010101': gen_ai.usage.output_tokens must be .* got '50'",
    ),
    (
        "otel_spans.jsonl",
        put(*SPAN, "attributes", 2, value={"key": "error.type", "value": {"stringValue": "timeout"}}),
        r"output_tokens must be .* got None \(the call failed: error.type is 'timeout'\)",
    ),
    (
        "otel_spans.jsonl",
        put(
            *SPAN,
            "attributes",
            3,
            value={"key": "gen_ai.usage.reasoning.output_tokens", "value": {"intValue": "51"}},
        ),
        "gen_ai.usage.reasoning.output_tokens is 51, of 50 output tokens",
    ),
    (
        "otel_spans.jsonl",
        put(*SPAN, "attributes", 3, value={"key": "gen_ai.conversation.id", "value": {"intValue": 3}}),
        "gen_ai.conversation.id must be a string, got 3",
    ),
]


@pytest.mark.parametrize(("name", "change", "reason"), BAD)
def test_errors_name_file_line_field_and_value(
    name: str, change: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    bad = copy.deepcopy(lines[0])
    change(bad)
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[-1], bad, *lines[:-1]]))
    with pytest.raises(TraceError, match=reason) as caught:
        load_trace(path, format=FORMATS[name])
    assert f"{path}, line 2: " in str(caught.value)
    kept = load_trace(path, format=FORMATS[name], on_bad_line="skip")
    assert [each.line for each in kept.bad_lines] == [2]
    assert len(kept) >= len(load_trace(DATA / name))


@pytest.mark.parametrize("key", ["text_input", "messages", "payload", "turns"])
def test_aiperf_lines_with_text_have_no_lengths(key: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"session_id": "s", key: [{"role": "user"}]}) + "\n")
    with pytest.raises(TraceError, match=f"line 1: input_length must be .* {key} has no token count"):
        load_trace(path)


def test_documents_can_follow_each_other(tmp_path: Path) -> None:
    documents = [json.loads((DATA / "otel_document.json").read_text()) for _ in range(2)]
    for number, document in enumerate(documents):
        document["resourceSpans"][0]["resource"]["attributes"][0]["value"]["stringValue"] = 'a "}{[\\'
        for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            span["traceId"] = f"{number}{span['traceId'][1:]}"
    path = tmp_path / "t.json"
    path.write_text("".join(json.dumps(document, indent=1) + "\n" for document in documents))
    assert len(load_trace(path)) == 2 * len(load_trace(DATA / "otel_document.json"))


def test_subagents_nest_to_a_limit(tmp_path: Path) -> None:
    conversation = json.loads((DATA / "weka.jsonl").read_text().splitlines()[1])
    for _ in range(60):
        subagent = {"t": 0.0, "type": "subagent", "agent_id": "a", "requests": conversation["requests"]}
        conversation["requests"] = [subagent]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(conversation) + "\n")
    with pytest.raises(TraceError, match="subagents nest more than 50 deep"):
        load_trace(path)
    span = json.loads((DATA / "otel_spans.jsonl").read_text().splitlines()[2])
    spans = span["resourceSpans"][0]["scopeSpans"][0]["spans"]
    outer = spans[0]
    for number in range(400):
        spans.append({**outer, "spanId": f"{number + 1:016x}", "parentSpanId": spans[-1]["spanId"]})
    call = json.loads((DATA / "otel_spans.jsonl").read_text().splitlines()[0])
    first = call["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    spans.append(first | {"parentSpanId": spans[-1]["spanId"]})
    path.write_text(json.dumps(span) + "\n")
    assert len(load_trace(path)) == 1


def test_sessions_of_aiperf_in_a_mooncake_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = (DATA / "aiperf_sessions.jsonl").read_text().splitlines(keepends=True)
    path.write_text(lines[3] + lines[0])
    with pytest.raises(TraceError, match=r"line 2: session_id must be .* 's1'; .* set the format aiperf"):
        load_trace(path)
    assert len(load_trace(path, format="aiperf")) == 2


def test_a_document_that_breaks_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text((DATA / "otel_document.json").read_text()[:900])
    with pytest.raises(TraceError, match=r"line 1: not JSON.*half-written"):
        load_trace(path, format="otel")


def test_long_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmetric_lab.sim.traces.load._LONGEST_BYTES", 1 << 9)
    for name in ("weka.jsonl", "weka_document.json"):
        with pytest.raises(TraceError, match=f"{name}, line 1: a line or JSON value of over 0 MiB"):
            load_trace(DATA / name)


def test_sessions_start_at_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes((DATA / "weka.jsonl").read_bytes() * 100)
    trace = load_trace(path, session_rate=0.5)
    assert trace.sessions is not None
    _, first = np.unique(trace.sessions, return_index=True)
    starts = trace.arrival_seconds[first]
    assert len(starts) == 200
    assert (np.diff(starts) > 0).all()
    assert 300 < starts[-1] < 500  # 200 sessions at 0.5/s
    np.testing.assert_array_equal(trace.arrival_seconds, load_trace(path, session_rate=0.5).arrival_seconds)
    own = np.flatnonzero(trace.sessions == 0)
    np.testing.assert_allclose(trace.arrival_seconds[own] - starts[0], [0, 2, 3, 3.5, 4, 7])
    with pytest.raises(TraceError, match="session_rate has no effect"):
        load_trace(DATA / "otel_spans.jsonl", session_rate=1)
    with pytest.raises(TraceError, match="session_rate must be above 0, got 0"):
        load_trace(path, session_rate=0)


def test_the_command_line_reads_and_converts(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(build([words[0]]), words)
        assert done.exit_code == 0, done.output
        return done.stdout

    out = tmp_path / "t.jsonl.gz"
    run("trace", "convert", str(DATA / "weka.jsonl"), "--session-rate", "0.1", "--out", str(out))
    assert lists(load_trace(out)) == lists(load_trace(DATA / "weka.jsonl", session_rate=0.1))
    shown = json.loads(run("trace", "show", str(DATA / "otel_document.json"), "--json"))
    assert (shown["sessions"], shown["waiting_requests"]) == (2, 4)
    words = ["--session-rate", "0.1", "--instances", "1", "--measure", "0:1", "--json", "-"]
    result = json.loads(run("simulate", "--trace", str(DATA / "weka.jsonl"), *words))
    assert result["setting"]["trace"]["session_rate"] == 0.1
    assert all(each["programs"]["failed"] == 0 for each in result["runs"])


intervals = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=9)


@settings(deadline=None)
@given(intervals)
def test_a_call_waits_for_the_latest_calls_that_ended(spans: list[tuple[int, int]]) -> None:
    calls = [Call(Row(float(at), 1, 1, None), float(at + length)) for at, length in spans]
    linked = Agent(items=list(calls)).link([])
    assert len(linked) == len(calls)
    for place, call in enumerate(linked):
        ended = [each for each in linked[:place] if each.end is not None and each.end <= call.start]
        latest = [
            each
            for index, each in enumerate(ended)
            if not any(later.start >= each.end for later in ended[index + 1 :])  # type: ignore[operator]
        ]
        assert call.waits == latest
