"""Follows the record files of a running router, and keeps the last minutes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from lmetric.record_files import LINES, RecordError, Records, check_header

SUFFIX = ".jsonl"  # compressed files are not of a running router
KEPT_FLEETS = 2_000


@dataclass
class _File:
    offset: int = 0
    header: dict[str, Any] | None = None


@dataclass
class Tail:
    """The records of the last ``window_seconds`` in a folder.

    `read` costs what is new. A line without its end is read when it is complete. Lines that are not
    valid are counted in ``skipped``.
    """

    folder: Path
    window_seconds: float
    skipped: int = 0
    _files: dict[Path, _File] = field(default_factory=dict)
    _requests: deque[dict[str, Any]] = field(default_factory=deque)
    _fleets: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_FLEETS))

    def read(self, now: float) -> Records:
        """The records until ``now``, Unix time, ordered by arrival.

        Raises:
            RecordError: no record file, or a file of another version.
            OSError: the folder or a file cannot be read.
        """
        paths = sorted(path for path in self.folder.iterdir() if path.name.endswith(SUFFIX))
        if not paths:
            raise RecordError(f"{self.folder}: no record file yet; send requests")
        begin = now - self.window_seconds
        for path in paths:
            if path in self._files or path.stat().st_mtime >= begin:
                self._read(path, begin)
        self._files = {path: state for path, state in self._files.items() if path in set(paths)}
        kept = sorted((each for each in self._requests if each["at"] >= begin), key=lambda each: each["at"])
        self._requests = deque(kept)
        self._drop_fleets(begin)
        headers = [state.header for state in self._files.values() if state.header is not None]
        return Records(headers, sorted(self._fleets, key=lambda each: each["at"]), kept)

    def _read(self, path: Path, begin: float) -> None:
        state = self._files.setdefault(path, _File())
        with path.open("rb") as file:
            file.seek(state.offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                state.offset += len(text)
                self._line(path, state, text, begin)

    def _line(self, path: Path, state: _File, text: bytes, begin: float) -> None:
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError:
            line = None
        if not isinstance(line, dict):
            self.skipped += 1
            return
        if state.header is None:
            state.header = check_header(f"{path}, line 1", line)
            return
        kind = line.get("type")
        if kind not in ("fleet", "request") or any(
            key.always and name not in line for name, key in LINES[kind].items()
        ):
            self.skipped += 1
        elif kind == "fleet":
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
