"""Values over all engines, which large fleets compute at most once a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SMALL = 500  # engines; a value over them takes about 2 ms
SECONDS = 1.0


class Recent(Generic[T]):
    """The last value of a computation over engines.

    Clients can ask for it at any rate, and its time grows with the fleet. So a value over more than
    `SMALL` engines may be up to `SECONDS` old.
    """

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value: list[T] = []  # empty: none yet
        self._at = 0.0

    def get(self, engines: int, compute: Callable[[], T]) -> T:
        """Returns the value; ``engines``: their number."""
        now = time.monotonic()
        if engines <= SMALL or not self._value or now - self._at >= SECONDS:
            self._value, self._at = [compute()], now
        return self._value[0]
