"""Tenant isolation: cache salts that separate a tenant's prompts from those of all other tenants.

Engines reuse the KV cache of an equal prompt, so a tenant can guess another tenant's prompt. Then
`cached_tokens`, or the time to the first token, reveals whether the guess was right. The prompts of
an isolated tenant get a salt of their own: a hash of the tenant's name under a secret, which all
routers of a fleet share. The client's own `cache_salt` goes into the hash. It separates the
tenant's own users and cannot lead to the salt of another tenant.
"""

from __future__ import annotations

from hashlib import blake2b

import structlog

from lmetric.config import ServerConfig, read_secret
from lmetric.engines.handover import CHAT
from lmetric.server.api.errors import ApiError
from lmetric.server.api.request import ParsedRequest

log = structlog.get_logger("lmetric.isolation")


class Isolation:
    """The salts of isolated tenants. Raises ConfigError if their secret cannot be read.

    ``random_secret``: a secret of this process, used if the configuration has none.
    """

    def __init__(self, config: ServerConfig, random_secret: bytes) -> None:
        names = [name for name, tenant in config.tenants.items() if tenant.isolate]
        self.tenants = frozenset(names)
        self._keys: dict[str, bytes] = {}
        if not names:
            return
        given = read_secret(config.auth.salt_secret, config.auth.salt_secret_file)
        if given is None:
            log.warning(
                "isolated tenants lose their prefix caches when the router restarts; set auth.salt_secret"
            )
        if not config.auth.identifies:
            log.warning(
                "without API keys, tenants are isolated only if a trusted proxy sets the header x-tenant"
            )
        secret = random_secret if given is None else blake2b(given.encode(), digest_size=32).digest()
        self._keys = {name: blake2b(name.encode(), key=secret, digest_size=32).digest() for name in names}

    def salt(self, tenant: str, given: str | None) -> str:
        """Returns the cache salt of an isolated tenant's prompt.

        ``given``: the client's own salt.
        """
        data = b"" if given is None else b"+" + given.encode()
        return blake2b(data, key=self._keys[tenant], digest_size=16).hexdigest()

    def scope(self, tenant: str) -> int:
        """Returns the id of the tokenizer cache partition of an isolated tenant."""
        return int.from_bytes(blake2b(b"tokens", key=self._keys[tenant], digest_size=8).digest())

    def apply(self, tenant: str, path: str, call: ParsedRequest) -> None:
        """Adds the salt to an isolated tenant's request, for the index and for the engine.

        Raises ApiError (403) if engines would ignore the salt on this path.
        """
        by = call.path.isolated_by
        if by == "refused":
            raise not_isolated(tenant, path)
        call.salt = self.salt(tenant, call.salt)
        call.scope = self.scope(tenant)
        if by == "no_cache":
            return
        call.change(("cache_salt",), {"cache_salt": call.salt})


def not_isolated(tenant: str, path: str) -> ApiError:
    """Returns the 403 of an isolated tenant's request whose salt an engine would ignore."""
    return ApiError(
        403,
        f"tenant {tenant!r} is isolated and {path} does not accept cache_salt; use {CHAT}",
        code="not_isolated",
    )
