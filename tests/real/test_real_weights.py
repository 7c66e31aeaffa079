"""Real vLLM whose weights change: what its cache and the router's index hold, and what a trainer's
calls do. The weights stay the same on CPU; only the calls are made."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from router_world import Served, served
from vllm_process import BLOCK, MODEL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

# Paths by name, and whether vLLM 0.32 empties its prefix cache.
CALLS = {
    "reset": ("/reset_prefix_cache", True),
    "abort": ("/pause", True),
    "wait": ("/pause?mode=wait", True),
    "keep": ("/pause?mode=keep", True),  # against its docstring
    "kept": ("/pause?mode=keep&clear_cache=false", False),
    "sleep_0": ("/sleep?level=0", False),
    "sleep_1": ("/sleep", True),
    "sleep_2": ("/sleep?level=2", True),
}


def drawn(seed: int, tokens: int = 20 * BLOCK + 5) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 2000) for _ in range(tokens)]


async def told(w: Served, prompt: list[int]) -> tuple[int, int, str | None]:
    """Cached tokens of a prompt: as predicted, as the engine reports; the version of weights."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    async with w.session.post(w.url + "/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        record = await w.record(response.headers)
    await asyncio.sleep(0.3)  # the events of its last blocks are on their way
    real = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    assert record["cached_tokens"] == real
    return record["predicted_cached_tokens"], real, response.headers.get("x-lmetric-weights")


async def post(session: aiohttp.ClientSession, url: str, body: Any = None) -> Any:
    async with session.post(url, json=body) as response:
        answer = await response.json()
        assert response.status == 200, (url, answer)
        return answer


async def call(w: Served, engine: VllmEngine, name: str) -> None:
    """Makes a call of `CALLS`, as a trainer does around an update."""
    await post(w.session, engine.url + CALLS[name][0])
    if name != "reset":
        await usable(w, engine, False)


async def resume(w: Served, engine: VllmEngine, name: str) -> None:
    if name == "reset":
        return
    await post(w.session, f"{engine.url}/{'resume' if 'pause' in CALLS[name][0] else 'wake_up'}")
    await usable(w, engine, True)


async def usable(w: Served, engine: VllmEngine, expected: bool) -> None:
    """Until the router knows that the engine is paused, asleep, or neither."""

    async def known() -> bool:
        return bool((await w.engines())[engine.name]["healthy"]) is expected

    await w.until(known, 60)


async def test_which_call_empties_the_cache_and_what_the_router_shows(
    vllm_engines: Callable[..., list[VllmEngine]],
) -> None:
    """The table in docs/how-to/rl_trainers.md."""
    (engine,) = vllm_engines(1)
    flags = ("--set", f"block_size={BLOCK}", "--set", "health.interval=0.5", "--set", "admin.enabled=true")
    async with served([engine], *flags) as w:
        found = {}
        for version, name in enumerate(CALLS):
            prompt = drawn(300 + version)
            assert (await told(w, prompt))[:2] == (0, 0)
            predicted, real, _ = await told(w, prompt)
            assert predicted == real == 20 * BLOCK
            await call(w, engine, name)
            await resume(w, engine, name)
            # Without an announcement, the router follows the engine's events alone.
            predicted, real, _ = await told(w, prompt)
            found[name] = real == 0
            if name.startswith("sleep"):
                assert predicted == real, "the router notices by itself that an engine slept"
            # vLLM publishes AllBlocksCleared with its next step: the first prompt may still count.
            assert predicted in (real, 20 * BLOCK)
            assert (await told(w, prompt))[:2] == (20 * BLOCK, 20 * BLOCK)
        assert found == {name: empties for name, (_, empties) in CALLS.items()}


async def test_a_prompt_of_old_weights_is_no_hit(vllm_engines: Callable[..., list[VllmEngine]]) -> None:
    (engine,) = vllm_engines(1)
    flags = ("--set", f"block_size={BLOCK}", "--set", "health.interval=0.5", "--set", "admin.enabled=true")
    async with served([engine], *flags) as w:
        for version, (name, (_, empties)) in enumerate(CALLS.items()):
            prompt = drawn(100 + version)
            await told(w, prompt)
            assert (await told(w, prompt))[:2] == (20 * BLOCK, 20 * BLOCK)
            await call(w, engine, name)
            asleep = name in ("sleep_1", "sleep_2")
            if asleep:
                async with w.session.post(w.url + "/admin/weights", json={"version": version}) as response:
                    assert response.status == 409, await response.text()
                await resume(w, engine, name)
            await post(w.session, w.url + "/admin/weights", {"version": version})
            if not asleep:
                await resume(w, engine, name)
            predicted, real, label = await told(w, prompt)
            assert (predicted, label) == (0, str(version))
            assert real == (0 if empties else 20 * BLOCK), "the engine has kept its cache"
            # No event names the blocks that an engine has kept, so the index lacks them. It has
            # those that were computed with the new weights.
            kept = 20 * BLOCK
            assert (await told(w, prompt))[:2] == (kept if empties else 0, kept)
            fresh = drawn(200 + version)
            await told(w, fresh)
            assert (await told(w, fresh))[:2] == (20 * BLOCK, 20 * BLOCK)
        # A trainer that keeps the cache on purpose says so.
        await post(w.session, w.url + "/admin/weights", {"version": "kept", "cache_kept": True})
        assert await told(w, fresh) == (20 * BLOCK, 20 * BLOCK, "kept")
