"""The observers of requests: metrics, records, live page, traces, canaries, usage and more.

Observers change nothing about a request, but for the trace context in its head for engines. Their
exceptions are logged and reach no client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import structlog

from lmetric.server.execution.exchange import ClientRequest, InFlightRequest, Intent

if TYPE_CHECKING:
    from lmetric.server.execution.progress import Progress

Ts = TypeVarTuple("Ts")
R = TypeVar("R")

FAILED_OBSERVER = "an observer of requests failed"

log = structlog.get_logger("lmetric.observers")


class Observer:
    """Receives the events of requests. A request may end after any of its events."""

    def arrived(self, intent: Intent) -> None:
        """Receives a request whose prompt is known, before its decision."""

    def placed(self, request: ClientRequest, relay: Progress) -> None:
        """Receives a request before it is sent to its first engine."""

    def sent(self, request: ClientRequest, relay: InFlightRequest) -> None:
        """Receives a request with a decision after it was sent, or has begun to connect."""

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Receives a request that has ended, once. ``relay``: None: it was refused at once."""


class Observers:
    """The observers, and the hooks that they have: an event without a hook costs nothing."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._join()

    def _join(self) -> None:
        found = [(each, type(each)) for each in self._observers]
        self.arrived = tuple(each.arrived for each, kind in found if kind.arrived is not Observer.arrived)
        self.placed = tuple(each.placed for each, kind in found if kind.placed is not Observer.placed)
        self.sent = tuple(each.sent for each, kind in found if kind.sent is not Observer.sent)
        self.ended = tuple(each.ended for each, kind in found if kind.ended is not Observer.ended)

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


def failed(hook: Callable[..., object]) -> None:
    """Logs the exception of a hook."""
    log.exception(FAILED_OBSERVER, hook=getattr(hook, "__qualname__", str(hook)))


def guarded(hook: Callable[[*Ts], R], *args: *Ts) -> R | None:
    """Calls a hook, and returns its result. Returns None after an exception, which is logged."""
    try:
        return hook(*args)
    except Exception:
        failed(hook)
        return None
