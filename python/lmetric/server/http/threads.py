"""Threads for long work on a request before its routing: they read, change and tokenize bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.http.waiting import WaitingRequest

T = TypeVar("T")

# Such work keeps a core busy, and the event loop needs one.
THREADS = 2


class PendingWork(WaitingRequest, Generic[T]):
    """A request that waits for other work, mostly in a thread.

    ``then`` is called once with the work, which is done, unless the request ends before.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        work: asyncio.Future[T],
        then: Callable[[asyncio.Future[T], PendingWork[T]], None],
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
    ) -> None:
        super().__init__(client_request, ended, limit_seconds)
        self._work = work
        self._then = then
        work.add_done_callback(self._done)

    def _done(self, work: asyncio.Future[T]) -> None:
        if work.cancelled():
            return
        work.exception()  # else asyncio logs the error of a request that has ended
        if self._goes_on():
            self._then(work, self)

    def _abandon(self) -> None:
        """Cancels the work. The result of a running thread is ignored."""
        self._work.cancel()


class WorkThreads:
    """The threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "lmetric-body")

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` in a thread. If it is canceled in the queue, it never starts."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Stops the threads, without waiting for their running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
