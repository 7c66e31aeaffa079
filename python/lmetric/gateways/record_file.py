"""A file of decision records, which a gateway appends to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orjson

_log = logging.getLogger("lmetric")


class RecordFile:
    """Appends a line of JSON for each record. A failed write loses its record and raises no error.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fails = False  # the last write failed, perhaps in the middle of a line
        with path.open("ab"):
            pass

    def add(self, record: Any) -> None:
        """Appends a record."""
        line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY, default=str) + b"\n"
        try:
            with self._path.open("ab") as file:
                file.write(b"\n" + line if self._fails else line)
        except OSError as error:
            if not self._fails:
                _log.warning(
                    "cannot write records (%s); requests go on without records until it works: free space, "
                    "or make %s writable",
                    error.strerror,
                    self._path,
                )
            self._fails = True
        else:
            self._fails = False
