"""Requests that wait before routing: for a thread, for a search, or for room in a cache."""

from __future__ import annotations

from collections.abc import Callable

from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.http.running import RunningRequests


class WaitingRequest(InFlightRequest):
    """A request that waits before routing. A `RequestRunner` replaces it after routing.

    It is in flight from its creation on, and ends once: it goes on, or it ends early with the
    client's error.
    """

    def __init__(self, client_request: ClientRequest, running: RunningRequests) -> None:
        self._client_request = client_request
        self._running = running
        self._limit_seconds = running.rules.timeouts.request  # of the whole request; None: none
        self._over = False
        running.add(client_request, self)

    def _end_wait(self) -> bool:
        """Ends the wait. Returns False if it was over."""
        over, self._over = self._over, True
        return not over

    def _go_on(self, then: Callable[[float], None], now: float) -> None:
        """Calls ``then`` with ``now``, unless the request has ended."""
        if self._end_wait():
            self._running.go_on(self._client_request, self, then, now=now)

    def _abandon(self) -> None:
        """Drops the work or the place in a queue: the request has ended early."""
        raise NotImplementedError

    def _explain(self) -> str:
        """Returns why the request still waits, for the message of a timeout."""
        return ""

    def check(self, now: float) -> None:
        """Called periodically: ends the request at its longest duration."""
        if reason := self._client_request.overdue(self._limit_seconds, now):
            self._leave(reason, ApiError(504, reason + self._explain(), code="timeout"))

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        """Ends the request early."""
        if self._end_wait():
            self._abandon()
            self.reason = reason
            self.close_client = error is None
            self._running.ended(self._client_request, self, error)
