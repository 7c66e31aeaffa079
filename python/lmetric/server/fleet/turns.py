"""Work on many engines, cut into turns of the event loop."""

import asyncio
from collections.abc import Iterable

# Steps in one turn of the event loop. A step takes up to 0.2 ms: it adds an engine.
STEPS_PER_TURN = 20


async def in_turns(steps: Iterable[object], per_turn: int = STEPS_PER_TURN) -> None:
    """Runs the steps of an iterator. Other tasks run between each ``per_turn`` of them."""
    for number, _ in enumerate(steps, 1):
        if number % per_turn == 0:
            await asyncio.sleep(0)
