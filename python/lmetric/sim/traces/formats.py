"""Trace formats: they convert one line to a row.

Mooncake (FAST '25): one JSON object per line. ``timestamp`` is in ms. ``hash_ids`` has one ID per
block of 512 prompt tokens; the last block can be partial. Equal IDs at equal positions mean an
equal prefix up to there::

    {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

`write_trace` adds keys that the reader supports: ``block_tokens`` if it is not 512, and for
conversations ``session_id``, ``previous`` and ``delay``. ``previous`` is the number (from 0) of the
line to wait for, and ``delay`` is the time in ms from its end. For agents, ``joins`` has the
numbers of further lines to wait for, ``program`` the number of the program, and ``finish`` the
reason why the answer ends (``stop`` or ``tool_calls``).

Qwen-Bailian (ATC '25): one JSON object per line. ``timestamp`` is in seconds, blocks have 16
tokens, and turns of a conversation are linked (-1 ends the chain)::

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
     "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090]}

Azure LLM inference (2023 and 2024): CSV with a header, without prefixes::

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from lmetric.sim.traces.trace import FINISH

_BOM = b"\xef\xbb\xbf"
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Row(NamedTuple):
    """One line's request."""

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    blocks: array[int] | None  # None: the line has no hash_ids
    key: Hashable = None  # what a later line's parent names; None: its number among the requests
    parent: Hashable = None  # None: the first of its conversation
    session: int | None = None  # None: from the chain of parents, if any
    think_seconds: float = 0.0
    think_tokens: int = 0  # of output_tokens
    waits: bool = False  # the file sets that it waits for its parent's answer
    joins: tuple[Hashable, ...] = ()  # keys of further lines to wait for
    program: int = -1  # -1: none
    finish: int = -1  # index in `FINISH`; -1: unknown


# Reads one line; None for a header. Raises ValueError with the problem.
Parser = Callable[[bytes], Row | None]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """The number format of one family of traces."""

    name: str
    block_tokens: int  # prompt tokens under one hash id
    bucket_seconds: float  # the grid coarse timestamps are rounded to; 0: exact timestamps
    parser: Callable[[int], Parser]  # takes the tokens under one hash id


def recognise_line(line: bytes) -> str | None:
    """The name of the format of a line, or None."""
    line = line.removeprefix(_BOM).strip()
    if line.startswith(b"{"):
        if b'"chat_id"' in line:
            return "qwen-bailian"
        return "mooncake" if b'"timestamp"' in line and b'"input_length"' in line else None
    if all(column.encode() in line for column in _AZURE_COLUMNS):
        return "azure"
    return None


class _JsonLines:
    """The common part of Mooncake and Qwen-Bailian lines."""

    def __init__(self, block_tokens: int, seconds_per_timestamp: float) -> None:
        self._block_tokens = block_tokens
        self._seconds = seconds_per_timestamp

    def _request(self, line: bytes) -> tuple[dict[str, Any], Row]:
        try:
            row = orjson.loads(line.removeprefix(_BOM))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {type(row).__name__}")
        arrival = _number(row, "timestamp") * self._seconds
        input_tokens = _whole(row, "input_length", 1)
        output_tokens = _whole(row, "output_length", 0)
        blocks = None if row.get("hash_ids") is None else self._blocks(row["hash_ids"], input_tokens)
        return row, Row(arrival, input_tokens, output_tokens, blocks)

    def _blocks(self, ids: Any, input_tokens: int) -> array[int]:
        try:
            if not isinstance(ids, list):
                raise TypeError
            blocks = array("Q", ids)
        except (TypeError, OverflowError):
            raise ValueError(
                f"hash_ids must be a list of whole numbers of at least 0, got {str(ids)[:60]}"
            ) from None
        most = -(-input_tokens // self._block_tokens)
        if len(blocks) > most:
            raise ValueError(
                f"{len(blocks)} hash_ids for {input_tokens} tokens: "
                f"at most {most} of {self._block_tokens} fit"
            )
        return blocks


class _Mooncake(_JsonLines):
    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens, seconds_per_timestamp=1e-3)

    def __call__(self, line: bytes) -> Row:
        row, request = self._request(line)
        if row.get("block_tokens", self._block_tokens) != self._block_tokens:
            raise ValueError(
                f"block_tokens is {row['block_tokens']!r}, read with blocks of {self._block_tokens} tokens"
            )
        session = _whole(row, "session_id", 0) if "session_id" in row else None
        if "think_length" in row:
            thoughts = _whole(row, "think_length", 0)
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
            request = request._replace(program=_whole(row, "program", 0))
        if "joins" in row:
            request = request._replace(joins=_lines(row), think_seconds=_delay(row), waits=True)
        if "previous" not in row:
            return request._replace(session=session)
        return request._replace(
            parent=_whole(row, "previous", 0),
            session=session,
            think_seconds=_delay(row),
            waits=True,
        )


class _QwenBailian(_JsonLines):
    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens, seconds_per_timestamp=1.0)

    def __call__(self, line: bytes) -> Row:
        row, request = self._request(line)
        key, parent = row.get("chat_id"), row.get("parent_chat_id", -1)
        for name, value in (("chat_id", key), ("parent_chat_id", parent)):
            if type(value) is not int:
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        return request._replace(key=key, parent=None if parent == -1 else parent)


class _Azure:
    def __init__(self, block_tokens: int) -> None:
        self._columns: list[str] = []

    def __call__(self, line: bytes) -> Row | None:
        try:
            text = line.removeprefix(_BOM).decode()
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text") from None
        cells = [cell.strip().strip('"') for cell in text.split(",")]
        if not self._columns:
            if missing := [column for column in _AZURE_COLUMNS if column not in cells]:
                raise ValueError(f"expected a header with {', '.join(_AZURE_COLUMNS)}: no {missing[0]} in it")
            self._columns = cells
            return None
        if len(cells) != len(self._columns):
            raise ValueError(f"expected {len(self._columns)} columns, got {len(cells)}")
        row = dict(zip(self._columns, cells, strict=True))
        stamp, prompt, answer = (row[column] for column in _AZURE_COLUMNS)
        return Row(
            _since_epoch(stamp),
            _count(prompt, "ContextTokens", 1),
            _count(answer, "GeneratedTokens", 0),
            None,
        )


def _number(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{key} must be a number of at least 0, got {value!r}")
    return value


def _delay(row: dict[str, Any]) -> float:
    return _number(row, "delay") * 1e-3 if "delay" in row else 0.0


def _lines(row: dict[str, Any]) -> tuple[int, ...]:
    lines = row["joins"]
    if not isinstance(lines, list) or not all(type(line) is int and line >= 0 for line in lines):
        raise ValueError(f"joins must be a list of line numbers, got {str(lines)[:60]}")
    return tuple(lines)


def _whole(row: dict[str, Any], key: str, least: int) -> int:
    value = row.get(key)
    if type(value) is not int or not least <= value < 2**31:
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}")
    return value


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


FORMATS = {
    "mooncake": TraceFormat("mooncake", block_tokens=512, bucket_seconds=3.0, parser=_Mooncake),
    "qwen-bailian": TraceFormat("qwen-bailian", block_tokens=16, bucket_seconds=0.0, parser=_QwenBailian),
    "azure": TraceFormat("azure", block_tokens=16, bucket_seconds=0.0, parser=_Azure),
}
