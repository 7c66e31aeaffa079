"""Streams that move by KV transfer, while they run, from the source's prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmetric_lab.emulated import EngineOptions
from moves_world import LONG, at_token, move, mover, moving, place, plain, shoved
from pd_world import nixl
from split_world import CHAT, COMPLETIONS, PROMPTS, alone, asked, body_of, both, equal
from waiting import PATIENCE_SECONDS

PATHS = [CHAT, COMPLETIONS]
USAGE = {"include_usage": True}
PULL: dict[str, Any] = {"migration_by": "fetch"}


def engines(speed: float = 2.0, **changes: Any) -> list[EngineOptions]:
    """Starts three engines with KV transfer."""
    return [nixl("both", clock_speed=speed, **changes) for _ in range(3)]


def stream_of(path: str, prompt: str = LONG, **changes: Any) -> dict[str, Any]:
    return body_of(path, prompt, **({"stream": True, "max_tokens": 120, "stream_options": USAGE} | changes))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("two_ways", [False, True])
async def test_the_answer_is_one_engines(path: str, two_ways: bool) -> None:
    kinds = [both(clock_speed=2.0) for _ in range(3)] if two_ways else engines()
    async with moving(*kinds, **PULL) as w:
        body = stream_of(path, return_token_ids=True)
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        source = place(await at_token(w, 10))
        assert await move(w, 10) is True
        said = await task
        equal(said, expected)
        ((token, target),) = said["record"]["migrations"]
        assert (mover(w).outcomes, w.outcomes) == ({"migrated": 1}, {"transferred": 1})
        # The source finds the fetched tokens in its cache, and no engine computes a token twice,
        # except the part of a block behind the fetched tokens. A fetch leaves one token to compute.
        prompt = expected["usage"]["prompt_tokens"]
        at_source, at_target = w.load(source), w.load(target)
        assert at_source["cached_prompt_tokens"] > prompt - 16
        assert at_target["fetched_prompt_tokens"] > prompt
        fetched_or_computed = at_target["prompt_tokens"] - at_target["cached_prompt_tokens"]
        assert fetched_or_computed <= token + 16 + 1


async def test_any_stream_moved_anywhere() -> None:
    cases = st.fixed_dictionaries(
        {
            "path": st.sampled_from(PATHS),
            "prompt": PROMPTS,
            "max_tokens": st.integers(2, 90),
            "moves": st.lists(st.integers(1, 60), min_size=1, max_size=4).map(sorted),
            "ids": st.booleans(),
        }
    )
    loop = asyncio.get_running_loop()
    async with moving(*engines(), plain(), **PULL) as w:
        moved: list[int] = []

        async def tried(case: dict[str, Any]) -> None:
            body = stream_of(
                case["path"], case["prompt"], max_tokens=case["max_tokens"], return_token_ids=case["ids"]
            )
            moved.append(await shoved(w, case["path"], body, case["moves"]))

        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases)
        def check(case: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(tried(case), loop).result(PATIENCE_SECONDS)

        await asyncio.to_thread(check)
        assert sum(moved) > 10
        assert w.outcomes["transferred"] > 5


@pytest.mark.parametrize("which", ["source", "target"])
@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_dies_meanwhile(path: str, which: str) -> None:
    async with moving(*engines(0.2), **PULL) as w:
        body = stream_of(path, max_tokens=60)
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        source = place(await at_token(w, 5))
        target = next(name for name in w.engines if name != source)
        assert await move(w, 5, target)
        await w.kill({"source": source, "target": target}[which])
        said = await task
        equal(said, expected)
        assert [to for _, to in said["record"]["migrations"]] == ([target] if which == "source" else [])
        assert mover(w).outcomes == ({"source_failed": 1} if which == "source" else {"target_failed": 1})


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_target_that_cannot_fetch_computes(policy: str) -> None:
    async with moving(*engines(kv_load_failure_policy=policy), **PULL) as w:
        body = stream_of(COMPLETIONS)
        expected = await alone(w, COMPLETIONS, body)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        await at_token(w, 5)
        for engine in w.engines.values():
            await engine._api._nixl.channel.stop()  # type: ignore[union-attr]
        assert await move(w, 5)
        said = await task
        equal(said, expected)
        assert len(said["record"]["migrations"]) == 1
        assert w.outcomes == {"transferred": 1} | ({"broken": 1} if policy == "fail" else {})


async def test_a_source_that_is_full_is_not_fetched_from() -> None:
    tight = nixl("both", max_sequences=1, max_queued_requests=0, clock_speed=0.5)
    async with moving(tight, tight, **PULL) as w:
        body = stream_of(COMPLETIONS)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        assert await move(w, 5)
        said = await task
        equal(said, await alone(w, COMPLETIONS, body))
        assert (mover(w).outcomes, w.outcomes) == ({"migrated": 1}, {"missing": 1})


async def test_what_is_late_is_not_fetched() -> None:
    async with moving(*engines(), handover_seconds=1e-9, **PULL) as w:
        body = stream_of(COMPLETIONS)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        assert await move(w, 5)
        said = await task
        equal(said, await alone(w, COMPLETIONS, body))
        assert len(said["record"]["migrations"]) == 1
        assert w.outcomes == {"late": 1}


# A source that dies without a move in progress.


@pytest.mark.parametrize("given", [{}, PULL])
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_whose_engine_dies_goes_on_elsewhere(path: str, given: dict[str, Any]) -> None:
    async with moving(*engines(0.5), **given) as w:
        body = stream_of(path)
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        gone = []
        for count in (5, 40):
            gone.append(place(await at_token(w, count)))
            await w.kill(gone[-1])
        said = await task
        equal(said, expected)
        assert len({to for _, to in said["record"]["migrations"]} - {gone[0]}) == 2
        assert mover(w).outcomes == {"source_failed": 2}
        assert said["record"]["outcome"] == "finished"


async def test_a_stream_that_nobody_takes_over_breaks_off() -> None:
    async with moving(*engines(0.5)[:1], **PULL) as w:
        task = asyncio.create_task(asked(w, CHAT, stream_of(CHAT)))
        await at_token(w, 5)
        await w.kill("b0")
        said = await task
        assert said["error"]["code"] in ("reset", "engine_error")
        assert mover(w).outcomes == {}


async def test_a_stream_is_not_handed_on_for_ever() -> None:
    async with moving(*engines(0.5), retries={"attempts": 2}, **PULL) as w:
        task = asyncio.create_task(asked(w, CHAT, stream_of(CHAT)))
        for count in (5, 20):
            await w.kill(place(await at_token(w, count)))
        said = await task
        assert "error" in said
        assert mover(w).outcomes == {"source_failed": 1}
