"""Tenant isolation: cache salts that separate a tenant's prompts from those of all other tenants.

Engines reuse the KV cache of an equal prompt, so a tenant can guess another tenant's prompt. Then
`cached_tokens`, or the time to the first token, reveals whether the guess was right. The prompts of
an isolated tenant get a salt of their own: a hash of the tenant's name under a secret, which all
routers of a fleet share. The client's own `cache_salt` goes into the hash. It separates the
tenant's own users and cannot lead to the salt of another tenant.

No salt separates images, sound and video that clients name (`uuid`, `features`): vLLM takes the
name for the content, in all its caches. So isolated tenants cannot name media.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import structlog

from lmetric.config import ServerConfig, read_secret
from lmetric.engines.handover import CHAT
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.request import ParsedRequest

# A body without any of these names no media. The last one may spell the others.
_MARKS = (b"uuid", b"features", b"\\u")

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

        Raises ApiError (403) if engines would ignore the salt on this path, or for media that the
        client names.
        """
        by = call.path.isolated_by
        if by == "refused":
            raise not_isolated(tenant, path)
        if any(mark in call.body for mark in _MARKS) and (place := _named_media(call)) is not None:
            raise ApiError(
                403,
                f"tenant {tenant!r} is isolated, and {place} would name media for all tenants; leave it out",
                code="not_isolated",
            )
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


def _named_media(call: ParsedRequest) -> str | None:
    """Returns the place in a body where the client names media; None: it names none.

    Raises ApiError (400) for a body that cannot be parsed.
    """
    try:
        fields = call.request
    except ValueError as error:
        raise bad(f"the body cannot be parsed: {error}") from None
    if call.path.prompt == "token_ids" and fields.get("features") is not None:
        return "features"
    for name, value in fields.items():
        if (place := _uuid(value, is_part=name == "content_parts")) is not None:
            return f"{name}{place}"
    return None


def _uuid(value: Any, *, is_part: bool) -> str | None:
    """Returns the place of the first `uuid` of a content part in a value; None: there is none.

    Parts are in `content` of messages and documents, and in `output` of items. The caller bounds
    the depth. A client chooses the length of names, so no place is written before one is found.
    """
    if isinstance(value, list):
        for index, inner in enumerate(value):
            is_token_id = not isinstance(inner, list | dict)  # one of many
            if not is_token_id and (place := _uuid(inner, is_part=is_part)) is not None:
                return f"[{index}]{place}"
    elif isinstance(value, dict):
        if is_part and value.get("uuid") is not None:
            return ".uuid"
        for name in ("content", "output"):
            if (place := _uuid(value.get(name), is_part=True)) is not None:
                return f".{name}{place}"
    return None
