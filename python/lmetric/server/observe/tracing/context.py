"""W3C trace context: the fields `traceparent` and `tracestate`.

Source: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lmetric.server.execution.trace import TraceContext

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_OWN_FIELDS = re.compile(rb"\r\n(?:traceparent|tracestate):[^\r\n]*", re.IGNORECASE)
_PARENT_FIELD = re.compile(rb"\r\ntraceparent:[^\r\n]*", re.IGNORECASE)
SAMPLED = 1
# The part of a trace id that decides whether a trace is sampled, as in OpenTelemetry's
# TraceIdRatioBased.
_RANGE = 1 << 64


class Parent(NamedTuple):
    """A valid `traceparent`."""

    trace_id: int
    span_id: int
    sampled: bool


def read_parent(field: bytes | None) -> Parent | None:
    """Returns the context of a `traceparent`; None if there is none, or if it is not valid."""
    found = _PARENT.fullmatch(field.strip()) if field is not None else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    parent = Parent(int(trace, 16), int(span, 16), bool(int(flags, 16) & SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Returns whether a trace without a parent is sampled, as all routers decide."""
    return trace_id & (_RANGE - 1) < round(ratio * _RANGE)


def parent_line(trace_id: int, span_id: int, sampled: bool) -> bytes:
    """Returns the line of a request's head that makes a span the parent of the engine's spans."""
    return b"traceparent: 00-%032x-%016x-%02x\r\n" % (trace_id, span_id, sampled)


def with_context(text: bytes, first: bytes, context: TraceContext) -> bytes:
    """Returns a head for an engine without the client's context.

    ``first``: the router's own lines at its start, which stay. The client's `tracestate` stays if
    its trace continues.
    """
    end = len(first) - 2  # the end of a line, where a field of the client may begin
    return text[:end] + without_parent(text[end:], keep_state=context.parent_id != 0)


def without_parent(fields: bytes, *, keep_state: bool) -> bytes:
    """Returns the lines of a head without the client's context.

    ``fields`` starts with the end of a line. ``keep_state``: `tracestate` stays.
    """
    return (_PARENT_FIELD if keep_state else _OWN_FIELDS).sub(b"", fields)
