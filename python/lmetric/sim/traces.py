"""Traces of real services, read into typed columns.

Mooncake's format (FAST '25), one JSON object a line, plain or gzip::

    {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

``timestamp`` is in milliseconds from the start, ``hash_ids`` names each block of 512 prompt tokens (the last
may be partial): equal ids at equal positions mean an equal prefix up to there. `FORMATS` lists what is read.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from lmetric._core import LmetricError

# Timestamps count as bucketed when this share of them lies within this distance of a multiple of the bucket.
_BUCKETED_SHARE = 0.99
_BUCKET_SLACK_SECONDS = 0.005


class TraceError(LmetricError):
    """A trace that cannot be read: names the file, the line and what would have been right."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How one family of JSON-lines traces writes its numbers."""

    name: str
    block_tokens: int  # prompt tokens under one hash id
    seconds_per_timestamp: float
    bucket_seconds: float  # the grid coarse timestamps are rounded to; 0: exact timestamps


FORMATS = {
    "mooncake": TraceFormat("mooncake", block_tokens=512, seconds_per_timestamp=1e-3, bucket_seconds=3.0)
}


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line left out of a trace, and why."""

    path: str
    line: int  # counted from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, one column per quantity.

    Request ``i`` arrives at ``arrival_seconds[i]`` (from the trace's start) with ``input_tokens[i]``
    prompt tokens, asks for ``output_tokens[i]``, and its prompt blocks are ``blocks(i)``. A prompt with fewer
    ids than blocks shares nothing past them.
    """

    name: str
    arrival_seconds: NDArray[np.float64]  # shape (n,), not decreasing
    input_tokens: NDArray[np.int64]  # shape (n,)
    output_tokens: NDArray[np.int64]  # shape (n,)
    hash_offsets: NDArray[np.int64]  # shape (n + 1,): request i owns hash_ids[offsets[i]:offsets[i + 1]]
    hash_ids: NDArray[np.uint64]
    block_tokens: int
    bad_lines: tuple[BadLine, ...] = ()  # lines skipped on request

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    @property
    def duration_seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_seconds[-1] - self.arrival_seconds[0]) if len(self) else 0.0

    def blocks(self, index: int) -> NDArray[np.uint64]:
        """The block ids of request `index`'s prompt, first block first."""
        return self.hash_ids[self.hash_offsets[index] : self.hash_offsets[index + 1]]

    def where(self, keep: NDArray[np.bool_]) -> Trace:
        """The requests for which `keep` (shape (n,)) holds, at their own arrival times."""
        counts = np.diff(self.hash_offsets)
        return replace(
            self,
            arrival_seconds=self.arrival_seconds[keep],
            input_tokens=self.input_tokens[keep],
            output_tokens=self.output_tokens[keep],
            hash_offsets=np.concatenate(([0], np.cumsum(counts[keep]))).astype(np.int64),
            hash_ids=self.hash_ids[np.repeat(keep, counts)],
        )

    def first(self, requests: int) -> Trace:
        """The first `requests` requests (all, where there are fewer)."""
        return self.where(np.arange(len(self)) < requests)

    def at_most(self, input_tokens: int) -> Trace:
        """Without the requests whose prompt is longer than `input_tokens`."""
        return self.where(self.input_tokens <= input_tokens)

    def between(self, start_seconds: float, end_seconds: float) -> Trace:
        """What arrives in ``[start_seconds, end_seconds)``, counted from `start_seconds`."""
        kept = self.where((self.arrival_seconds >= start_seconds) & (self.arrival_seconds < end_seconds))
        return replace(kept, arrival_seconds=kept.arrival_seconds - start_seconds)

    def faster(self, speed: float) -> Trace:
        """The same requests arriving `speed` times as fast."""
        if not speed > 0:
            raise ValueError(f"speed must be above 0, got {speed:g}")
        return replace(self, arrival_seconds=self.arrival_seconds / speed)


