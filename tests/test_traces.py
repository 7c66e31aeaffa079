"""Traces: what a line may say, what a bad one gets, and how coarse timestamps are spread."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmetric.sim.traces import TraceError, load_trace


def line(
    timestamp: float = 0, tokens: int = 600, output: int = 5, ids: list[int] | None = None, **more: Any
) -> str:
    ids = [1, 2] if ids is None else ids
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids} | more
    return json.dumps(row) + "\n"


def write(path: Path, *lines: str) -> Path:
    text = "".join(lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
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
    with pytest.raises(TraceError, match="no request in it"):
        load_trace(write(tmp_path / "empty.jsonl"))
    with pytest.raises(TraceError, match=r"no request in it; first bad line: .*line 1"):
        load_trace(write(tmp_path / "junk.jsonl", "x\n"), on_bad_line="skip")
    whole = gzip.compress("".join(line(k) for k in range(2000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="breaks off or is damaged after line"):
        load_trace(tmp_path / "cut.jsonl.gz")
    (tmp_path / "not.jsonl.gz").write_bytes(b"plain")
    with pytest.raises(TraceError, match="breaks off or is damaged after line 0"):
        load_trace(tmp_path / "not.jsonl.gz")
    with pytest.raises(TraceError, match="unknown trace format 'qwen'; known: mooncake"):
        load_trace(tmp_path / "t.jsonl", format="qwen")
