"""Engines' own error answers, which the client gets unchanged, and the wait that they ask for."""

from __future__ import annotations

import re
import time
from datetime import UTC
from email.utils import parsedate_to_datetime
from math import ceil

from lmetric.server.api.errors import ApiError

_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*([^\r\n]*)", re.IGNORECASE)
_DATE = re.compile(rb"\r\ndate:[ \t]*([^\r\n]*)", re.IGNORECASE)


class EngineRefusal(ApiError):
    """An engine's own error answer: its end-to-end fields and its body reach the client unchanged.

    ``lines``: status line and fields of its head. ``engine``: the name of the engine.
    """

    def __init__(self, status: int, lines: bytes, answer: bytes, engine: str) -> None:
        super().__init__(status, "")
        self._lines = lines
        self._answer = answer
        self.engine = engine
        self.retry_after = retry_after_seconds(lines)

    def first_lines(self) -> bytes:
        """Returns the engine's status line and fields."""
        return self._lines

    def body(self, show_engines: bool = True) -> bytes:
        """Returns the engine's answer."""
        return self._answer

    def wait(self, seconds: int) -> None:
        """Replaces the engine's Retry-After unless it means the same."""
        if self.retry_after != seconds:
            self._lines = _RETRY_AFTER.sub(b"", self._lines)
            self.headers["retry-after"] = str(seconds)


def retry_after_seconds(lines: bytes) -> int | None:
    """Returns the seconds of a `retry-after` field among the lines of a head.

    Returns None without one, and if it is neither digits nor a date (RFC 9110, 10.2.3). A date
    counts from the engine's own `date`: the clocks need not agree.
    """
    found = _RETRY_AFTER.search(lines)
    if found is None:
        return None
    value = found[1].strip()
    if value.isdigit():
        return int(value[:18])
    if (until := _seconds_of(value)) is None:
        return None
    dated = _DATE.search(lines)
    now = None if dated is None else _seconds_of(dated[1])
    return max(ceil(until - (time.time() if now is None else now)), 0)


def _seconds_of(date: bytes) -> float | None:
    try:
        found = parsedate_to_datetime(date.decode("latin-1").strip())
        if found.tzinfo is None:  # the form of `asctime` names no zone
            found = found.replace(tzinfo=UTC)
        return found.timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
