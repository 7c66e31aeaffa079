"""Periodic polls of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.turns import in_turns

log = structlog.get_logger("lmetric.health")

# Polls that begin in one turn of the event loop. Each takes about 0.1 ms.
POLLS_PER_TURN = 10


class Polls:
    """Polls of one kind. Each engine has at most one poll in flight."""

    def __init__(self, name: str, poll: Callable[[Engine], Awaitable[None]]) -> None:
        self.running: dict[Engine, asyncio.Task[None]] = {}
        self._name = name
        self._poll = poll

    def begin(self, engine: Engine) -> asyncio.Task[None]:
        """Starts a poll of an engine, or returns the one in flight."""
        task = self.running.get(engine)
        if task is None:
            task = self.running[engine] = asyncio.create_task(self._run(engine), name=self._name)
        return task

    async def begin_all(self, engines: Sequence[Engine]) -> None:
        """Starts polls of engines. In large fleets, other tasks run in between."""
        await in_turns(map(self.begin, engines), POLLS_PER_TURN)

    async def _run(self, engine: Engine) -> None:
        try:
            await self._poll(engine)
        except Exception:
            log.exception("a poll failed", poll=self._name, engine=engine.name)
        finally:
            del self.running[engine]
