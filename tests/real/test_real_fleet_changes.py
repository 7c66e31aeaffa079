"""vLLM engines that leave and come back warm: their prefixes move over NIXL before requests do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmetric.profiles import load_profile
from split_world import COMPLETIONS, equal
from test_real_pull import PAIR, SLOW_SECONDS_PER_TOKEN, WORDS, heard_of, less, sources
from test_real_split import asked, cutting, request
from vllm_process import BLOCK, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

Start = Callable[..., list[VllmEngine]]
WARM: dict[str, Any] = {
    "policy": "lmetric",
    "admin": True,
    "fleet_changes": {"kind": "warm", "min_tokens": 2 * BLOCK, "max_seconds": 120.0},
    "health": {"interval": 1, "timeout": 30},
}


async def test_prefixes_of_an_engine_that_leaves_are_fetched_first(
    vllm_engines: Start, tmp_path: Path
) -> None:
    """Each of three engines drains in turn; the prompt never has to be computed again."""
    engines = {engine.name: engine for engine in vllm_engines(3, kv_transfer_config=PAIR)}
    profile = tmp_path / "slow.yaml"
    known = load_profile("independent-sim").model_dump(exclude_none=True)
    profile.write_text(yaml.safe_dump(known | {"prefill_seconds_per_token": SLOW_SECONDS_PER_TOKEN}))
    async with cutting(list(engines.values()), tmp_path, **(WARM | {"profile": str(profile)})) as world:
        await heard_of(world)
        body = request(COMPLETIONS, WORDS, 16)
        want = await asked(world, COMPLETIONS, body)
        holder = want["headers"]["x-lmetric-instance"]
        tokens = (want["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
        for _ in engines:
            before = {name: await sources(engine) for name, engine in engines.items() if name != holder}
            async with world.session.post(f"{world.url}/admin/engines/{holder}/drain") as response:
                assert response.status == 200, await response.read()

            async def sent(holder: str = holder) -> bool:
                return not (await world.engines())[holder]["sends_prefixes"]

            await world.until(sent, seconds=180)
            took = {name: less(await sources(engines[name]), was) for name, was in before.items()}
            fetched = sum(each["external_kv_transfer"] for each in took.values())
            held = sum(each["local_cache_hit"] for each in took.values())
            assert fetched + held >= tokens - BLOCK, took
            said = await asked(world, COMPLETIONS, body)
            equal(said, want)
            successor = said["headers"]["x-lmetric-instance"]
            assert successor != holder
            assert (await world.receipt(said["headers"]))["cached_tokens"] >= tokens - BLOCK
            async with world.session.post(f"{world.url}/admin/engines/{holder}/undrain") as response:
                assert response.status == 200, await response.read()
            holder = successor
