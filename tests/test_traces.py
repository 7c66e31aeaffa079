"""Traces: the fields of a line in each format, errors for bad lines, and coarse timestamps.

Slices keep conversations together, and a written trace can be read again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmetric_lab.packed import SUFFIXES, packed
from lmetric_lab.sim.traces import (
    Trace,
    TraceError,
    ideal_hit_tokens,
    load_trace,
    summarize_trace,
    write_trace,
)


def line(
    timestamp: float = 0, tokens: int = 600, output: int = 5, ids: list[int] | None = None, **more: Any
) -> str:
    ids = [1, 2] if ids is None else ids
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids} | more
    return json.dumps(row) + "\n"


def write(path: Path, *lines: str) -> Path:
    text = "".join(lines)
    path.write_bytes(packed(text.encode(), path))
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.xz", "t.jsonl.zst"])
def test_columns(tmp_path: Path, name: str) -> None:
    trace = load_trace(
        write(tmp_path / name, line(0, 513, 7, [4, 9]), line(17, 10, 1, [4]), line(20, 30, 0, []))
    )
    assert len(trace) == 3
    assert trace.name == name
    assert trace.block_tokens == 512
    np.testing.assert_allclose(trace.arrival_seconds, [0, 0.017, 0.020])
    assert trace.input_tokens.tolist() == [513, 10, 30]
    assert trace.output_tokens.tolist() == [7, 1, 0]
    assert [trace.blocks(i).tolist() for i in range(3)] == [[4, 9], [4], []]
    assert trace.bad_lines == ()


def test_buckets_are_spread_evenly_over_themselves(tmp_path: Path) -> None:
    stamps = [0, 0, 3000, 2999, 3001, 3000, 9002]
    trace = load_trace(write(tmp_path / "t.jsonl", *(line(t, output=k) for k, t in enumerate(stamps))))
    np.testing.assert_allclose(trace.arrival_seconds, [0, 1.5, 3, 3.75, 4.5, 5.25, 9])
    # A millisecond of jitter decides the order inside a bucket, so 2999 comes before 3000.
    assert trace.output_tokens.tolist() == [0, 1, 3, 2, 5, 4, 6]


def test_exact_timestamps_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *(line(t) for t in (0, 700, 1450, 3100)))
    np.testing.assert_allclose(load_trace(path).arrival_seconds, [0, 0.7, 1.45, 3.1])
    np.testing.assert_allclose(load_trace(path, bucket_seconds=1.0).arrival_seconds, [0, 1, 1.5, 3])


def test_bucketed_timestamps_stay_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(0), line(0), line(3000))
    np.testing.assert_allclose(load_trace(path, bucket_seconds=0).arrival_seconds, [0, 0, 3])


def test_sorted_by_arrival_with_its_blocks(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "t.jsonl", line(50, ids=[7, 8]), line(10, ids=[3]), line(20, ids=[])))
    np.testing.assert_allclose(trace.arrival_seconds, [0.010, 0.020, 0.050])
    assert [trace.blocks(i).tolist() for i in range(3)] == [[3], [], [7, 8]]


def test_slices(tmp_path: Path) -> None:
    rows = [line(100 * k, tokens=100 * (k + 1), ids=[k]) for k in range(5)]
    trace = load_trace(write(tmp_path / "t.jsonl", *rows))
    assert trace.first(2).input_tokens.tolist() == [100, 200]
    assert len(trace.first(99)) == 5
    short = trace.at_most(300)
    assert [short.blocks(i).tolist() for i in range(len(short))] == [[0], [1], [2]]
    middle = trace.between(0.1, 0.3)
    np.testing.assert_allclose(middle.arrival_seconds, [0, 0.1])
    assert [middle.blocks(i).tolist() for i in range(2)] == [[1], [2]]
    np.testing.assert_allclose(trace.faster(4).arrival_seconds, [0, 0.025, 0.05, 0.075, 0.1])
    assert trace.faster(4).duration_seconds == pytest.approx(0.1)
    with pytest.raises(ValueError, match="above 0"):
        trace.faster(0)


BAD = [
    ("{nonsense}\n", "not JSON"),
    ("[1, 2]\n", "expected a JSON object, got list"),
    (line().replace('"timestamp": 0', '"timestamp": "now"'), "timestamp must be a number"),
    (line(-1), "timestamp must be a number of at least 0, got -1"),
    (line(tokens=0), "input_length must be a whole number of at least 1, got 0"),
    (line(tokens=2**40), "input_length must be a whole number"),
    (line().replace('"output_length": 5', '"output_length": 5.5'), "output_length must be a whole number"),
    (
        line().replace('"output_length": 5, ', ""),
        "output_length must be a whole number of at least 0, got None",
    ),
    (line(ids=[1, -2]), "hash_ids must be a list"),
    (line(tokens=512, ids=[1, 2]), "2 hash_ids for 512 tokens: at most 1 of 512 fit"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_bad_line_stops_with_file_and_line(tmp_path: Path, bad: str, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", line(0), bad, line(9))
    with pytest.raises(TraceError, match=reason) as caught:
        load_trace(path)
    assert f"{path}, line 2: " in str(caught.value)


def test_bad_lines_are_skipped_and_kept_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(0), "{nonsense}\n", "\n", line(9), line(9)[:40])
    trace = load_trace(path, on_bad_line="skip")
    assert len(trace) == 2
    assert [bad.line for bad in trace.bad_lines] == [2, 5]
    assert "half-written" in str(trace.bad_lines[1])


def test_half_written_last_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(0), line(9)[:40])
    with pytest.raises(TraceError, match=r"line 2: not JSON.*half-written"):
        load_trace(path)


def test_file_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="the file is empty"):
        load_trace(write(tmp_path / "empty.jsonl"))
    with pytest.raises(TraceError, match=r"no request in it; first bad line: .*line 1"):
        load_trace(write(tmp_path / "junk.jsonl", "x\n"), on_bad_line="skip", format="mooncake")
    with pytest.raises(TraceError, match="known formats: mooncake, qwen-bailian, azure, aiperf"):
        load_trace(write(tmp_path / "junk.jsonl", "x\n"))
    for suffix in SUFFIXES:
        cut, other = tmp_path / f"cut.jsonl{suffix}", tmp_path / f"not.jsonl{suffix}"
        whole = packed("".join(line(k) for k in range(2000)).encode(), cut)
        cut.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(TraceError, match="breaks off or is damaged after line"):
            load_trace(cut)
        other.write_bytes(b"plain")
        with pytest.raises(TraceError, match=r"not a compressed file|damaged after line 0"):
            load_trace(other)
    with pytest.raises(TraceError, match="unknown trace format 'qwen-bailain'; did you mean 'qwen-bailian'"):
        load_trace(write(tmp_path / "t.jsonl", line()), format="qwen-bailain")


def chat(key: int, parent: int, timestamp: float, tokens: int = 33, **more: Any) -> str:
    row = {"chat_id": key, "parent_chat_id": parent, "timestamp": timestamp, "input_length": tokens}
    rest = {"output_length": 4, "type": "text", "turn": 1, "hash_ids": [5, 6, 7][: -(-tokens // 16)]}
    return json.dumps(row | rest | more) + "\n"


def test_bailian_is_recognised_and_its_chain_makes_sessions(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        chat(10, -1, 0.5),
        chat(11, -1, 1.0),
        chat(12, 10, 61.114),
        chat(13, 99, 62.0),  # a turn of a conversation that began before the file
        chat(14, 12, 63.0),
        chat(15, 99, 64.0),
    )
    trace = load_trace(path)
    assert trace.block_tokens == 16
    np.testing.assert_allclose(trace.arrival_seconds, [0.5, 1, 61.114, 62, 63, 64])
    assert trace.sessions is not None
    assert trace.sessions.tolist() == [0, 1, 0, 2, 0, 2]
    assert trace.previous is None  # arrivals stay as recorded
    closed = load_trace(path, closed_loop=True)
    assert closed.previous is not None
    assert closed.previous.tolist() == [-1, -1, 0, -1, 2, -1]
    assert closed.think_seconds is not None
    assert not closed.think_seconds.any()
    np.testing.assert_array_equal(closed.arrival_seconds, trace.arrival_seconds)


def test_bailian_without_a_parent_begins_a_conversation(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", chat(1, -1, 0).replace('"parent_chat_id": -1, ', ""), chat(2, 1, 3))
    trace = load_trace(path, closed_loop=True)
    assert trace.previous is not None
    assert trace.previous.tolist() == [-1, 0]


def test_bailian_out_of_order_keeps_the_chain(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", chat(12, 10, 9), chat(11, -1, 5), chat(10, -1, 1))
    trace = load_trace(path, closed_loop=True)
    assert trace.sessions is not None
    assert trace.previous is not None
    assert trace.sessions.tolist() == [0, 1, 0]
    assert trace.previous.tolist() == [-1, -1, 0]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (chat(1, 7, 3.0), "line 2: comes before the request it follows \\(line 3\\)"),
        (chat(1, 1, 3.0), "line 2: follows itself"),
        (chat(6, -1, 3.0), "line 2: chat_id 6 stands in line 1 already"),
        (chat(1, -1, 3.0, hash_ids=None), "line 2: no hash_ids: line 1 has them, and all lines must agree"),
        (chat(1, -1, 3.0, chat_id="a"), "line 2: chat_id must be a whole number, got 'a'"),
    ],
)
def test_bad_chains_are_named_or_skipped(tmp_path: Path, bad: str, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", chat(6, -1, 0), bad, chat(7, 6, 5), chat(8, 7, 6))
    with pytest.raises(TraceError, match=reason):
        load_trace(path)
    trace = load_trace(path, on_bad_line="skip", closed_loop=True)
    assert len(trace.bad_lines) == 1
    assert trace.previous is not None
    assert trace.previous.tolist() == [-1, 0, 1]


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_azure_is_recognised_and_counted_from_its_first_arrival(
    tmp_path: Path, name: str, start: str
) -> None:
    rows = ["2023-11-16 18:15:46.6805900,374,44\r\n", "2023-11-16 18:16:47.1805900,396,0"]
    trace = load_trace(write(tmp_path / name, start + HEADER, *rows))
    np.testing.assert_allclose(trace.arrival_seconds, [0, 60.5], atol=2e-6)
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 0]
    assert len(trace.hash_ids) == 0
    assert trace.sessions is None
    with pytest.raises(TraceError, match="names no conversations"):
        load_trace(tmp_path / name, closed_loop=True)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            "yesterday,374,44\n",
            "TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900, got 'yesterday'",
        ),
        ("2023-11-16 18:15:47,0,44\n", "ContextTokens must be a whole number of at least 1, got '0'"),
        ("2023-11-16 18:15:47,3,x\n", "GeneratedTokens must be a whole number of at least 0, got 'x'"),
        ("2023-11-16 18:15:47,3\n", "expected 3 columns, got 2"),
    ],
)
def test_bad_csv_lines_are_named_or_skipped(tmp_path: Path, bad: str, reason: str) -> None:
    path = write(tmp_path / "a.csv", HEADER, "2023-11-16 18:15:46,374,44\n", bad)
    with pytest.raises(TraceError, match=f"line 3: {reason}"):
        load_trace(path)
    trace = load_trace(path, on_bad_line="skip")
    assert (len(trace), len(trace.bad_lines)) == (1, 1)


def test_csv_without_a_header_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "2023-11-16 18:15:46,374,44\n")
    for policy in ("stop", "skip"):
        with pytest.raises(TraceError, match="expected a header with TIMESTAMP, ContextTokens"):
            load_trace(path, format="azure", on_bad_line=policy)  # type: ignore[arg-type]


def test_hash_ids_may_be_missing_for_a_whole_file(tmp_path: Path) -> None:
    def bare(timestamp: float) -> str:
        return line(timestamp).replace(', "hash_ids": [1, 2]', "")

    trace = load_trace(write(tmp_path / "t.jsonl", bare(1), bare(7)))
    assert len(trace) == 2
    assert len(trace.hash_ids) == 0
    with pytest.raises(TraceError, match="line 2: unexpected hash_ids: line 1 has none"):
        load_trace(write(tmp_path / "t.jsonl", bare(1), line(7)))
    whole = load_trace(write(tmp_path / "t.jsonl", line(1), line(7)))
    assert len(whole.without_prefixes().hash_ids) == 0
    assert whole.without_prefixes().blocks(1).tolist() == []


def test_a_few_bad_lines_at_the_top_hide_no_format(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", "{nonsense}\n", chat(1, -1, 0))
    assert load_trace(path, on_bad_line="skip").block_tokens == 16
    with pytest.raises(TraceError, match="line 1: not JSON"):
        load_trace(path)


def test_block_tokens_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(1, tokens=100, ids=[1, 2, 3, 4]))
    assert load_trace(path, block_tokens=32).block_tokens == 32
    with pytest.raises(TraceError, match="at most 1 of 512 fit"):
        load_trace(path)


def conversations(arrivals: list[float], previous: list[int]) -> Trace:
    n = len(arrivals)
    sessions = np.arange(n)
    for i, before in enumerate(previous):
        if before >= 0:
            sessions[i] = sessions[before]
    return Trace(
        "t",
        np.array(arrivals, dtype=np.float64),
        np.arange(1, n + 1) * 16,
        np.full(n, 3),
        np.concatenate(([0], np.cumsum(np.arange(1, n + 1)))),
        np.arange(n * (n + 1) // 2, dtype=np.uint64),
        16,
        sessions=sessions,
        previous=np.array(previous, dtype=np.int64),
        think_seconds=np.arange(n) * 0.5,
    )


def test_slices_keep_the_chain() -> None:
    trace = conversations([0, 1, 2, 3, 4], [-1, 0, -1, 1, 3])
    middle_gone = trace.where(np.array([True, False, True, True, True]))
    assert middle_gone.previous is not None
    assert middle_gone.previous.tolist() == [
        -1,
        -1,
        0,
        2,
    ]  # the turn after the one left out waits for its first
    assert middle_gone.think_seconds is not None
    assert middle_gone.think_seconds.tolist() == [0, 1, 1.5, 2]
    late = trace.between(1.5, 9)
    assert late.previous is not None
    assert late.previous.tolist() == [-1, -1, 1]
    assert late.sessions is not None
    assert late.sessions.tolist() == [2, 0, 0]
    faster = trace.faster(2)
    assert faster.think_seconds is not None
    assert faster.think_seconds.tolist() == [0, 0.25, 0.5, 0.75, 1]
    share = trace.share(0.2, 0.8)
    np.testing.assert_allclose(share.arrival_seconds, [0, 1, 2])
    assert share.blocks(0).tolist() == trace.blocks(1).tolist()
    assert trace.open_loop().previous is None
    for start, end in ((-0.1, 1), (0.5, 0.5), (0, 1.1)):
        with pytest.raises(ValueError, match="0 <= start < end <= 1"):
            trace.share(start, end)


chains = st.lists(st.tuples(st.integers(0, 20), st.integers(-1, 8)), min_size=1, max_size=9).map(
    lambda rows: conversations(
        sorted(float(arrival) / 4 for arrival, _ in rows),
        [min(before, i - 1) for i, (_, before) in enumerate(rows)],
    )
)


@settings(deadline=None)
@given(trace=chains, keep=st.lists(st.booleans(), min_size=9, max_size=9))
def test_a_slice_waits_for_the_nearest_kept_ancestor(trace: Trace, keep: list[bool]) -> None:
    kept = [i for i in range(len(trace)) if keep[i]]
    part = trace.where(np.array(keep[: len(trace)]))
    assert trace.previous is not None
    assert part.previous is not None
    assert part.sessions is not None
    assert trace.sessions is not None
    for new, old in enumerate(kept):
        ancestor = int(trace.previous[old])
        while ancestor >= 0 and ancestor not in kept:
            ancestor = int(trace.previous[ancestor])
        assert part.previous[new] == (kept.index(ancestor) if ancestor >= 0 else -1)
        assert part.sessions[new] == trace.sessions[old]
        assert part.blocks(new).tolist() == trace.blocks(old).tolist()


@settings(deadline=None, max_examples=50)
@given(trace=chains, suffix=st.sampled_from(["", *SUFFIXES]))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("w") / f"t.jsonl{suffix}"
    write_trace(trace, path)
    first = path.read_bytes()
    read = load_trace(path, bucket_seconds=0)
    for column in (
        "arrival_seconds",
        "input_tokens",
        "output_tokens",
        "hash_offsets",
        "hash_ids",
        "sessions",
    ):
        np.testing.assert_allclose(getattr(read, column), getattr(trace, column), atol=1e-6)
    assert read.block_tokens == trace.block_tokens
    assert trace.previous is not None
    if (trace.previous >= 0).any():
        assert read.previous is not None
        assert read.previous.tolist() == trace.previous.tolist()
        assert trace.think_seconds is not None
        waits = trace.previous >= 0
        assert read.think_seconds is not None
        np.testing.assert_allclose(read.think_seconds[waits], trace.think_seconds[waits], atol=1e-6)
        assert load_trace(path, closed_loop=False).previous is None
    write_trace(read, path)
    assert path.read_bytes() == first


@pytest.mark.parametrize("arrivals", [[0.0] * 6, [0.0, 3.0, 3.0, 6.0], [0.0, 3.0, 6.0], [0.0, 1.5, 1.5]])
def test_equal_arrivals_are_read_again(tmp_path: Path, arrivals: list[float]) -> None:
    trace = conversations(arrivals, [-1] * len(arrivals))
    path = tmp_path / "t.jsonl"
    write_trace(trace, path)
    assert load_trace(path).arrival_seconds.tolist() == arrivals
    # Only if the arrivals look rounded, the file marks them as exact.
    marked = arrivals in ([0.0] * 6, [0.0, 3.0, 3.0, 6.0])
    assert all(json.loads(line).get("exact") == (True if marked else None) for line in path.open())
    assert load_trace(path, bucket_seconds=3).arrival_seconds.tolist() != [0.0] * 6


@pytest.mark.parametrize("reference", [{"previous": 3}, {"joins": [0, 9]}])
def test_lines_that_wait_for_no_request_are_named_or_skipped(
    tmp_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Uninitialized memory must not become the number of a session.
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, 7).astype(dtype))
    request = {"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1], "delay": 5}
    last = request | {"previous": 1}
    lines = [request, request | reference, last]
    (path := tmp_path / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(
        TraceError, match=r"line 2: waits for request \d, but the file has 3, numbered from 0"
    ):
        load_trace(path)
    trace = load_trace(path, on_bad_line="skip")
    assert len(trace) == 2
    assert [bad.line for bad in trace.bad_lines] == [2]
    assert trace.previous is not None
    assert trace.previous.tolist() == [-1, -1]  # its own previous turn is skipped
    assert trace.sessions is not None
    # It stays in the conversation of the skipped line, which "joins" alone does not continue.
    assert trace.sessions.tolist() == [0, 1]
    path.write_text(json.dumps(request | {"previous": 1}) + "\n")
    with pytest.raises(TraceError, match="no request in it; first bad line"):
        load_trace(path, on_bad_line="skip")


def test_a_mark_of_exact_arrivals_is_checked(tmp_path: Path) -> None:
    wrong = json.dumps(json.loads(line(0)) | {"exact": 1})
    with pytest.raises(TraceError, match="exact must be true or false, got 1"):
        load_trace(write(tmp_path / "t.jsonl", wrong))


def test_a_plain_trace_is_written_with_mooncakes_four_keys(tmp_path: Path) -> None:
    source = line(17, 513, 7, [4, 9])
    write_trace(load_trace(write(tmp_path / "t.jsonl", source)), tmp_path / "u.jsonl")
    assert json.loads((tmp_path / "u.jsonl").read_text()) == json.loads(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": np.array([1])}, r"input_tokens must have the shape \(2,\)"),
        ({"arrival_seconds": np.array([1.0, 0.0])}, "arrival_seconds must be finite and not decrease"),
        ({"previous": np.array([-1, 1])}, "previous must be -1 or the index of an earlier request"),
        ({"think_seconds": np.array([0, -1.0])}, "think_seconds must be finite and at least 0"),
        ({"hash_offsets": np.array([0, 1, 2])}, "hash_offsets must rise from 0"),
        ({"output_tokens": np.array([1, -1])}, "output_tokens must be at least 0"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(conversations([0, 1], [-1, 0]), **change)


prompts = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=8)


@settings(deadline=None)
@given(prompts, st.integers(0, 15))
def test_ideal_hits_are_those_of_an_endless_cache(blocks: list[list[int]], short: int) -> None:
    counts = [len(each) for each in blocks]
    trace = Trace(
        "t",
        np.arange(len(blocks), dtype=np.float64),
        np.array([max(1, 16 * count - short) for count in counts]),
        np.ones(len(blocks), dtype=np.int64),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.array([block for each in blocks for block in each], dtype=np.uint64),
        16,
    )
    seen: set[int] = set()
    for i, each in enumerate(blocks):
        leading = 0
        while leading < len(each) and each[leading] in seen:
            leading += 1
        assert ideal_hit_tokens(trace)[i] == min(16 * leading, trace.input_tokens[i] - 1)
        seen |= set(each)


def test_a_summary_by_hand(tmp_path: Path) -> None:
    rows = [line(700, 1024, 10, [1, 2]), line(700, 1100, 20, [1, 2, 3]), line(2700, 512, 90, [1])]
    path = write(tmp_path / "t.jsonl", *rows, "{bad\n")
    summary = summarize_trace(load_trace(path, on_bad_line="skip"))
    assert (summary.requests, summary.duration_seconds, summary.requests_per_second) == (3, 2.0, 1.5)
    assert summary.simultaneous_requests == 2
    assert (summary.blocks, summary.distinct_blocks, summary.bad_lines) == (6, 3, 1)
    assert (summary.input_tokens.total, summary.input_tokens.p50, summary.input_tokens.max) == (
        2636,
        1024,
        1100,
    )
    assert summary.output_tokens.mean == 40
    assert summary.ideal_hit_ratio == pytest.approx((1024 + 511) / 2636)
    assert (summary.sessions, summary.waiting_requests) == (0, 0)
