"""Two vLLM engines prefill and two decode: NIXL between them, the router before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric.config import EngineConfig
from lmetric.doctor import Target, examine
from lmetric.engines.handover import CHAT, COMPLETIONS, FirstSegment
from router_world import Served, configured, served
from test_real_router import running, text
from vllm_process import MODEL, NIXL, VllmEngine, environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Start = Callable[..., list[VllmEngine]]
FIXED = {"ignore_eos": True}
LONG = 3500  # tokens of an answer during which an engine dies
# Reads paths and bodies, and prints vLLM's objection to each of them, or null.
CHECKER = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
def check(path, body):
    kind = ChatCompletionRequest if "chat" in path else CompletionRequest
    try:
        kind.model_validate_json(body)
    except Exception as error:
        return str(error)
print(json.dumps([check(*each) for each in json.load(sys.stdin)]))
"""
# Fields that depend on each other.
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": [1, 2]}),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9}),
    (COMPLETIONS, {"min_tokens": 5, "max_tokens": 9, "logprobs": 2, "return_tokens_as_token_ids": True}),
    (COMPLETIONS, {"echo": True, "max_tokens": 9, "return_token_ids": True}),
    (CHAT, {"logprobs": True, "logprob_token_ids": [1, 2]}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9}),
    (CHAT, {"min_tokens": 5, "max_tokens": 9, "max_completion_tokens": 9, "return_token_ids": True}),
]


@contextlib.asynccontextmanager
async def two_and_two(
    engines: list[VllmEngine], folder: Path, **more: Any
) -> AsyncIterator[tuple[Served, list[VllmEngine], list[VllmEngine]]]:
    """The router, the engines that prefill, and those that decode."""
    prefill, decode = engines[:2], engines[2:]
    given = [{"url": engine.url, "role": "prefill" if engine in prefill else "decode"} for engine in engines]
    # Four engines that compute on two cores leave each other's pages waiting for seconds.
    slow = {"health": {"timeout": 30}}
    flags, run = configured(folder, engines=given, decode_policy="round_robin", **slow, **more)
    async with served([], *flags, run=run) as world:
        yield world, prefill, decode


async def counted(engine: VllmEngine, name: str, label: str = "") -> float:
    """A counter of an engine's, by itself."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}") and label in line
    )


def test_vllm_accepts_the_body_of_each_prefill() -> None:
    given = []
    for path, fields in ANSWERS:
        prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
        body = json.dumps({"model": "m", **prompt, **fields}).encode()
        given += [(path, each.decode()) for each in (body, FirstSegment(path, body).for_one_token())]
    command = [environment() / "bin" / "python", "-c", CHECKER]
    run = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == [None] * len(given)


async def fetched(engines: list[VllmEngine]) -> float:
    """Prompt tokens that engines have from other engines."""
    label = 'source="external_kv_transfer"'
    return sum([await counted(e, "prompt_tokens_by_source_total", label) for e in engines])


async def computed(engines: list[VllmEngine]) -> float:
    """Prompt tokens that engines have computed."""
    return sum([await counted(e, "prompt_tokens_by_source_total", 'source="local_compute"') for e in engines])


async def outcomes(world: Served) -> dict[str, float]:
    """The number of KV transfers by outcome."""
    lines = (await world.page("/metrics")).splitlines()
    found = [line for line in lines if line.startswith("lmetric_kv_transfers_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in found}


async def alone(engine: VllmEngine, body: dict[str, Any], path: str = "/v1/completions") -> str:
    """The engine's answer to a request that is sent to it directly, not through the router."""
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body) as response:
        choice = (await response.json())["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def completion(seed: int, words: int = 200, tokens: int = 24) -> dict[str, Any]:
    prompt = text(random.Random(seed), words)
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **FIXED}


async def ask(world: Served, body: dict[str, Any]) -> tuple[str, Any]:
    """The text of the answer, and the headers of the response."""
    async with world.session.post(f"{world.url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return str(answer["choices"][0]["text"]), response.headers


async def streamed(world: Served, body: dict[str, Any]) -> str:
    stream = await world.client.completions.create(
        model=MODEL,
        prompt=body["prompt"],
        max_tokens=body["max_tokens"],
        temperature=0,
        stream=True,
        extra_body=FIXED,
    )
    return "".join([part.choices[0].text async for part in stream if part.choices])


async def test_the_answer_is_one_engines_and_the_prompt_comes_over(
    vllm_engines: Start, tmp_path: Path
) -> None:
    engines = vllm_engines(4, kv_transfer_config=NIXL)
    async with two_and_two(engines, tmp_path) as (world, prefill, decode):
        shown = await world.engines()
        for engine in engines:
            told = shown[engine.name]
            assert told["healthy"], told
            assert told["capabilities"]["handover"]["connector"] == "nixl"
            assert told["capabilities"]["handover"]["on_failure"] in ("recompute", None)
        prompt_tokens = 0
        before, computed_before = await fetched(decode), await computed(decode)
        for seed in range(6):
            body = completion(seed)
            if seed % 2:
                said = await streamed(world, body)
            else:
                said, headers = await ask(world, body)
                assert headers["x-lmetric-prefill"] in [engine.name for engine in prefill]
                assert headers["x-lmetric-instance"] in [engine.name for engine in decode]
                record = await world.record(headers)
                assert record["outcome"] == "finished"
            assert said == await alone(prefill[0], body), seed
            prompt_tokens += await _length(prefill[0], body["prompt"])
        assert await fetched(decode) - before == prompt_tokens
        assert await computed(decode) - computed_before == 0
        messages = [{"role": "user", "content": text(random.Random(99), 150)}]
        chat = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **FIXED}
        got = await world.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=16, temperature=0, extra_body=FIXED
        )
        assert got.choices[0].message.content == await alone(prefill[0], chat, "/v1/chat/completions")
        many = [completion(seed) for seed in range(100, 112)]
        texts = await asyncio.gather(*(streamed(world, body) for body in many))
        for body, said in zip(many, texts, strict=True):
            assert said == await alone(prefill[1], body)
        assert await outcomes(world) == {"transferred": 19}


