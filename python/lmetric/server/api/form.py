"""Requests with a file: multipart forms (RFC 7578).

The router reads the names of all fields, and the values of those that routing needs. It decodes no
file, and the engine gets the form unchanged. aiohttp's reader needs about 100 times as long: it
reads a file line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message

from lmetric._core import INTERNAL_FIELDS
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.paths import RelayedPath
from lmetric.server.api.request import ParsedRequest

MAX_PARTS = 64
MAX_HEAD_BYTES = 4096  # header fields of one part
MAX_VALUE_BYTES = 1024  # value of a field that routing needs
MAX_BOUNDARY_BYTES = 70  # RFC 2046, 5.1.1
WINDOW_BYTES = 1 << 20  # searched at once: 3 ms if many lines begin as the boundary does
_NEEDED = frozenset({"model", "stream"})
_FOLD = re.compile(rb"\r\n[ \t]+")  # a header field that goes on


def parse_form(path: RelayedPath, content_type: bytes | None, body: bytes) -> ParsedRequest:
    """Reads a multipart form. Raises ApiError (400, 415)."""
    values: dict[str, str] = {}
    model_at, has_xargs = None, False
    for name, value, start in _parts(body, _boundary(content_type)):
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
            values[name] = str(value, "utf-8")
        except UnicodeDecodeError:
            raise bad(f"the field {name} is not UTF-8", name) from None
        if name == "model":
            model_at = start, start + len(value)
    return ParsedRequest(
        path,
        body,
        values.get("model"),
        values.get("stream", "").lower() in ("true", "1", "yes", "on", "t", "y"),
        session=None,
        session_id=None,
        salt=None,
        max_tokens=None,
        text=None,
        tokens=None,
        more_bytes=0,
        more_tokens=0,
        priority=None,
        _fields={},
        model_at=model_at,
        has_xargs=has_xargs,
    )


def _boundary(content_type: bytes | None) -> bytes:
    """Returns the line that separates the parts. Raises ApiError."""
    head = Message()
    head["content-type"] = (content_type or b"").decode("latin-1")
    boundary = head.get_boundary("").encode("latin-1", "replace")
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError(415, "the content-type must be multipart/form-data with a boundary")
    if len(boundary) > MAX_BOUNDARY_BYTES:
        raise bad(f"the boundary of the form is longer than {MAX_BOUNDARY_BYTES} bytes")
    return b"--" + boundary


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[str, memoryview, int]]:
    """Yields name, value and the value's place of each part. Raises ApiError (400)."""
    view = memoryview(body)
    line = b"\r\n" + boundary
    at = 0 if body.startswith(boundary) else _find(body, line, 0) + 2
    if at == 1:
        raise bad("the form has no part: its boundary does not occur")
    for _ in range(MAX_PARTS):
        at += len(boundary)
        if body.startswith(b"--", at):
            return
        head = body.find(b"\r\n", at, at + MAX_BOUNDARY_BYTES)  # spaces may follow a boundary
        start = body.find(b"\r\n\r\n", head, head + MAX_HEAD_BYTES) if head >= 0 else -1
        if start < 0 or body[at:head].strip(b" \t"):
            raise bad(f"a part of the form has no complete header of at most {MAX_HEAD_BYTES} bytes")
        end = _find(body, line, start + 4)
        if end < 0:
            raise bad("the form is cut off: its last boundary is missing")
        yield _name(body[head + 2 : start]), view[start + 4 : end], start + 4
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


def _name(head: bytes) -> str:
    """Returns the name of a part.

    Raises ApiError (400) for a part with no name, or more than one: engines may take another one.
    """
    lines = _FOLD.sub(b" ", head).split(b"\r\n")
    fields = [(name.strip().lower(), value) for name, _, value in (line.partition(b":") for line in lines)]
    values = [value.decode("utf-8", "replace") for name, value in fields if name == b"content-disposition"]
    # Quotes do not count here: readers differ in where they end.
    keys = [part.partition("=")[0].strip().lower() for value in values for part in value.split(";")]
    if len(values) == 1 and [key.partition("*")[0] for key in keys].count("name") == 1:
        parsed = Message()
        parsed["content-disposition"] = values[0].replace("\r", " ").replace("\n", " ").strip()
        found = parsed.get_param("name", header="content-disposition")
        if isinstance(found, str):
            return found
    raise bad("each part of the form must have one content-disposition, with one name")
