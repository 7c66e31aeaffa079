"""Prefixes that two vLLM engines fetch from each other: clients receive one engine's answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmetric.profiles import load_profile
from router_world import Served
from split_world import CHAT, COMPLETIONS, equal
from test_real_pd import counted, outcomes
from test_real_router import running
from test_real_split import asked, cutting, request
from vllm_process import BIDIRECTIONAL, BLOCK, NIXL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

Start = Callable[..., list[VllmEngine]]
BOTH_WAYS = BIDIRECTIONAL["kv_connector_extra_config"]
# Failed fetches of a prompt's start: with "recompute" vLLM 0.32 waits for ever, see
# docs/reference/engines.md.
WHERE_IT_FAILS = {"kv_load_failure_policy": "fail"}
PAIR = NIXL | WHERE_IT_FAILS | {"kv_connector_extra_config": BOTH_WAYS}
# Computing is said to take so long that a pull pays, however long two crowded cores take for one.
SLOW_SECONDS_PER_TOKEN = 1.0
PULLS: dict[str, Any] = {
    "policy": "0 - fetch_tokens",  # wherever most is to be pulled
    "prefix_fetch": {"seconds_per_token": 0.0, "fixed_seconds": 0.0, "min_tokens": 2 * BLOCK},
    "prefix_fetch_timeout_seconds": 120.0,
    # An engine that fails is known by that only.
    "health": {"interval": 3600, "timeout": 30},
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
IDS = {"return_token_ids": True}
KINDS: list[tuple[str, dict[str, Any]]] = [
    (path, fields) for path in (COMPLETIONS, CHAT) for fields in ({}, IDS, USAGE, USAGE | IDS)
]
WORDS = 500
BUSY = (3900, 2500)  # tokens of the streams that keep an engine busy, one after the other


@contextlib.asynccontextmanager
async def pulling(
    engines: list[VllmEngine], folder: Path, *, exact: bool = True, **config: Any
) -> AsyncIterator[Served]:
    """A router that fetches every prefix it can; at the end no fetch is in progress."""
    profile = folder / "slow.yaml"
    known = load_profile("independent-sim").model_dump(exclude_none=True)
    profile.write_text(yaml.safe_dump(known | {"prefill_seconds_per_token": SLOW_SECONDS_PER_TOKEN}))
    async with cutting(engines, folder, **(PULLS | {"profile": str(profile)} | config)) as world:
        if exact:
            await heard_of(world)
        yield world

        async def over() -> bool:
            return not any((await world.indicator("fetches")).values())

        await world.until(over)


async def heard_of(world: Served) -> None:
    """Waits until the router receives both engines' events; crowded cores may delay them."""

    async def exact() -> bool:
        return all(engine["mode"] == "exact" for engine in (await world.engines()).values())

    await world.until(exact, seconds=120)


@contextlib.asynccontextmanager
async def occupied(world: Served, engine: VllmEngine) -> AsyncIterator[None]:
    """An engine that others keep busy, past the router, as the router knows by its load report."""

    async def streams(tokens: int) -> None:
        while True:
            body = request(COMPLETIONS, 1, tokens, stream=True)
            # A connection of its own: an engine may close an idle connection.
            own = {"connection": "close"}
            async with world.session.post(engine.url + COMPLETIONS, json=body, headers=own) as response:
                assert response.status == 200, await response.read()
                async for _ in response.content.iter_any():
                    pass

    async def busy() -> bool:
        return (await world.indicator("bs"))[engine.name] == len(BUSY)

    async def idle() -> bool:
        return (await world.indicator("bs"))[engine.name] == 0

    tasks = [asyncio.create_task(streams(tokens)) for tokens in BUSY]
    try:
        await world.until(busy, seconds=60)
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    await world.until(idle, seconds=60)


