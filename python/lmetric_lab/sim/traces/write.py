"""Writes a trace in Mooncake's format, to store it or replay it against real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from lmetric.file_errors import write_file
from lmetric_lab.packed import packed
from lmetric_lab.sim.traces.formats import FORMATS
from lmetric_lab.sim.traces.load import looks_coarse
from lmetric_lab.sim.traces.trace import FINISH, Trace


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` as Mooncake's JSON lines. Files with the extension ``.gz``,
    ``.xz`` or ``.zst`` are compressed.

    `load_trace` reads the same columns again, with arrivals and think times to the microsecond.
    Every line has the four keys of Mooncake's format. Additional keys (module `formats`) appear
    only for conversations, if blocks do not have 512 tokens, or if arrivals lie on Mooncake's grid.
    Equal traces give identical files. Raises `OSError`.
    """
    path = Path(path)
    text = b"".join(_lines(trace))
    write_file(path, packed(text, path))


def _lines(trace: Trace) -> list[bytes]:
    shape = FORMATS["mooncake"]
    stamps = [_milliseconds(arrival) for arrival in trace.arrival_seconds.tolist()]
    exact = looks_coarse(np.array(stamps) * 1e-3, shape.bucket_seconds)
    offsets = trace.hash_offsets.tolist()
    ids = trace.hash_ids.tolist()
    previous = None if trace.previous is None else trace.previous.tolist()
    joins: dict[int, list[int]] = {}
    for request, awaited_request in [] if trace.joins is None else trace.joins.tolist():
        joins.setdefault(request, []).append(awaited_request)
    lines = []
    for index, (stamp, prompt, answer) in enumerate(
        zip(stamps, trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ):
        row: dict[str, Any] = {
            "timestamp": stamp,
            "input_length": prompt,
            "output_length": answer,
            "hash_ids": ids[offsets[index] : offsets[index + 1]],
        }
        if exact:
            row["exact"] = True
        if trace.block_tokens != shape.block_tokens:
            row["block_tokens"] = trace.block_tokens
        if trace.sessions is not None and trace.sessions[index] >= 0:
            row["session_id"] = int(trace.sessions[index])
        if previous is not None and previous[index] >= 0:
            row["previous"] = previous[index]
            if trace.think_seconds is not None and trace.think_seconds[index] > 0:
                row["delay"] = _milliseconds(float(trace.think_seconds[index]))
        if awaited := joins.get(index):
            row["joins"] = awaited
            if "delay" not in row and trace.think_seconds is not None and trace.think_seconds[index] > 0:
                row["delay"] = _milliseconds(float(trace.think_seconds[index]))
        if trace.programs is not None and trace.programs[index] >= 0:
            row["program"] = int(trace.programs[index])
        if trace.finish is not None and trace.finish[index] >= 0:
            row["finish"] = FINISH[trace.finish[index]]
        if trace.think_tokens is not None and trace.think_tokens[index] > 0:
            row["think_length"] = int(trace.think_tokens[index])
        lines.append(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return lines


def _milliseconds(seconds: float) -> float | int:
    """Milliseconds to the microsecond, as an integer if possible, as other readers expect."""
    value = round(seconds * 1e3, 3)
    return int(value) if value == int(value) else value
