"""API keys that the router issues: their table, and its JSON in files and between routers.

A record changes once at most, when its key is revoked, and the revocation wins. So tables can be
merged in any order and any number of times, and a revoked key never becomes valid again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from lmetric._core import BadValueError

PREFIX = "lm-"
# 256 random bits: no search finds a key from its hash, so SHA-256 protects keys as well as a slow
# hash, which passwords need.
KEY_BYTES = 32
KEY_ID_DIGITS = 12
MOST_CHARACTERS = 128  # of the names of tenants and keys
MOST_SECONDS = 10 * 365 * 86_400  # longest life of a key; each record of a revoked key ends, too
# Records of one router. Each change writes all of them: 2 MB.
MOST_KEYS = 10_000
ROOM_FOR_OTHERS = 1_000  # further records, which other routers make at the same time
# A record stays this long after its key has expired, because the clocks of routers may differ.
# Without a record, a router whose clock is late would accept a revoked key. Later, another record
# may take its place.
KEPT_SECONDS = 3600

State = Literal["active", "expired", "revoked"]
_Text = Annotated[str, Meta(min_length=1, max_length=MOST_CHARACTERS)]
_UnixSeconds = Annotated[int, Meta(ge=0, lt=1 << 37)]  # before the year 6325


class IssuedKey(Struct, frozen=True, gc=False):
    """The record of a key. Times are Unix times in seconds.

    Attributes:
        sha256: hash of the key, 64 hexadecimal digits. The key itself is stored nowhere.
        revoked: when it was revoked; 0: it is not revoked.
    """

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: _Text
    name: Annotated[str, Meta(max_length=MOST_CHARACTERS)]
    created: _UnixSeconds
    expires: _UnixSeconds
    revoked: _UnixSeconds = 0

    @property
    def id(self) -> str:
        """The ID of the key: it begins the hash."""
        return self.sha256[:KEY_ID_DIGITS]


class KeyTable(Struct, frozen=True):
    """Records in a file, or in an answer to another router.

    Attributes:
        router: ID of the router that answers.
        version: of its table, up to the last of these records.
    """

    keys: list[IssuedKey]
    router: str = ""
    version: int = 0

    def encode(self) -> bytes:
        """Returns the records as JSON."""
        return msgspec.json.encode(self)


def decode(content: bytes) -> KeyTable:
    """Reads the JSON of `KeyTable.encode`. Raises BadValueError."""
    try:
        return _DECODER.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadValueError(f"saved API keys: {error}") from None


_DECODER = msgspec.json.Decoder(KeyTable)


def issue(tenant: str, name: str, expires: int) -> tuple[str, IssuedKey]:
    """Returns a new key and its record. ``expires``: Unix time in seconds."""
    key = f"{PREFIX}{secrets.token_urlsafe(KEY_BYTES)}"
    return key, IssuedKey(sha256(key.encode()).hexdigest(), tenant, name, int(time.time()), expires)


def shown_time(unix_seconds: int) -> str:
    """Returns a time such as 2026-01-31T00:00:00Z."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class IssuedKeys:
    """The table of issued keys.

    ``stored``: whether a file keeps them. ``clock``: returns the Unix time.
    """

    def __init__(self, *, stored: bool, clock: Callable[[], float] = time.time) -> None:
        self.stored = stored
        self.version = 0  # grows with each change
        self.refused = 0  # records of other routers for which there was no room
        self._clock = clock
        self._keys: dict[bytes, IssuedKey] = {}  # by hash, in the order of their last changes
        self._changed: dict[bytes, int] = {}  # by hash: version of the last change, in the same order

    def __len__(self) -> int:
        return len(self._keys)

    def all(self) -> list[IssuedKey]:
        """Returns all records."""
        return list(self._keys.values())

    def state(self, key: IssuedKey) -> State:
        """Returns whether a key is valid now."""
        if key.revoked:
            return "revoked"
        return "active" if self._clock() < key.expires else "expired"

    def find(self, hashed: bytes) -> IssuedKey | None:
        """Returns the record of a hash; None: the key was not issued."""
        return self._keys.get(hashed)

    def has_room(self) -> bool:
        """Returns whether another key may be issued. Drops records that are no longer needed."""
        return self._make_room(MOST_KEYS)

    def merge(self, keys: Iterable[IssuedKey]) -> list[IssuedKey]:
        """Adds records, and revokes known keys. Returns the changed records.

        `refused` counts the records for which there is no room.
        """
        changed = []
        for key in keys:
            hashed = bytes.fromhex(key.sha256)
            known = self._keys.get(hashed)
            if known is None:
                if not self._make_room(MOST_KEYS + ROOM_FOR_OTHERS):
                    self.refused += 1
                    continue
                new = key
            elif key.revoked and (not known.revoked or key.revoked < known.revoked):
                new = msgspec.structs.replace(known, revoked=key.revoked)
            else:
                continue
            for table in (self._keys, self._changed):
                table.pop(hashed, None)
            self.version += 1
            self._keys[hashed], self._changed[hashed] = new, self.version
            changed.append(new)
        return changed

    def since(self, version: int, most: int) -> tuple[list[IssuedKey], int]:
        """Returns the first records that changed after a version, and the version up to them."""
        later = []
        for hashed, changed in reversed(self._changed.items()):
            if changed <= version:
                break
            later.append(hashed)
        found = later[::-1][:most]
        end = self.version if len(found) == len(later) else self._changed[found[-1]]
        return [self._keys[hashed] for hashed in found], end

    def _make_room(self, most: int) -> bool:
        """Returns whether there are fewer records than ``most``."""
        if len(self._keys) < most:
            return True
        oldest = self._clock() - KEPT_SECONDS
        unneeded = [hashed for hashed, key in self._keys.items() if key.expires < oldest]
        for hashed in unneeded:
            del self._keys[hashed], self._changed[hashed]
        return len(self._keys) < most

    def count(self) -> int:
        """Returns the number of valid keys."""
        now = self._clock()
        return sum(not key.revoked and now < key.expires for key in self._keys.values())


def revoke(key: IssuedKey, now: float) -> IssuedKey:
    """Returns the record of a key that is revoked. ``now``: Unix time in seconds."""
    return key if key.revoked else msgspec.structs.replace(key, revoked=int(now))
