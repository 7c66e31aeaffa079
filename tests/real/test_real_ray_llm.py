"""The router in Ray Serve LLM, with emulated engines in place of vLLM's.

TEST_RAY_LLM_VENV names an environment with vLLM (see install_vllm), ray[serve], pyarrow and fsspec.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from ray_process import environ, free_port
from test_real_ray import ask, prompt

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
VENV = os.environ.get("TEST_RAY_LLM_VENV")


@pytest.fixture(scope="module")
def ray_llm() -> Iterator[tuple[str, str]]:
    """The address of the API, and that of the metrics."""
    if VENV is None:
        pytest.skip("TEST_RAY_LLM_VENV is not set")
    here = Path(__file__).parent
    env = environ()
    env["PYTHONPATH"] += f"{os.pathsep}{here}"
    metrics = free_port()
    world = subprocess.Popen(
        [Path(VENV) / "bin" / "python", here / "ray_llm_world.py", str(metrics)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
    )  # fmt: skip
    assert world.stdin is not None
    assert world.stdout is not None
    try:
        port = next(line.split()[1] for line in world.stdout if line.startswith("ready"))
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics"
        world.stdin.close()
        assert world.wait(120) == 0
    finally:
        world.kill()
        world.wait()


async def test_prompts_find_their_prefix(ray_llm: tuple[str, str]) -> None:
    api, metrics = ray_llm
    async with aiohttp.ClientSession() as session:
        for family in range(4):
            for turn in range(3):
                usage = await ask(session, api, prompt(family, turn))
                if turn:
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    assert cached > 0.4 * usage["prompt_tokens"]
        for _ in range(60):
            async with session.get(metrics) as answer:
                page = await answer.text()
            if "lmetric_predicted_cached_tokens" in page:
                break
            await asyncio.sleep(0.5)
        assert "lmetric_predicted_cached_tokens" in page
