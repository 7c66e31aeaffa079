"""Trace formats: they convert one line to a row.

Mooncake (FAST '25): one JSON object per line. ``timestamp`` is in ms. ``hash_ids`` has one ID per
block of 512 prompt tokens; the last block can be partial. Equal IDs at equal positions mean an
equal prefix up to there::

    {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

`write_trace` adds keys that the reader supports: ``block_tokens`` if it is not 512, and for
conversations ``session_id``, ``previous`` and ``delay``. ``previous`` is the number (from 0) of the
line to wait for, and ``delay`` is the time in ms from its end. For agents, ``joins`` has the
numbers of further lines to wait for, ``program`` the number of the program, and ``finish`` the
reason why the answer ends (``stop``, ``tool_calls`` or ``length``). ``exact`` is true if arrivals
lie on the grid of Mooncake's timestamps but are not rounded.

Qwen-Bailian (ATC '25): one JSON object per line. ``timestamp`` is in seconds, blocks have 16
tokens, and turns of a conversation are linked (-1 ends the chain)::

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
     "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090]}

Azure LLM inference (2023 and 2024): CSV with a header, without prefixes::

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

The modules `aiperf`, `weka` and `otel` read the other formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lmetric_lab.sim.traces.aiperf import TEXT, AiPerf
from lmetric_lab.sim.traces.fields import BOM, Parser, Row, blocks, json_object, number, whole
from lmetric_lab.sim.traces.otel import Otel
from lmetric_lab.sim.traces.trace import FINISH
from lmetric_lab.sim.traces.weka import Weka

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """The number format of one family of traces."""

    name: str
    block_tokens: int  # prompt tokens under one hash id
    bucket_seconds: float  # the grid coarse timestamps are rounded to; 0: exact timestamps
    parser: Callable[[int], Parser]  # takes the tokens under one hash id
    matches: Callable[[dict[str, Any]], bool]  # whether a line with this JSON object has the format
    block_key: str | None = None  # the key with the tokens under one hash id, if lines can have one


def recognise_line(line: bytes) -> tuple[str | None, int | None]:
    """The format of a line and its tokens under one hash ID, if the line has them."""
    line = line.removeprefix(BOM).strip()
    if all(column.encode() in line for column in _AZURE_COLUMNS):
        return "azure", None
    try:
        row = json_object(line)
    except ValueError:
        return None, None
    for shape in FORMATS.values():
        if shape.matches(row):
            size = row.get(shape.block_key) if shape.block_key else None
            return shape.name, size if type(size) is int and size > 0 else None
    return None, None


def _request(row: dict[str, Any], seconds_per_timestamp: float, block_tokens: int) -> Row:
    """The common part of Mooncake and Qwen-Bailian lines."""
    arrival = number(row, "timestamp") * seconds_per_timestamp
    tokens = whole(row, "input_length", 1)
    output = whole(row, "output_length", 0)
    ids = row.get("hash_ids")
    return Row(arrival, tokens, output, None if ids is None else blocks(ids, tokens, block_tokens))


class _Mooncake(Parser):
    def read(self, line_number: int, line: bytes) -> Iterable[Row]:
        row = json_object(line)
        request = _request(row, 1e-3, self.block_tokens)
        if row.get("block_tokens", self.block_tokens) != self.block_tokens:
            raise ValueError(
                f"block_tokens is {row['block_tokens']!r}, read with blocks of {self.block_tokens} tokens"
            )
        if isinstance(name := row.get("session_id"), str):
            raise ValueError(
                f"session_id must be a whole number, got {name!r}; for AIPerf set the format aiperf"
            )
        session = whole(row, "session_id", 0) if "session_id" in row else None
        if "exact" in row:
            if type(row["exact"]) is not bool:
                raise ValueError(f"exact must be true or false, got {row['exact']!r}")
            request = request._replace(exact=row["exact"])
        if "think_length" in row:
            thoughts = whole(row, "think_length", 0)
            if thoughts > request.output_tokens:
                raise ValueError(
                    f"think_length is {thoughts}, of an output_length of {request.output_tokens}"
                )
            request = request._replace(think_tokens=thoughts)
        if (finish := row.get("finish")) is not None:
            if finish not in FINISH:
                raise ValueError(f"finish must be one of {', '.join(FINISH)}, got {finish!r}")
            request = request._replace(finish=FINISH.index(finish))
        if "program" in row:
            request = request._replace(program=whole(row, "program", 0))
        if "joins" in row:
            request = request._replace(joins=_lines(row), think_seconds=_delay(row), waits=True)
        if "previous" not in row:
            return [request._replace(session=session)]
        request = request._replace(
            parent=whole(row, "previous", 0),
            session=session,
            think_seconds=_delay(row),
            waits=True,
        )
        return [request]


class _QwenBailian(Parser):
    def read(self, line_number: int, line: bytes) -> Iterable[Row]:
        row = json_object(line)
        request = _request(row, 1.0, self.block_tokens)
        key, parent = row.get("chat_id"), row.get("parent_chat_id", -1)
        for name, value in (("chat_id", key), ("parent_chat_id", parent)):
            if type(value) is not int:
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        return [request._replace(key=key, parent=None if parent == -1 else parent)]


class _Azure(Parser):
    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._columns: list[str] = []

    def read(self, line_number: int, line: bytes) -> Iterable[Row]:
        try:
            text = line.removeprefix(BOM).decode()
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text") from None
        cells = [cell.strip().strip('"') for cell in text.split(",")]
        if not self._columns:
            if missing := [column for column in _AZURE_COLUMNS if column not in cells]:
                raise ValueError(f"expected a header with {', '.join(_AZURE_COLUMNS)}: no {missing[0]} in it")
            self._columns = cells
            return []
        if len(cells) != len(self._columns):
            raise ValueError(f"expected {len(self._columns)} columns, got {len(cells)}")
        row = dict(zip(self._columns, cells, strict=True))
        stamp, prompt, answer = (row[column] for column in _AZURE_COLUMNS)
        tokens = _count(prompt, "ContextTokens", 1), _count(answer, "GeneratedTokens", 0)
        return [Row(_since_epoch(stamp), *tokens, None)]


def _delay(row: dict[str, Any]) -> float:
    return number(row, "delay") * 1e-3 if "delay" in row else 0.0


def _lines(row: dict[str, Any]) -> tuple[int, ...]:
    lines = row["joins"]
    if not isinstance(lines, list) or not all(type(line) is int and line >= 0 for line in lines):
        raise ValueError(f"joins must be a list of line numbers, got {str(lines)[:60]}")
    return tuple(lines)


def _count(text: str, column: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text) < 2**31:
        raise ValueError(f"{column} must be a whole number of at least {least}, got {text!r}")
    return int(text)


def _since_epoch(text: str) -> float:
    """Seconds of an ISO time, to the microsecond; UTC if it has no zone."""
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900, got {text!r}"
        ) from None
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def _is_aiperf(row: dict[str, Any]) -> bool:
    """AIPerf's lines that are not Mooncake's: with named sessions, or with text."""
    return isinstance(row.get("session_id"), str) or ("input_length" not in row and not TEXT.isdisjoint(row))


def _is_mooncake(row: dict[str, Any]) -> bool:
    return "timestamp" in row and "input_length" in row and "chat_id" not in row and not _is_aiperf(row)


FORMATS = {
    shape.name: shape
    for shape in (
        TraceFormat("mooncake", 512, 3.0, _Mooncake, _is_mooncake, block_key="block_tokens"),
        TraceFormat("qwen-bailian", 16, 0.0, _QwenBailian, lambda row: "chat_id" in row),
        TraceFormat("azure", 16, 0.0, _Azure, lambda row: False),
        TraceFormat("aiperf", 512, 0.0, AiPerf, _is_aiperf),
        TraceFormat("weka", 64, 0.0, Weka, lambda row: "requests" in row, block_key="block_size"),
        TraceFormat("otel", 64, 0.0, Otel, lambda row: "resourceSpans" in row),
    )
}
