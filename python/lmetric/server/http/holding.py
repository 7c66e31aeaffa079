"""Requests that wait until their agent program fits into a cache."""

from __future__ import annotations

import math
from collections.abc import Callable

from lmetric._core import Arrival
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.fleet.programs import HeldPrograms
from lmetric.server.http.waiting import WaitingRequest


class HeldRequest(WaitingRequest):
    """A held request.

    ``then`` is called once when the request may run, unless the request ends before. Arguments:
    the monotonic clock, s, and this request. ``comments``: the client waits for a stream, and gets
    its head and comments after each `HeldPrograms.keep_alive_seconds`.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        arrival: Arrival,
        programs: HeldPrograms,
        then: Callable[[float, HeldRequest], None],
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
        *,
        comments: bool,
        now: float,
    ) -> None:
        super().__init__(client_request, ended, limit_seconds)
        self._arrival = arrival
        self._programs = programs
        self._then = then
        self._since = self._written_at = now
        self._every = (
            programs.keep_alive_seconds if comments and programs.keep_alive_seconds > 0 else math.inf
        )
        programs.wait(arrival, self._release)

    def _release(self, now: float) -> None:
        if self._goes_on():
            self._then(now, self)

    def check(self, now: float) -> None:
        """Called periodically: keeps the client's connection alive, and enforces the time limit."""
        client_request = self._client_request
        if now - self._written_at >= self._every and not client_request.client.writing_paused:
            self._written_at = now
            if not client_request.opened:
                client_request.open_stream()
            client_request.comment(b"held for %d s" % (now - self._since))
        super().check(now)

    def _abandon(self) -> None:
        self._programs.leave(self._arrival)

    def _explain(self) -> str:
        return f"; it was held: {self.why}"

    @property
    def why(self) -> str:
        """Why the request is held."""
        arrival = self._arrival
        ratio = arrival.working_set_ratio
        return (
            f"its program needs {arrival.needed_tokens or 0:,.0f} tokens of KV cache; the emptiest engine's "
            f"cache is {ratio:.0%} in use"
            if ratio is not None
            else "its program does not fit into a cache"
        )
