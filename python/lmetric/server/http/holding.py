"""Requests that wait until an engine or a cache has room for them, and refusals under overload."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from lmetric._core import Arrival
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import Intent
from lmetric.server.fleet.admission import Waiting
from lmetric.server.http.running import RunningRequests
from lmetric.server.http.waiting import WaitingRequest


class _Refusal(NamedTuple):
    """The code of a 429, and its message with the seconds until a retry is worth it."""

    code: str
    message: str


# By reason of the core router.
_REFUSALS = {
    "programs": _Refusal(
        code="caches_full",
        message="the running agent programs fill the KV caches; a new one would wait about {seconds} s",
    ),
    "deadline": _Refusal(
        code="deadline",
        message="overloaded: the first token would come after its deadline; try again in about {seconds} s",
    ),
    "queue": _Refusal(
        code="queue_full", message="overloaded: too many requests wait; try again in about {seconds} s"
    ),
}
# Why a request is held, for the message of a timeout.
_HOLDS = {
    "room": "no engine had room for it",
    "concurrency": "its tenant has the maximum number of requests on the engines",
}


def refusal(model: str, reason: str, seconds: float) -> ApiError:
    """Returns the 429 for a reason of the core router. `seconds`: for Retry-After."""
    code, message = _REFUSALS[reason]
    wait = max(1, math.ceil(seconds))
    text = message.format(seconds=wait)
    headers = {"retry-after": f"{wait}"}
    return ApiError(429, f"{model or 'the fleet'}: {text}", code=code, headers=headers)


class HeldRequest(WaitingRequest):
    """A held request.

    ``then`` is called once with the monotonic clock (s) when the request may run, unless the
    request ends before. A client that waits for a stream gets its head and
    comments after each `HeldRequests.keep_alive_seconds`.
    """

    def __init__(
        self,
        intent: Intent,
        arrival: Arrival,
        running: RunningRequests,
        then: Callable[[float], None],
        now: float,
    ) -> None:
        client_request, model, call = intent.client_request, intent.model, intent.call
        super().__init__(client_request, running)
        self._arrival = arrival
        self._model = model
        self._then = then
        self._since = self._written_at = now
        every = model.held.keep_alive_seconds
        comments = call.stream and call.path.streams and client_request.gateway is None
        self._every = every if comments and every > 0 else math.inf
        tenant, slo_class = client_request.tenant, client_request.slo_class
        model.held.wait(Waiting(arrival, tenant, slo_class, run=self._release, refuse=self._refuse))

    def _release(self, now: float) -> None:
        self._go_on(self._then, now)

    def _refuse(self, reason: str, seconds: float) -> None:
        """Ends the request with a 429: it can no longer be served in time."""
        self._client_request.refused_because = reason
        self._leave(f"refused while it was held ({reason})", refusal(self._model.name, reason, seconds))

    def check(self, now: float) -> None:
        """Called periodically: keeps the client's connection alive, and enforces the time limit."""
        client_request = self._client_request
        if now - self._written_at >= self._every and not client_request.client.writing_paused:
            self._written_at = now
            client_request.comment(b"held for %d s" % (now - self._since))
        super().check(now)

    def _abandon(self) -> None:
        self._model.held.leave(self._arrival)

    def _explain(self) -> str:
        return f"; it was held: {self.why}"

    @property
    def why(self) -> str:
        """Why the request is held."""
        arrival = self._arrival
        ratio = arrival.working_set_ratio
        if ratio is not None:
            return (
                f"its program needs {arrival.needed_tokens or 0:,.0f} tokens of KV cache, and the emptiest "
                f"engine's cache is {ratio:.0%} in use"
            )
        return _HOLDS.get(arrival.reason or "", "its program does not fit into a cache")
