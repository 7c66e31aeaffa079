"""Two vLLM engines between which requests are cut: one answer, with one engine's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from router_world import Served, configured, served
from split_world import CHAT, COMPLETIONS, equal, heard, told
from test_real_pd import computed, fetched, outcomes
from test_real_router import TOOLS, text
from vllm_process import BIDIRECTIONAL, MODEL, NIXL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Start = Callable[..., list[VllmEngine]]
# Words of the prompt and tokens of the answer. The same fractions cut inside the prompt, near its
# end, and inside the answer.
SHAPES = [(120, 40), (50, 90), (20, 150)]
_seeds = itertools.count(1)


def fresh(what: str) -> str:
    """A name that nothing else has."""
    return f"{what} {next(_seeds)}"


@contextlib.asynccontextmanager
async def cutting(engines: list[VllmEngine], folder: Path, **config: Any) -> AsyncIterator[Served]:
    """A router that has seen what the engines can do."""
    # Engines that compute on two cores leave each other's pages waiting for seconds.
    given = {"policy": "round_robin", "experimental": True, "health": {"timeout": 30}, **config}
    flags, run = configured(folder, engines=[{"url": e.url} for e in engines], **given)
    async with served([], *flags, run=run) as world:

        async def seen() -> bool:
            shown = (await world.engines()).values()
            return all(each["healthy"] and knows_mode(each["capabilities"]) for each in shown)

        await world.until(seen, seconds=60)
        yield world


def knows_mode(capabilities: dict[str, Any]) -> bool:
    """Whether the page of a busy engine that shows the mode of its transfers was read."""
    handover = capabilities.get("handover") or {"bidirectional": False}
    return bool(capabilities) and handover["bidirectional"] is not None


async def asked(world: Served, path: str, body: dict[str, Any], url: str | None = None) -> dict[str, Any]:
    """The answer of the router, or of the engine at `url`, which computes everything itself."""
    headers = {}
    if url is not None:
        body = body | {"cache_salt": fresh("alone")}
        # vLLM closes a connection that was idle for 5 s, perhaps just as it is used again.
        headers["connection"] = "close"
    async with world.session.post((url or world.url) + path, json=body, headers=headers) as response:
        raw = await response.read()
        assert response.status == 200, raw
        said = heard(raw) if body.get("stream") else told(orjson.loads(raw))
        said["headers"] = response.headers
    return said


def request(path: str, words: int, tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy request whose prompt nobody has seen."""
    said = text(random.Random(fresh("cut")), words)
    prompt = {"messages": [{"role": "user", "content": said}]} if path == CHAT else {"prompt": said}
    fixed = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return prompt | fixed | fields


