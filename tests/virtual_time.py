"""An event loop with a clock of its own: what a test measures does not depend on the machine.

Engines, routers and clients of a test run in this loop, with real sockets between them. Their work
takes no time.
"""

import asyncio
import os
import selectors
from typing import Any


class _Selector(selectors.EpollSelector):
    """Waits for sockets, or lets the clock go on to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)  # nothing but another thread or process can go on
        found = super().select(0)
        if not found and timeout > 0:
            os.sched_yield()  # a thread of the kernel may have to deliver what was sent
            found = super().select(0)
            if not found:
                self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time goes on only when there is nothing to do, from one timer to the next."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Returns the time, seconds since the loop was made."""
        return self._clock.now
