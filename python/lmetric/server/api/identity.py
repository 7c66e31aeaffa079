"""The identity of clients: the tenant of an API key or of a JSON Web Token."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Self

from prometheus_client.core import GaugeMetricFamily, Metric

from lmetric.config import Auth, ConfigError
from lmetric.extras import install
from lmetric.server.api.caller import NOBODY, Caller
from lmetric.server.api.errors import ApiError
from lmetric.server.api.issued import IssuedKeys
from lmetric.server.api.keys import Keys

if TYPE_CHECKING:
    from lmetric.server.api.jwt import Client, Tokens


def bearer(authorization: str | None) -> str | None:
    """Returns the token of an `authorization` header; None if its scheme is not `Bearer`."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class Identity:
    """Finds the tenants of requests by their credentials. ``tokens``: None: no issuers."""

    def __init__(self, keys: Keys, tokens: Tokens | None = None) -> None:
        self.keys = keys
        self.tokens = tokens
        self.on = keys.on or tokens is not None  # whether a request needs a credential

    @classmethod
    def load(cls, auth: Auth, issued: IssuedKeys) -> Self:
        """Reads the files that the settings name. Raises ConfigError."""
        tokens = None
        if auth.jwt:
            tokens = _load_jwt().Tokens(auth.jwt)
            tokens.load_files()
        return cls(Keys.load(auth.keys_file, issued), tokens)

    async def take_over(self, before: Identity) -> None:
        """Takes what stays of an identity that this one replaces. Raises ConfigError."""
        if self.tokens is not None:
            await self.tokens.take_over(before.tokens)

    def start(self) -> None:
        """Follows the keys of issuers."""
        if self.tokens is not None:
            self.tokens.start()

    async def stop(self, after: Identity | None = None) -> None:
        """Stops following the keys of issuers, except what ``after`` has taken over."""
        if self.tokens is not None:
            await self.tokens.stop(None if after is None else after.tokens)

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of API keys and tokens."""
        family = GaugeMetricFamily(
            "lmetric_api_keys", "Valid API keys, by source: file (auth.keys_file), admin", labels=("source",)
        )
        family.add_metric(("file",), len(self.keys))
        family.add_metric(("admin",), self.keys.issued.count())
        yield family
        if self.tokens is not None:
            yield from self.tokens.metrics()

    def problems(self) -> Iterator[tuple[str, str, float | None]]:
        """Yields the key sets that cannot be read: place, reason, and since when (monotonic)."""
        for source in () if self.tokens is None else self.tokens.sources.values():
            if source.problem is not None:
                yield source.place, source.problem, source.problem_since

    def identify(self, authorization: str | None, *api_keys: str | None, client: Client | None) -> Caller:
        """Returns who sent a request with these headers.

        ``api_keys``: `x-api-key`, `api-key`. One known key is enough: some clients send a second
        credential for another service. ``client``: its connection, which limits invalid tokens;
        None: no limit. Raises ApiError (401, 429, 503), UnknownKeyError.
        """
        if not self.on:
            return NOBODY
        token = bearer(authorization)
        given = [key for key in (token, *api_keys) if key]
        if not given:
            what = "API key" if self.keys.on else "JWT"
            if self.keys.on and self.tokens is not None:
                what = "API key or JWT"
            raise ApiError(
                401,
                f"no {what}; send it as Authorization: Bearer {'KEY' if self.keys.on else 'TOKEN'}",
                headers={"www-authenticate": "Bearer"},
            )
        for key in given if self.keys.on else ():  # first: only a few tokens are remembered
            if (caller := self.keys.find(key)) is not None:
                return caller
        if token and self.tokens is not None and (caller := self.tokens.known(token)) is not None:
            return caller
        if token and self.tokens is not None and self.tokens.is_token(token):
            return self.tokens.check(token, client)
        text = "unknown API key" if self.keys.on else "the bearer token is no JWT, and there are no API keys"
        why = next(filter(None, map(self.keys.refusal, given)), text)
        raise ApiError(401, why, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _load_jwt() -> ModuleType:
    """Imports PyJWT, which only routers with issuers need. Raises ConfigError without it."""
    try:
        from lmetric.server.api import jwt
    except ImportError as missing:
        raise ConfigError(f"auth.jwt needs another package ({missing}): {install('jwt')}") from None
    return jwt
