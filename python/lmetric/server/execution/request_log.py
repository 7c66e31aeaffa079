"""Trace and request ids in the log lines that a request writes, while the router records traces.

The code of a request runs in callbacks of shared connections and timers, never in a task of its
own. A context variable would stay set in the connections and tasks that a request starts. So the
request is set around each callback, per thread. Without traces, nothing sets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import structlog

from lmetric.server.execution.exchange import ClientRequest

Ts = TypeVarTuple("Ts")
R = TypeVar("R")


class _Current(threading.local):
    request: ClientRequest | None = None


current = _Current()  # the request whose ids log lines get now


def in_request(request: ClientRequest, call: Callable[[*Ts], R], *args: *Ts) -> R:
    """Calls a function, whose log lines get the ids of the request. Returns its result."""
    before, current.request = current.request, request
    try:
        return call(*args)
    finally:
        current.request = before


def request_ids(request: ClientRequest | None) -> dict[str, str]:
    """Returns the fields of a log line for a request; empty without traces."""
    if request is None or request.trace is None:
        return {}
    ids = {"trace_id": request.trace.hex_id, "request_id": request.head.request_id}
    return {name: value for name, value in ids.items() if value}


def add_request_ids(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Adds the ids of the current request to a log line, as a structlog processor."""
    if current.request is not None:
        for name, value in request_ids(current.request).items():
            event.setdefault(name, value)
    return event
