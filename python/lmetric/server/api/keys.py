"""API keys and their tenants."""

import hashlib
import re
from pathlib import Path

from lmetric.config import ConfigError, read_yaml_mapping
from lmetric.config.kinds import is_reference
from lmetric.server.api.caller import Caller

KEY_ID_BYTES = 6
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")


def digest(token: str) -> bytes:
    """Returns the SHA-256 hash of a secret."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The known API keys.

    Only digests are stored and compared, so timing reveals nothing of a key.
    """

    def __init__(self, tenants: dict[bytes, str] | None) -> None:
        self._tenants = tenants
        self.on = tenants is not None  # whether a key is needed

    @classmethod
    def load(cls, file: Path | None) -> "Keys":
        """Reads a YAML mapping of key, or ``sha256:HEX``, to tenant.

        Without a file no key is needed.

        Raises ConfigError.
        """
        if file is None:
            return cls(None)
        tenants: dict[bytes, str] = {}
        for place, (key, tenant) in enumerate(read_yaml_mapping(file).items(), 1):
            # Keys are secrets, so an error names the entry by its position.
            if not isinstance(key, str) or not isinstance(tenant, str) or not key or not tenant:
                raise ConfigError(
                    f"{file}: entry {place}: expected a key and a tenant's name, both non-empty strings"
                )
            if is_reference(key):
                raise ConfigError(
                    f"{file}: entry {place}: the key looks like a reference to a variable, which is not "
                    "expanded here; write the key itself, or sha256: and its digest"
                )
            hashed = _SHA256.fullmatch(key)
            if key.startswith("sha256:") and not hashed:
                raise ConfigError(f"{file}: entry {place}: expected 64 hexadecimal digits after sha256:")
            tenants[bytes.fromhex(hashed[1]) if hashed else digest(key)] = tenant
        if not tenants:
            raise ConfigError(f"{file}: there are no keys in it; unset auth.keys_file to run without keys")
        return cls(tenants)

    def changes(self, newer: "Keys") -> tuple[int, int]:
        """Returns the numbers of keys that `newer` adds and removes.

        A key with another tenant counts as both.
        """
        old, new = set((self._tenants or {}).items()), set((newer._tenants or {}).items())
        return len(new - old), len(old - new)

    def find(self, key: str) -> Caller | None:
        """Returns the caller that has a key; None: the key is unknown.

        The key's ID begins its SHA-256 hash.
        """
        hashed = digest(key)
        tenant = (self._tenants or {}).get(hashed)
        return None if tenant is None else Caller(tenant, hashed[:KEY_ID_BYTES].hex())
