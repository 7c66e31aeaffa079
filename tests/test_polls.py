"""Polls of many engines leave the event loop to other tasks in between."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from lmetric.server.background.polls import POLLS_PER_TURN, Polls

ENGINES: list[Any] = [f"e{number}" for number in range(10 * POLLS_PER_TURN + 1)]


async def test_other_tasks_run_between_the_polls_of_a_large_fleet() -> None:
    polled: list[Any] = []
    counts = [0]

    async def poll(engine: Any) -> None:
        polled.append(engine)

    async def other() -> None:
        while True:
            counts.append(len(polled))
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    polls = Polls("test", poll)
    await polls.begin_all(ENGINES)
    await asyncio.gather(*polls.running.values())
    task.cancel()
    assert polled == ENGINES
    assert max(after - before for before, after in pairwise(counts)) <= POLLS_PER_TURN


async def test_an_engine_has_one_poll_at_a_time() -> None:
    begun: list[Any] = []
    over = asyncio.Event()

    async def poll(engine: Any) -> None:
        begun.append(engine)
        await over.wait()

    polls = Polls("test", poll)
    for _ in range(2):
        await polls.begin_all(ENGINES[:3])
        await asyncio.sleep(0)
    assert begun == ENGINES[:3]
    over.set()
    await asyncio.gather(*polls.running.values())
    await polls.begin_all(ENGINES[:1])
    await asyncio.sleep(0)
    assert begun == [*ENGINES[:3], ENGINES[0]]
