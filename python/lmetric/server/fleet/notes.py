"""Notes about requests for their decision records: earlier names, and the credential."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

# Requests whose notes are kept, for each model.
KEPT = 4096


class RequestNotes:
    """Notes about a model's requests, by decision. The oldest are forgotten."""

    def __init__(self) -> None:
        self._notes: OrderedDict[int, Mapping[str, str]] = OrderedDict()

    def add(self, decision: int, notes: Mapping[str, str]) -> None:
        """Keeps the notes about a request, with the keys of its record."""
        self._notes[decision] = notes
        if len(self._notes) > KEPT:
            self._notes.popitem(last=False)

    def of(self, decision: int) -> Mapping[str, str]:
        """Returns the notes about a request; empty if there are none."""
        return self._notes.get(decision, {})
