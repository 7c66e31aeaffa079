"""Puts requests into arms by a keyed hash, so that requests with one key stay in one arm."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, NamedTuple

Arm = Literal["stable", "canary"]

BUCKETS = 1024
"""Number of groups of keys. Keys of one group are in one arm, and count as one for intervals."""

_WHOLE = float(1 << 64)


class Place(NamedTuple):
    """Where a key belongs."""

    canary: bool
    bucket: int  # 0 to BUCKETS - 1


class Splitter:
    """Puts keys into two arms.

    Args:
        salt: routers with the same salt put a key into the same arm. Another salt draws all keys
            again.
        share: share of the keys in the canary's arm, above 0 and below 1.
    """

    __slots__ = ("_hash", "_limit")

    def __init__(self, salt: str, share: float) -> None:
        if not 0.0 < share < 1.0:
            raise ValueError(f"share: {share!r} is not valid; expected a number above 0 and below 1")
        key = blake2b(salt.encode(), digest_size=32, person=b"lmetric-canary").digest()
        self._hash = blake2b(digest_size=16, key=key)
        self._limit = int(share * _WHOLE)

    def place(self, key: bytes) -> Place:
        """Returns the arm and the group of a key."""
        hashed = self._hash.copy()
        hashed.update(key)
        digest = hashed.digest()
        return Place(
            int.from_bytes(digest[:8], "little") < self._limit,
            int.from_bytes(digest[8:12], "little") % BUCKETS,
        )
