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

ROLLOUTS, PROMPT, TOKENS = 8, 5 * BLOCK + 3, 400
FLAGS = ("--set", f"block_size={BLOCK}", "--set", "health.interval=0.5", "--set", "admin.enabled=true")


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, 2000) for _ in range(PROMPT)] for _ in range(ROLLOUTS)]


class Rollout:
    """One rollout: its prompt, and the tokens so far over all of its requests."""

    def __init__(self, w: Served, prompt: list[int], *, stream: bool) -> None:
        self.w, self.prompt, self.stream = w, prompt, stream
        self.tokens: list[int] = []
        self.ends: list[str | None] = []
        self.records: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Sends a request for the tokens that are missing, and reads what comes."""
        body = {
            "model": MODEL,
            "prompt": [*self.prompt, *self.tokens],
            "max_tokens": TOKENS - len(self.tokens),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
        }
        async with self.w.session.post(self.w.url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if self.stream:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._add(json.loads(line[6:]))
            else:
                self._add(await response.json())
        self.records.append(await self.w.record(response.headers))

    def _add(self, answer: dict[str, Any]) -> None:
        assert "error" not in answer, answer
        for choice in answer["choices"]:
            self.tokens += choice["token_ids"]
            if choice["finish_reason"] is not None:
                self.ends.append(choice["finish_reason"])


async def whole(w: Served, engine: VllmEngine, prompt: list[int]) -> list[int]:
    """The tokens of an uninterrupted answer of an engine without the router."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    async with w.session.post(engine.url + "/v1/completions", json=body) as response:
        ids: list[int] = (await response.json())["choices"][0]["token_ids"]
        return ids


@pytest.mark.parametrize("stream", [True, False])
async def test_a_pause_that_aborts_loses_no_token(
    vllm_engines: Callable[..., list[VllmEngine]], *, stream: bool
) -> None:
    (engine,) = vllm_engines(1)
    async with served([engine], *FLAGS) as w:
        rollouts = [Rollout(w, prompt, stream=stream) for prompt in prompts(int(stream))]
        running = [asyncio.create_task(each.run()) for each in rollouts]
        await asyncio.sleep(1.5)
        async with w.session.post(f"{engine.url}/pause?mode=abort&clear_cache=false") as response:
            assert response.status == 200
        await asyncio.gather(*running)
        print(
            [
                (
                    len(r.tokens),
                    r.ends,
                    r.records[-1].get("outcome"),
                    r.records[-1].get("output_tokens"),
                    r.records[-1].get("failure"),
                )
                for r in rollouts
            ]
        )
        print((await w.engines())[engine.name])
        async with w.session.post(f"{engine.url}/resume") as response:
            assert response.status == 200
        await asyncio.sleep(2)
        print((await w.engines())[engine.name])
        await asyncio.gather(*(each.run() for each in rollouts))
        print(rollouts[0].records[-1])
        for each in rollouts:
            assert each.tokens == await whole(w, engine, each.prompt)
        raise AssertionError("look")
