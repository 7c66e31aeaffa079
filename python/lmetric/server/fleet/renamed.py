"""The names that requests had before an alias or a fallback gave them the name of their model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

# Requests whose names are remembered, for each model.
REMEMBERED = 4096


class RenamedRequests:
    """The earlier names of a model's requests, by decision. The oldest are forgotten."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, Mapping[str, str]] = OrderedDict()

    def note(self, decision: int, names: Mapping[str, str]) -> None:
        """Remembers the names of a request, as in its records."""
        self._names[decision] = names
        if len(self._names) > REMEMBERED:
            self._names.popitem(last=False)

    def of(self, decision: int) -> Mapping[str, str]:
        """Returns the names of a request; empty if it had no other names."""
        return self._names.get(decision, {})
