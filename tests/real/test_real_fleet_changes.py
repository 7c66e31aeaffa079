"""vLLM engines that leave and come back warm: their prefixes move over NIXL before requests do."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

from lmetric.profiles import load_profile
from split_world import COMPLETIONS, equal
from test_real_pull import PAIR, SLOW_SECONDS_PER_TOKEN, WORDS, heard_of, less, sources
from test_real_router import text
from test_real_split import asked, cutting, fresh, request
from vllm_process import BLOCK, MODEL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

Start = Callable[..., list[VllmEngine]]
WARM: dict[str, Any] = {
    "policy": "lmetric",
    "admin": True,
    "fleet_changes": {"kind": "warm", "min_tokens": 2 * BLOCK, "max_seconds": 120.0},
    "health": {"interval": 1, "timeout": 30},
}


def slow_prefills(folder: Path) -> str:
    """Returns a profile's file: computing is said to take so long that a fetch pays."""
    profile = folder / "slow.yaml"
    known = load_profile("independent-sim").model_dump(exclude_none=True)
    profile.write_text(yaml.safe_dump(known | {"prefill_seconds_per_token": SLOW_SECONDS_PER_TOKEN}))
    return str(profile)


async def test_prefixes_of_an_engine_that_leaves_are_fetched_first(
    vllm_engines: Start, tmp_path: Path
) -> None:
    """Each of three engines drains in turn; the prompt never has to be computed again. The first
    prefix moves; later an engine that drained before still has it."""
    engines = {engine.name: engine for engine in vllm_engines(3, kv_transfer_config=PAIR)}
    settings = WARM | {"profile": slow_prefills(tmp_path)}
    async with cutting(list(engines.values()), tmp_path, **settings) as world:
        await heard_of(world)
        body = request(COMPLETIONS, WORDS, 16)
        want = await asked(world, COMPLETIONS, body)
        holder = want["headers"]["x-lmetric-instance"]
        tokens = (want["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
        for turn in range(len(engines)):
            before = {name: await sources(engine) for name, engine in engines.items() if name != holder}
            async with world.session.post(f"{world.url}/admin/engines/{holder}/drain") as response:
                assert response.status == 200, await response.read()

            async def sent(holder: str = holder) -> bool:
                return not (await world.engines())[holder]["sends_prefixes"]

            await world.until(sent, seconds=180)
            if turn == 0:
                took = {name: less(await sources(engines[name]), was) for name, was in before.items()}
                fetched = sum(each["external_kv_transfer"] for each in took.values())
                held = sum(each["local_cache_hit"] for each in took.values())
                assert fetched + held >= tokens - BLOCK, took
            said = await asked(world, COMPLETIONS, body)
            equal(said, want)
            successor = said["headers"]["x-lmetric-instance"]
            assert successor != holder
            assert (await world.record(said["headers"]))["cached_tokens"] >= tokens - BLOCK
            async with world.session.post(f"{world.url}/admin/engines/{holder}/undrain") as response:
                assert response.status == 200, await response.read()
            holder = successor


USERS, TURN_TOKENS, STEADY_SECONDS = 20, 12, 40.0


async def test_a_rolling_restart_loses_nothing(
    vllm_engines: Start, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Three engines restart one after another under twenty users. Prefixes come before requests."""
    engines = vllm_engines(3, kv_transfer_config=PAIR)
    settings = WARM | {"profile": slow_prefills(tmp_path), "migration_max_gap_seconds": 60.0}
    async with cutting(engines, tmp_path, **settings) as world:
        over = asyncio.Event()
        failed: list[str] = []
        ttft: list[tuple[float, float]] = []  # when it was sent, seconds to the first token

        async def turn(number: int, prompt: str) -> str:
            streams = number % 2 == 0
            body = {"model": MODEL, "prompt": prompt, "max_tokens": TURN_TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "stream": streams}
            body |= {"stream_options": {"include_usage": True}} if streams else {}
            said, tokens, sent = "", None, time.monotonic()
            async with world.session.post(world.url + COMPLETIONS, json=body) as response:
                if not streams:
                    whole = orjson.loads(await response.read())
                    assert response.status == 200, whole
                    assert whole["usage"]["completion_tokens"] == TURN_TOKENS
                    return str(whole["choices"][0]["text"])
                assert response.status == 200, await response.read()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if not said:
                        ttft.append((sent, time.monotonic() - sent))
                    event = orjson.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    said += "".join(choice["text"] for choice in event["choices"])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            assert tokens == TURN_TOKENS
            return said

        async def user(number: int) -> None:
            draw = random.Random(fresh(f"user {number}"))
            prompt = text(draw, 200)
            while not over.is_set():
                try:
                    prompt += await turn(number, prompt) + text(draw, 5)
                except Exception as error:
                    failed.append(f"user {number}: {error!r}")
                    return
                if len(prompt) > 9_000:  # near the longest prompt of the model
                    prompt = text(draw, 200)
                await asyncio.sleep(draw.uniform(1.0, 3.0))

        users = [asyncio.create_task(user(number)) for number in range(USERS)]
        await asyncio.sleep(STEADY_SECONDS)
        changed = time.monotonic()
        for engine in engines:
            name = engine.name
            async with world.session.post(f"{world.url}/admin/engines/{name}/drain") as response:
                assert response.status == 200, await response.read()

            async def idle(name: str = name) -> bool:
                shown = (await world.engines())[name]
                return not shown["running"] and not shown["sends_prefixes"]

            await world.until(idle, seconds=240)
            engine.stop()

            async def gone(name: str = name) -> bool:
                return not (await world.engines())[name]["healthy"]

            await world.until(gone, seconds=60)
            engine.start()
            await asyncio.to_thread(engine.wait)

            async def warm(name: str = name) -> bool:
                shown = (await world.engines())[name]
                return bool(shown["healthy"]) and not shown["warming"]

            await world.until(warm, seconds=240)
            taken = await sources(engine)
            assert taken["external_kv_transfer"] > 0, (name, taken)
            async with world.session.post(f"{world.url}/admin/engines/{name}/undrain") as response:
                assert response.status == 200, await response.read()
            assert failed == []
        ended = time.monotonic()
        over.set()
        await asyncio.gather(*users)
        assert failed == []
        during = [seconds for sent, seconds in ttft if sent >= changed]
        before = [seconds for sent, seconds in ttft if changed - STEADY_SECONDS / 2 <= sent < changed]
        for name, values in (("before", before), ("during", during)):
            p50, p99 = np.percentile(values, [50, 99])
            record_property(f"ttft_{name}", {"streams": len(values), "p50": p50, "p99": p99})
            print(f"TTFT {name}: {len(values)} streams, P50 {p50:.3f} s, P99 {p99:.3f} s")
        print(f"restart of {len(engines)} engines: {ended - changed:.0f} s")
