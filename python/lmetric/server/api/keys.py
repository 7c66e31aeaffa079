"""API keys and their tenants."""

import hashlib
import re
from pathlib import Path

from lmetric.config import ConfigError, read_yaml_mapping
from lmetric.config.kinds import is_reference
from lmetric.server.api.caller import Caller
from lmetric.server.api.issued import KEY_ID_DIGITS, IssuedKeys, shown_time

_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")


def digest(token: str) -> bytes:
    """Returns the SHA-256 hash of a secret."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The known API keys: those of a file, and those that the router has issued.

    Only digests are stored and compared, so timing reveals nothing of a key.
    """

    def __init__(self, tenants: dict[bytes, str] | None, issued: IssuedKeys) -> None:
        self._tenants = tenants or {}
        self.issued = issued
        self.on = tenants is not None  # whether a key is needed

    @classmethod
    def load(cls, file: Path | None, issued: IssuedKeys) -> "Keys":
        """Reads a YAML mapping of key, or ``sha256:HEX``, to tenant.

        Without a file no key is needed. If a file stores issued keys, the mapping may be `{}`.

        Raises ConfigError.
        """
        if file is None:
            return cls(None, issued)
        tenants: dict[bytes, str] = {}
        for place, (key, tenant) in enumerate(read_yaml_mapping(file, secret_keys=True).items(), 1):
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
        if not tenants and not issued.stored:
            raise ConfigError(
                f"{file}: there are no keys in it; add one, set state_folder to make keys with /admin/keys, "
                "or unset auth.keys_file to run without keys"
            )
        if not tenants and not file.read_text(encoding="utf-8").strip():  # its writer may have failed
            raise ConfigError(
                f"{file}: the file is empty; write {{}} into it if all keys are from /admin/keys"
            )
        return cls(tenants, issued)

    def changes(self, newer: "Keys") -> tuple[int, int]:
        """Returns the numbers of keys that the file of `newer` adds and removes.

        A key with another tenant counts as both.
        """
        old, new = set(self._tenants.items()), set(newer._tenants.items())
        return len(new - old), len(old - new)

    def __len__(self) -> int:
        """Returns the number of keys of the file."""
        return len(self._tenants)

    def of_file(self) -> list[Caller]:
        """Returns the tenants and IDs of the file's keys."""
        return [Caller(tenant, _id(hashed)) for hashed, tenant in self._tenants.items()]

    def find(self, key: str) -> Caller | None:
        """Returns the caller that has a key; None: the key is not valid.

        The key's ID begins its SHA-256 hash.
        """
        hashed = digest(key)
        tenant = self._tenants.get(hashed)
        if tenant is not None:
            return Caller(tenant, _id(hashed))
        issued = self.issued.find(hashed)
        if issued is None or self.issued.state(issued) != "active":
            return None
        return Caller(issued.tenant, _id(hashed), issued=True)

    def refusal(self, key: str) -> str | None:
        """Returns why a key that `find` does not accept is not valid; None: it is unknown."""
        issued = self.issued.find(digest(key))
        if issued is None:
            return None
        if issued.revoked:
            return f"API key {issued.id} is revoked"
        return f"API key {issued.id} has expired ({shown_time(issued.expires)})"


def _id(hashed: bytes) -> str:
    return hashed[: KEY_ID_DIGITS // 2].hex()
