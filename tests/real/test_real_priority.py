"""The order of the queues of vLLM engines whose router gives each request its priority."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router_world import Served
from split_world import COMPLETIONS
from test_real_router import text
from test_real_split import cutting, fresh, request
from vllm_process import VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

Start = Callable[..., list[VllmEngine]]
MIXED = [1500, 50, 700, 50, 1500, 50, 700, 50]  # words of the prompts of one engine's queue
# A prompt half as long is worth 35 s of arrival: more than it takes to send all.
UNIBOOST = {"priority": {"kind": "uniboost", "gamma": 0.02, "max_boost_seconds": 600}}
# About 700 tokens/s on two cores: an answer runs for over a minute; its client leaves long before.
TOKENS = 50_000
# In chunks of many tokens: two engines at full speed leave nobody else any time.
ONE_PLACE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_model_len": 1 << 16,
    "hf_overrides": {"max_position_embeddings": 1 << 16},
    "num_gpu_blocks_override": 2100,
    "stream_interval": 100,
    "enable_log_requests": True,
}


@dataclass
class Waited:
    """A queued request: its priority and how the router sent it, from the decision record."""

    number: int  # in the order in which they were sent
    words: int
    priority: int | None = None
    sent: str | None = None


async def queues_of(world: Served, engines: list[VllmEngine], words: list[int]) -> dict[str, list[Waited]]:
    """The requests that each engine took from its queue, in its order, by engine name.

    The requests have prompts of `words` words. They are sent one after the other while the engines
    are paused, so no clock decides the order. Each request is sent when the engine's scheduler logs
    that it has the previous request. All requests are queued when the engines resume. A request
    holds its engine's only sequence slot until its client leaves. The client leaves when the first
    token is recorded.
    """
    taken: dict[str, list[Waited]] = {engine.name: [] for engine in engines}
    decisions: list[tuple[Waited, Any]] = []

    def added() -> int:
        return sum(engine.log.read_text(errors="replace").count(" Added request ") for engine in engines)

    async def tell(path: str) -> None:
        async def one(engine: VllmEngine) -> None:
            async with world.session.post(f"{engine.url}/{path}", headers={"connection": "close"}) as told:
                assert told.status == 200, await told.text()

        await asyncio.gather(*map(one, engines))

    async def ask(waited: Waited) -> None:
        prompt = text(random.Random(fresh("queued")), waited.words)
        body = request(COMPLETIONS, 1, TOKENS, stream=True) | {"prompt": prompt}
        async with world.session.post(world.url + COMPLETIONS, json=body) as response:
            assert response.status == 200, await response.text()
            assert (await response.content.readany()).startswith(b"data: {")
            taken[response.headers["x-lmetric-instance"]].append(waited)
            assert not response.content.at_eof(), "its answer ended before its client left"
            response.close()
        decisions.append((waited, response.headers))

    await tell("pause?mode=keep")
    tasks = []
    try:
        for number, count in enumerate(words, 1):
            before = added()

            async def queued(before: int = before) -> bool:
                return added() > before

            tasks.append(asyncio.create_task(ask(Waited(number, count))))
            await world.until(queued, seconds=60)
        assert not any(taken.values())
    finally:
        await tell("resume")
    await asyncio.gather(*tasks)
    for waited, headers in decisions:
        record = await world.record(headers)
        waited.priority, waited.sent = record["priority"], record.get("priority_sent")
    for name, queue in taken.items():
        print(name, *queue, sep="\n  ")
    return taken


@pytest.mark.parametrize("given", [UNIBOOST, {"priority": "none"}], ids=lambda given: given["priority"])
async def test_each_of_two_engines_takes_its_queue_in_the_order_of_priority(
    vllm_engines: Start, tmp_path: Path, given: dict[str, Any]
) -> None:
    engines = vllm_engines(2, **ONE_PLACE)
    async with cutting(engines, tmp_path, **given) as world:
        # By turns to one and to the other.
        taken = await queues_of(world, engines, [count for count in MIXED for _ in engines])
    for queue in taken.values():
        assert sorted(waited.words for waited in queue) == sorted(MIXED)
        arrival = [waited.number for waited in queue]
        if given["priority"] == "none":
            assert {waited.priority for waited in queue} == {None}
            assert arrival == sorted(arrival)
            continue
        priorities = [waited.priority or 0 for waited in queue]
        assert priorities == sorted(priorities)
        assert len(set(priorities)) == len(MIXED)
        assert all((waited.sent or "").startswith("sent as a header") for waited in queue)
        # That is another order than that of arrival.
        assert [waited.words for waited in queue] == sorted(MIXED)
