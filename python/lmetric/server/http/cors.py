"""Cross-origin requests (CORS): the web pages that may call the API from a browser.

aiohttp's middleware cannot do this: engines' answers go to clients as bytes and bypass it.
"""

import re
from collections.abc import Sequence

from aiohttp import web

from lmetric._core import RequestHead

_PREFLIGHT_SECONDS = 600  # browsers keep the answer to a preflight request this long
_EXPOSED = (
    "x-request-id, x-lmetric-decision, x-lmetric-instance, x-lmetric-prefill, "
    "x-lmetric-weights, retry-after, "
    + ", ".join(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    )
)
_FIELD_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,1024}")
_ORIGIN = re.compile(rb"[!-~]*")


class Cors:
    """The allowed origins, and the CORS header fields of answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origins)

    def allows(self, origin: str | None) -> bool:
        """Returns whether web pages of this origin may call the API."""
        return origin is not None and (self._all or origin.lower() in self._origins)

    def fields(self, origin: str | None) -> dict[str, str]:
        """Returns the fields of an answer to a request of this origin.

        None: the request has none.
        """
        fields = {"vary": "Origin"}
        if origin is not None and self.allows(origin):
            fields["access-control-allow-origin"] = "*" if self._all else origin
            fields["access-control-expose-headers"] = _EXPOSED
        return fields

    def lines(self, head: RequestHead) -> bytes:
        """Returns the CORS fields of the answer to a request, as lines of its head. Never empty."""
        given = head.field(b"origin")
        origin = given.decode() if given is not None and _ORIGIN.fullmatch(given) else None
        fields = self.fields(origin)
        return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()

    def preflight(self, request: web.BaseRequest, method: str) -> web.Response | None:
        """Returns the answer to a preflight request for a path with this method.

        None: it is not a preflight request, or its origin is not allowed.
        """
        origin = request.headers.get("origin")
        if not self.allows(origin) or "access-control-request-method" not in request.headers:
            return None
        fields = self.fields(origin)
        fields["access-control-allow-methods"] = method
        fields["access-control-max-age"] = str(_PREFLIGHT_SECONDS)
        wanted = request.headers.get("access-control-request-headers", "")
        if _FIELD_NAMES.fullmatch(wanted):
            fields["access-control-allow-headers"] = wanted
        return web.Response(status=204, headers=fields)
