"""Requests for unknown models, which wait until the engines have been asked again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.http.waiting import WaitingRequest


class PendingSearch(WaitingRequest):
    """A request that waits for a search of its model (`Fleet.seek`).

    ``then`` is called once at the end of the search, unless the request ends before. Arguments: the
    monotonic clock, s, and this request.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        found: asyncio.Future[None],
        then: Callable[[float, PendingSearch], None],
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
    ) -> None:
        super().__init__(client_request, ended, limit_seconds)
        self._found = found
        self._then = then
        found.add_done_callback(self._done)

    def _done(self, found: asyncio.Future[None]) -> None:
        if not found.cancelled() and self._goes_on():
            self._then(time.monotonic(), self)

    def _abandon(self) -> None:
        self._found.cancel()

    def _explain(self) -> str:
        return "; the engines were asked for its model"
