"""vLLM engines with the schedulers of lmetric-vllm: same answers, bounded steps, refusals."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from vllm_process import MODEL, VllmEngine, environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
ENVIRON = {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'integrations' / 'vllm'}"}
Start = Callable[..., list[VllmEngine]]
# Few slots and little memory: requests wait, and running ones go back.
CROWDED: dict[str, Any] = {
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 100,
    "max_model_len": 3072,
    "scheduling_policy": "fcfs",
    "kv_events_config": None,
}
SLO: dict[str, Any] = {
    "scheduler_cls": "lmetric_vllm.SloScheduler",
    "additional_config": {"lmetric": {"token_slo_ms": 20}},
}
BOOST: dict[str, Any] = {
    "scheduler_cls": "lmetric_vllm.UniBoostScheduler",
    "additional_config": {"lmetric": {"bin_tokens": 32, "hysteresis_seconds": 0.01}},
}
COLOR = {"structured_outputs": {"choice": ["red", "green", "blue"]}}


def requests(count: int) -> list[dict[str, Any]]:
    """Short and long prompts, some with a common prefix, some bound to a grammar."""
    rng = random.Random(5)
    shared = " ".join(f"w{rng.randrange(500)}" for _ in range(120))
    bodies = []
    for number in range(count):
        words = rng.choice([5, 20, 60, 300])
        prompt = (shared if number % 3 == 0 else "") + " ".join(
            f"v{rng.randrange(500)}" for _ in range(words)
        )
        body = {"prompt": prompt, "max_tokens": rng.choice([4, 30, 90]), "ignore_eos": True}
        if number % 10 == 0:
            body = {"prompt": prompt, "max_tokens": 8} | COLOR
        if number % 7 == 0:
            body["vllm_xargs"] = {"token_slo_ms": 5}
        bodies.append(body)
    return bodies


async def answers(engine: VllmEngine, bodies: list[dict[str, Any]]) -> list[str]:
    """The greedy answers, all requests at once."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def one(body: dict[str, Any]) -> str:
            whole = {"model": MODEL, "temperature": 0, **body}
            async with session.post(f"{engine.url}/v1/completions", json=whole) as answer:
                found = await answer.json()
                assert answer.status == 200, found
                return str(found["choices"][0]["text"])

        return await asyncio.gather(*map(one, bodies))


async def preemptions(engine: VllmEngine) -> float:
    """Requests that the engine took back since its start."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as page:
        lines = (await page.text()).splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_preemptions_total")]
    return sum(found)


async def test_answers_are_those_of_vllm(vllm_engines: Start) -> None:
    bodies = requests(300)
    (stock,) = vllm_engines(**CROWDED)
    expected = await answers(stock, bodies)
    for flags in (SLO, BOOST):
        (engine,) = vllm_engines(environ=ENVIRON, **CROWDED, **flags)
        got = await answers(engine, bodies)
        differ = [number for number, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
        assert not differ, f"{flags['scheduler_cls']}: answers {differ[:10]} differ"
        if flags is BOOST:
            assert await preemptions(engine) > 0, "no request went back: the test compares nothing"


async def test_long_prompts_wait_for_decodes(vllm_engines: Start) -> None:
    """A long prompt beside a chat: the longest gap of the chat's stream with the scheduler is
    less than half of vLLM's own."""
    longest = {}
    for name, flags, environ in (("stock", {}, {}), ("slo", SLO, ENVIRON)):
        (engine,) = vllm_engines(
            environ=environ,
            max_num_batched_tokens=4096,
            scheduling_policy="fcfs",
            kv_events_config=None,
            **flags,
        )
        await gap_beside_prompts(engine)  # the table fills
        longest[name] = min([await gap_beside_prompts(engine) for _ in range(3)])
    assert longest["slo"] < longest["stock"] / 2, longest


async def gap_beside_prompts(engine: VllmEngine) -> float:
    """Longest time between two tokens of a stream, while three long prompts arrive, in seconds."""
    gaps: list[float] = []
    begun = asyncio.Event()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def chat() -> None:
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
            last = 0.0
            async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        if last:
                            gaps.append(now - last)
                            begun.set()
                        last = now

        async def prompt() -> None:
            await begun.wait()
            words = " ".join(f"x{random.randrange(900)}" for _ in range(900))
            body = {"model": MODEL, "prompt": words, "max_tokens": 1}
            async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

        await asyncio.gather(chat(), *(prompt() for _ in range(3)))
    return max(gaps)


def test_the_package_changes_no_version_of_vllms() -> None:
    """Both packages go into vLLM's environment, and only add to it."""
    venv = environment()
    command = [venv / "bin" / "uv", "pip", "install", "--dry-run", "--python", venv / "bin" / "python"]
    done = subprocess.run([*command, ROOT, ROOT / "integrations" / "vllm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changes = [line.strip() for line in done.stderr.splitlines() if line.startswith((" + ", " - ", " ~ "))]
    assert any(line.startswith("+ lmetric-vllm") for line in changes), done.stderr
    assert not [line for line in changes if not line.startswith("+ ")], changes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"scheduler_cls": SLO["scheduler_cls"]}, "lmetric.token_slo_ms: missing"),
        (SLO | {"additional_config": {"lmetric": {"token_slo_ms": 20, "profile": "nothing"}}}, "nothing"),
        (
            SLO | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
        ),
        (BOOST | {"scheduling_policy": "priority"}, "--scheduling-policy fcfs"),
    ],
)
def test_an_engine_that_was_not_tested_does_not_start(
    vllm_engines: Start, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match="ended") as refused:
        vllm_engines(environ=ENVIRON, **(CROWDED | flags))
    assert message in str(refused.value)