async def _length(engine: VllmEngine, prompt: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/tokenize", json={"model": MODEL, "prompt": prompt}) as response,
    ):
        return int((await response.json())["count"])


async def test_what_is_late_is_computed_again(vllm_engines: Start, tmp_path: Path) -> None:
    engines = vllm_engines(4, kv_transfer_config=NIXL)
    async with two_and_two(engines, tmp_path, handover_seconds=1e-9) as (world, prefill, decode):
        before = await fetched(decode)
        body = completion(500)
        said, _ = await ask(world, body)
        assert said == await alone(prefill[0], body)
        assert (await fetched(decode), await outcomes(world)) == (before, {"late": 1})


async def test_a_client_that_leaves_frees_both(vllm_engines: Start, tmp_path: Path) -> None:
    engines = vllm_engines(4, kv_transfer_config=NIXL)
    async with two_and_two(engines, tmp_path) as (world, _, _):
        stream = await world.client.completions.create(
            model=MODEL, prompt=text(random.Random(7), 300), max_tokens=3000, stream=True, extra_body=FIXED
        )
        async for _ in stream:
            break
        assert sum([await running(engine, world) for engine in engines]) == 1
        await stream.close()

        async def idle() -> bool:
            return sum([await running(engine, world) for engine in engines]) == 0

        await world.until(idle, seconds=5)


async def test_the_doctor_proves_it(vllm_engines: Start) -> None:
    engines = vllm_engines(4, kv_transfer_config=NIXL)
    found = await examine(
        [
            Target(EngineConfig(url=engines[0].url, role="prefill")),
            Target(EngineConfig(url=engines[2].url, role="decode")),
        ]
    )
    for each in found:
        verdict = each.verdicts["handover"]
        assert verdict.outcome == "pass", verdict
        assert "the answer equals the answer of one engine" in verdict.seen


async def test_engines_die(vllm_engines: Start, tmp_path: Path) -> None:
    """A decode engine dies in mid-stream, then a prefill engine: no answer differs."""
    engines = vllm_engines(4, kv_transfer_config=NIXL)
    async with two_and_two(engines, tmp_path) as (world, prefill, decode):
        bodies = [completion(seed) for seed in range(710, 717)]
        right = [await alone(prefill[1], body) for body in bodies]

        begun: dict[int, str] = {}

        async def stream(seed: int) -> str:
            """Returns its text."""
            body = completion(seed, tokens=LONG) | {"stream": True}
            async with world.session.post(f"{world.url}/v1/completions", json=body) as response:
                raw = await response.content.readany()
                begun[seed] = response.headers["x-lmetric-instance"]
                raw += await response.read()
            events = raw.removesuffix(b"\n\n").split(b"\n\n")
            assert events.pop() == b"data: [DONE]"
            frames = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
            return "".join(choice["text"] for frame in frames for choice in frame["choices"])

        streams = {seed: asyncio.create_task(stream(seed)) for seed in range(700, 704)}

        async def one_begun() -> bool:
            return decode[0].name in begun.values()

        await world.until(one_begun, seconds=60)
        decode[0].kill()
        await asyncio.gather(*streams.values())
        # All continue at the other decode engine, also in mid-stream.
        for seed, task in streams.items():
            assert task.result() == await alone(prefill[1], completion(seed, tokens=LONG))
        for number, body in enumerate(bodies[:3]):
            said, headers = await ask(world, body)
            assert (headers["x-lmetric-instance"], said) == (decode[1].name, right[number])
        prefill[0].kill()
        for number, body in enumerate(bodies[3:6], 3):
            said, headers = await ask(world, body)
            assert (headers["x-lmetric-prefill"], said) == (prefill[1].name, right[number])
        # Nobody prefills any more: who decodes takes whole requests.
        prefill[1].kill()
        said, headers = await ask(world, bodies[6])
        assert (headers["x-lmetric-instance"], said) == (decode[1].name, right[6])
        assert "x-lmetric-prefill" not in headers
