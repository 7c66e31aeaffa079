"""Work that the server does again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger("lmetric.server")


def periodic(
    name: str, seconds: float | Callable[[], float], work: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    """Starts a task that does ``work`` after each pause of ``seconds``, until it is canceled.

    An error is logged and ends nothing. A function for ``seconds`` is called before each pause.
    """

    async def forever() -> None:
        while True:
            await asyncio.sleep(seconds() if callable(seconds) else seconds)
            try:
                await work()
            except Exception:
                log.exception("periodic task failed", task=name)

    return asyncio.create_task(forever(), name=name)
