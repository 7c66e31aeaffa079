"""Backfill of the KV index: asks an engine to report the cached prefixes of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from lmetric.engines.handover import CHAT, COMPLETIONS, with_fields

# Each such request costs its engine an event as long as the prompt, hence the limits.
REFILL_REQUESTS = 4096
REFILL_SECONDS = 600.0
# Larger requests do not get the field: the engine reports all blocks of a prompt in one message,
# and the feed refuses messages above 4 MiB. They hold about 500,000 tokens.
MAX_BODY_BYTES = 2 << 20


class KvBackfill:
    """Adds an engine's full-report field to its requests, up to a time limit and a count limit."""

    __slots__ = ("_field", "_least", "left", "until")

    def __init__(self, field: Mapping[str, Any], block_size: int, now: float) -> None:
        self._field = field
        self._least = 2 * block_size
        self.until = now + REFILL_SECONDS
        self.left = REFILL_REQUESTS

    def over(self, now: float) -> bool:
        """Returns whether a limit is reached."""
        return now >= self.until or self.left <= 0

    def body(self, path: str, body: bytes, unknown_tokens: int) -> bytes:
        """Returns the body, with the field if at least two blocks of its prompt are unknown.

        ``unknown_tokens``: prompt tokens not known to be cached. A client's own field of that name
        stays.
        """
        if (
            unknown_tokens < self._least
            or self.left <= 0
            or len(body) > MAX_BODY_BYTES
            or path not in (CHAT, COMPLETIONS)
        ):
            return body
        if not self._field.keys().isdisjoint(orjson.loads(body)):
            return body
        self.left -= 1
        return with_fields(body, self._field)
