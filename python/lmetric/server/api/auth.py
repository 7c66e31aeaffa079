"""API keys and their tenants, the admin token, and access to the router's own pages."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from lmetric.config import ConfigError, ServerConfig, read_secret, read_yaml_mapping
from lmetric.config.kinds import is_reference
from lmetric.server.api.errors import ApiError

NO_TENANT = ""
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")


def bearer(authorization: str | None) -> str | None:
    """Returns the token of an `authorization` header; None if its scheme is not `Bearer`."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


KEY_ID_BYTES = 6


class BearerToken:
    """A secret token that requests carry as `Authorization: Bearer TOKEN`.

    Digests are compared in constant time, so timing reveals neither the token nor its length.
    """

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    def matches(self, authorization: str | None) -> bool:
        """Returns whether an `authorization` header carries the token."""
        given = bearer(authorization)
        return given is not None and hmac.compare_digest(_digest(given), self._digest)


def _digest(token: str) -> bytes:
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
            digest = bytes.fromhex(hashed[1]) if hashed else _digest(key)
            tenants[digest] = tenant
        if not tenants:
            raise ConfigError(f"{file}: there are no keys in it; unset auth.keys_file to run without keys")
        return cls(tenants)

    def changes(self, newer: "Keys") -> tuple[int, int]:
        """Returns the numbers of keys that `newer` adds and removes.

        A key with another tenant counts as both.
        """
        old, new = set((self._tenants or {}).items()), set((newer._tenants or {}).items())
        return len(new - old), len(old - new)

    def tenant(self, authorization: str | None, *api_keys: str | None) -> str:
        """Returns the tenant of a request with these headers. Raises ApiError (401)."""
        return self.identify(authorization, *api_keys)[0]

    def identify(self, authorization: str | None, *api_keys: str | None) -> tuple[str, str]:
        """Returns the tenant of a request with these headers, and the ID of its key.

        ``api_keys``: `x-api-key`, `api-key`. The ID begins the key's SHA-256 hash. One known key is
        enough: some clients send a second credential for another service. Raises ApiError (401).
        """
        if self._tenants is None:
            return NO_TENANT, ""
        keys = [key for key in (bearer(authorization), *api_keys) if key]
        if not keys:
            raise ApiError(
                401,
                "no API key; send it as Authorization: Bearer KEY",
                headers={"www-authenticate": "Bearer"},
            )
        for key in keys:
            tenant = self._tenants.get(digest := _digest(key))
            if tenant is not None:
                return tenant, digest[:KEY_ID_BYTES].hex()
        raise ApiError(401, "unknown API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def is_local(headers: Mapping[str, str]) -> bool:
    """Returns whether a request to a loopback address can come only from a program on this machine.

    A web page can make a browser send requests to loopback. Its POSTs carry its origin. Its GETs
    carry the name of the page's host, whose address may have become a loopback address meanwhile
    (DNS rebinding).
    """
    if "origin" in headers:
        return False
    host = headers.get("host", "localhost")  # browsers always send it
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class PageAccess:
    """Checks access to the router's own pages, by the table in docs/how-to/access.md.

    Raises ConfigError.
    """

    def __init__(self, config: ServerConfig, keys: Keys) -> None:
        self._keys = keys
        self._tenants = config.tenants
        self._open = config.debug_is_open
        self._protects_metrics = config.admin.protect_metrics
        token = read_secret(config.admin.token, config.admin.token_file)
        self._token = BearerToken(token) if token is not None else None

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Returns whether a request may use /admin and /debug."""
        if self._open:
            return is_local(headers)
        return self._token is not None and self._token.matches(headers.get("authorization"))

    def require_admin(self, headers: Mapping[str, str], path: str) -> None:
        """Raises ApiError (401, 403) unless a request may use /admin and /debug."""
        if self.is_admin(headers):
            return
        if self._open:
            raise ApiError(
                403,
                f"{path} refuses requests from web pages, and those for another host than localhost, unless "
                "admin.token is set",
            )
        if self._token is None:
            raise ApiError(403, f"{path} is closed; set admin.token to open it", code="no_admin_token")
        if self._keys.on:
            self._tenant_of_key(headers)  # 401 for a key that is unknown
            raise ApiError(403, f"API keys have no access to {path}; send the admin token", code="not_admin")
        raise ApiError(
            401,
            f"{path} needs the admin token; send it as Authorization: Bearer TOKEN",
            headers={"www-authenticate": "Bearer"},
        )

    def require_metrics(self, headers: Mapping[str, str], path: str) -> None:
        """Raises ApiError (401, 403) unless a request may read /metrics."""
        if self._protects_metrics:
            self.require_admin(headers, path)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Returns the tenant of a request for one of the router's own pages.

        Raises ApiError (401).
        """
        if self._keys.on:
            return self._tenant_of_key(headers)
        named = headers.get("x-tenant", "")
        return named if named in self._tenants else NO_TENANT  # without keys, the header is trusted

    def _tenant_of_key(self, headers: Mapping[str, str]) -> str:
        given = (headers.get(name) for name in ("authorization", "x-api-key", "api-key"))
        return self._keys.tenant(*given)
