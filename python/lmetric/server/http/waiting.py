"""Requests that wait before routing, for a tokenizer thread or for room in a cache."""

from __future__ import annotations

from collections.abc import Callable

from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest


class WaitingRequest(InFlightRequest):
    """A request that waits before routing. A `RequestRunner` replaces it after routing.

    It ends once. Either it goes on (`_goes_on` returns True, then the subclass calls its own
    callback), or it ends early: ``ended`` is called with the client's error. ``limit_seconds``:
    longest duration of the request; None: no limit.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
    ) -> None:
        self._client_request = client_request
        self._ended = ended
        self._limit_seconds = limit_seconds
        self._over = False

    def _goes_on(self) -> bool:
        """Ends the wait. Returns False if it was over."""
        over, self._over = self._over, True
        return not over

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
        if self._goes_on():
            self._abandon()
            self.reason = reason
            self.close_client = error is None
            self._ended(self._client_request, self, error)
