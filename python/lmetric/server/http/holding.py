"""Requests that wait until their agent program fits into a cache."""

from __future__ import annotations

from collections.abc import Callable

from lmetric._core import ProgramTurn
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.fleet.programs import HeldPrograms
from lmetric.server.http.waiting import WaitingRequest


class HeldRequest(WaitingRequest):
    """A held request.

    ``then`` is called once when the request may run, unless the request ends before. Arguments:
    the monotonic clock, s, and this request.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        turn: ProgramTurn,
        programs: HeldPrograms,
        then: Callable[[float, HeldRequest], None],
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
    ) -> None:
        super().__init__(client_request, ended, limit_seconds)
        self._turn = turn
        self._programs = programs
        self._then = then
        programs.wait(turn, self._release)

    def _release(self, now: float) -> None:
        if self._goes_on():
            self._then(now, self)

    def _abandon(self) -> None:
        self._programs.leave(self._turn)

    def _explain(self) -> str:
        return f"; it was held: {self.why}"

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