def kinds(words: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Chats and completions, streamed and not, with token ids told and not."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    ids = {"return_token_ids": True}
    rng = random.Random(fresh("ids"))
    return [
        (COMPLETIONS, request(COMPLETIONS, words, tokens)),
        (COMPLETIONS, request(COMPLETIONS, words, tokens, **usage, **ids)),
        # As many as its answer: cut in half, it is cut at the prompt's end.
        (
            COMPLETIONS,
            request(COMPLETIONS, 1, tokens) | ids | {"prompt": rng.choices(range(300, 2000), k=tokens)},
        ),
        (CHAT, request(CHAT, words, tokens, **ids)),
        (CHAT, request(CHAT, words, tokens, **usage)),
    ]


async def length(world: Served, engine: VllmEngine, body: dict[str, Any]) -> int:
    """Tokens of a prompt, as an engine counts them."""
    if isinstance(body.get("prompt"), list):
        return len(body["prompt"])
    asks = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
    async with world.session.post(f"{engine.url}/tokenize", json=asks) as response:
        return int((await response.json())["count"])


async def cut_requests(world: Served) -> int:
    """As the router counts them."""
    lines = (await world.page("/metrics")).splitlines()
    return sum(
        int(float(x.rpartition(" ")[2])) for x in lines if x.startswith("lmetric_split_requests_total{")
    )


@pytest.mark.parametrize("at", [0.2, 0.5, 0.8])
async def test_cut_anywhere(vllm_engines: Start, tmp_path: Path, at: float) -> None:
    engines = vllm_engines(2, kv_transfer_config=BIDIRECTIONAL)
    async with cutting(engines, tmp_path, split={"kind": "force", "fraction": at}) as world:
        shown = await world.engines()
        assert all(shown[e.name]["capabilities"]["handover"]["bidirectional"] for e in engines), shown
        requests = [each for shape in SHAPES for each in kinds(*shape)]
        for number, (path, body) in enumerate(requests):
            prompt = await length(world, engines[0], body)
            before = await fetched(engines), await computed(engines)
            said = await asked(world, path, body)
            record = await world.record(said["headers"])
            cut = math.ceil(at * (prompt + body["max_tokens"]))
            assert (record["cuts"], record["split_reason"], record["outcome"]) == ([cut], None, "finished")
            first, second = said["headers"]["x-lmetric-prefill"], said["headers"]["x-lmetric-instance"]
            assert {first, second} == {engine.name for engine in engines}
            after = await fetched(engines), await computed(engines)
            # Of a token made before the cut, the second computes the KV.
            kept = int(cut > prompt)
            expected = (cut - kept, prompt + kept)
            assert (after[0] - before[0], after[1] - before[1]) == expected, (path, body, cut)
            equal(said, await asked(world, path, body, engines[number % 2].url))
        assert await outcomes(world) == {"transferred": len(requests)}
        assert await cut_requests(world) == len(requests)


async def test_many_at_once_and_answers_that_stop(vllm_engines: Start, tmp_path: Path) -> None:
    """Answers stop in the first segment, in the second, and at the boundary."""
    engines = vllm_engines(2, kv_transfer_config=BIDIRECTIONAL)
    async with cutting(engines, tmp_path, split={"kind": "force", "fraction": 0.8}) as world:
        plain = [request(COMPLETIONS, 30, 120, return_token_ids=True) for _ in range(8)]
        whole = await asyncio.gather(*(asked(world, COMPLETIONS, body, engines[1].url) for body in plain))
        bodies = []
        for number, (body, said) in enumerate(zip(plain, whole, strict=True)):
            seam = math.ceil(0.8 * (said["usage"]["prompt_tokens"] + 120)) - said["usage"]["prompt_tokens"]
            place = (5, seam - 1, seam, seam + 1, 110, seam // 2, 60, 119)[number]
            streams = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
            bodies.append(body | streams | {"stop_token_ids": [said["ids"][place]]})
        got = await asyncio.gather(*(asked(world, COMPLETIONS, body) for body in bodies))
        for body, said in zip(bodies, got, strict=True):
            equal(said, await asked(world, COMPLETIONS, body, engines[0].url))
            assert said["finish"] == "stop"
        assert set(await outcomes(world)) <= {"transferred"}


async def test_libra_cuts_what_it_likes(vllm_engines: Start, tmp_path: Path) -> None:
    engines = vllm_engines(2, kv_transfer_config=BIDIRECTIONAL)
    eager = {"kind": "libra", "min_gain": 0.0, "min_tokens": 8, "transfer_fixed_seconds": 0.0}
    config = {"policy": "lmetric", "profile": "independent-sim", "split": eager}
    async with cutting(engines, tmp_path, **config) as world:
        shapes = [(300, 60), (40, 200), (500, 30)]
        # It knows of no length at first, and cuts nothing.
        learned = [(await asked(world, *each))["headers"] for shape in shapes for each in kinds(*shape)]
        assert "output lengths are unknown" in (await world.record(learned[0]))["split_reason"]
        requests = [each for shape in shapes for each in kinds(*shape)]
        wanted = [await asked(world, path, body, engines[0].url) for path, body in requests]
        turns = asyncio.Semaphore(8)

        async def one(path: str, body: dict[str, Any]) -> dict[str, Any]:
            async with turns:
                return await asked(world, path, body)

        got = await asyncio.gather(*(one(path, body) for path, body in requests))
        for said, want in zip(got, wanted, strict=True):
            equal(said, want)
        records = [await world.record(headers) for headers in [*learned, *(s["headers"] for s in got)]]
        cuts = sum(bool(record["cuts"]) for record in records[len(learned) :])
        print("cut:", cuts, "of", len(requests), await outcomes(world))
        print("whole:", Counter(record["split_reason"] for record in records if record["split_reason"]))
        assert cuts > 0
        assert sum(bool(record["cuts"]) for record in records) == await cut_requests(world)


async def test_log_probabilities_are_joined(vllm_engines: Start, tmp_path: Path) -> None:
    engines = vllm_engines(2, kv_transfer_config=BIDIRECTIONAL)
    async with cutting(engines, tmp_path, split={"kind": "force", "fraction": 0.6}) as world:
        for stream in (False, True):
            body = request(COMPLETIONS, 10, 60, logprobs=2, return_token_ids=True, stream=stream)
            got, want = [await logprobs(world, body, url) for url in (world.url, engines[0].url)]
            assert len((await world.record(got["headers"]))["cuts"]) == 1
            assert got["tokens"] == want["tokens"]
            # In a stream they depend on which tokens come in one chunk.
            assert stream or got["text_offset"] == want["text_offset"]
            assert got["token_logprobs"] == pytest.approx(want["token_logprobs"], abs=1e-3)
            for mine, its in zip(got["top_logprobs"], want["top_logprobs"], strict=True):
                assert mine == pytest.approx(its, abs=1e-3)


async def logprobs(world: Served, body: dict[str, Any], url: str) -> dict[str, Any]:
    """The log probabilities of a completion, its chunks' one after the other."""
    body = body | {"cache_salt": fresh("alone")}
    async with world.session.post(url + COMPLETIONS, json=body, headers={"connection": "close"}) as response:
        raw, said = await response.read(), {"headers": response.headers}
    events = raw.split(b"\n\n")[:-2] if body["stream"] else [raw]
    for event in events:
        (choice,) = orjson.loads(event.removeprefix(b"data: "))["choices"]
        for name, values in choice["logprobs"].items():
            said[name] = said.get(name, []) + values
    return said


async def test_what_stays_whole_says_why_and_is_right(vllm_engines: Start, tmp_path: Path) -> None:
    engines = vllm_engines(2, kv_transfer_config=BIDIRECTIONAL)
    named = {"type": "function", "function": {"name": "weather"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": True, "top_logprobs": 2}, "(logprobs)"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "(tools)"),
        ({"tools": TOOLS, "tool_choice": named}, "(tools)"),
        ({"stop": ["qqq"]}, "(stop)"),
        ({"presence_penalty": 0.5}, "(presence_penalty)"),
    ]
    async with cutting(engines, tmp_path, split={"kind": "force", "fraction": 0.6}) as world:
        for fields, why in cases:
            body = request(CHAT, 10, 120, **fields)
            answers, headers = [], []
            for url in (world.url, engines[0].url):
                salted = body | {"cache_salt": fresh("alone")}
                head = {"connection": "close"}
                async with world.session.post(url + CHAT, json=salted, headers=head) as response:
                    assert response.status == 200, await response.read()
                    answers.append((await response.json())["choices"][0])
                    headers.append(response.headers)
            record = await world.record(headers[0])
            assert (record["cuts"], record["outcome"]) == ([], "finished")
            assert why in record["split_reason"]
            for answer in answers:
                for call in answer["message"].get("tool_calls") or ():
                    assert call.pop("id")  # drawn at random
            # Weights drawn at random call it with arguments that the engine may take for mere text.
            assert (b"weather" in orjson.dumps(answers[0])) == (fields.get("tool_choice") is named)
            if fields.get("logprobs"):
                told = [
                    (each["token"], pytest.approx(each["logprob"], abs=1e-3))
                    for each in answers[1].pop("logprobs")["content"]
                ]
                assert [(e["token"], e["logprob"]) for e in answers[0].pop("logprobs")["content"]] == told
            assert answers[0] == answers[1], fields


async def test_an_engine_dies(vllm_engines: Start, tmp_path: Path) -> None:
    """During first and second segments: clients get whole answers, or one clean error."""
    engines = vllm_engines(2, kv_transfer_config=BIDIRECTIONAL)
    async with cutting(engines, tmp_path, split={"kind": "force", "fraction": 0.6}) as world:
        bodies = [
            request(COMPLETIONS, 20, tokens, stream=True) for tokens in (300, 300, 900, 900, 1500, 1500)
        ]
        began: asyncio.Event = asyncio.Event()

        async def stream(body: dict[str, Any]) -> dict[str, Any]:
            async with world.session.post(f"{world.url}{COMPLETIONS}", json=body) as response:
                raw = await response.content.readany()
                began.set()
                return heard(raw + await response.read())

        streams = [asyncio.create_task(stream(body)) for body in bodies]
        await asyncio.wait_for(began.wait(), 120)
        engines[0].kill()
        got = await asyncio.wait_for(asyncio.gather(*streams), 300)
        wanted = [await asked(world, COMPLETIONS, body, engines[1].url) for body in bodies]
        errors = 0
        for said, want in zip(got, wanted, strict=True):
            if "error" in said:
                errors += 1
                assert said["finish"] is None
                assert said["text"]  # else it would have gone elsewhere
                assert want["text"].startswith(said["text"])
            else:
                assert (said["text"], said["finish"]) == (want["text"], want["finish"])
        print("broke off:", errors, await outcomes(world))
        assert errors < len(bodies)

        for path, body in kinds(40, 30):
            said = await asked(world, path, body)
            assert said["headers"]["x-lmetric-instance"] == engines[1].name
            equal(said, await asked(world, path, body, engines[1].url))

        async def idle() -> bool:
            async with world.session.get(f"{engines[1].url}/metrics") as response:
                lines = (await response.text()).splitlines()
            waits = [
                x for x in lines if x.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
            ]
            return all(float(line.rpartition(" ")[2]) == 0 for line in waits)

        await world.until(idle, seconds=30)


async def test_plain_nixl_cuts_at_the_prompts_end_or_behind(vllm_engines: Start, tmp_path: Path) -> None:
    engines = vllm_engines(2, kv_transfer_config=NIXL)
    async with cutting(engines, tmp_path, split={"kind": "force", "fraction": 0.4}) as world:
        requests = [each for shape in SHAPES for each in kinds(*shape)]
        for number, (path, body) in enumerate(requests):
            prompt = await length(world, engines[0], body)
            before = await fetched(engines), await computed(engines)
            said = await asked(world, path, body)
            record = await world.record(said["headers"])
            cut = max(prompt, math.ceil(0.4 * (prompt + body["max_tokens"])))
            assert (record["cuts"], record["split_reason"], record["outcome"]) == ([cut], None, "finished")
            after = await fetched(engines), await computed(engines)
            assert (after[0] - before[0], after[1] - before[1]) == (cut, prompt), (path, body, cut)
            equal(said, await asked(world, path, body, engines[number % 2].url))
        assert await outcomes(world) == {"transferred": len(requests)}


async def test_without_a_connector_it_is_computed_again(vllm_engines: Start, tmp_path: Path) -> None:
    engines = vllm_engines(2)
    async with cutting(
        engines, tmp_path, split={"kind": "force", "fraction": 0.6}, split_recompute=True
    ) as world:
        requests = [each for shape in SHAPES for each in kinds(*shape)]
        cuts = 0
        for number, (path, body) in enumerate(requests):
            prompt = await length(world, engines[0], body)
            before = await computed(engines)
            said = await asked(world, path, body)
            record = await world.record(said["headers"])
            again = await computed(engines) - before - prompt
            # A cut inside the prompt would save nobody anything.
            cut = math.ceil(0.6 * (prompt + body["max_tokens"]))
            print(prompt, body["max_tokens"], cut, record["cuts"], record["split_reason"], again)
            assert again == sum(record["cuts"])
            cuts += len(record["cuts"])
            equal(said, await asked(world, path, body, engines[number % 2].url))
        assert await fetched(engines) == 0
        assert await outcomes(world) == {"no_connector": cuts}
