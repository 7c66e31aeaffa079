"""Filling an index with holes: the engine is asked to tell the cached prefixes of the requests it gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from lmetric.engines.handover import CHAT, COMPLETIONS, with_fields

# Each request that asks for it costs its engine an event as long as its prompt, so there are bounds.
REFILL_REQUESTS = 4096
REFILL_SECONDS = 600.0


class KvBackfill:
    """Adds an engine's field for a full report to its requests, until a time and a number are reached."""

    __slots__ = ("_field", "_least", "left", "until")

    def __init__(self, field: Mapping[str, Any], block_size: int, now: float) -> None:
        self._field = field
        self._least = 2 * block_size
        self.until = now + REFILL_SECONDS
        self.left = REFILL_REQUESTS

    def over(self, now: float) -> bool:
        """Whether a bound is reached."""
        return now >= self.until or self.left <= 0

    def body(self, path: str, body: bytes, unknown_tokens: int) -> bytes:
        """The body to send: with the field, where so many tokens of its prompt are not known to be cached
        that there may be blocks among them. A client's own field of that name stays as it is."""
        if unknown_tokens < self._least or self.left <= 0 or path not in (CHAT, COMPLETIONS):
            return body
        if not self._field.keys().isdisjoint(orjson.loads(body)):
            return body
        self.left -= 1
        return with_fields(body, self._field)
