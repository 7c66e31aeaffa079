"""Load messages between routers: what one sends, and what another has received.

Most messages hold only the entries that changed since the last message that the other router has
received. Each message has a version, and names the version that it builds on.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# An engine's name, its load values, and the roots of its agent programs. No values: no load.
Entry = tuple[str, list[float], list[tuple[int, float, float]]]

MOST_ENTRIES = 65_536  # entries kept of one router; a full message has at most 16,384 per model


class SentLoads:
    """The load of this router: the latest entries, and the versions in which they changed."""

    def __init__(self) -> None:
        self.version = 0
        self._entries: dict[tuple[str, str], tuple[int, Entry]] = {}  # by model and engine

    def update(self, models: Mapping[str, Iterable[Entry]], oldest: int) -> None:
        """Replaces the load.

        ``oldest``: the oldest version that a message may still build on.
        """
        self.version += 1
        present = set()
        for model, entries in models.items():
            for entry in entries:
                key = model, entry[0]
                present.add(key)
                known = self._entries.get(key)
                if known is None or known[1] != entry:
                    self._entries[key] = self.version, entry
        for key in self._entries.keys() - present:
            version, (_, values, _) = self._entries[key]
            if values:
                self._entries[key] = self.version, (key[1], [], [])
            elif version <= oldest:
                del self._entries[key]

    def since(self, base: int | None) -> dict[str, list[Entry]]:
        """Returns the entries that changed after version ``base``, by model; None: all loads."""
        changed: dict[str, list[Entry]] = {}
        for (model, _), (version, entry) in self._entries.items():
            if entry[1] if base is None else version > base:
                changed.setdefault(model, []).append(entry)
        return changed


class ReceivedLoads:
    """The load of another router, as of its last message."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._models: dict[str, dict[str, Entry]] = {}

    def apply(self, version: int, base: int | None, models: Mapping[str, Iterable[Entry]]) -> bool:
        """Applies a message. Returns False if it builds on a version that this router has not.

        Nothing changes then.
        """
        if base is not None and base != self.version:
            return False
        if base is None:
            self._models = {}
        for model, entries in models.items():
            known = self._models.setdefault(model, {})
            for entry in entries:
                if entry[1]:
                    known[entry[0]] = entry
                else:
                    known.pop(entry[0], None)
        self.version = version
        return True

    def entries(self, model: str) -> list[Entry]:
        """Returns the entries of a model."""
        return list(self._models.get(model, {}).values())

    def __len__(self) -> int:
        return sum(map(len, self._models.values()))


def load_message(router: str, names: list[str], sent: SentLoads, base: int | None) -> dict[str, Any]:
    """Returns the message to a router that has received version ``base``; None: a full message."""
    return {
        "router": router,
        "names": names,
        "version": sent.version,
        "base": base,
        "models": sent.since(base),
    }
