"""Open-loop arrivals: each request leaves when the trace says, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from lmetric.replay.client import Client, Record
from lmetric.sim.prompts import PromptWriter
from lmetric.sim.traces import Trace


class Player:
    """Plays `trace` against `client`'s server; `records` holds every request sent so far."""

    def __init__(self, trace: Trace, client: Client, prompts: PromptWriter) -> None:
        self.trace = trace
        self.records: list[Record] = []
        self.seconds = 0.0  # from the first arrival's due time to the end of the last answer
        self.interrupted = False
        self._client = client
        self._prompts = prompts
        self._sending: set[asyncio.Task[None]] = set()
        self._feeding: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        return len(self._sending)

    def stop(self) -> None:
        """End early: nothing more is sent, what is in flight is cancelled; `run` returns."""
        self.interrupted = True
        if self._feeding is not None:
            self._feeding.cancel()
        for task in self._sending:
            task.cancel()

    async def run(self) -> None:
        """Send everything and wait for every answer; returns early after `stop`."""
        start = time.monotonic()
        try:
            self._feeding = asyncio.create_task(self._feed(start))
            await asyncio.wait([self._feeding])
            if not self._feeding.cancelled():
                self._feeding.result()
            if self._sending:
                await asyncio.wait(self._sending)
        finally:
            self.seconds = time.monotonic() - start
            if self._feeding is not None:
                self._feeding.cancel()
            for task in self._sending:
                task.cancel()

    async def _feed(self, start: float) -> None:
        for record, body in self._requests():
            # Without a pause, requests that are overdue would all leave before the first of them is written.
            await asyncio.sleep(max(0.0, start + record.due - time.monotonic()))
            self.records.append(record)
            task = asyncio.create_task(self._client.send(body, record, start))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def _requests(self) -> Iterator[tuple[Record, bytes]]:
        """Each body is made before its time has come, so that making it delays no one."""
        arrivals = self.trace.arrival_seconds - self.trace.arrival_seconds[0]
        for index, due in enumerate(arrivals.tolist()):
            prompt = self._prompts.prompt(self.trace, index)
            yield Record(index, due), self._client.body(prompt, int(self.trace.output_tokens[index]))
