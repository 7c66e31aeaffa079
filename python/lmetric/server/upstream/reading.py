"""Connections that read much take turns: a few of them read in each turn of the event loop.

uvloop reads all ready connections before it runs anything else. One read is bounded, but hundreds
of peers that send small things without end would make one long turn. A byte takes up to 25 ns, in
chunks of one byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

# Connections that read on in one turn of the loop.
READERS_IN_TURN = 8
# Reads of at least this size count.
COUNTED_READ = 16 << 10
# Bytes of counted reads that connections process in one turn, besides those that read on.
BYTES_IN_TURN = 2 << 20
# Bytes of engines' answers that wait for a turn: 512 first reads of uvloop. Further reads do not
# wait. Reads of clients that wait are within the limits on body bytes.
WAITING_BYTES = 128 << 20


class _Queue:
    """The connections that wait for a turn of one loop."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ends_turn = False  # the next turn counts from 0
        self.waiting_bytes = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, loop: asyncio.AbstractEventLoop, read_on: Callable[[], None]) -> None:
        """Calls a function in one of the next turns."""
        if not self._waiting:
            loop.call_soon(self._turn, loop)
        self._waiting.append(read_on)

    def takes(self, loop: asyncio.AbstractEventLoop, size: int) -> bool:
        """Returns whether this turn may process more bytes."""
        self._bytes += size
        # Earlier turns may count, too: a callback at the end of each turn would cost more.
        if not self._ends_turn and self._bytes > BYTES_IN_TURN // 2:
            self._ends_turn = True
            loop.call_soon(self._new_turn)
        return self._bytes <= BYTES_IN_TURN

    def _new_turn(self) -> None:
        self._bytes = 0
        self._ends_turn = False

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for _ in range(min(READERS_IN_TURN, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            if self._waiting:
                loop.call_soon(self._turn, loop)


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()


def _queue(loop: asyncio.AbstractEventLoop) -> _Queue:
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = _Queue()
    return queue


def read_on_later(loop: asyncio.AbstractEventLoop, read_on: Callable[[], None]) -> None:
    """Calls a function in one of the next turns of a loop."""
    _queue(loop).add(loop, read_on)


def takes(loop: asyncio.AbstractEventLoop, size: int) -> bool:
    """Returns whether this turn of a loop may process a large read."""
    return _queue(loop).takes(loop, size)


def begin_waiting(loop: asyncio.AbstractEventLoop, size: int) -> bool:
    """Counts a read of an engine that waits for a turn. Returns False if it must not wait."""
    queue = _queue(loop)
    if queue.waiting_bytes + size > WAITING_BYTES:
        return False
    queue.waiting_bytes += size
    return True


def end_waiting(loop: asyncio.AbstractEventLoop, size: int) -> None:
    """Ends the count of a read that waited."""
    _queue(loop).waiting_bytes -= size
