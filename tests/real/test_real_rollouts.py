"""Partial rollouts on real vLLM: a trainer aborts them, and sends prompt and tokens again."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from router_world import Served, served
from vllm_process import BLOCK, MODEL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROLLOUTS, PROMPT, TOKENS = 4, 5 * BLOCK + 3, 6 * BLOCK
SEEN = 2 * BLOCK  # tokens that a stream has when it is aborted
# On a crowded machine, an engine needs seconds to report its configuration.
SETTINGS = {"block_size": BLOCK, "health.interval": 0.5, "health.timeout": 20}
FLAGS = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]


class Rollout:
    """One rollout: its prompt, and its tokens over all of its requests."""

    def __init__(self, w: Served, prompt: list[int], *, stream: bool) -> None:
        self.w, self.prompt, self.stream = w, prompt, stream
        self.tokens: list[int] = []
        self.ends: list[str] = []
        self.records: list[dict[str, Any]] = []

    def body(self) -> dict[str, Any]:
        """A request for the tokens that are missing."""
        return {
            "model": MODEL,
            "prompt": [*self.prompt, *self.tokens],
            "max_tokens": TOKENS - len(self.tokens),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
        } | ({"stream_options": {"include_usage": True}} if self.stream else {})

    async def run(self, *, leaves: bool = False) -> None:
        """Sends the request and reads what comes. `leaves`: ends the connection in the middle."""
        async with self.w.session.post(self.w.url + "/v1/completions", json=self.body()) as response:
            assert response.status == 200, await response.text()
            if not self.stream:
                self._add(await response.json())
            else:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._add(json.loads(line[6:]))
                    if leaves and len(self.tokens) >= SEEN:
                        break
                if leaves:
                    response.close()
        self.records.append(await self.w.record(response.headers))

    def _add(self, answer: dict[str, Any]) -> None:
        assert "error" not in answer, answer
        for choice in answer["choices"]:
            self.tokens += choice["token_ids"]
            if choice["finish_reason"] is not None:
                self.ends.append(choice["finish_reason"])

    async def whole(self, engine: VllmEngine) -> list[int]:
        """The tokens of an uninterrupted answer, without the router."""
        body = self.body() | {"prompt": self.prompt, "max_tokens": TOKENS, "stream": False}
        body.pop("stream_options", None)
        async with self.w.session.post(engine.url + "/v1/completions", json=body) as response:
            ids: list[int] = (await response.json())["choices"][0]["token_ids"]
            return ids


def drawn(w: Served, seed: str, *, stream: bool) -> list[Rollout]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, 2000) for _ in range(PROMPT)] for _ in range(ROLLOUTS)]
    return [Rollout(w, prompt, stream=stream) for prompt in prompts]


async def call(w: Served, engine: VllmEngine, path: str) -> None:
    async with w.session.post(engine.url + path, json={}) as response:
        assert response.status == 200, await response.text()


async def generated(w: Served, engine: VllmEngine) -> float:
    """Tokens that the engine has generated so far."""
    async with w.session.get(f"{engine.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


HOW = ["pause a stream", "pause a whole answer", "abort a stream", "leave a stream"]


@pytest.mark.parametrize("how", HOW)
async def test_abort_and_resume_loses_no_token(
    vllm_engines: Callable[..., list[VllmEngine]], how: str
) -> None:
    (engine,) = vllm_engines(1)
    async with served([engine], *FLAGS) as w:
        before = await generated(w, engine)
        rollouts = drawn(w, how, stream="stream" in how)
        leaves = how.startswith("leave")
        running = [asyncio.create_task(each.run(leaves=leaves)) for each in rollouts]
        if not leaves:

            async def halfway() -> bool:
                seen = all(len(each.tokens) >= SEEN or not each.stream for each in rollouts)
                return seen and await generated(w, engine) - before >= ROLLOUTS * SEEN

            await w.until(halfway, 300)
            pauses = how.startswith("pause")
            await call(w, engine, "/pause?mode=abort&clear_cache=false" if pauses else "/abort_requests")
        await asyncio.gather(*running)
        parts = [len(each.tokens) for each in rollouts]
        assert all(SEEN // 2 <= part < TOKENS for part in parts), parts
        if not leaves:
            assert [each.ends for each in rollouts] == [["abort"]] * ROLLOUTS
            await call(w, engine, "/resume")

        async def usable() -> bool:
            return bool((await w.engines())[engine.name]["service"]["in_service"])

        await w.until(usable, 60)
        await asyncio.sleep(0.3)  # the events of the last blocks are on their way
        await asyncio.gather(*(each.run() for each in rollouts))
        for each, part in zip(rollouts, parts, strict=True):
            assert each.ends[-1] == "length"
            assert len(each.tokens) == TOKENS, "each token counts once"
            record = each.records[-1]
            # The weights are the same: prompt and partial answer are a hit, but for the last block.
            assert record["predicted_cached_tokens"] == record["cached_tokens"]
            assert record["cached_tokens"] >= (PROMPT + part) // BLOCK * BLOCK - BLOCK
        expected = await asyncio.gather(*(each.whole(engine) for each in rollouts))
        assert [each.tokens for each in rollouts] == expected


@pytest.mark.parametrize("stream", [True, False])
async def test_another_engine_answers_when_an_engine_shuts_down(
    vllm_engines: Callable[..., list[VllmEngine]], stream: bool
) -> None:
    """vLLM aborts its answers then, too, but it does not answer whether it is paused."""
    engines = vllm_engines(2)
    async with served(engines, *FLAGS) as w:
        before = await generated(w, engines[0])
        rollouts = drawn(w, f"shutdown {stream}", stream=stream)
        running = [asyncio.create_task(each.run()) for each in rollouts]

        async def halfway() -> bool:
            if stream:
                return all(len(each.tokens) >= SEEN for each in rollouts)
            return await generated(w, engines[0]) - before >= SEEN

        await w.until(halfway, 300)
        await asyncio.to_thread(engines[0].stop)
        await asyncio.gather(*running)
        assert [each.ends for each in rollouts] == [["length"]] * ROLLOUTS
        assert any(engines[0].name in each.records[0]["tried"] for each in rollouts), "some were moved"
        expected = await asyncio.gather(*(each.whole(engines[1]) for each in rollouts))
        assert [each.tokens for each in rollouts] == expected
