"""Requests that wait before routing: for a thread, for a search, or for room on an engine.

Threads do long work on a request: they read, change and tokenize its body. Under overload, requests
are held until an engine or a cache has room for them, or they are refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from lmetric._core import Arrival
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest, Intent
from lmetric.server.fleet.admission import Waiting
from lmetric.server.http.running import RunningRequests

T = TypeVar("T")

# Long work keeps a core busy, and the event loop needs one.
THREADS = 2


class WaitingRequest(InFlightRequest):
    """A request that waits before routing. A `Runner` replaces it after routing.

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


# -- for work --------------------------------------------------------------------------------------


class PendingWork(WaitingRequest, Generic[T]):
    """A request that waits for other work, mostly in a thread.

    ``then`` is called once with the work, which is done, and the monotonic clock (s), unless the
    request ends before. ``why``: added to the message of a timeout.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        running: RunningRequests,
        work: asyncio.Future[T],
        then: Callable[[asyncio.Future[T], float], None],
        *,
        why: str = "",
    ) -> None:
        super().__init__(client_request, running)
        self._work = work
        self._then = then
        self._why = why
        work.add_done_callback(self._done)

    def _done(self, work: asyncio.Future[T]) -> None:
        if work.cancelled():
            return
        work.exception()  # else asyncio logs the error of a request that has ended
        self._go_on(partial(self._then, work), time.monotonic())

    def _explain(self) -> str:
        return self._why

    def _abandon(self) -> None:
        """Cancels the work. The result of a running thread is ignored."""
        self._work.cancel()


class WorkThreads:
    """Threads for long work on requests."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "lmetric-body")

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` in a thread. If it is canceled in the queue, it never starts."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Stops the threads, without waiting for their running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# -- for room --------------------------------------------------------------------------------------


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
