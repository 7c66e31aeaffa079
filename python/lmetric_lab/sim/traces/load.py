"""Reads a trace file into columns.

It detects the format, reports bad lines, spreads coarse timestamps, and links the turns of
conversations.
"""

from __future__ import annotations

import difflib
import gzip
import re
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.defaults import no_trace, trace_path
from lmetric_lab.errors import TraceError
from lmetric_lab.packed import DAMAGED, open_packed
from lmetric_lab.public_traces import available
from lmetric_lab.sim.traces.fields import BOM, Row
from lmetric_lab.sim.traces.formats import FORMATS, TraceFormat, recognise_line
from lmetric_lab.sim.traces.trace import BadLine, Trace, gather, renumbered
from lmetric_lab.sim.traces.turns import chained_by_prefix

# Timestamps count as bucketed when this share of them lies within this distance of a multiple of
# the bucket.
_BUCKETED_SHARE = 0.99
_BUCKET_SLACK_SECONDS = 0.005
_EPOCH_SECONDS = 1e8  # arrivals beyond this count from 1970, not from the trace's start
_RECOGNISED_WITHIN = 100  # lines: a few bad ones at the top do not hide a format
_LONGEST_BYTES = 256 << 20  # of a line or a JSON value; bounds memory
_SHOWN = 40  # bytes of a line in a message
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]')  # strings and brackets of JSON


def load_trace(
    path: str | Path,
    *,
    format: str | None = None,
    on_bad_line: Literal["stop", "skip"] = "stop",
    bucket_seconds: float | None = None,
    block_tokens: int | None = None,
    closed_loop: bool | None = None,
    session_rate: float | None = None,
) -> Trace:
    """Read a trace. Files with the extension ``.gz``, ``.xz`` or ``.zst`` are decompressed.
    Requests are sorted by arrival.

    A file without `hash_ids` in all lines has no shared prefixes.

    Args:
        path: the trace file, or the name of a public trace (`lmetric_lab.public_traces`), which is
            downloaded once. ``"slice"`` is the recorded trace in the package, and
            ``"coding-agents"`` the synthetic workload. A ``.yaml`` file describes a synthetic
            trace.
        format: a name in `FORMATS`; None: detected from the content.
        on_bad_line: ``"stop"``: an invalid line raises; ``"skip"``: it is skipped and kept in
            `Trace.bad_lines`.
        bucket_seconds: grid of rounded arrivals. The requests of a bucket are spread evenly over
            it. 0: keep the arrivals. None: the format's grid, if the timestamps are on it and the
            file does not mark them as exact.
        block_tokens: prompt tokens per hash ID; None: from the file or format.
        closed_loop: True: a turn waits for the previous answer of its conversation. It arrives at
            its recorded time, or at the end of that answer if that is later. Files record gaps
            between arrivals, so this is a lower bound, and the think time after a late answer is 0.
            In files with ends or delays, a turn waits for its true gap after that answer. If a file
            names no conversations, they are found by the prefixes of its prompts.
            False: no request waits. None: as the file sets it (`write_trace`, and formats with
            gaps).
        session_rate: sessions per second (Poisson, seed 0), for files of sessions without start
            times. None: these sessions start at 0. In a synthetic trace, it replaces the rate.

    Raises:
        TraceError: an unknown format, an invalid line, no request, or a public trace that cannot be
            downloaded. `closed_loop` for a file without conversations and hash IDs.
            `session_rate` for a file with start times.
        SyntheticError: an invalid description of a synthetic trace.
        OSError: the file is missing or unreadable.
    """
    path = available(trace_path(path))
    if not path.exists():
        raise no_trace(path)
    if path.suffix in (".yaml", ".yml"):
        return _synthetic(path, format, block_tokens, closed_loop, session_rate)
    recognised, own_block_tokens = recognise(path)
    if format is None:
        if recognised is None:
            first = next((line for _, line in _numbered_lines(path)), b"")
            begin = first[:_SHOWN].decode("utf-8", "replace").strip()
            what = f"{begin!r} is no request" if begin else "the file is empty; expected a request per line"
            raise TraceError(f"{path}, line 1: {what}; known formats: {', '.join(FORMATS)}")
        format = recognised
    if format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FORMATS)}"
        raise TraceError(f"unknown trace format {format!r}; {hint}")
    if block_tokens is not None and block_tokens < 1:
        raise TraceError(f"block_tokens must be at least 1, got {block_tokens}")
    if session_rate is not None and not 0 < session_rate < float("inf"):
        raise TraceError(f"session_rate must be above 0, got {session_rate:g}")
    shape = FORMATS[format]
    rows = _Rows(path, on_bad_line == "skip")
    rows.read(shape, block_tokens or own_block_tokens or shape.block_tokens)
    trace = rows.trace(closed_loop, session_rate)
    if bucket_seconds is None:
        coarse = not rows.exact and _lies_on(trace.arrival_seconds, shape.bucket_seconds)
        bucket_seconds = shape.bucket_seconds if coarse else 0.0
    trace = _spread(trace, bucket_seconds)
    return chained_by_prefix(trace) if closed_loop and trace.previous is None else trace


