"""The router inside a real Ray Serve: its example, cached prefixes, counts that return to zero,
replicas that come and leave during the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from ray_process import ROOT, RayServe, environ, ray_venv

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

FAMILIES, TURNS = 8, 4


@pytest.fixture(scope="module")
def ray_serve() -> Iterator[RayServe]:
    with RayServe(3) as serve:
        yield serve


def prompt(family: int, turn: int) -> str:
    return " ".join(f"f{family} w{word}" for word in range(300 * (turn + 1)))


async def ask(session: aiohttp.ClientSession, url: str, text: str, tokens: int = 8) -> dict[str, Any]:
    """The usage of a streamed answer. Fails without one, so no answer may break."""
    body = {
        "model": "emulated", "prompt": text, "max_tokens": tokens, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line async for line in answer.content if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"data: [DONE]"
    usage = orjson.loads(lines[-2][6:])["usage"]
    assert usage["completion_tokens"] == tokens
    return usage  # type: ignore[no-any-return]


async def metric(session: aiohttp.ClientSession, serve: RayServe, name: str) -> float:
    """The sum of a metric of all routers of replicas."""
    async with session.get(f"http://127.0.0.1:{serve.metrics_port}/metrics") as answer:
        page = await answer.text()
    values = re.findall(rf"^ray_{name}(?:_total)?{{[^}}]*Replica[^}}]*}} ([0-9.e+]+)$", page, re.MULTILINE)
    return sum(map(float, values))


@pytest.fixture
def example(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [ROOT / "examples" / "ray_serve" / "run"],
            env=environ(VENV=str(ray_venv())), start_new_session=True, stdout=log, stderr=log,
        )  # fmt: skip
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(90)
    print((tmp_path / "log").read_text())


async def test_the_example_serves_with_one_command(example: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            assert example.poll() is None
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get("http://127.0.0.1:8000/v1/models") as answer:
                    if answer.status == 200:
                        break
            await asyncio.sleep(1)
        usage = await ask(session, "http://127.0.0.1:8000", prompt(0, 0))
    assert usage["prompt_tokens"] > 300


async def test_turns_find_their_prefix_and_counts_return_to_zero(ray_serve: RayServe) -> None:
    async with aiohttp.ClientSession() as session:

        async def conversation(family: int) -> tuple[int, int]:
            cached = total = 0
            for turn in range(TURNS):
                usage = await ask(session, ray_serve.url, prompt(family, turn))
                if turn:
                    cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    total += usage["prompt_tokens"]
            return cached, total

        found = await asyncio.gather(*(conversation(family) for family in range(FAMILIES)))
        # A turn repeats 50 to 75% of its prompt, and the policy also balances load. Random replicas
        # find a third of the repeated part, about 20%.
        assert sum(cached for cached, _ in found) > 0.4 * sum(total for _, total in found)

        # Clients that leave in the middle.
        async def leave() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await ask(session, ray_serve.url, prompt(99, 0), tokens=2_000)

        await asyncio.gather(*(leave() for _ in range(6)))
        for _ in range(60):
            if await metric(session, ray_serve, "lmetric_requests_in_flight") == 0:
                break
            await asyncio.sleep(0.5)
        assert await metric(session, ray_serve, "lmetric_requests_in_flight") == 0
        assert await metric(session, ray_serve, "lmetric_prompt_tokens") > 0
        assert await metric(session, ray_serve, "lmetric_predicted_cached_tokens") > 0


async def test_replicas_come_and_leave_during_the_run(ray_serve: RayServe) -> None:
    async with aiohttp.ClientSession() as session:
        over = asyncio.Event()
        answers = 0

        async def client(number: int) -> None:
            nonlocal answers
            while not over.is_set():
                await ask(session, ray_serve.url, prompt(number, answers % 4), tokens=20)
                answers += 1

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        try:
            for replicas in (5, 2):
                await asyncio.sleep(3)
                await asyncio.to_thread(ray_serve.scale, replicas)
            await asyncio.sleep(3)
        finally:
            over.set()
            done = await asyncio.gather(*clients, return_exceptions=True)
        assert [each for each in done if each is not None] == []
        assert answers > 20
