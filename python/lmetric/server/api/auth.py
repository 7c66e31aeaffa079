"""The admin token, and access to the router's own pages."""

import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Protocol

from lmetric.config import ServerConfig, read_secret
from lmetric.server.api.caller import NOBODY, Caller, by_header
from lmetric.server.api.errors import ApiError
from lmetric.server.api.identity import Identity, bearer
from lmetric.server.api.keys import digest

# Fields that proxies add to the requests of their clients.
_OF_PROXIES = ("x-forwarded-for", "x-forwarded-host", "forwarded", "x-real-ip", "via")


class BearerToken:
    """A secret token that requests carry as `Authorization: Bearer TOKEN`.

    Digests are compared in constant time, so timing reveals neither the token nor its length.
    """

    def __init__(self, token: str) -> None:
        self._digest = digest(token)

    def matches(self, authorization: str | None) -> bool:
        """Returns whether an `authorization` header carries the token."""
        given = bearer(authorization)
        return given is not None and hmac.compare_digest(digest(given), self._digest)


def is_local(headers: Mapping[str, str]) -> bool:
    """Returns whether a request to a loopback address can come only from a program on this machine.

    A web page can make a browser send requests to loopback. Its POSTs carry its origin. Its GETs
    carry the name of the page's host, whose address may have become a loopback address meanwhile
    (DNS rebinding). A proxy on this machine forwards requests of others.
    """
    if "origin" in headers or any(name in headers for name in _OF_PROXIES):
        return False
    host = headers.get("host", "localhost")  # browsers always send it
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class PageRequest(Protocol):
    """A request for one of the router's own pages."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its header fields, by names in any case."""

    @property
    def protocol(self) -> Any:
        """Its connection, a `jwt.Client`. Its forged tokens are limited."""


class PageAccess:
    """Checks access to the router's own pages, by the table in docs/how-to/access.md.

    Raises ConfigError.
    """

    def __init__(self, config: ServerConfig, identity: Identity) -> None:
        self._identity = identity
        self._tenants = by_header(config.tenants)
        self._open = config.debug_is_open
        self._protects_metrics = config.admin.protect_metrics
        token = read_secret(config.admin.token, config.admin.token_file)
        self._token = BearerToken(token) if token is not None else None

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Returns whether a request may use /admin and /debug."""
        if self._open:
            return is_local(headers)
        return self._token is not None and self._token.matches(headers.get("authorization"))

    def require_admin(self, request: PageRequest, path: str) -> None:
        """Raises ApiError (401, 403, 429) unless a request may use /admin and /debug."""
        if self.is_admin(request.headers):
            return
        if self._open:
            raise ApiError(
                403,
                f"{path} refuses requests from web pages and proxies, and those for another host than "
                "localhost, unless admin.token is set",
            )
        if self._token is None:
            raise ApiError(403, f"{path} is closed; set admin.token to open it", code="no_admin_token")
        if self._identity.on:
            self._identify(request)  # 401 for a key that is unknown
            raise ApiError(403, f"API keys have no access to {path}; send the admin token", code="not_admin")
        raise ApiError(
            401,
            f"{path} needs the admin token; send it as Authorization: Bearer TOKEN",
            headers={"www-authenticate": "Bearer"},
        )

    def require_metrics(self, request: PageRequest, path: str) -> None:
        """Raises ApiError (401, 403, 429) unless a request may read /metrics."""
        if self._protects_metrics:
            self.require_admin(request, path)

    def caller(self, request: PageRequest) -> Caller:
        """Returns who asks for a page of the router. Raises ApiError (401, 429, 503)."""
        if self._identity.on:
            return self._identify(request)
        sent = request.headers.get("x-tenant", "").encode("utf-8", "surrogateescape")
        named = self._tenants.get(str(sent, "latin-1"))
        return Caller(named) if named else NOBODY  # without keys, the header is trusted

    def tenant(self, request: PageRequest) -> str:
        """Returns the tenant who asks for a page of the router. Raises ApiError (401, 429, 503)."""
        return self.caller(request).tenant

    def _identify(self, request: PageRequest) -> Caller:
        given = (request.headers.get(name) for name in ("authorization", "x-api-key", "api-key"))
        return self._identity.identify(*given, client=request.protocol)
