"""Waiting in tests: for something to come true, never for a time to pass."""

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 10.0


def _looks(true: Callable[[], object], seconds: float, seen: Callable[[], object] | None) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come true{f': {seen()}' if seen else ''}")
        yield


async def until(
    true: Callable[[], object],
    seconds: float = PATIENCE_SECONDS,
    *,
    seen: Callable[[], object] | None = None,
) -> None:
    """Lets the loop run until it is true; else fails with what is ``seen``."""
    for _ in _looks(true, seconds, seen):
        await asyncio.sleep(0.002)


def until_threads(true: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Waits for what another thread is about to do."""
    for _ in _looks(true, seconds, None):
        time.sleep(0.002)
