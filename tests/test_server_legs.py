"""Requests in slices that move between two slices: the client gets the answer of one engine."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmetric.options import SplitAt
from lmetric_lab.emulated import EngineOptions
from moves_world import LONG, at_token, move, mover, moving, place, plain, shoved
from pd_world import Pd, nixl
from split_world import CHAT, COMPLETIONS, PROMPTS, alone, asked, body_of, both, equal

PATHS = [CHAT, COMPLETIONS]
USAGE = {"include_usage": True}
STEP_SECONDS = 0.009  # the least of a decode step of `engines`, at speed 1
BY_LEGS: dict[str, Any] = {"migration_by": "segments", "migration_segment_tokens": 8}
GENEROUS: dict[str, Any] = BY_LEGS | {"migration_max_gap_seconds": 60.0}


def engines(speed: float = 2.0, **changes: Any) -> list[EngineOptions]:
    """Starts three engines with KV transfer."""
    return [nixl("both", clock_speed=speed, **changes) for _ in range(3)]


def request(path: str, *, stream: bool, **changes: Any) -> dict[str, Any]:
    more = {"stream_options": USAGE} if stream else {}
    return body_of(path, LONG, **({"stream": stream, "max_tokens": 120} | more | changes))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [False, True])
async def test_the_answer_is_one_engines(path: str, stream: bool, ids: bool) -> None:
    body = request(path, stream=stream, return_token_ids=ids)
    async with moving(*engines(), **GENEROUS) as w:
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        source = place(await at_token(w, 10))
        assert await move(w, 10) is True
        said = await task
        equal(said, expected)
        ((token, target),) = said["receipt"]["migrations"]
        prompt = expected["usage"]["prompt_tokens"]
        assert prompt + 10 <= token < prompt + 120
        assert target != source
        # It moved at the end of a slice: 1 token, then 8 at a time.
        assert (token - prompt - 1) % 8 == 0
        assert said["headers"]["x-lmetric-instance"] == (source if stream else target)
        assert (mover(w).outcomes, w.outcomes) == ({"migrated": 1}, {"transferred": 1})
        assert w.load(target)["pulled_prompt_tokens"] == token - 1  # the last is computed
        stats = w.server.fleet.pools[0].router.stats()
        assert (stats["output_tokens"], stats["finished"]) == (120, 1)


async def test_any_request_moved_anywhere() -> None:
    cases = st.fixed_dictionaries(
        {
            "path": st.sampled_from(PATHS),
            "prompt": PROMPTS,
            "stream": st.booleans(),
            "max_tokens": st.integers(2, 90),
            "leg": st.integers(1, 30),
            "moves": st.lists(st.integers(1, 60), min_size=1, max_size=4).map(sorted),
            "ids": st.booleans(),
            "least": st.sampled_from([None, 5, 70]),
            "continuous": st.booleans(),
        }
    )
    loop = asyncio.get_running_loop()
    async with moving(*engines(), plain(), **GENEROUS) as w:
        moved: list[int] = []

        async def tried(case: dict[str, Any]) -> None:
            mover(w).segment_tokens = case["leg"]
            usage = {"stream_options": USAGE | {"continuous_usage_stats": case["continuous"]}}
            body = body_of(
                case["path"],
                case["prompt"],
                max_tokens=case["max_tokens"],
                min_tokens=case["least"] and min(case["least"], case["max_tokens"]),
                stream=case["stream"],
                return_token_ids=case["ids"],
                **(usage if case["stream"] else {}),
            )
            moved.append(await shoved(w, case["path"], body, case["moves"]))

        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases)
        def check(case: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(tried(case), loop).result(20)

        await asyncio.to_thread(check)
        assert sum(moved) > 10
        assert max(moved) > 1
        assert w.outcomes["transferred"] > 5


async def test_no_leg_longer_than_a_client_may_wait() -> None:
    speed, gap = 1.0, 0.3
    given = {"migration_by": "segments", "migration_max_gap_seconds": gap}
    async with moving(*engines(speed), **given) as w:
        body = request(COMPLETIONS, stream=True, max_tokens=300)
        slices: list[int] = []  # tokens: each is a word
        async with w.client.post(w.url + COMPLETIONS, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {") and (choices := orjson.loads(line[6:])["choices"]):
                    slices.append(len(choices[0]["text"].split()))
        assert sum(slices) == 300
        assert max(slices) > 2 * min(slices), "slices grow"
        assert max(slices) < 2 * gap / STEP_SECONDS  # an engine that is late makes slices shorter


async def test_no_gap_longer_than_allowed() -> None:
    given = BY_LEGS | {"migration_max_gap_seconds": 1e-6}
    for kinds in (engines(), [plain() for _ in range(3)]):
        async with moving(*kinds, **given) as w:
            body = request(CHAT, stream=True)
            task = asyncio.create_task(asked(w, CHAT, body))
            assert await move(w, 10) is False
            said = await task
            equal(said, await alone(w, CHAT, body))
            assert said["receipt"]["migrations"] == []
            assert mover(w).outcomes == {"long_gap": 1}


async def test_one_slow_fetch_stops_no_move_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving(*engines(), **BY_LEGS) as w:
        body = request(COMPLETIONS, stream=True)
        for remembered, outcome in ((60.0, "long_gap"), (0.0, "migrated")):
            monkeypatch.setattr("lmetric.server.fleet.rebalancer.REMEMBERED_SECONDS", remembered)
            mover(w).fetched(1, 30.0)
            task = asyncio.create_task(asked(w, COMPLETIONS, body))
            assert await move(w, 10) is (outcome == "migrated")
            equal(await task, await alone(w, COMPLETIONS, body))
            assert mover(w).outcomes[outcome] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_hand_nothing_over(stream: bool) -> None:
    async with moving(**GENEROUS) as w:
        body = request(CHAT, stream=stream)
        task = asyncio.create_task(asked(w, CHAT, body))
        assert await move(w, 10)
        said = await task
        equal(said, await alone(w, CHAT, body))
        assert len(said["receipt"]["migrations"]) == 1
        assert (mover(w).outcomes, w.outcomes) == ({"migrated": 1}, {})


async def test_engines_without_a_prefix_cache_run_no_legs() -> None:
    async with moving(*engines(), cache=False, **GENEROUS) as w:
        for stream in (False, True):
            body = request(COMPLETIONS, stream=stream)
            task = asyncio.create_task(asked(w, COMPLETIONS, body))
            if stream:
                assert await move(w, 10)
            said = await task
            equal(said, await alone(w, COMPLETIONS, body))
            assert len(said["receipt"]["migrations"]) == stream
        # One request each, and one for the moved one: no slices.
        assert sum(w.load(name)["prompt_tokens"] for name in w.engines) < 3.5 * len(LONG.split())
        assert (mover(w).outcomes, w.outcomes) == ({"migrated": 1}, {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_the_source_dies_in_a_leg(path: str, stream: bool) -> None:
    async with moving(*engines(0.5), **GENEROUS) as w:
        body = request(path, stream=stream)
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        source = place(await at_token(w, 5))
        await w.kill(source)
        said = await task
        equal(said, expected)
        ((token, target),) = said["receipt"]["migrations"]
        assert target != source
        # Only the slice is lost.
        assert (token - expected["usage"]["prompt_tokens"] - 1) % 8 == 0
        assert mover(w).outcomes == {"source_failed": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_all_die_but_one(stream: bool) -> None:
    async with moving(*engines(0.5), **GENEROUS) as w:
        body = request(COMPLETIONS, stream=stream)
        expected = await alone(w, COMPLETIONS, body)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        for count in (5, 30):
            await w.kill(place(await at_token(w, count)))
        said = await task
        equal(said, expected)
        assert len({to for _, to in said["receipt"]["migrations"]}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_has_no_room_for_the_next_leg(stream: bool) -> None:
    tight = nixl("both", max_sequences=1, max_queued_requests=0, clock_speed=1.0)
    async with moving(tight, tight, **GENEROUS) as w:
        body = request(COMPLETIONS, stream=stream)
        expected = await alone(w, COMPLETIONS, body)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        chain = await at_token(w, 5)
        source = place(chain)
        # Another request takes its sequence slot between two slices.
        (relay,) = w.server.front.relays
        relay.client_slow()
        await w.until(lambda: chain.execution.state == "BETWEEN")
        other = asyncio.create_task(w.post(body | {"stream": False}, url=w.engines[source].url))
        await w.until(lambda: w.busy(source))
        relay.client_ready()
        said = await task
        await other
        equal(said, expected)
        assert mover(w).outcomes["source_failed"] == len(said["receipt"]["migrations"]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_is_left(stream: bool) -> None:
    async with moving(nixl("both", clock_speed=0.5), **GENEROUS) as w:
        body = request(COMPLETIONS, stream=stream)
        task = asyncio.create_task(w.client.post(w.url + COMPLETIONS, json=body))
        await at_token(w, 5)
        await w.kill("b0")
        response = await task
        raw = await response.text()
        assert response.status == (200 if stream else 502)
        assert '"error"' in raw
        assert sum(w.server.fleet.pools[0].router.stats()["failed"].values()) == 1


async def held_by_the_source(w: Pd, body: dict[str, Any]) -> tuple[asyncio.Task[Any], str, str]:
    """Stops a request between two slices, while its source prepares the transfer.

    Returns its task, the source and the target.
    """
    task = asyncio.create_task(asked(w, COMPLETIONS, body))
    source = place(await at_token(w, 5))
    target = next(name for name in w.engines if name != source)
    assert await move(w, 5, target)
    (on_its_way,) = mover(w).moves
    await w.until(lambda: on_its_way.phase == "holding")
    return task, source, target


@pytest.mark.parametrize("which", ["source", "target"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_dies_between_two_legs(stream: bool, which: str) -> None:
    async with moving(*engines(0.2), **GENEROUS) as w:
        body = request(COMPLETIONS, stream=stream, max_tokens=60)
        expected = await alone(w, COMPLETIONS, body)
        task, source, target = await held_by_the_source(w, body)
        await w.kill({"source": source, "target": target}[which])
        said = await task
        equal(said, expected)
        assert said["receipt"]["outcome"] == "finished"
        assert mover(w).outcomes == ({"source_failed": 1} if which == "source" else {"migrated": 1})


@pytest.mark.parametrize("when", ["leg", "between", "behind"])
async def test_a_client_that_leaves(when: str) -> None:
    async with moving(*engines(0.2), **GENEROUS) as w:
        body = request(COMPLETIONS, stream=True, max_tokens=500)
        if when == "between":
            task, *_ = await held_by_the_source(w, body)
        else:
            task = asyncio.create_task(asked(w, COMPLETIONS, body))
            await at_token(w, 5)
            if when == "behind":
                await move(w, 5)
                await w.until(lambda: mover(w).outcomes == {"migrated": 1})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await w.until(lambda: not any(w.busy(name) for name in w.engines))
        await w.until(lambda: w.in_flight() == 0)
        assert w.server.fleet.pools[0].router.stats()["failed"]["cancelled"] == 1


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_target_that_cannot_fetch(policy: str) -> None:
    async with moving(*engines(kv_load_failure_policy=policy), **GENEROUS) as w:
        body = request(COMPLETIONS, stream=True)
        expected = await alone(w, COMPLETIONS, body)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        await at_token(w, 5)
        for engine in w.engines.values():
            await engine._api._nixl.channel.stop()  # type: ignore[union-attr]
        await move(w, 5)
        said = await task
        equal(said, expected)
        assert len(said["receipt"]["migrations"]) == 1
        assert w.outcomes == {"transferred": 1} | ({"broken": 1} if policy == "fail" else {})


async def test_a_lease_that_is_over() -> None:
    async with moving(*engines(), handover_seconds=1e-6, **GENEROUS) as w:
        body = request(COMPLETIONS, stream=True)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        await move(w, 5)
        said = await task
        equal(said, await alone(w, COMPLETIONS, body))
        assert len(said["receipt"]["migrations"]) == 1
        assert w.outcomes == {"late": 1}


async def test_what_was_cut_runs_in_legs_too() -> None:
    async with moving(*[both(clock_speed=2.0) for _ in range(3)], **GENEROUS) as w:
        pool = w.server.fleet.pools[0]
        for path in PATHS:
            for stream in (False, True):
                for at in (0.5, 0.8):
                    pool.router.configure(split=SplitAt(fraction=at))
                    body = request(path, stream=stream, max_tokens=200)
                    said = await asked(w, path, body)
                    equal(said, await alone(w, path, body))


async def test_decodes_move_between_decode_engines() -> None:
    kinds = [nixl(role, clock_speed=2.0) for role in ("prefill", "decode", "decode")]
    async with moving(*kinds, **GENEROUS) as w:
        for path in PATHS:
            for stream in (False, True):
                body = request(path, stream=stream)
                task = asyncio.create_task(asked(w, path, body))
                assert await move(w, 10, {"d0": "d1", "d1": "d0"}[place(await at_token(w, 10))])
                said = await task
                equal(said, await alone(w, path, body))
                assert len(said["receipt"]["migrations"]) == 1
        assert w.outcomes == {"transferred": 8}


async def test_a_client_that_reads_slowly_gets_no_further_leg() -> None:
    async with moving(*engines(50.0), **GENEROUS) as w:
        body = request(COMPLETIONS, stream=True, max_tokens=400)
        expected = await alone(w, COMPLETIONS, body)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        await at_token(w, 5)
        (relay,) = w.server.front.relays
        relay.client_slow()
        await w.until(lambda: not any(w.busy(name) for name in w.engines))
        assert not task.done()
        relay.client_ready()
        equal(await task, expected)
