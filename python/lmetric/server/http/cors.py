"""Cross-origin requests (CORS): which web pages may call the API from a browser.

Written by hand because the answers of engines go to clients as bytes, past aiohttp and its middleware.
"""

import re
from collections.abc import Sequence

from aiohttp import web

from lmetric._core import RequestHead

_PREFLIGHT_SECONDS = 600  # browsers keep the answer to a preflight request this long
_EXPOSED = "x-request-id, x-lmetric-decision, x-lmetric-instance, x-lmetric-prefill, retry-after"
_FIELD_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,1024}")
_ORIGIN = re.compile(rb"\r\norigin:[ \t]*([!-~]*)[ \t]*\r\n", re.IGNORECASE)


class Cors:
    """The allowed origins, and the header fields that tell browsers about them."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origins)

    def allows(self, origin: str | None) -> bool:
        """Whether web pages of this origin may call the API."""
        return origin is not None and (self._all or origin.lower() in self._origins)

    def fields(self, origin: str | None) -> dict[str, str]:
        """Fields of an answer to a request of this origin (None: it names none)."""
        fields = {"vary": "Origin"}
        if origin is not None and self.allows(origin):
            fields["access-control-allow-origin"] = "*" if self._all else origin
            fields["access-control-expose-headers"] = _EXPOSED
        return fields

    def lines(self, head: RequestHead) -> bytes:
        """`fields` of the answer to a request, as lines of a head. Never empty."""
        found = _ORIGIN.search(head.for_engine(b"\r\n", 0))
        fields = self.fields(found[1].decode() if found else None)
        return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()

    def preflight(self, request: web.BaseRequest, method: str) -> web.Response | None:
        """The answer to a preflight request for a path of this method; None: it is none, or not allowed."""
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
