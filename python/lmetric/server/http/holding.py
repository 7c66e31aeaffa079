"""Requests that wait until their agent program fits into a cache."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from lmetric._core import ProgramTurn
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.fleet.programs import HeldPrograms

log = structlog.get_logger("lmetric.programs")


class HeldRequest(InFlightRequest):
    """A held request. A `RequestRunner` replaces it after routing.

    ``then`` is called once when the request may run; argument: the monotonic clock, s. If the
    request ends before, ``ended`` is called instead, once, with the client's error.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        turn: ProgramTurn,
        programs: HeldPrograms,
        then: Callable[[float], None],
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
    ) -> None:
        self._client_request = client_request
        self._turn = turn
        self._programs = programs
        self._then = then
        self._ended = ended
        self._limit_seconds = limit_seconds
        self._over = False
        programs.wait(turn, self._release)

    def _release(self, now: float) -> None:
        if not self._over:
            self._over = True
            self._then(now)

    def check(self, now: float) -> None:
        """Called periodically: ends the request at its longest duration."""
        if reason := self._client_request.overdue(self._limit_seconds, now):
            error = ApiError(504, f"{reason}; it was held: {self.why}", code="timeout")
            self._leave(reason, error)

    @property
    def why(self) -> str:
        """Why the request is held."""
        turn = self._turn
        ratio = turn.working_set_ratio
        return (
            f"its program needs {turn.needed_tokens or 0:,.0f} tokens of KV cache, and the emptiest engine's "
            f"cache is {ratio:.0%} in use"
            if ratio is not None
            else "its program does not fit into a cache"
        )

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        """Ends the request."""
        if self._over:
            return
        self._over = True
        self._programs.leave(self._turn)
        self.reason = reason
        self.close_client = error is None
        self._ended(self._client_request, self, error)
