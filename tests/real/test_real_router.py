"""The router before two real vLLM engines: answers, predictions, and the death of an engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from router_world import Served, served
from vllm_process import BLOCK, MODEL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

Start = Callable[..., list[VllmEngine]]
FIXED = {"ignore_eos": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]
WORDS = [
    "river", "engine", "summer", "letter", "cache", "garden", "signal",
    "winter", "bridge", "market", "token", "memory", "queue", "castle",
]  # fmt: skip


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def until_exact(world: Served) -> None:
    """Waits until the router receives events of every engine."""

    async def exact() -> bool:
        engines = (await world.engines()).values()
        return all(engine["healthy"] and engine["mode"] == "exact" for engine in engines)

    await world.until(exact)


async def running(engine: VllmEngine, world: Served) -> float:
    """Requests that run in an engine or wait there, by itself."""
    async with world.session.get(f"{engine.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


async def test_openai_client(vllm_engines: Start) -> None:
    """Chat and completion, plain and streamed, as OpenAI's library reads them."""
    engines = vllm_engines(2)
    async with served(engines, "--policy", "round_robin") as world:
        client = world.client
        assert [card.id async for card in await client.models.list()] == [MODEL]
        messages: Any = [{"role": "user", "content": "Tell me of the river."}]
        texts: dict[str, list[str]] = {"chat": [], "completion": []}
        for _ in range(2):  # once on each engine: same weights, same answers
            chat = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=12, temperature=0, extra_body=FIXED
            )
            assert chat.choices[0].finish_reason == "length"
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 12
            said = chat.choices[0].message.content
            assert said

            pieces, usage = [], None
            async for part in await client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=FIXED,
            ):
                pieces += [choice.delta.content or "" for choice in part.choices]
                usage = part.usage or usage
            assert "".join(pieces) == said
            assert usage is not None
            assert usage.prompt_tokens == chat.usage.prompt_tokens

            completion = await client.completions.create(
                model=MODEL, prompt="The engine", max_tokens=9, temperature=0, extra_body=FIXED
            )
            assert completion.choices[0].finish_reason == "length"
            streamed = [
                part.choices[0].text
                async for part in await client.completions.create(
                    model=MODEL,
                    prompt="The engine",
                    max_tokens=9,
                    temperature=0,
                    stream=True,
                    extra_body=FIXED,
                )
            ]
            assert "".join(streamed) == completion.choices[0].text
            texts["chat"].append(said)
            texts["completion"].append(completion.choices[0].text)
        assert texts["chat"][0] == texts["chat"][1]
        assert texts["completion"][0] == texts["completion"][1]


class Conversation:
    """A client whose every turn repeats the whole conversation before it."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.rng = random.Random(seed)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": text(self.rng, 90)}]
        self.prompt = text(self.rng, 80)

    async def turn(self, world: Served) -> dict[str, Any]:
        """Sends one more turn; returns its decision record."""
        more = text(self.rng, self.rng.randrange(3, 80))
        if self.kind == "completion":
            self.prompt += f" {more}"
            answer: Any = await world.client.completions.with_raw_response.create(
                model=MODEL, prompt=self.prompt, max_tokens=20, extra_body=FIXED
            )
            self.prompt += answer.parse().choices[0].text
            return await world.record(answer.headers)
        parts = [{"type": "text", "text": more}, {"type": "text", "text": " And then?"}]
        self.messages.append({"role": "user", "content": parts if self.kind == "parts" else more})
        extra: dict[str, Any] = {"tools": TOOLS, "tool_choice": "none"} if self.kind == "tools" else {}
        answer = await world.client.chat.completions.with_raw_response.create(
            model=MODEL, messages=self.messages, max_tokens=20, extra_body=FIXED, **extra
        )
        self.messages.append({"role": "assistant", "content": answer.parse().choices[0].message.content})
        return await world.record(answer.headers)


async def test_the_prediction_is_what_the_engine_finds(vllm_engines: Start) -> None:
    """Exactly, at every turn: chats with and without tools or content in parts, and completions."""
    engines = vllm_engines(2)
    async with served(engines) as world:
        await until_exact(world)
        conversations = [
            Conversation(kind, seed)
            for seed, kind in enumerate(["chat", "tools", "parts", "completion"] * 2, start=100)
        ]
        cached, instances = 0, set()
        for turn in range(8):
            for conversation in conversations:
                record = await conversation.turn(world)
                told = (conversation.kind, turn, record)
                assert record["predicted_cached_tokens"] == record["cached_tokens"], told
                assert record["cached_tokens"] % BLOCK == 0, told
                cached += record["cached_tokens"]
                instances.add(record["instance"])
                await asyncio.sleep(0.05)  # events of the answer's last blocks are on their way
        assert cached > 10_000
        assert instances == {engine.name for engine in engines}


async def test_a_client_that_leaves_frees_the_engine(vllm_engines: Start) -> None:
    (engine,) = vllm_engines(1)
    async with served([engine]) as world:
        stream = await world.client.completions.create(
            model=MODEL, prompt="On and on", max_tokens=4000, stream=True, extra_body=FIXED
        )
        async for _ in stream:
            break
        assert await running(engine, world) == 1
        await stream.close()

        async def gone() -> bool:
            return await running(engine, world) == 0

        await world.until(gone, seconds=2)


async def test_an_engine_that_dies_and_comes_back(vllm_engines: Start) -> None:
    """Its requests fail over, the router forgets its blocks and counts, and it is exact again."""
    engines = vllm_engines(2)
    async with served(engines) as world:
        await until_exact(world)
        shared = text(random.Random(5), 300)

        async def ask() -> dict[str, Any]:
            answer = await world.client.completions.with_raw_response.create(
                model=MODEL, prompt=shared, max_tokens=2, extra_body=FIXED
            )
            await asyncio.sleep(0.1)
            return await world.record(answer.headers)

        await ask()
        second = await ask()
        assert second["predicted_cached_tokens"] == second["cached_tokens"] > 0
        holder = next(engine for engine in engines if engine.name == second["instance"])
        (other,) = (engine for engine in engines if engine is not holder)

        streams = [
            asyncio.create_task(
                world.client.completions.create(
                    model=MODEL, prompt=f"{n} {text(random.Random(n), 40)}", max_tokens=200, extra_body=FIXED
                )
            )
            for n in range(8)
        ]
        await asyncio.sleep(0.1)
        holder.kill()
        # Plain answers begin anew elsewhere: not one of them is lost.
        for answer in await asyncio.gather(*streams):
            assert answer.choices[0].finish_reason == "length"
        third = await ask()
        assert third["instance"] == other.name
        assert third["predicted_cached_tokens"] == third["cached_tokens"]

        holder.start()
        await asyncio.to_thread(holder.wait)
        await until_exact(world)
        stats = (await world.engines())[holder.name]
        assert stats["healthy"]
        # The cache is empty: with its old blocks in the index, the prediction would not be 0.
        other.stop()
        fourth = await ask()
        assert fourth["instance"] == holder.name
        assert fourth["predicted_cached_tokens"] == fourth["cached_tokens"] == 0
        fifth = await ask()
        assert fifth["predicted_cached_tokens"] == fifth["cached_tokens"] > 0
