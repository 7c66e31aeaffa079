"""Prefix fetch during faults: the request is answered all the same, and no count is left over.

`pd` checks at its end that nothing is in flight anywhere, `pulling` that nobody is pulled from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from lmetric_lab.emulated import EngineOptions
from pd_world import Pd
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, both, equal, renders_otherwise
from test_pull_server import LONG, SETTINGS, computed, heated, outcomes, pulling, stats
from waiting import PATIENCE_SECONDS

PATHS = [CHAT, COMPLETIONS]
BODY = body_of(COMPLETIONS, LONG + "and then?")


def pair(**changes: Any) -> list[EngineOptions]:
    return [both(**({"clock_speed": 2.0} | changes)) for _ in range(2)]


@contextlib.asynccontextmanager
async def occupied(w: Pd, holder: str) -> AsyncIterator[None]:
    """An engine that has one place, taken by a request that nobody routed."""
    url = w.engines[holder].url + COMPLETIONS
    body = body_of(COMPLETIONS, "once", max_tokens=20_000, stream=True)
    async with w.client.post(url, json=body) as response:
        await response.content.readline()
        yield
        response.close()


def waiting(w: Pd, name: str) -> int:
    return int(w.load(name)["waiting"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_holder_that_is_gone(path: str, stream: bool) -> None:
    body = body_of(path, LONG + "and then?", stream=stream)
    async with pulling(*pair()) as w:
        expected = await alone(w, path, body)
        holder = await heated(w, path)
        await w.kill(holder)
        said = await asked(w, path, body)
        equal(said, expected)
        assert (said["record"]["fetch_instance"], said["record"]["fetched_tokens"]) == (holder, 0)
        assert "x-lmetric-prefill" not in said["headers"]
        assert (outcomes(w), w.outcomes) == ({"holder_failed": 1}, {})
        load = w.load(said["headers"]["x-lmetric-instance"])
        assert (load["fetched_prompt_tokens"], load["cached_prompt_tokens"]) == (0, 0)


async def test_a_holder_that_dies_while_it_is_asked() -> None:
    async with pulling(*pair(max_sequences=1)) as w:
        expected = await alone(w, COMPLETIONS, BODY)
        holder = await heated(w)
        async with occupied(w, holder):
            task = asyncio.create_task(asked(w, COMPLETIONS, BODY))
            await w.until(lambda: waiting(w, holder))
            await w.kill(holder)
            equal(await task, expected)
        assert outcomes(w) == {"holder_failed": 1}


@pytest.mark.parametrize("path", PATHS)
async def test_a_slow_holder_is_waited_for_only_so_long(path: str) -> None:
    body = body_of(path, LONG + "and then?", stream=True)
    async with pulling(*pair(max_sequences=1), prefix_fetch_timeout_seconds=0.1) as w:
        expected = await alone(w, path, body)
        holder = await heated(w, path)
        async with occupied(w, holder):
            said = await asked(w, path, body)
            await w.until(lambda: not waiting(w, holder))  # what it was asked for is called off
            assert w.busy(holder) == 1
        equal(said, expected)
        record = said["record"]
        assert record["fetched_tokens"] == 0
        assert 0.1 <= record["fetch_seconds"] < 2
        assert (outcomes(w), w.outcomes) == ({"late": 1}, {})
        assert computed(w.load(said["headers"]["x-lmetric-instance"])) == record["prompt_tokens"]


async def test_by_default_it_is_waited_for_as_long_as_computing_takes() -> None:
    async with pulling(*pair(max_sequences=1), prefix_fetch_timeout_seconds=None) as w:
        holder = await heated(w)
        async with occupied(w, holder):
            said = await asked(w, COMPLETIONS, BODY)
        model = w.server.fleet.models[0]
        target = model.engines[said["headers"]["x-lmetric-instance"]]
        # It had computed nothing yet: as the router assumes of such.
        tokens = said["record"]["fetch_to_token"]
        assert said["record"]["fetch_seconds"] == pytest.approx(tokens / 8_000, abs=0.1)
        assert outcomes(w) == {"late": 1}
        assert model.prefill_seconds(target, 1000) > 0


async def test_a_full_holder_refuses_and_stays_healthy() -> None:
    async with pulling(*pair(max_sequences=1, max_queued_requests=0)) as w:
        holder = await heated(w)
        async with occupied(w, holder):
            equal(await asked(w, COMPLETIONS, BODY), await alone(w, COMPLETIONS, BODY))
        assert outcomes(w) == {"refused": 1}
        assert w.server.fleet.models[0].engines[holder].healthy


async def test_a_holder_that_has_evicted_the_prompt_computes_it() -> None:
    async with pulling(*pair()) as w:
        holder = await heated(w)
        async with w.client.post(w.engines[holder].url + "/reset_prefix_cache") as response:
            assert response.status == 200
        before = computed(w.load(holder))
        said = await asked(w, COMPLETIONS, BODY)
        equal(said, await alone(w, COMPLETIONS, BODY))
        pulled = said["record"]["fetched_tokens"]
        assert computed(w.load(holder)) - before == pulled > 0
        assert outcomes(w) == {"fetched": 1}


async def test_what_is_held_too_long_is_not_fetched() -> None:
    async with pulling(*pair(), handover_seconds=1e-9) as w:
        await heated(w)
        said = await asked(w, COMPLETIONS, BODY)
        equal(said, await alone(w, COMPLETIONS, BODY))
        assert w.load(said["headers"]["x-lmetric-instance"])["fetched_prompt_tokens"] == 0
        assert w.outcomes == {"late": 1}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_target_that_cannot_fetch_computes(policy: str, path: str, stream: bool) -> None:
    body = body_of(path, LONG + "and then?", stream=stream)
    async with pulling(*pair(kv_load_failure_policy=policy)) as w:
        expected = await alone(w, path, body)
        holder = await heated(w, path)
        await w.engines[holder]._api._nixl.channel.stop()  # type: ignore[union-attr]
        equal(await asked(w, path, body), expected)
        assert outcomes(w) == {"fetched": 1}
        assert w.outcomes == {"transferred": 1} | ({"broken": 1} if policy == "fail" else {})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_target_is_gone_when_it_is_its_turn(path: str, stream: bool) -> None:
    body = body_of(path, LONG + "and then?", stream=stream)
    async with pulling(*[both(clock_speed=2.0)] * 3) as w:
        expected = await alone(w, path, body)
        holder = await heated(w, path)
        target = next(name for name in w.engines if name > holder)
        await w.kill(target)
        said = await asked(w, path, body)
        equal(said, expected)
        assert said["headers"]["x-lmetric-instance"] not in (target,)
        assert said["record"]["outcome"] == "finished"
        # Pulled for the first, and again for the next unless that is the holder itself.
        again = said["headers"]["x-lmetric-instance"] != holder
        assert outcomes(w) == {"fetched": 1 + again}


async def test_a_target_taken_out_meanwhile() -> None:
    async with pulling(*pair(max_sequences=1)) as w:
        holder = await heated(w)
        target = next(name for name in w.engines if name != holder)
        async with occupied(w, holder):
            task = asyncio.create_task(asked(w, COMPLETIONS, BODY))
            await w.until(lambda: waiting(w, holder))
            w.server.fleet.models[0].remove(target)
        said = await task
        equal(said, await alone(w, COMPLETIONS, BODY))
        assert said["headers"]["x-lmetric-instance"] == holder


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_meanwhile(stream: bool) -> None:
    async with pulling(*pair(max_sequences=1)) as w:
        holder = await heated(w)
        async with occupied(w, holder):
            task = asyncio.create_task(asked(w, COMPLETIONS, BODY | {"stream": stream}))
            await w.until(lambda: waiting(w, holder))
            router = w.server.fleet.models[0].router
            assert router.indicators()["fetches"].sum() == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await w.until(lambda: not w.in_flight())
            await w.until(lambda: not waiting(w, holder))
            assert not router.indicators()["fetches"].any()
        assert outcomes(w) == {"ended": 1}
        assert stats(w)["fetched_tokens"] == 0


async def test_a_server_that_stops_meanwhile() -> None:
    async with pulling(*pair(max_sequences=1), timeouts={"drain": 0.2}) as w:
        holder = await heated(w)
        async with occupied(w, holder):
            task = asyncio.create_task(w.post(BODY))
            await w.until(lambda: waiting(w, holder))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await w.server.stop()
            with contextlib.suppress(Exception):
                status, _, _ = await task
                assert status == 503
            await w.until(lambda: not waiting(w, holder))
        assert outcomes(w) == {"ended": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_an_engine_renders_otherwise(stream: bool) -> None:
    """It fetches the cache of other tokens than it makes of the chat; only it can tell."""
    async with pulling(*pair(tokenize=False)) as w:
        for name in w.engines:
            renders_otherwise(w, name)
        body = body_of(CHAT, LONG, stream=stream)
        first, said, again = [await asked(w, CHAT, body) for _ in range(3)]
        assert said["record"]["fetch_instance"]
        assert (outcomes(w), w.outcomes) == ({"fetched": 1}, {"transferred": 1, "other_tokens": 1})
        equal(said, first)
        assert "tokenizes a chat differently" in again["record"]["fetch_reason"]


async def test_engines_of_other_blocks_compute() -> None:
    async with pulling(*pair()) as w:
        holder = await heated(w)
        engine = w.server.fleet.models[0].engines[holder]
        engine.capabilities = replace(engine.capabilities, block_size=32)
        before = w.load(holder)["prompt_tokens"]
        said = await asked(w, COMPLETIONS, BODY)
        equal(said, await alone(w, COMPLETIONS, BODY))
        assert (outcomes(w), w.outcomes) == ({"other_blocks": 1}, {})
        assert w.load(holder)["prompt_tokens"] == before  # it was not even asked


async def test_many_at_once_while_the_holder_dies() -> None:
    most = {"prefix_fetch": SETTINGS | {"max_fetches": 100}}
    async with pulling(*[both(clock_speed=0.5)] * 3, **most) as w:
        holder = await heated(w)
        bodies = [body_of(COMPLETIONS, f"{LONG} {n}", max_tokens=20) for n in range(24)]
        tasks = [asyncio.create_task(asked(w, COMPLETIONS, body)) for body in bodies]
        await w.until(lambda: outcomes(w).get("fetched"))
        await w.kill(holder)
        for body, said in zip(bodies, await asyncio.gather(*tasks), strict=True):
            assert said["record"]["outcome"] == "finished"
            equal(said, await alone(w, COMPLETIONS, body))
