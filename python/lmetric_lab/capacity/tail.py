"""Follows the record files of running routers, and keeps the last minutes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from lmetric.record_files import not_found
from lmetric.record_schema import RecordError, Records, parse_line

SUFFIX = ".jsonl"  # compressed files are not of a running router
KEPT_FLEETS = 2_000
KEPT_REQUESTS = 100_000


@dataclass
class _File:
    offset: int = 0
    header: dict[str, Any] | None = None
    foreign: str | None = None  # why the file is not read
    newest: float = -inf  # last arrival, Unix time


@dataclass
class Tail:
    """The records of the last ``window_seconds``, at most `KEPT_REQUESTS`.

    ``paths``: folders of record files, or such files. `read` costs what is new. A line without its
    end is read when it is complete. Lines that are not valid are counted in ``skipped``. Files of
    another version, or without a header, are not read.
    """

    paths: Sequence[Path]
    window_seconds: float
    skipped: int = 0
    _files: dict[Path, _File] = field(default_factory=dict)
    _requests: list[dict[str, Any]] = field(default_factory=list)
    _fleets: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_FLEETS))

    def read(self, now: float) -> Records:
        """The records until ``now``, Unix time, ordered by arrival, with notes of skipped files and
        lines. Without any file, the records are empty, and a note says so.

        Raises:
            RecordError: none of the files can be read.
            OSError: a folder or a file cannot be read, or a path does not exist.
        """
        paths = list(self._found())
        if not paths:
            self._files, self._requests = {}, []
            self._fleets.clear()
            folders = ", ".join(map(str, self.paths))
            return Records([], [], [], [f"{folders}: no record file yet; send requests"])
        begin = now - self.window_seconds
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # the router has deleted it
                if path in self._files or path.stat().st_mtime >= begin:
                    self._read(path, begin)
        self._files = {path: state for path, state in self._files.items() if path in set(paths)}
        files = [(each.header, each.newest) for each in self._files.values() if each.header is not None]
        foreign = [state.foreign for state in self._files.values() if state.foreign is not None]
        if foreign and not files:
            raise RecordError(foreign[0])
        self._keep_newest(begin)
        kept = self._requests.copy()
        self._drop_fleets(begin)
        notes = [f"{len(foreign)} files are skipped: {foreign[0]}"] if foreign else []
        if self.skipped:
            notes.append(f"{self.skipped} lines of records are not valid and are skipped")
        if len(kept) == KEPT_REQUESTS:
            notes.append(f"only the newest {KEPT_REQUESTS:,} requests are used; a shorter window has fewer")
        return Records(
            [header for header, _ in files],
            sorted(self._fleets, key=lambda each: each["at"]),
            kept,
            notes,
            [newest for _, newest in files],
        )

    def _found(self) -> Iterator[Path]:
        """Yields the files. Raises FileNotFoundError for a missing path."""
        for path in self.paths:
            if path.is_dir():
                yield from sorted(each for each in path.iterdir() if each.name.endswith(SUFFIX))
            elif path.exists():
                yield path
            else:
                raise not_found(path)

    def _keep_newest(self, begin: float) -> None:
        """Drops requests before ``begin``, and the oldest ones above `KEPT_REQUESTS`."""
        kept = sorted((each for each in self._requests if each["at"] >= begin), key=lambda each: each["at"])
        self._requests = kept[-KEPT_REQUESTS:]

    def _read(self, path: Path, begin: float) -> None:
        state = self._files.setdefault(path, _File())
        if state.foreign is not None:
            return
        with path.open("rb") as file:
            file.seek(state.offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                state.offset += len(text)
                try:
                    line = parse_line(str(path), text, header=state.header is None)
                except RecordError as error:
                    if state.header is None:
                        state.foreign = str(error)
                        return
                    self.skipped += 1
                    continue
                if state.header is None:
                    state.header = line
                    continue
                if line["type"] == "fleet":
                    self._fleets.append(line)
                    continue
                state.newest = max(state.newest, line["at"])
                if line["at"] >= begin:
                    self._requests.append(line)
                    if len(self._requests) >= 2 * KEPT_REQUESTS:  # the files are not in order of time
                        self._keep_newest(begin)

    def _drop_fleets(self, begin: float) -> None:
        """Keeps the states since ``begin``, and for each model the last one before."""
        last: dict[str, dict[str, Any]] = {}
        later = []
        for each in sorted(self._fleets, key=lambda line: float(line["at"])):
            if each["at"] < begin:
                last[each["model"]] = each
            else:
                later.append(each)
        self._fleets = deque([*last.values(), *later], maxlen=KEPT_FLEETS)
