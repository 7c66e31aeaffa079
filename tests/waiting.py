"""Waiting in tests: until a condition is true, never for a fixed time."""

import asyncio
import time
from collections.abc import Callable, Iterator

# A test that waits this long hangs. The speed of the machine must not decide over a test.
PATIENCE_SECONDS = 60.0


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
    """Runs the loop until a condition is true.

    Fails with the value of ``seen`` after ``seconds``.
    """
    for _ in _looks(true, seconds, seen):
        await asyncio.sleep(0.002)


def until_threads(true: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until another thread makes a condition true."""
    for _ in _looks(true, seconds, None):
        time.sleep(0.002)
