"""Backends for many runs: threads (the simulator releases the interpreter lock), or a Ray
cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lmetric._core import BadValueError, LmetricError
from lmetric.extras import install

if TYPE_CHECKING:
    from lmetric_lab.sim.traces import Trace
    from lmetric_lab.sim.workload import Workload

T = TypeVar("T")
R = TypeVar("R")


class Backend(Protocol):
    """Processes a list of items, each with its prepared trace."""

    def map(
        self, work: Callable[[T, Trace | Workload], R], items: Sequence[tuple[T, Workload]]
    ) -> Iterator[tuple[T, R]]:
        """Yields results of ``work(item, trace)`` in the order of completion.

        The first exception stops it. Closing the iterator drops items that have not begun.
        """

    def close(self) -> None:
        """Release the resources of the backend."""


class Threads:
    """This machine's cores."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or len(os.sched_getaffinity(0))

    def map(
        self, work: Callable[[T, Trace | Workload], R], items: Sequence[tuple[T, Workload]]
    ) -> Iterator[tuple[T, R]]:
        pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="simulate")
        # Not `concurrent.futures.wait`: it takes the locks of all futures. Ctrl-C in between would
        # leave some locks taken, and the threads would wait forever.
        ended: SimpleQueue[Future[R]] = SimpleQueue()
        waiting: dict[Future[R], T] = {}
        try:
            for item, trace in items:
                future = pool.submit(work, item, trace)
                waiting[future] = item
                future.add_done_callback(ended.put)
            while waiting:
                try:
                    # Without a time limit, Ctrl-C would wait for the end of a run.
                    future = ended.get(timeout=0.2)
                except Empty:
                    continue
                yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Does nothing: no resource outlives `map`."""


class Ray:
    """The Ray cluster at `address`; None: a new cluster on this machine."""

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise LmetricError(
                f"Ray is not installed; run: {install('ray')}, or leave --backend out"
            ) from None
        self._ray: Any = ray
        self.started_here = not ray.is_initialized()
        if self.started_here:
            # Ignore Ray's warning about GPU visibility: no GPU is used.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(
                    address=address,
                    num_cpus=jobs if address is None else None,
                    include_dashboard=False if address is None else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, ValueError) as error:
                raise BadValueError(f"Ray cluster {address!r}: {error}") from None

    def map(
        self, work: Callable[[T, Trace | Workload], R], items: Sequence[tuple[T, Workload]]
    ) -> Iterator[tuple[T, R]]:
        ray = self._ray

        def call(item: T, trace: Trace) -> R:  # Ray needs a function; `work` can be a partial
            return work(item, trace)

        remote = ray.remote(num_cpus=1)(call)
        stored: dict[int, Any] = {}  # each trace is sent once
        waiting = {}
        try:
            for item, workload in items:
                if id(workload) not in stored:
                    stored[id(workload)] = ray.put(workload.trace)  # the worker computes the hashes
                waiting[remote.remote(item, stored[id(workload)])] = item
            while waiting:
                done, _ = ray.wait(list(waiting), num_returns=1)
                for reference in done:
                    try:
                        yield waiting.pop(reference), ray.get(reference)
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause if isinstance(error.cause, Exception) else error from None
        finally:
            for reference in waiting:
                ray.cancel(reference)

    def close(self) -> None:
        """Stops the cluster if it was started here."""
        if self.started_here:
            self._ray.shutdown()
