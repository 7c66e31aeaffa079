"""HTTP/1.1 rules that aiohttp's parser leaves to the server (RFC 9112, RFC 9110).

Plain requests never get here: the Rust reader (`rust/wire/src/request.rs`) gives everything else to
aiohttp.
"""

import re

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError

from lmetric.server.api.errors import ApiError, bad
from lmetric.server.http.connection import in_short

_ABSOLUTE = re.compile(r"https?://[^/?]*", re.IGNORECASE)
_TARGET = re.compile(r"[A-Za-z0-9!$%&'()*+,\-./:;=?@_~]*")  # RFC 3986, 3.3 and 3.4
_HOST = re.compile(r"[A-Za-z0-9!$%&'()*+,\-.:;=_~\[\]]*")  # RFC 3986, 3.2.2 and 3.2.3
# aiohttp decodes the last two if their libraries are installed, else it raises
# ContentEncodingError.
_ENCODINGS = frozenset(("gzip", "deflate", "br", "zstd"))


def unreadable(error: HttpProcessingError) -> ApiError:
    """Returns the answer to a request that aiohttp could not read."""
    if isinstance(error, ContentEncodingError):
        return _unsupported(in_short(error))
    return bad(f"the request is not valid HTTP/1.1: {in_short(error)}")


def origin_form(target: str) -> str:
    """Returns path and query of a request target, without scheme and host."""
    if target.startswith("/"):
        return target
    rest, absolute = _ABSOLUTE.subn("", target, count=1)
    return rest if not absolute or rest.startswith("/") else f"/{rest}"


def violation(request: web.BaseRequest, target: str) -> ApiError | None:
    """Returns the error for a request that breaks HTTP although aiohttp read it; None: it is valid.

    ``target``: the request's target in origin form.
    """
    version, headers = request.version, request.headers
    if version not in (HttpVersion10, HttpVersion11):
        name = f"HTTP/{version.major}.{version.minor}"
        if version < HttpVersion10:
            return bad(f"the request is {name}; send HTTP/1.1")
        return ApiError(505, f"{name} is not supported; send HTTP/1.1", code="http_version_not_supported")
    hosts = headers.getall("host", ())
    if len(hosts) > 1 or (not hosts and version == HttpVersion11):
        return bad(f"the request has {len(hosts)} host fields; expected one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return bad(f"the host field {hosts[0][:100]!r} is not a host and a port")
    if not _TARGET.fullmatch(target):
        return bad("the request target has characters that a URL cannot have; percent-encode them")
    codings = headers.getall("transfer-encoding", ())
    if codings and version < HttpVersion11:
        return bad("transfer-encoding needs HTTP/1.1; send content-length")
    if codings and [coding.strip().lower() for coding in codings] != ["chunked"]:
        given = ", ".join(codings)[:100]
        return ApiError(
            501, f'transfer-encoding "{given}" is not supported; send "chunked"', code="not_implemented"
        )
    fields = ",".join(headers.getall("content-encoding", ())).split(",")
    encodings = [name for field in fields if (name := field.strip().lower()) not in ("", "identity")]
    if len(encodings) > 1 or not _ENCODINGS.issuperset(encodings):
        return _unsupported(f'content-encoding "{", ".join(encodings)[:100]}" is not supported')
    return None


def _unsupported(message: str) -> ApiError:
    return ApiError(
        415,
        f"{message}; send gzip or deflate, or no content-encoding",
        code="unsupported_content_encoding",
        headers={"accept-encoding": "gzip, deflate"},
    )
