"""A router that moves streams between emulated engines, at tokens that a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from lmetric.server.execution.runner import Runner
from lmetric.server.fleet.rebalancer import Movable, Rebalancer
from lmetric_lab.emulated import EngineOptions
from pd_world import Pd, pd
from split_world import alone, asked, equal
from waiting import PATIENCE_SECONDS

LONG = "the history of the quiet river and of all who lived by it " * 60


def plain(**changes: Any) -> EngineOptions:
    """An engine without KV transfer."""
    return EngineOptions.model_validate({"port": 0, "clock_speed": 2.0} | changes)


@contextlib.asynccontextmanager
async def moving(*options: EngineOptions, cache: bool = True, **config: Any) -> AsyncIterator[Pd]:
    """Starts such a router.

    Its own rounds are an hour apart. `cache`: whether engines report a prefix cache.
    """
    kinds = options or (plain(), plain(), plain())
    given = {
        "tokenizer": None,
        "policy": "round_robin",
        "rebalance": {"kind": "star", "period_seconds": 3600.0},
        "migration_by": "recompute",
    }
    async with pd(*kinds, **(given | config)) as world:
        model = world.server.fleet.models[0]
        await world.until(lambda: all(engine.identified for engine in model.engines.values()))
        for engine in model.engines.values():
            engine.capabilities = replace(engine.capabilities, prefix_caching=cache)
        yield world
        assert not mover(world).running
        assert not mover(world).moves


def mover(w: Pd) -> Rebalancer:
    """The rebalancer that starts moves."""
    found = w.server.fleet.models[0].mover
    assert found is not None
    return found


def only(w: Pd) -> Runner | None:
    """The only stream that may move."""
    found = next(iter(mover(w).running.values()), None)
    assert found is None or isinstance(found, Runner)
    return found


def place(request: Movable) -> str:
    """The engine that runs it."""
    return request.ticket.instance


async def at_token(w: Pd, count: int) -> Runner:
    """Waits until the only stream has this many tokens and pauses; returns it."""

    def there() -> bool:
        request = only(w)
        return request is not None and request.known_tokens >= count and request.migration is None

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not there():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    request = only(w)
    assert request is not None
    return request


def begins(moves: Rebalancer, ticket: int, target: str) -> bool:
    """Starts a move. Returns whether it has started or is done."""
    request, done = moves.running[ticket], moves.outcomes["migrated"]
    before = request.migration
    moves.begin(ticket, target, time.monotonic())
    return request.migration is not before or moves.outcomes["migrated"] > done


async def move(w: Pd, count: int, target: str | None = None) -> bool:
    """Starts to move the only stream to another engine at this token.

    Returns whether the move started.
    """
    request = await at_token(w, count)
    others = [name for name in w.engines if name not in w.stopped | {place(request)}]
    ticket = request.ticket.id
    return begins(mover(w), ticket, target or others[count % len(others)])


async def shoved(w: Pd, path: str, body: dict[str, Any], moves: list[int]) -> int:
    """Moves a request at each of these tokens, and checks that its answer is that of one engine.

    Returns its moves.
    """
    expected = await alone(w, path, body)
    task = asyncio.create_task(asked(w, path, body))

    async def shove() -> None:
        for count in moves:
            await move(w, count)

    shoving = asyncio.create_task(shove())
    said = await task
    shoving.cancel()
    await asyncio.gather(shoving, return_exceptions=True)
    equal(said, expected)
    return len(said["record"]["migrations"])
