"""Values that a model keeps by request, such as notes and versions of weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

T = TypeVar("T")

# Requests that are remembered, for each model.
REMEMBERED = 4096


class Remembered(OrderedDict[int, T]):
    """Something about a model's requests, by decision. The oldest are forgotten."""

    def __init__(self, most: int = REMEMBERED) -> None:
        super().__init__()
        self._most = most

    def keep(self, decision: int, value: T) -> None:
        """Remembers a value. A decision that has one keeps its place."""
        self[decision] = value
        while len(self) > self._most:
            self.popitem(last=False)
