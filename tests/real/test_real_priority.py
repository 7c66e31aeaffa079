"""What goes first in the queue of a vLLM engine whose router gives each request its priority."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router_world import Served
from split_world import COMPLETIONS
from test_real_pd import counted
from test_real_router import text
from test_real_split import cutting, fresh, request
from vllm_process import VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

Start = Callable[..., list[VllmEngine]]
SHORT, LONG = 5, 1500  # words of a prompt


async def order_of(world: Served, engine: VllmEngine, words: list[int]) -> list[int]:
    """In which order such prompts are answered, that are sent one after the other while another request holds
    the engine's only place."""
    ended: list[int] = []

    async def ask(number: int, body: dict[str, Any]) -> None:
        async with world.session.post(world.url + COMPLETIONS, json=body) as response:
            assert response.status == 200, await response.text()
            ended.append(number)
            receipt = await world.receipt(response.headers)
            print(
                number, {name: receipt.get(name) for name in ("priority", "boost_seconds", "priority_sent")}
            )

    async def queued(running: int, waiting: int) -> bool:
        counts = [await counted(engine, f"num_requests_{name}") for name in ("running{", "waiting{")]
        return counts == [running, waiting]

    holds = request(COMPLETIONS, SHORT, 4000, stream=True)
    async with world.session.post(world.url + COMPLETIONS, json=holds) as holder:
        await world.until(lambda: queued(1, 0), seconds=60)
        tasks = []
        for number, count in enumerate(words):
            body = request(COMPLETIONS, 1, 4) | {"prompt": text(random.Random(fresh("queued")), count)}
            tasks.append(asyncio.create_task(ask(number, body)))
            await world.until(lambda n=number: queued(1, n + 1), seconds=60)  # type: ignore[misc]
        assert not holder.content.at_eof()
        holder.close()
    await asyncio.gather(*tasks)
    return ended


async def test_short_prompts_pass_long_ones_by_the_routers_priorities(
    vllm_engines: Start, tmp_path: Path
) -> None:
    (engine,) = vllm_engines(1, max_num_seqs=1)
    given = {"priority": "uniboost", "priority_settings": {"gamma": 0.1}}
    async with cutting([engine], tmp_path, **given) as world:
        shown = (await world.engines())[engine.name]
        assert shown["priority"].startswith("sent as a header")
        assert await order_of(world, engine, [LONG, LONG, SHORT, SHORT]) == [2, 3, 0, 1]