def load_trace(
    path: str | Path,
    *,
    format: str = "mooncake",
    on_bad_line: Literal["stop", "skip"] = "stop",
    bucket_seconds: float | None = None,
) -> Trace:
    """Read a trace; names ending in ``.gz`` are decompressed.

    `bucket_seconds` is the grid that arrivals were rounded to, each bucket being spread evenly over itself
    (0: leave them as they are; None: the format's own grid, where the timestamps do lie on it). Requests are
    sorted by arrival. A line that cannot be read raises `TraceError`, or with ``on_bad_line="skip"`` is left
    out and kept in `Trace.bad_lines`. A missing or unreadable file raises `OSError`.
    """
    if format not in FORMATS:
        raise TraceError(f"unknown trace format {format!r}; known: {', '.join(FORMATS)}")
    shape = FORMATS[format]
    arrivals, inputs, outputs = array("d"), array("q"), array("q")
    ids, offsets = array("Q"), array("q", [0])
    bad: list[BadLine] = []
    for number, line in _numbered_lines(Path(path)):
        if not line.strip():
            continue
        try:
            arrival, input_tokens, output_tokens, blocks = _parse(line, shape)
        except ValueError as error:
            whole = line.endswith(b"\n")
            reason = str(error) if whole else f"{error} (last line, no line end: half-written?)"
            bad.append(BadLine(str(path), number, reason))
            if on_bad_line == "stop":
                raise TraceError(str(bad[-1])) from None
            continue
        arrivals.append(arrival)
        inputs.append(input_tokens)
        outputs.append(output_tokens)
        ids.extend(blocks)
        offsets.append(len(ids))
    if not arrivals:
        raise TraceError(f"{path}: no request in it" + (f"; first bad line: {bad[0]}" if bad else ""))
    read = Trace(
        name=Path(path).name,
        arrival_seconds=np.frombuffer(arrivals, np.float64),
        input_tokens=np.frombuffer(inputs, np.int64),
        output_tokens=np.frombuffer(outputs, np.int64),
        hash_offsets=np.frombuffer(offsets, np.int64),
        hash_ids=np.frombuffer(ids, np.uint64) if ids else np.empty(0, np.uint64),
        block_tokens=shape.block_tokens,
        bad_lines=tuple(bad),
    )
    if bucket_seconds is None:
        bucket_seconds = shape.bucket_seconds if _lies_on(read.arrival_seconds, shape.bucket_seconds) else 0.0
    return _spread(_sorted(read), bucket_seconds)


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: the compressed file breaks off or is damaged after line {number} ({error})"
        ) from None


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _parse(line: bytes, shape: TraceFormat) -> tuple[float, int, int, list[int]]:
    """One line's arrival in seconds, input and output tokens, block ids; ValueError says what is wrong."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    timestamp = row.get("timestamp")
    if not isinstance(timestamp, int | float) or isinstance(timestamp, bool) or timestamp < 0:
        raise ValueError(f"timestamp must be a number of at least 0, got {timestamp!r}")
    input_tokens = _whole(row, "input_length", 1)
    output_tokens = _whole(row, "output_length", 0)
    blocks = row.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block < 2**64 for block in blocks):
        raise ValueError(f"hash_ids must be a list of whole numbers of at least 0, got {str(blocks)[:60]}")
    most = -(-input_tokens // shape.block_tokens)
    if len(blocks) > most:
        raise ValueError(
            f"{len(blocks)} hash_ids for {input_tokens} tokens: at most {most} of {shape.block_tokens} fit"
        )
    return timestamp * shape.seconds_per_timestamp, input_tokens, output_tokens, blocks


def _whole(row: dict[str, object], key: str, least: int) -> int:
    value = row.get(key)
    if type(value) is not int or not least <= value < 2**31:
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}")
    return value


def _lies_on(arrivals: NDArray[np.float64], bucket: float) -> bool:
    if bucket <= 0:
        return False
    distance = np.abs(arrivals - np.round(arrivals / bucket) * bucket)
    return bool(np.mean(distance <= _BUCKET_SLACK_SECONDS) >= _BUCKETED_SHARE)


def _sorted(trace: Trace) -> Trace:
    if np.all(np.diff(trace.arrival_seconds) >= 0):
        return trace
    order = np.argsort(trace.arrival_seconds, kind="stable")
    counts = np.diff(trace.hash_offsets)[order]
    return replace(
        trace,
        arrival_seconds=trace.arrival_seconds[order],
        input_tokens=trace.input_tokens[order],
        output_tokens=trace.output_tokens[order],
        hash_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        hash_ids=np.concatenate([trace.blocks(int(i)) for i in order]),
    )


def _spread(trace: Trace, bucket: float) -> Trace:
    """Move the j-th of a bucket's n requests to j / n of it: rounding makes bursts that never were."""
    if bucket <= 0:
        return trace
    number = np.round(trace.arrival_seconds / bucket)
    _, first, counts = np.unique(number, return_index=True, return_counts=True)
    position = np.arange(len(trace)) - np.repeat(first, counts)
    return replace(trace, arrival_seconds=(number + position / np.repeat(counts, counts)) * bucket)
