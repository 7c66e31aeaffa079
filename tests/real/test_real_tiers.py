"""Real vLLM with a CPU tier: events fill the tier's index, and hits in it are predicted exactly."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from router_world import served
from vllm_process import BLOCK, MODEL, VllmEngine, cpu_tier

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

GPU_BLOCKS = 160  # one request of full length takes 128


def tiered(*, described: bool) -> dict[str, Any]:
    """Flags of an engine with a CPU tier."""
    return {
        "num_gpu_blocks_override": GPU_BLOCKS,
        **cpu_tier(64 << 20, self_describing_kv_events=described),
    }


@pytest.mark.parametrize("described", [True, False])
async def test_hits_in_the_cpu_tier_are_predicted_exactly(
    vllm_engines: Callable[..., list[VllmEngine]], *, described: bool
) -> None:
    (engine,) = vllm_engines(1, **tiered(described=described))
    draw = random.Random(5)
    prompts = [[draw.randrange(5, 2000) for _ in range(1400)] for _ in range(8)]
    async with served([engine], "--set", f"block_size={BLOCK}") as w:

        async def ask(prompt: list[int]) -> tuple[int, int, str]:
            """The cached tokens, as predicted; the part of them in the tier; the text."""
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with w.session.post(w.url + "/v1/completions", json=body) as response:
                lines = (await response.text()).split("data: ")[1:-1]
                assert response.status == 200, lines
                record = await w.record(response.headers)
            chunks = [json.loads(line) for line in lines]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            real = (chunks[-1]["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            feed = (await w.engines())[engine.name]["kv_events"]
            # Of a prompt of whole blocks, vLLM loads the last one, too, and computes a token again.
            least = real - BLOCK if len(prompt) % BLOCK == 0 else real
            assert least <= record["predicted_cached_tokens"] <= real, (len(prompt), record, feed)
            await asyncio.sleep(0.15)  # events of its last blocks are on their way
            return real, record["predicted_tier_tokens"], text

        texts = [(await ask(prompt[:1000]))[2] for prompt in prompts]
        feed = (await w.engines())[engine.name]["kv_events"]["ranks"]["0"]
        assert feed["tiers"]["CPU"] == 8 * (1000 // BLOCK), "each block of a prompt is stored in the tier"
        # The GPU has evicted the first prompt. All of it comes from the tier, with the same answer.
        assert await ask(prompts[0][:1000]) == (992, 992, texts[0])
        in_tier = mixed = 0
        loaded = 992
        for _ in range(40):
            which, tokens = draw.randrange(8), draw.choice([300, 641, 1000, 1001, 1200, 1400])
            cached, tier, _ = await ask(prompts[which][:tokens])
            in_tier += tier > 0
            mixed += 0 < tier < cached
            loaded += tier
        assert in_tier >= 10, "hits in the tier"
        assert mixed >= 2, "runs that begin on the GPU and continue in the tier"
        feed = (await w.engines())[engine.name]["kv_events"]["ranks"]["0"]
        assert not feed["skipped"], feed
        tier = (await w.engines())[engine.name]["tiers"]["CPU"]
        assert tier["blocks"] == feed["tiers"]["CPU"]
        assert tier["loads"] >= 10, "the cost of loads is learned"
        assert 0 <= tier["load_ratio"] <= 1
        assert tier["hit_tokens"] == loaded
        metrics = await w.page("/metrics")
        assert f'medium="CPU",model="{MODEL}"}} {float(loaded)}' in metrics
        await ask(prompts[0][: 20 * BLOCK])
