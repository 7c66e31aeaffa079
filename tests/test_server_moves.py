"""Streams that move to another engine while they run: the client gets the answer of one engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmetric.options import SplitAt
from moves_world import LONG, at_token, begins, move, mover, moving, place, plain, shoved
from pd_world import nixl
from split_world import CHAT, COMPLETIONS, PROMPTS, alone, asked, body_of, both, equal
from waiting import PATIENCE_SECONDS

PATHS = [CHAT, COMPLETIONS]
USAGE = {"include_usage": True}


def stream_of(path: str, prompt: str = LONG, **changes: Any) -> dict[str, Any]:
    return body_of(path, prompt, **({"stream": True, "max_tokens": 120} | changes))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("cache", [False, True])
async def test_the_answer_is_one_engines(path: str, ids: bool, cache: bool) -> None:
    body = stream_of(path, stream_options=USAGE, return_token_ids=ids)
    async with moving(cache=cache) as w:
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        chain = await at_token(w, 10)
        source = place(chain)
        assert await move(w, 10) is True
        said = await task
        equal(said, expected)
        assert said["roles"] == (path == CHAT)
        ((token, target),) = said["record"]["migrations"]
        prompt = expected["usage"]["prompt_tokens"]
        assert prompt + 10 <= token < prompt + 120
        assert target != source
        assert said["headers"]["x-lmetric-instance"] == source
        assert mover(w).outcomes == {"migrated": 1}
        # Tokens computed ahead are not computed in the gap.
        cached = w.load(target)["cached_prompt_tokens"]
        assert (cached > prompt - 32) is cache
        page = (await (await w.client.get(f"{w.url}/metrics")).text()).splitlines()
        assert 'lmetric_migrated_requests_total{model="emulated"} 1.0' in page
        assert 'lmetric_migrations_total{model="emulated",outcome="migrated"} 1.0' in page
        assert w.server.fleet.models[0].router.stats()["output_tokens"] == 120


async def test_any_stream_moved_anywhere() -> None:
    cases = st.fixed_dictionaries(
        {
            "path": st.sampled_from(PATHS),
            "prompt": PROMPTS,
            "max_tokens": st.integers(2, 90),
            "moves": st.lists(st.integers(1, 60), min_size=1, max_size=4).map(sorted),
            "ids": st.booleans(),
            "usage": st.sampled_from([None, USAGE]),
            "continuous": st.booleans(),
            "logprobs": st.sampled_from([None, False]),
        }
    )
    loop = asyncio.get_running_loop()
    async with moving() as w:
        moved: list[int] = []

        async def tried(case: dict[str, Any]) -> None:
            usage = case["usage"] and case["usage"] | {"continuous_usage_stats": case["continuous"]}
            body = stream_of(
                case["path"],
                case["prompt"],
                max_tokens=case["max_tokens"],
                return_token_ids=case["ids"],
                stream_options=usage,
                logprobs=case["logprobs"],
            )
            moved.append(await shoved(w, case["path"], body, case["moves"]))

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases)
        def check(case: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(tried(case), loop).result(PATIENCE_SECONDS)

        await asyncio.to_thread(check)
        assert sum(moved) > 20
        assert max(moved) > 1


@pytest.mark.parametrize("by", ["recompute", "fetch"])
async def test_star_moves_what_piles_up(by: str) -> None:
    kinds = [nixl("both", clock_speed=1.0) for _ in range(3)]
    given = {
        "rebalance": {"kind": "star", "period_seconds": 0.05},
        "migration_max_concurrent": 3,
    }
    async with moving(*kinds, migration_by=by, **given) as w:
        engines = w.server.fleet.models[0].engines
        for name in ("b1", "b2"):
            engines[name].draining = True
            engines[name].hold()
        bodies = [
            (PATHS[n % 2], stream_of(PATHS[n % 2], f"{n} quiet rivers", max_tokens=400)) for n in range(18)
        ]
        tasks = [asyncio.create_task(asked(w, path, body)) for path, body in bodies]
        await w.until(lambda: len(mover(w).running) == 18)
        for name in ("b1", "b2"):
            engines[name].draining = False
            engines[name].hold()
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, len(mover(w).moves))
            await asyncio.sleep(0.001)
        said = await asyncio.gather(*tasks)
        moves = [heard["record"]["migrations"] for heard in said]
        assert sum(map(len, moves)) >= 4
        assert {target for each in moves for _, target in each} >= {"b1", "b2"}
        assert 0 < most <= 3
        for (path, body), heard in list(zip(bodies, said, strict=True))[::3]:
            equal(heard, await alone(w, path, body))


async def test_decodes_move_between_decode_engines() -> None:
    kinds = [nixl(role, clock_speed=2.0) for role in ("prefill", "decode", "decode")]
    async with moving(*kinds) as w:
        for path in PATHS:
            body = stream_of(path, stream_options=USAGE)
            expected = await alone(w, path, body)
            task = asyncio.create_task(asked(w, path, body))
            chain = await at_token(w, 10)
            target = {"d0": "d1", "d1": "d0"}[place(chain)]
            assert await move(w, 10, target)
            said = await task
            equal(said, expected)
            assert [to for _, to in said["record"]["migrations"]] == [target]
            assert said["headers"]["x-lmetric-prefill"] == "p0"
        assert w.outcomes == {"transferred": 2}


@pytest.mark.parametrize("at", [0.5, 0.8])
async def test_what_was_cut_moves_too(at: float) -> None:
    kinds = [both(clock_speed=2.0) for _ in range(3)]
    async with moving(*kinds, split=SplitAt(fraction=at)) as w:
        for path in PATHS:
            body = stream_of(path, stream_options=USAGE, max_tokens=400)
            task = asyncio.create_task(asked(w, path, body))
            while not await move(w, 40):  # noqa: ASYNC110 - its last segment has no token yet
                await asyncio.sleep(0.001)
            said = await task
            equal(said, await alone(w, path, body))
            assert len(said["record"]["cuts"]) == 1
            assert len(said["record"]["migrations"]) == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"stream": False}, "not streamed"),
        ({"presence_penalty": 0.5}, "(presence_penalty)"),
        ({"max_tokens": None}, "(max_tokens)"),
    ],
)
async def test_what_stays_says_why(fields: dict[str, Any], why: str) -> None:
    async with moving(plain(clock_speed=50.0, max_model_len=2048)) as w:
        body = stream_of(CHAT, "a river") | fields
        said = await asked(w, CHAT, body)
        assert why in said["record"]["split_reason"]
        assert said["record"]["migrations"] == []


async def test_no_gap_longer_than_allowed() -> None:
    for cache in (True, False):
        async with moving(cache=cache, migration_max_gap_seconds=1e-6) as w:
            body = stream_of(CHAT)
            task = asyncio.create_task(asked(w, CHAT, body))
            assert await move(w, 10) is cache
            said = await task
            equal(said, await alone(w, CHAT, body))
            assert said["record"]["migrations"] == []
            assert mover(w).outcomes == {"long_gap": 1}


async def test_a_slow_target_that_knows_the_prompt_is_no_long_gap() -> None:
    """The target computes one block slowly, while the source adds many.

    Later blocks may take less time each.
    """
    async with moving(plain(clock_speed=40.0), plain(clock_speed=0.1), migration_max_gap_seconds=0.8) as w:
        body = stream_of(COMPLETIONS, max_tokens=4000)
        await asked(w, COMPLETIONS, body | {"max_tokens": 1}, w.engines["b1"].url)
        async with w.client.post(f"{w.url}{COMPLETIONS}", json=body):
            assert place(await at_token(w, 10)) == "b0"
            assert await move(w, 10, "b1")
            await at_token(w, 11)
            assert mover(w).outcomes == {"migrated": 1}
        await w.until(lambda: not mover(w).running)


async def test_one_move_at_a_time() -> None:
    async with moving(*[plain(clock_speed=0.5)] * 3, migration_max_concurrent=1) as w:
        body = stream_of(COMPLETIONS)
        tasks = [asyncio.create_task(asked(w, COMPLETIONS, body)) for _ in range(2)]
        await w.until(lambda: len(mover(w).running) == 2)
        one, other = list[Any](mover(w).running.values())
        await w.until(lambda: one.known_tokens > 3 and other.known_tokens > 3)
        target = next(name for name in w.engines if name not in (place(one), place(other)))
        assert begins(mover(w), one.ticket.id, target)
        assert not begins(mover(w), one.ticket.id, target)
        assert not begins(mover(w), other.ticket.id, target)
        said = await asyncio.gather(*tasks)
        assert mover(w).outcomes == {"too_many": 1, "migrated": 1}
        expected = await alone(w, COMPLETIONS, body)
        for each in said:
            equal(each, expected)