def _synthetic(
    path: Path,
    format: str | None,
    block_tokens: int | None,
    closed_loop: bool | None,
    session_rate: float | None,
) -> Trace:
    """The trace of a description. Arguments as in `load_trace`."""
    from lmetric_lab.sim.synthetic import read_synthetic

    if format is not None:
        raise TraceError(f"{path}: a description of a synthetic trace has no format, got {format!r}")
    trace = read_synthetic(str(path), session_rate=session_rate, block_tokens=block_tokens).make()
    if closed_loop and trace.previous is None:
        raise TraceError(f"{path}: has no sessions, so no request can wait for another")
    return trace.open_loop() if closed_loop is False else trace


def recognise(path: str | Path) -> tuple[str | None, int | None]:
    """The format of a file's first lines, and its tokens per block if the lines have them."""
    for number, line in _numbered_values(Path(path)):
        if (found := recognise_line(line))[0] is not None:
            return found
        if number >= _RECOGNISED_WITHIN:
            break
    return None, None


@dataclass(slots=True)
class _Rows:
    """The columns during reading."""

    path: Path
    skip: bool
    block_tokens: int = 0
    bad: list[BadLine] = field(default_factory=list)
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    inputs: array[int] = field(default_factory=lambda: array("q"))
    outputs: array[int] = field(default_factory=lambda: array("q"))
    ids: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    thinks: array[float] = field(default_factory=lambda: array("d"))
    thoughts: array[int] = field(default_factory=lambda: array("q"))
    sessions: array[int] = field(default_factory=lambda: array("q"))
    programs: array[int] = field(default_factory=lambda: array("q"))
    finish: array[int] = field(default_factory=lambda: array("q"))
    gaps_known: array[int] = field(default_factory=lambda: array("b"))
    from_start: array[int] = field(default_factory=lambda: array("b"))
    joins: dict[int, tuple[Hashable, ...]] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)
    parents: list[Hashable] = field(default_factory=list)
    by_key: dict[Hashable, int] = field(default_factory=dict)
    exact: bool = False  # some line marks its arrival as exact
    chained: bool = False  # some line names a chat or a parent
    waits: bool = False  # some line waits for another
    first_line_has_ids: tuple[int, bool] | None = None
    later: dict[int, int] = field(default_factory=dict)  # largest later number that a row refers to
    refused: set[int] = field(default_factory=set)  # rows that refer to no request
    requests: int = 0  # with refused requests, so that later references stay valid

    def read(self, shape: TraceFormat, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        parser = shape.parser(block_tokens)
        number = 0
        for number, line in _numbered_values(self.path):
            if line.strip():
                note = "" if line.endswith(b"\n") else " (last line, no line end: half-written?)"
                self._take(number, partial(parser.read, number, line), note)
        self._take(number, parser.end, "")
        for row, named in self.later.items():
            if named >= self.requests:
                self.refused.add(row)
                self._refuse(
                    self.lines[row],
                    f"waits for request {named}, but the file has {self.requests}, numbered from 0",
                )
        if len(self.lines) == len(self.refused):
            raise TraceError(
                f"{self.path}: no request in it" + (f"; first bad line: {self.bad[0]}" if self.bad else "")
            )

    def _take(self, number: int, read: Callable[[], Iterable[Row | ValueError]], note: str) -> None:
        """Adds the requests of a line, and refuses what is invalid."""
        try:
            for row in read():
                try:
                    if isinstance(row, ValueError):
                        raise row
                    self._add(number if row.line is None else row.line, row)
                except ValueError as error:
                    self._refuse(number, f"{error}{note}")
                self.requests += 1
        except ValueError as error:
            self._refuse(number, f"{error}{note}")
            self.requests += 1

    def _add(self, number: int, row: Row) -> None:
        has_ids = row.blocks is not None
        if self.first_line_has_ids is None:
            self.first_line_has_ids = (number, has_ids)
        elif has_ids != self.first_line_has_ids[1]:
            other = f"line {self.first_line_has_ids[0]} has {'none' if has_ids else 'them'}"
            raise ValueError(
                f"{'unexpected' if has_ids else 'no'} hash_ids: {other}, and all lines must agree"
            )
        key = self.requests if row.key is None else row.key
        if key in self.by_key:
            raise ValueError(f"chat_id {key} stands in line {self.lines[self.by_key[key]]} already")
        self.by_key[key] = len(self.lines)
        self.chained |= row.key is not None or row.parent is not None or bool(row.joins)
        self.waits |= row.waits
        self.exact |= row.exact
        self.lines.append(number)
        self.parents.append(row.parent)
        self.arrivals.append(row.arrival_seconds)
        self.inputs.append(row.input_tokens)
        self.outputs.append(row.output_tokens)
        if row.blocks is not None and len(row.blocks):
            self.ids.frombytes(np.frombuffer(row.blocks, np.uint8).data)
        self.offsets.append(len(self.ids))
        self.thinks.append(row.think_seconds)
        self.thoughts.append(row.think_tokens)
        self.sessions.append(-1 if row.session is None else row.session)
        self.programs.append(row.program)
        self.finish.append(row.finish)
        self.gaps_known.append(row.gap_known)
        self.from_start.append(row.from_start)
        if row.joins:
            self.joins[len(self.lines) - 1] = row.joins
        if row.key is None:  # so the row refers to others by their numbers
            named = max((each for each in (row.parent, *row.joins) if isinstance(each, int)), default=-1)
            if named > self.requests:
                self.later[len(self.lines) - 1] = named

    def _refuse(self, number: int, reason: str) -> None:
        self.bad.append(BadLine(str(self.path), number, reason))
        if not self.skip:
            raise TraceError(str(self.bad[-1])) from None

    def trace(self, closed_loop: bool | None, session_rate: float | None) -> Trace:
        """All rows as a trace, sorted by arrival."""
        if closed_loop and not self.chained and not self.ids:
            raise TraceError(
                f"{self.path}: names no conversations and has no hash_ids, so no request can wait for another"
            )
        arrivals = np.frombuffer(self.arrivals, np.float64).copy()
        if arrivals.min() > _EPOCH_SECONDS:
            arrivals -= arrivals.min()
        if session_rate is not None:
            self._start(arrivals, session_rate)
        waits = self.chained and (self.waits if closed_loop is None else closed_loop)
        if waits:
            self._move_to_earliest(arrivals)
        order = np.argsort(arrivals, kind="stable")
        previous, sessions, order = self._chains(order) if self.chained else (None, self._named(), order)
        offsets, ids = gather(
            np.frombuffer(self.offsets, np.int64),
            np.frombuffer(self.ids, np.uint64) if self.ids else np.empty(0, np.uint64),
            order,
        )
        return Trace(
            name=self.path.name,
            arrival_seconds=arrivals[order],
            input_tokens=np.frombuffer(self.inputs, np.int64)[order],
            output_tokens=np.frombuffer(self.outputs, np.int64)[order],
            hash_offsets=offsets,
            hash_ids=ids,
            block_tokens=self.block_tokens,
            bad_lines=tuple(sorted(self.bad, key=lambda bad: bad.line)),
            sessions=None if sessions is None else sessions[order],
            previous=renumbered(previous, order) if waits and previous is not None else None,
            think_seconds=np.frombuffer(self.thinks, np.float64)[order] if waits else None,
            think_tokens=np.frombuffer(self.thoughts, np.int64)[order] if any(self.thoughts) else None,
            joins=self._joined(order) if waits and self.joins else None,
            programs=_if_any(self.programs, order),
            finish=_if_any(self.finish, order),
        )

    def _awaited(self, row: int) -> list[int]:
        """The earlier rows that a row waits for."""
        keys = () if self.parents[row] is None else (self.parents[row],)
        found = (self.by_key.get(key, row) for key in (*keys, *self.joins.get(row, ())))
        return [before for before in found if before < row]

    def _move_to_earliest(self, arrivals: NDArray[np.float64]) -> None:
        """Moves rows with a known gap to their earliest arrivals: answers are immediate."""
        for row in np.flatnonzero(np.frombuffer(self.gaps_known, np.int8)).tolist():
            if awaited := self._awaited(row):
                arrivals[row] = arrivals[awaited].max() + self.thinks[row]

    def _start(self, arrivals: NDArray[np.float64], rate: float) -> None:
        """Starts the sessions without a recorded start, `rate` per second (Poisson, seed 0)."""
        moved = np.flatnonzero(np.frombuffer(self.from_start, np.int8))
        if not len(moved):
            raise TraceError(f"{self.path}: session_rate has no effect: all sessions have a recorded start")
        sessions = np.frombuffer(self.sessions, np.int64)[moved]
        names = np.where(sessions >= 0, sessions, -1 - moved)  # a row without a session is its own
        _, first, which = np.unique(names, return_index=True, return_inverse=True)
        starts = np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(first)))
        place = np.empty(len(first), np.int64)
        place[np.argsort(first)] = np.arange(len(first))  # in the order of the file
        arrivals[moved] += starts[place[which]]

    def _joined(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pairs of a request and a further request that it waits for, in the order of the trace.

        Raises `TraceError` if a line waits for a later request.
        """
        place = np.full(len(self.lines), -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        pairs = []
        for row, keys in self.joins.items():
            for key in keys:
                before = self.by_key.get(key)
                if place[row] < 0 or before is None or place[before] < 0:
                    continue  # one of the two lines was skipped
                if place[before] >= place[row]:
                    raise TraceError(
                        f"{self.path}, line {self.lines[row]}: joins names line {self.lines[before]}, which "
                        "does not come before it"
                    )
                pairs.append((place[row], place[before]))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def _named(self) -> NDArray[np.int64] | None:
        """The sessions that the file numbers."""
        sessions = np.frombuffer(self.sessions, np.int64)
        return sessions if (sessions >= 0).any() else None

    def _chains(
        self, order: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The previous turn (-1: none in this file) and the conversation of each row, and a new
        `order`.

        The new order has no rows before their parents. Rows that were refused have a conversation,
        too, for those that follow them.
        """
        previous = np.full(len(order), -1, dtype=np.int64)
        sessions = np.empty(len(order), dtype=np.int64)
        numbers: dict[Hashable, int] = {}
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        refused = np.zeros(len(order), dtype=np.bool_)
        refused[list(self.refused)] = True
        for row in order.tolist():
            parent = self.parents[row]
            before = -1 if parent is None else self.by_key.get(parent, -1)
            late = before >= 0 and place[before] >= place[row]
            if before >= 0 and not late:
                previous[row], sessions[row] = before, sessions[before]
                continue
            if late and not refused[row]:
                refused[row] = True
                self._refuse(
                    self.lines[row],
                    f"comes before the request it follows (line {self.lines[before]})"
                    if before != row
                    else "follows itself",
                )
            # Turns stay in one conversation even if its first turn is not in this file.
            name = ("row", row) if parent is None or before >= 0 else ("parent", parent)
            sessions[row] = numbers.setdefault(name, len(numbers))
        named = self._named()
        return previous, sessions if named is None else named, order[~refused[order]]


def _if_any(column: array[int], order: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The column in this order; None if all entries are -1."""
    values = np.frombuffer(column, np.int64)
    return values[order] if (values >= 0).any() else None


def _numbered_values(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers. If its first line is only an opening brace, its JSON
    values have many lines: the values, with the numbers of their first lines."""
    depth, begin, document = 0, 0, False
    value: list[bytes] = []
    size = 0
    for number, line in _numbered_lines(path):
        if number == 1:
            document = line.removeprefix(BOM).strip() == b"{"
        if not document:
            yield number, line
            continue
        if not value:
            begin, size = number, 0
        value.append(line)
        size += len(line)
        if size > _LONGEST_BYTES:
            raise TraceError(_too_long(path, begin))
        depth += sum({b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(each, 0) for each in _MARKS.findall(line))
        if depth <= 0:
            yield begin, b"".join(value)
            value.clear()
    if value:
        yield begin, b"".join(value)


def _too_long(path: Path, number: int) -> str:
    return (
        f"{path}, line {number}: a line or JSON value of over {_LONGEST_BYTES >> 20} MiB; "
        "write one conversation, or one export, per line"
    )


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with open_packed(path) as file:
            while line := file.readline(_LONGEST_BYTES + 1):
                number += 1
                if len(line) > _LONGEST_BYTES:
                    raise TraceError(_too_long(path, number))
                yield number, line
    except DAMAGED as error:
        raise TraceError(
            f"{path}: the compressed file breaks off or is damaged after line {number}"
            if number or not isinstance(error, gzip.BadGzipFile)
            else f"{path}: not a compressed file of this kind; correct the end of its name"
        ) from None


def _lies_on(arrivals: NDArray[np.float64], bucket: float) -> bool:
    if bucket <= 0:
        return False
    distance = np.abs(arrivals - np.round(arrivals / bucket) * bucket)
    return bool(np.mean(distance <= _BUCKET_SLACK_SECONDS) >= _BUCKETED_SHARE)


def looks_coarse(arrivals: NDArray[np.float64], bucket: float) -> bool:
    """Whether `load_trace` would take these exact arrivals for rounded ones, and move some."""
    moved = np.abs(_evenly(arrivals, bucket) - arrivals) > 1e-6
    return bool(moved.any()) and _lies_on(arrivals, bucket)


def _spread(trace: Trace, bucket: float) -> Trace:
    """Spread the requests of each bucket, to remove bursts caused by rounding."""
    if bucket <= 0:
        return trace
    return replace(trace, arrival_seconds=_evenly(trace.arrival_seconds, bucket))


def _evenly(arrivals: NDArray[np.float64], bucket: float) -> NDArray[np.float64]:
    """Move request j of a bucket's n requests to j / n of it."""
    number = np.round(arrivals / bucket)
    _, first, counts = np.unique(number, return_index=True, return_counts=True)
    position = np.arange(len(arrivals)) - np.repeat(first, counts)
    return (number + position / np.repeat(counts, counts)) * bucket
