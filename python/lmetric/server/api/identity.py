"""The tenants of requests, by their API keys."""

from typing import Self

from lmetric.config import Auth
from lmetric.server.api.errors import ApiError
from lmetric.server.api.keys import Caller, Keys

_NOBODY = Caller("")


def bearer(authorization: str | None) -> str | None:
    """Returns the token of an `authorization` header; None if its scheme is not `Bearer`."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class Identity:
    """Finds the tenants of requests by their credentials."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.on = keys.on  # whether a request needs a credential

    @classmethod
    def load(cls, auth: Auth) -> Self:
        """Reads the files that the settings name. Raises ConfigError."""
        return cls(Keys.load(auth.keys_file))

    def identify(self, authorization: str | None, *api_keys: str | None) -> Caller:
        """Returns who sent a request with these headers.

        ``api_keys``: `x-api-key`, `api-key`. One known key is enough: some clients send a second
        credential for another service. Raises ApiError (401).
        """
        if not self.on:
            return _NOBODY
        given = [key for key in (bearer(authorization), *api_keys) if key]
        if not given:
            raise ApiError(
                401,
                "no API key; send it as Authorization: Bearer KEY",
                headers={"www-authenticate": "Bearer"},
            )
        for key in given:
            if (caller := self.keys.find(key)) is not None:
                return caller
        raise ApiError(401, "unknown API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
