"""Requests with a file: multipart forms (RFC 7578).

The router reads the names of all fields, and the values of those that routing needs. It decodes no
file, and the engine gets the form unchanged. So the router refuses forms that readers may read in
several ways: with a preamble, a folded header field, or a repeated, extended or escaped parameter.
Standard readers are slow: aiohttp's reads files line by line, and `email` takes quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lmetric._core import INTERNAL_FIELDS
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.paths import RelayedPath
from lmetric.server.api.request import ParsedRequest

MAX_PARTS = 64
MAX_TYPE_BYTES = 512  # content-type of the form
MAX_HEAD_BYTES = 4096  # header fields of one part
MAX_VALUE_BYTES = 1024  # value of a field that routing needs
# Engines decode names and values by the charset of the form. All of these decode ASCII alike.
_CHARSETS = {"utf-8": "UTF-8", "utf8": "UTF-8", "us-ascii": "ASCII", "iso-8859-1": "ASCII"}
WINDOW_BYTES = 1 << 20  # searched at once: 3 ms if many lines begin as the boundary does
_NEEDED = frozenset({"model", "stream"})
_BOUNDARY_VALUE = re.compile("[!-~]{1,70}")  # RFC 2046, 5.1.1
_HEAD = re.compile(r"(?:[!-9;-~]+:[^\r\n]*(?:\r\n|\Z))+")
_DISPOSITION = re.compile(r"\r\ncontent-disposition:([^\r\n]*)", re.IGNORECASE)
# A parameter in a header field, after ";". Quotes do not count: readers differ in where they end.
# Its value, with or without quotes; no group: readers may differ in the value.
_VALUE = r'=[ \t]*(?:"([^"\\;<\0-\x1f]*)"|([^\s"\\;<]+))[ \t]*(?=;|\Z)'
_BOUNDARY, _CHARSET, _NAME = (
    re.compile(rf";\s*{name}\s*(?:{_VALUE}|(?=[*=;]|\Z))", re.IGNORECASE)
    for name in ("boundary", "charset", "name")
)


def parse_form(path: RelayedPath, content_type: bytes | None, body: bytes) -> ParsedRequest:
    """Reads a multipart form. Raises ApiError (400, 415)."""
    values: dict[str, str] = {}
    model_at, has_xargs = None, False
    boundary, charset = _kind(content_type)
    for name, value, start in _parts(body, boundary):
        plain = name.partition("[")[0]
        if plain in INTERNAL_FIELDS:
            raise bad(f"{name} is a field for engines only", name)
        has_xargs = has_xargs or plain == "vllm_xargs"
        if name not in _NEEDED:
            continue
        if name in values:
            raise bad(f"the form has the field {name} twice", name)
        if len(value) > MAX_VALUE_BYTES:
            raise bad(f"the field {name} is longer than {MAX_VALUE_BYTES} bytes", name)
        try:
            values[name] = str(value, charset)
        except UnicodeDecodeError:
            raise bad(f"the field {name} is not {charset}", name) from None
        if name == "model":
            model_at = start, start + len(value)
    stream = values.get("stream", "").lower() in ("true", "1", "yes", "on", "t", "y")
    return ParsedRequest(
        path, body, values.get("model"), stream, _fields={}, model_at=model_at, has_xargs=has_xargs
    )


def _kind(content_type: bytes | None) -> tuple[bytes, str]:
    """Returns the line that separates the parts, and the charset of values. Raises ApiError."""
    field = (content_type or b"").decode("latin-1")
    if len(field) > MAX_TYPE_BYTES:
        raise ApiError(415, f"the content-type has {len(field)} bytes; expected at most {MAX_TYPE_BYTES}")
    given = f"the content-type is {field[:160]!a}; expected"
    if field.partition(";")[0].strip(" \t").lower() != "multipart/form-data":
        raise ApiError(415, f"{given} multipart/form-data")
    boundaries = [each or "" for each in _values(_BOUNDARY, field)]
    if len(boundaries) != 1 or not _BOUNDARY_VALUE.fullmatch(boundaries[0]):
        expected = "one boundary without spaces, of 1 to 70 visible ASCII characters"
        raise ApiError(400 if boundaries else 415, f"{given} {expected}")
    charsets = [_CHARSETS.get((each or "").lower()) for each in _values(_CHARSET, field)] or ["UTF-8"]
    if len(charsets) > 1 or charsets[0] is None:
        raise bad(f"{given} one charset: UTF-8, US-ASCII or ISO-8859-1")
    return b"--" + boundaries[0].encode(), charsets[0]


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[str, memoryview, int]]:
    """Yields name, value and the value's place of each part. Raises ApiError (400)."""
    view = memoryview(body)
    line = b"\r\n" + boundary
    at = 2 if body.startswith(line) else 0
    if not body.startswith(boundary, at):
        raise bad("the form does not begin with its boundary")
    for _ in range(MAX_PARTS):
        at += len(boundary)
        if body.startswith(b"--", at):
            return
        start = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES) if body.startswith(b"\r\n", at) else -1
        if start < 0:
            raise bad(f"a part of the form has no complete header of at most {MAX_HEAD_BYTES} bytes")
        end = _find(body, line, start + 4)
        if end < 0:
            raise bad("the form is cut off: its last boundary is missing")
        yield _name(str(body[at:start], "latin-1")), view[start + 4 : end], start + 4
        at = end + 2
    raise bad(f"the form has more than {MAX_PARTS} parts")


def _find(body: bytes, line: bytes, at: int) -> int:
    """Returns the next place of ``line``, or -1. Other threads run between two windows."""
    while at < len(body):
        found = body.find(line, at, at + WINDOW_BYTES + len(line))
        if found >= 0:
            return found
        at += WINDOW_BYTES
    return -1


def _name(head: str) -> str:
    """Returns the name of a part. Raises ApiError (400) if engines may take another one.

    ``head``: its header fields, each after an end of line.
    """
    fields = _DISPOSITION.findall(head)
    names = _values(_NAME, fields[0]) if len(fields) == 1 and _HEAD.fullmatch(head, 2) else []
    if len(names) == 1 and names[0] is not None:
        return names[0]
    raise bad("each part of the form must have one content-disposition, with one name")


def _values(parameter: re.Pattern[str], field: str) -> list[str | None]:
    """Returns the values of a parameter in a header field. None: readers may differ in it."""
    return [found[found.lastindex] if found.lastindex else None for found in parameter.finditer(f";{field}")]
