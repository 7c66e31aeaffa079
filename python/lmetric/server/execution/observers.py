"""The observers of requests: metrics, records, live page, traces, canaries and access log.

Observers change nothing about a request. Their exceptions are logged and reach no client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import structlog
from msgspec import Struct

from lmetric._core import Decision, Request
from lmetric.server.api.errors import ApiError
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.fleet.pool import Pool

P = ParamSpec("P")
R = TypeVar("R")

FAILED_OBSERVER = "an observer of requests failed"

log = structlog.get_logger("lmetric.observers")


class Placement(Struct, eq=False, gc=False):
    """A request that is about to be sent to its engine. Times: seconds on the monotonic clock."""

    request: ClientRequest
    pool: Pool
    relay: InFlightRequest
    decision: Decision | None  # None: the engine holds the stored response that the request is about
    before: float  # start of the decision
    after: float  # end of the decision
    held: bool = False  # the request waited on purpose


class RequestEnd(Struct, eq=False, gc=False):
    """The end of a request for an engine."""

    request: ClientRequest
    relay: InFlightRequest | None  # None: it ended before it waited or was placed
    error: ApiError | None  # the router's answer; None: an engine's, or the client left
    status: int
    at: float  # seconds on the monotonic clock


class Observer:
    """Receives the events of requests. A request may end after any of its events."""

    def arrived(self, request: ClientRequest, asked: Request, call: ParsedRequest) -> None:
        """Receives a request whose prompt is known, before its decision."""

    def placed(self, placement: Placement) -> None:
        """Receives a request before it is sent to the engine of its decision."""

    def sent(self, placement: Placement) -> None:
        """Receives a request after it was sent, or has begun to connect. It has a decision."""

    def ended(self, end: RequestEnd) -> None:
        """Receives a request that has ended. Each request ends once."""


class Observers:
    """Passes the events of requests on to the observers."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._join()

    def _join(self) -> None:
        """Collects the hooks that the observers have: others cost nothing."""
        found = [(each, type(each)) for each in self._observers]
        self._arrived = tuple(each.arrived for each, kind in found if kind.arrived is not Observer.arrived)
        self._placed = tuple(each.placed for each, kind in found if kind.placed is not Observer.placed)
        self._sent = tuple(each.sent for each, kind in found if kind.sent is not Observer.sent)
        self._ended = tuple(each.ended for each, kind in found if kind.ended is not Observer.ended)

    def add(self, observer: Observer) -> None:
        """Adds an observer, unless it is there."""
        if observer not in self._observers:
            self._observers.append(observer)
            self._join()

    def remove(self, observer: Observer) -> None:
        """Removes an observer, if it is there."""
        if observer in self._observers:
            self._observers.remove(observer)
            self._join()

    # Without `guarded`: these calls are part of each request.

    def arrived(self, request: ClientRequest, asked: Request, call: ParsedRequest) -> None:
        """Passes on a request whose prompt is known."""
        for hook in self._arrived:
            try:
                hook(request, asked, call)
            except Exception:
                log.exception(FAILED_OBSERVER, hook=hook.__qualname__)

    def placed(self, placement: Placement) -> None:
        """Passes on a request that is about to be sent."""
        for hook in self._placed:
            try:
                hook(placement)
            except Exception:
                log.exception(FAILED_OBSERVER, hook=hook.__qualname__)

    def sent(self, placement: Placement) -> None:
        """Passes on a request that was sent."""
        for hook in self._sent:
            try:
                hook(placement)
            except Exception:
                log.exception(FAILED_OBSERVER, hook=hook.__qualname__)

    def ended(self, end: RequestEnd) -> None:
        """Passes on a request that has ended."""
        for hook in self._ended:
            try:
                hook(end)
            except Exception:
                log.exception(FAILED_OBSERVER, hook=hook.__qualname__)


def guarded(hook: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Calls a hook, and returns its result. Returns None after an exception, which is logged."""
    try:
        return hook(*args, **kwargs)
    except Exception:
        log.exception(FAILED_OBSERVER, hook=getattr(hook, "__qualname__", str(hook)))
        return None
