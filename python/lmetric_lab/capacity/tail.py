"""Follows the record files of a running router, and keeps the last minutes."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmetric.record_files import RecordError, Records, parse_line

SUFFIX = ".jsonl"  # compressed files are not of a running router
KEPT_FLEETS = 2_000
KEPT_REQUESTS = 100_000


@dataclass
class _File:
    offset: int = 0
    header: dict[str, Any] | None = None
    foreign: str | None = None  # why the file is not read


@dataclass
class Tail:
    """The records of the last ``window_seconds`` in a folder, at most `KEPT_REQUESTS`.

    `read` costs what is new. A line without its end is read when it is complete. Lines that are not
    valid are counted in ``skipped``. Files of another version, or without a header, are not read.
    """

    folder: Path
    window_seconds: float
    skipped: int = 0
    _files: dict[Path, _File] = field(default_factory=dict)
    _requests: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))
    _fleets: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_FLEETS))

    def read(self, now: float) -> Records:
        """The records until ``now``, Unix time, ordered by arrival, with notes of skipped files and
        lines.

        Raises:
            RecordError: no record file, or none that can be read.
            OSError: the folder or a file cannot be read.
        """
        paths = sorted(path for path in self.folder.iterdir() if path.name.endswith(SUFFIX))
        if not paths:
            raise RecordError(f"{self.folder}: no record file yet; send requests")
        begin = now - self.window_seconds
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # the router has deleted it
                if path in self._files or path.stat().st_mtime >= begin:
                    self._read(path, begin)
        self._files = {path: state for path, state in self._files.items() if path in set(paths)}
        headers = [state.header for state in self._files.values() if state.header is not None]
        foreign = [state.foreign for state in self._files.values() if state.foreign is not None]
        if foreign and not headers:
            raise RecordError(foreign[0])
        kept = sorted((each for each in self._requests if each["at"] >= begin), key=lambda each: each["at"])
        self._requests = deque(kept, maxlen=KEPT_REQUESTS)
        self._drop_fleets(begin)
        notes = [f"{len(foreign)} files are skipped: {foreign[0]}"] if foreign else []
        if self.skipped:
            notes.append(f"{self.skipped} lines of records are not valid and are skipped")
        if len(kept) == KEPT_REQUESTS:
            notes.append(f"only the newest {KEPT_REQUESTS:,} requests are used; a shorter window has fewer")
        return Records(headers, sorted(self._fleets, key=lambda each: each["at"]), kept, notes)

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
                elif line["type"] == "fleet":
                    self._fleets.append(line)
                elif line["at"] >= begin:
                    self._requests.append(line)

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
