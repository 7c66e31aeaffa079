"""HTTP/1.1 rules beyond the parsers (RFC 9112, RFC 9110), and the errors of both parsers.

The Rust reader (`rust/wire/src/request.rs`) reads each head first and refuses malformed ones. Plain
requests never get here: aiohttp reads all others. No error repeats the value of a header field or a
query, because both may hold secrets.
"""

import re

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError
from multidict import CIMultiDictProxy

from lmetric._core import HeadTooLargeError, WireError
from lmetric.server.api.errors import ApiError, bad

_ENCODINGS = ("gzip", "deflate")
_ABSOLUTE = re.compile(r"https?://[^/?]*", re.IGNORECASE)
_TARGET = re.compile(r"[A-Za-z0-9!$%&'()*+,\-./:;=?@_~]*")  # RFC 3986, 3.3 and 3.4
_HOST = re.compile(r"[A-Za-z0-9!$%&'()*+,\-.:;=_~\[\]]*")  # RFC 3986, 3.2.2 and 3.2.3
_VERSION = re.compile(rb"HTTP/(\d)\.(\d)")
_QUOTED = ("b'", 'b"', "^")  # how lines begin in which aiohttp quotes the request
_SHOWN = 100  # most characters of a URL in an error


def in_short(error: Exception) -> str:
    """Returns aiohttp's message about malformed HTTP as one line, without quoted bytes."""
    message = error.message if isinstance(error, HttpProcessingError) else str(error)
    if isinstance(error, InvalidURLError):
        return f"invalid URL {message.partition('?')[0][:_SHOWN]}"
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_QUOTED)).rstrip(":")


def unreadable(error: HttpProcessingError) -> ApiError:
    """Returns the answer to a request that aiohttp could not read."""
    return bad(f"the request is not valid HTTP/1.1: {in_short(error)}")


def malformed_head(data: bytes, error: WireError) -> ApiError:
    """Returns the answer to a request that the Rust reader could not read."""
    if isinstance(error, HeadTooLargeError):
        return ApiError(431, f"{error}", code="head_too_large")
    if data[:1] == b"\x16":
        return bad("the request is not HTTP: received TLS on a port without TLS")
    line = data.lstrip(b"\r\n").partition(b"\n")[0].removesuffix(b"\r")
    words = line.split(b" ")
    if len(words) == 2 and words[0] == b"GET" and words[1].startswith(b"/"):
        return bad("the request is HTTP/0.9; send HTTP/1.1")
    version = _VERSION.fullmatch(words[-1]) if len(words) == 3 else None
    if version is not None and version[1] != b"1":
        name = version[0].decode()
        if version[1] == b"0":
            return bad(f"the request is {name}; send HTTP/1.1")
        return ApiError(505, f"{name} is not supported; send HTTP/1.1", code="http_version_not_supported")
    return bad(f"the request is not valid HTTP/1.1: {str(error).removeprefix('malformed: ')}")


def wants_websocket(headers: CIMultiDictProxy[str]) -> bool:
    """Returns whether a request asks for an upgrade to WebSocket (RFC 6455, 4.1)."""
    return _names(headers, "upgrade", "websocket") and _names(headers, "connection", "upgrade")


def _names(headers: CIMultiDictProxy[str], field: str, name: str) -> bool:
    values = ",".join(headers.getall(field, ())).split(",")
    return any(value.strip().lower() == name for value in values)


def upgrade_required(
    path: str, instead: str = "send the request over HTTP/1.1 without an upgrade"
) -> ApiError:
    """Returns the answer to an upgrade to WebSocket. Clients such as Codex then use HTTP."""
    return ApiError(
        426,
        f"{path}: the router does not relay WebSocket; {instead}",
        code="websocket",
        headers={"upgrade": "HTTP/1.1", "connection": "upgrade, close"},
    )


def content_coding(headers: CIMultiDictProxy[str]) -> str | None:
    """Returns the coding of a valid request's body; None: it has none."""
    return next(iter(_codings(headers)), None)


def _codings(headers: CIMultiDictProxy[str]) -> list[str]:
    names = (name.strip().lower() for name in ",".join(headers.getall("content-encoding", ())).split(","))
    return [name for name in names if name not in ("", "identity")]


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
    encodings = _codings(headers)
    if len(encodings) > 1 or not set(encodings).issubset(_ENCODINGS):
        return _unsupported(f'content-encoding "{", ".join(encodings)[:100]}" is not supported')
    return None


def _unsupported(message: str) -> ApiError:
    return ApiError(
        415,
        f"{message}; send gzip or deflate, or no content-encoding",
        code="unsupported_content_encoding",
        headers={"accept-encoding": "gzip, deflate"},
    )


def late_body(received: int, length: int, seconds: float) -> ApiError:
    """Returns the error of a body that takes longer than these seconds.

    ``received``: its bytes so far. ``length``: 0: it is unknown.
    """
    of = f" of {length}" if length else ""
    return ApiError(408, f"the body is incomplete after {seconds:g} s: {received}{of} bytes received")


def no_room_error() -> ApiError:
    """Returns the error of a request at a limit on body bytes."""
    return ApiError(
        503,
        "the request bodies in flight exceed the router's limit; try again",
        code="too_many_bytes",
        headers={"retry-after": "1"},
    )
