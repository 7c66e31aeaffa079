"""API keys and their tenants."""

import hashlib
import re
from pathlib import Path

from lmetric.config import ConfigError, read_yaml_mapping
from lmetric.server.openai import ApiError

NO_TENANT = ""
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")


def bearer(authorization: str | None) -> str | None:
    """The token of an `authorization` header; None: it is of another scheme."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class Keys:
    """Known keys. Only digests are kept, and only digests are compared: timing tells nothing of a key."""

    def __init__(self, tenants: dict[bytes, str] | None) -> None:
        self._tenants = tenants

    @classmethod
    def load(cls, file: Path | None) -> "Keys":
        """Reads a YAML mapping of key, or ``sha256:HEX``, to tenant. Without a file everybody may ask.

        Raises ConfigError.
        """
        if file is None:
            return cls(None)
        tenants: dict[bytes, str] = {}
        for place, (key, tenant) in enumerate(read_yaml_mapping(file).items(), 1):
            # Keys are secrets: an error names the entry by its place.
            if not isinstance(key, str) or not isinstance(tenant, str) or not key or not tenant:
                raise ConfigError(f"{file}: entry {place}: expected a key and a tenant's name, both strings")
            hashed = _SHA256.fullmatch(key)
            if key.startswith("sha256:") and not hashed:
                raise ConfigError(f"{file}: entry {place}: sha256: takes 64 hexadecimal digits")
            digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()
            tenants[digest] = tenant
        if not tenants:
            raise ConfigError(f"{file}: no keys in it; leave out auth.keys_file to run without keys")
        return cls(tenants)

    def changes(self, newer: "Keys") -> tuple[int, int]:
        """How many keys another set of keys adds, and how many it takes away. A key with another tenant
        counts as both."""
        old, new = set((self._tenants or {}).items()), set((newer._tenants or {}).items())
        return len(new - old), len(old - new)

    @property
    def on(self) -> bool:
        """Whether a key is needed."""
        return self._tenants is not None

    def tenant(self, authorization: str | None, api_key: str | None = None) -> str:
        """The tenant of a request with these headers. Raises ApiError (401)."""
        if self._tenants is None:
            return NO_TENANT
        token = bearer(authorization)
        key = (api_key or "") if token is None else token
        if not key:
            raise ApiError(
                401,
                "no API key; send it as Authorization: Bearer KEY",
                headers={"www-authenticate": "Bearer"},
            )
        tenant = self._tenants.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())
        if tenant is None:
            raise ApiError(
                401, "unknown API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        return tenant