async def pulls(world: Served) -> dict[str, float]:
    """The number of prefix fetches by outcome."""
    lines = (await world.page("/metrics")).splitlines()
    found = [line for line in lines if line.startswith("lmetric_prefix_fetches_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in found}


async def sources(engine: VllmEngine) -> dict[str, float]:
    """Where an engine had the tokens of its prompts from."""
    names = ("external_kv_transfer", "local_compute", "local_cache_hit")
    return {n: await counted(engine, "prompt_tokens_by_source_total", f'source="{n}"') for n in names}


def less(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def behind(body: dict[str, Any], more: str) -> dict[str, Any]:
    """The same request with more words at its end."""
    if "messages" in body:
        (message,) = body["messages"]
        return body | {"messages": [message | {"content": message["content"] + more}]}
    return body | {"prompt": body["prompt"] + more}


async def heated(world: Served, engine: VllmEngine, path: str, body: dict[str, Any]) -> None:
    """Has an engine compute a prompt, past the router, which hears of it by the engine's events."""
    alone = {name: value for name, value in body.items() if not name.startswith("stream")}
    headers = {"connection": "close"}  # vLLM closes connections that were idle for 5 s
    async with world.session.post(
        engine.url + path, json=alone | {"max_tokens": 2}, headers=headers
    ) as response:
        assert response.status == 200, await response.read()


@contextlib.contextmanager
def frozen(engine: VllmEngine) -> Any:
    """An engine that stands still."""
    engine.freeze()
    try:
        yield
    finally:
        engine.thaw()


async def test_a_prefix_is_pulled_and_known_afterwards(vllm_engines: Start, tmp_path: Path) -> None:
    """The other engine answers, with what it fetches; then the router knows that both hold it."""
    engines = vllm_engines(2, kv_transfer_config=PAIR)
    holder, target = engines
    fetched_tokens = 0
    async with pulling(engines, tmp_path) as world:
        for number, (path, fields) in enumerate(KINDS, 1):
            first = request(path, WORDS, 16, **fields)
            body = behind(first, " and then the river")
            await heated(world, holder, path, first)
            want = await asked(world, path, body, target.url)
            await heard_of(world)
            before = [await sources(engine) for engine in engines]
            began = time.monotonic()
            said = await asked(world, path, body)
            seconds = time.monotonic() - began
            gave, took = [
                less(await sources(engine), was) for engine, was in zip(engines, before, strict=True)
            ]
            record = await world.record(said["headers"])
            held = record["fetch_seconds"]
            print(f"{path} {list(fields)}: {seconds:.2f} s, the holder took {held:.2f} s,", gave, took)
            equal(said, want)
            assert said["headers"]["x-lmetric-instance"] == target.name
            assert said["headers"]["x-lmetric-prefill"] == record["fetch_instance"] == holder.name
            prompt, tokens = want["usage"]["prompt_tokens"], record["fetched_tokens"]
            assert tokens == (prompt - 1) // BLOCK * BLOCK
            assert took == {
                "external_kv_transfer": tokens,
                "local_compute": prompt - tokens,
                "local_cache_hit": 0,
            }
            # Of a prompt that it holds as a whole, vLLM computes the last block again.
            assert gave == {
                "external_kv_transfer": 0,
                "local_compute": BLOCK,
                "local_cache_hit": tokens - BLOCK,
            }
            if details := said["usage"].get("prompt_tokens_details"):
                assert details["cached_tokens"] == tokens
            fetched_tokens += tokens
            answered: set[str] = set()
            async with asyncio.timeout(60):
                while len(answered) < 2:  # drawn by lot between equals
                    again = await asked(world, path, body)
                    equal(again, want)
                    record = await world.record(again["headers"])
                    assert record["fetch_instance"] is None
                    assert record["predicted_cached_tokens"] == record["cached_tokens"] >= tokens
                    answered.add(again["headers"]["x-lmetric-instance"])
            assert (await pulls(world), await outcomes(world)) == (
                {"fetched": number},
                {"transferred": number},
            )
        page = await world.page("/metrics")
        assert f'lmetric_prefix_fetched_tokens_total{{model="tiny"}} {fetched_tokens}.0' in page


async def test_a_prefix_is_pulled_and_its_answer_goes_on_elsewhere(
    vllm_engines: Start, tmp_path: Path
) -> None:
    """Three segments: the second computes the prompt and returns the first token."""
    engines = vllm_engines(2, kv_transfer_config=PAIR)
    holder, target = engines
    settings = {"kind": "apart", "min_gain_seconds": 0, "max_stall_seconds": 60}
    went = 0
    async with pulling(engines, tmp_path, split=settings) as world:
        for path, fields in KINDS:
            first = request(path, WORDS, 16, **fields)
            body = behind(first, " and then the river")
            await heated(world, holder, path, first)
            want = await asked(world, path, body, target.url)
            await heard_of(world)
            before = [await sources(engine) for engine in engines]
            said = await asked(world, path, body)
            gave, took = [
                less(await sources(engine), was) for engine, was in zip(engines, before, strict=True)
            ]
            record = await world.record(said["headers"])
            print(path, list(fields), record["cuts"], record["split_reason"], gave, took, flush=True)
            equal(said, want)
            assert (record["instance"], record["fetch_instance"]) == (target.name, holder.name)
            prompt, tokens = want["usage"]["prompt_tokens"], record["fetched_tokens"]
            assert took["external_kv_transfer"] == tokens == (prompt - 1) // BLOCK * BLOCK
            assert took["local_compute"] == prompt - tokens
            if not record["cuts"]:
                # Nothing speaks for another engine until this one has computed a prompt.
                assert (went, record["split_reason"]) == (0, "a decode on another instance gains too little")
                continue
            went += 1
            assert (record["cuts"], record["decode_instance"]) == ([prompt + 1], holder.name)
            # It fetches what it does not hold, and computes the first token's.
            assert gave["external_kv_transfer"] == prompt - tokens
            assert gave["local_compute"] == BLOCK + 1
        assert went >= len(KINDS) - 1
        assert await pulls(world) == {"fetched": len(KINDS)}
        assert await outcomes(world) == {"transferred": len(KINDS) + went}


async def test_a_busy_holder_is_pulled_from(vllm_engines: Start, tmp_path: Path) -> None:
    """`lmetric_pull` sends the request elsewhere, as it is not crowded there."""
    engines = vllm_engines(2, kv_transfer_config=PAIR)
    holder, target = engines
    async with pulling(engines, tmp_path, policy="lmetric_pull") as world:
        first = request(COMPLETIONS, WORDS, 8, **USAGE)
        body = behind(first, " and then the river")
        await heated(world, holder, COMPLETIONS, first)
        want = await asked(world, COMPLETIONS, body, target.url)
        async with occupied(world, holder):
            await heard_of(world)
            said = await asked(world, COMPLETIONS, body)
        equal(said, want)
        assert said["headers"]["x-lmetric-instance"] == target.name
        assert said["headers"]["x-lmetric-prefill"] == holder.name
        assert await pulls(world) == {"fetched": 1}


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_holder_that_dies(vllm_engines: Start, tmp_path: Path, when: str) -> None:
    """Before it is asked, or while it is: the request is answered all the same."""
    engines = vllm_engines(2, kv_transfer_config=PAIR)
    holder, target = engines
    async with pulling(engines, tmp_path) as world:
        first = request(COMPLETIONS, WORDS, 40, **USAGE)
        body = behind(first, " and then the river")
        await heated(world, holder, COMPLETIONS, first)
        want = await asked(world, COMPLETIONS, body, target.url)
        if when == "before":
            await asyncio.to_thread(holder.kill)
            said = await asked(world, COMPLETIONS, body)
        else:
            holder.freeze()
            task = asyncio.create_task(asked(world, COMPLETIONS, body))
            await until_pulling(world, holder)
            await asyncio.to_thread(holder.kill)
            said = await task
        equal(said, want)
        record = await world.record(said["headers"])
        assert (record["fetch_instance"], record["fetched_tokens"]) == (holder.name, 0)
        assert "x-lmetric-prefill" not in said["headers"]
        assert (await pulls(world), await outcomes(world)) == ({"holder_failed": 1}, {})
        # Nobody holds it any more.
        for path, fields in KINDS:
            body = request(path, WORDS, 20, **fields)
            said = await asked(world, path, body)
            equal(said, await asked(world, path, body, target.url))
            assert said["headers"]["x-lmetric-instance"] == target.name


async def until_pulling(world: Served, holder: VllmEngine) -> None:
    async def asked_for() -> bool:
        return (await world.indicator("fetches"))[holder.name] == 1

    await world.until(asked_for)


async def test_a_holder_that_dies_before_the_target_has_fetched(vllm_engines: Start, tmp_path: Path) -> None:
    """It answered, so the router sent the request on; its engine cannot fetch, and computes."""
    engines = vllm_engines(2, kv_transfer_config=PAIR)
    holder, target = engines
    async with pulling(engines, tmp_path) as world:
        first = request(COMPLETIONS, WORDS, 40, **USAGE)
        body = behind(first, " and then the river")
        await heated(world, holder, COMPLETIONS, first)
        want = await asked(world, COMPLETIONS, body, target.url)
        before = await sources(target)

        async def answered() -> bool:
            return bool(await pulls(world))

        with frozen(target):
            task = asyncio.create_task(asked(world, COMPLETIONS, body))
            await world.until(answered)
            await asyncio.sleep(1)  # the request is in its socket
            await asyncio.to_thread(holder.kill)
        began = time.monotonic()
        said = await task
        print(f"answered {time.monotonic() - began:.2f} s after", less(await sources(target), before))
        equal(said, want)
        record = await world.record(said["headers"])
        print(record, await pulls(world), await outcomes(world))


@pytest.mark.parametrize("which", ["holder", "target"])
async def test_a_client_that_leaves(vllm_engines: Start, tmp_path: Path, which: str) -> None:
    """While the holder is asked or the other engine fetches: nothing is left, both serve on."""
    engines = vllm_engines(2, kv_transfer_config=PAIR)
    holder, target = engines
    async with pulling(engines, tmp_path) as world:
        for path, fields in KINDS[1::2]:
            first = request(path, WORDS, 40, **fields)
            body = behind(first, " and then the river")
            await heated(world, holder, path, first)
            await heard_of(world)
            # A frozen engine keeps its last load report, and this one must have no request in it.
            await world.until(lambda: nothing(world))
            counts = await pulls(world)

            async def told(counts: dict[str, float] = counts) -> bool:
                return await pulls(world) != counts

            with frozen(holder if which == "holder" else target):
                task = asyncio.create_task(asked(world, path, body))
                if which == "holder":
                    await until_pulling(world, holder)
                else:
                    await world.until(told, seconds=60)
                    await asyncio.sleep(0.5)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await world.until(lambda: nothing(world))
            for engine in engines:
                await world.until(lambda engine=engine: rests(world, engine), seconds=60)
            came = "ended" if which == "holder" else "fetched"
            assert await pulls(world) == counts | {came: counts.get(came, 0) + 1}
            said = await asked(world, path, body)
            equal(said, await asked(world, path, body, holder.url))
            print(path, await pulls(world), await outcomes(world), said["headers"].get("x-lmetric-prefill"))


async def nothing(world: Served) -> bool:
    """Nothing is in flight, as the router counts."""
    return not any([*(await world.indicator("bs")).values(), *(await world.indicator("fetches")).values()])


async def rests(world: Served, engine: VllmEngine) -> bool:
    return await running(engine, world) == 0


# Engines that hold few prompts: 2,048 tokens.
SMALL = {"max_model_len": 1024, "num_gpu_blocks_override": 64}
LEASE_SECONDS = 30
BRIEF = PAIR | {
    "kv_connector_extra_config": BOTH_WAYS | {"kv_lease_duration": LEASE_SECONDS, "decoder_kv_blocks_ttl": 2}
}


@pytest.mark.parametrize("exact", [True, False])
async def test_a_holder_that_has_evicted_the_prefix(vllm_engines: Start, tmp_path: Path, exact: bool) -> None:
    """By its events the router knows; without, it asks, and the holder computes the prefix."""
    events: dict[str, Any] = {} if exact else {"kv_events_config": None}
    engines = vllm_engines(2, kv_transfer_config=BRIEF, **SMALL, **events)
    async with pulling(engines, tmp_path, exact=exact) as world:
        for path, fields in KINDS[1::2]:
            first = request(path, WORDS, 20, **fields)
            body = behind(first, " and then the river")
            said = await asked(world, path, first)
            (holder,) = (e for e in engines if e.name == said["headers"]["x-lmetric-instance"])
            (target,) = (e for e in engines if e is not holder)
            for _ in range(5):
                await heated(world, holder, COMPLETIONS, request(COMPLETIONS, WORDS, 2))
            if exact:
                await asyncio.sleep(1)  # its events are on their way
            before = [await sources(engine) for engine in (holder, target)]
            said = await asked(world, path, body)
            gave, took = [
                less(await sources(engine), was) for engine, was in zip((holder, target), before, strict=True)
            ]
            equal(said, await asked(world, path, body, target.url))
            record = await world.record(said["headers"])
            print(path, record["fetch_instance"], record["fetched_tokens"], gave, took)
            if exact:
                assert record["fetch_instance"] is None
                assert record["cached_tokens"] == 0
            else:
                assert record["fetch_instance"] == holder.name
                assert gave["local_compute"] == record["fetched_tokens"] == took["external_kv_transfer"] > 400
        assert await pulls(world) == ({} if exact else {"fetched": 4})


async def test_what_is_pulled_does_not_fill_its_engine(vllm_engines: Start, tmp_path: Path) -> None:
    """vLLM keeps a fetching request's blocks for one more lease after its end; six fill it."""
    holder, target = vllm_engines(2, kv_transfer_config=BRIEF, **SMALL)
    tokens = []
    async with pulling([holder, target], tmp_path) as world:
        for _ in range(9):
            first = request(COMPLETIONS, 300, 4)
            await heated(world, holder, COMPLETIONS, first)
            began = time.monotonic()
            said = await asked(world, COMPLETIONS, behind(first, " and then the river"))
            seconds = time.monotonic() - began
            record = await world.record(said["headers"])
            tokens.append(record["fetched_tokens"] or 0)
            used = await counted(target, "kv_cache_usage_perc")
            shown = (await world.indicator("kv_usage"))[target.name]
            print(
                f"{seconds:.2f} s",
                tokens[-1],
                said["headers"]["x-lmetric-instance"] == target.name,
                used,
                shown,
            )
            assert used < 1
