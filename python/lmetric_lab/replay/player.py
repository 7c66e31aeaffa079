"""Sends requests at the arrival times of a trace.

Most requests are sent at their time, even if earlier requests failed or still run. In closed-loop
traces, later turns of a conversation wait for the previous answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Protocol

import orjson

from lmetric_lab.replay.client import Record
from lmetric_lab.sim.traces import Trace


class Sender(Protocol):
    """Sends requests: a `Client`, or a choice among several clients."""

    def body(self, prompt: str | orjson.Fragment, output_tokens: int, **fields: Any) -> bytes:
        """The body of a request for `output_tokens` tokens after `prompt`, with additional
        `fields`."""

    async def send(self, body: bytes, record: Record, start: float) -> None:
        """Send `body` now and fill in `record`; `start` is the run's begin by
        ``time.monotonic()``."""


class Player:
    """Sends `trace` to `client`'s server. `records` has all requests sent so far, in order.

    A request with ``trace.previous`` is due at ``max(arrival, end of previous + think)``. With
    ``trace.joins``, the last end counts. The end of an answer also counts if that request failed:
    the conversation continues.
    `prompt` returns the prompt of the trace's request `index`: text, or the JSON of token IDs.
    `fields` returns additional fields of the body of the trace's request `index`.
    """

    def __init__(
        self,
        trace: Trace,
        client: Sender,
        prompt: Callable[[Trace, int], str | orjson.Fragment],
        *,
        fields: Callable[[int], Mapping[str, Any]] = lambda index: {},
    ) -> None:
        self.trace = trace
        self._fields = fields
        self.records: list[Record] = []
        self.seconds = 0.0  # from the first arrival's due time to the end of the last answer
        self.interrupted = False
        self._client = client
        self._prompt = prompt
        self._sending: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self._feeding: asyncio.Task[None] | None = None
        self._awaited = trace.awaited()
        # End of each answer with a waiting request, seconds since the start.
        self._ends: dict[int, asyncio.Future[float]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._sending)

    def stop(self) -> None:
        """Stop early: cancel the requests in flight and send no others. `run` then returns."""
        self.interrupted = True
        self._cancel()

    async def run(self) -> None:
        """Send everything and wait for every answer; returns early after `stop`."""
        start = time.monotonic()
        loop = asyncio.get_running_loop()
        earlier = {index for each in self._awaited.values() for index in each}
        self._ends = {index: loop.create_future() for index in sorted(earlier)}
        try:
            self._feeding = asyncio.create_task(self._feed(start))
            await asyncio.wait([self._feeding])
            if not self._feeding.cancelled():
                self._feeding.result()
            while tasks := self._sending | self._waiting:
                await asyncio.wait(tasks)
        finally:
            self.seconds = time.monotonic() - start
            self._cancel()

    def _cancel(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        for task in self._sending | self._waiting:
            task.cancel()

    async def _feed(self, start: float) -> None:
        for record, body in self._requests():
            # Without a pause, the first overdue request is written only after all others are
            # created.
            await asyncio.sleep(max(0.0, start + record.due - time.monotonic()))
            if record.index not in self._awaited:
                self._send(record, body, start)
            else:
                self._track(self._waiting, self._send_after(record, body, start))

    async def _send_after(self, record: Record, body: bytes, start: float) -> None:
        end = max([await asyncio.shield(self._ends[index]) for index in self._awaited[record.index]])
        think = 0.0 if self.trace.think_seconds is None else float(self.trace.think_seconds[record.index])
        record.due = max(record.due, end + think)
        await asyncio.sleep(max(0.0, start + record.due - time.monotonic()))
        self._send(record, body, start)

    def _send(self, record: Record, body: bytes, start: float) -> None:
        self.records.append(record)
        self._track(self._sending, self._answered(record, body, start))

    async def _answered(self, record: Record, body: bytes, start: float) -> None:
        try:
            await self._client.send(body, record, start)
        finally:
            if (end := self._ends.get(record.index)) is not None:
                end.set_result(time.monotonic() - start)

    @staticmethod
    def _track(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _requests(self) -> Iterator[tuple[Record, bytes]]:
        """Yields bodies before they are due, so that their creation delays no request."""
        arrivals = self.trace.arrival_seconds - self.trace.arrival_seconds[0]
        for index, due in enumerate(arrivals.tolist()):
            prompt = self._prompt(self.trace, index)
            output_tokens = int(self.trace.output_tokens[index])
            yield Record(index, due), self._client.body(prompt, output_tokens, **self._fields(index))
