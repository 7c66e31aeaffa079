"""Threads for long work on a request before its routing: they read, change and tokenize bodies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from lmetric.server.execution.exchange import ClientRequest
from lmetric.server.http.running import RunningRequests
from lmetric.server.http.waiting import WaitingRequest

T = TypeVar("T")

# Such work keeps a core busy, and the event loop needs one.
THREADS = 2


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
    """The threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "lmetric-body")

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work` in a thread. If it is canceled in the queue, it never starts."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Stops the threads, without waiting for their running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
