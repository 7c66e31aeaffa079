"""Requests with a prefix fetch that continue on another engine: three engines, one answer.

`pd` checks at its end that no request is in flight, `pulling` that no fetch is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmetric.option_values import parse
from lmetric.options import SplitAt
from lmetric_lab.emulated import EngineOptions
from moves_world import move, mover
from pd_world import Pd
from split_world import CHAT, COMPLETIONS, PROMPTS, alone, asked, body_of, both, equal, renders_otherwise
from test_pull_server import LONG, SETTINGS, computed, heated, outcomes, pulling, stats
from test_pull_server_faults import occupied, waiting
from waiting import PATIENCE_SECONDS

PATHS = [CHAT, COMPLETIONS]
USAGE = {"stream_options": {"include_usage": True}}
CUT: dict[str, Any] = {"split": SplitAt(fraction=0.5)}
SLOWLY = 0.02  # speed of a clock: a segment takes longer than a busy machine's pauses


def engines(count: int = 3, **changes: Any) -> list[EngineOptions]:
    return [both(**({"clock_speed": 2.0} | changes)) for _ in range(count)]


def body_at(path: str, *, stream: bool = False, **changes: Any) -> dict[str, Any]:
    usage: dict[str, Any] = USAGE if stream else {}
    return body_of(path, LONG + "and then?", stream=stream, **({"max_tokens": 40} | usage | changes))


def cut_at(w: Pd, fraction: float | None) -> None:
    """Sets the split position of all requests from now on."""
    router = w.server.fleet.models[0].router
    if fraction is None:
        router.configure(split=None)
    else:
        router.configure(split=SplitAt(fraction=fraction))


async def ready(w: Pd, path: str, body: dict[str, Any], tokens: int = 0) -> tuple[str, dict[str, Any]]:
    """Prepares a prefix on one engine, and a split of the request after this many answer tokens.

    Returns the engine with the prefix, and the answer of one engine.
    """
    cut_at(w, None)
    holder = await heated(w, path)
    expected = await alone(w, path, body)
    whole = await alone(w, path, {k: v for k, v in body.items() if k != "stream_options"} | {"stream": False})
    prompt = whole["usage"]["prompt_tokens"]
    cut_at(w, (prompt + tokens - 0.5) / (prompt + body["max_tokens"]))
    return holder, expected


def busy(w: Pd, names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in w.stopped and w.busy(name)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 12])
async def test_the_answer_is_one_engines(path: str, stream: bool, tokens: int) -> None:
    body = body_at(path, stream=stream, return_token_ids=True)
    async with pulling(*engines(), **CUT) as w:
        holder, expected = await ready(w, path, body, tokens)
        said = await asked(w, path, body)
        equal(said, expected)
        record, prompt = said["record"], said["record"]["prompt_tokens"]
        first, last, pulled = record["instance"], record["decode_instance"], record["fetched_tokens"]
        assert len({first, holder}) == len({first, last}) == 2
        assert (record["fetch_instance"], record["cuts"]) == (holder, [prompt + tokens])
        assert prompt - 64 < pulled < prompt
        # The prefix was fetched, the rest computed, and everything transferred.
        assert w.load(first)["fetched_prompt_tokens"] == pulled
        assert computed(w.load(first)) == prompt - pulled
        assert (said["headers"]["x-lmetric-prefill"], said["headers"]["x-lmetric-instance"]) == (first, last)
        if last != holder:  # it has most tokens in its own cache
            assert w.load(last)["fetched_prompt_tokens"] == prompt + tokens
        assert (outcomes(w), w.outcomes) == ({"fetched": 1}, {"transferred": 2})
        assert (stats(w)["fetches"], stats(w)["fetched_tokens"], stats(w)["split"]) == (1, pulled, 1)
        page = (await (await w.client.get(f"{w.url}/metrics")).text()).splitlines()
        assert 'lmetric_prefix_fetches_total{model="emulated",outcome="fetched"} 1.0' in page
        assert 'lmetric_kv_transfers_total{model="emulated",outcome="transferred"} 2.0' in page


async def test_a_cut_inside_the_prompt_pulls_nothing() -> None:
    body = body_at(COMPLETIONS)
    async with pulling(*engines(), **CUT) as w:
        _, expected = await ready(w, COMPLETIONS, body)
        cut_at(w, 0.5)
        said = await asked(w, COMPLETIONS, body)
        equal(said, expected)
        assert said["record"]["cuts"][0] < said["record"]["prompt_tokens"]
        assert said["record"]["fetch_instance"] is None
        assert (outcomes(w), w.outcomes) == ({}, {"transferred": 1})


async def test_any_request_cut_anywhere_whose_front_another_holds() -> None:
    cases = st.fixed_dictionaries(
        {
            "path": st.sampled_from(PATHS),
            "prompt": PROMPTS,
            "words": st.integers(0, 100),
            "max_tokens": st.integers(2, 60),
            "at": st.floats(0.0, 0.99),
            "stream": st.booleans(),
            "ids": st.booleans(),
        }
    )
    loop = asyncio.get_running_loop()
    front = LONG.split(" ")
    async with pulling(*engines(4, clock_speed=20.0), **CUT) as w:
        router = w.server.fleet.models[0].router
        both_ways: list[bool] = []

        async def tried(case: dict[str, Any]) -> None:
            router.configure(
                prefix_fetch=parse("prefix_fetch", SETTINGS)
            )  # learned values would end it: these engines are fast
            words = " ".join([str(len(both_ways)), *front[: 100 + case["words"]]])
            path, most = case["path"], case["max_tokens"]
            cut_at(w, None)
            await asked(w, path, body_of(path, words, max_tokens=1))
            body = body_of(
                path,
                f"{words} {case['prompt']}",
                max_tokens=most,
                stream=case["stream"],
                return_token_ids=case["ids"],
            )
            whole = await alone(w, path, body | {"stream": False})
            prompt = whole["usage"]["prompt_tokens"]
            cut_at(w, (prompt + case["at"] * (most - 1) - 0.5) / (prompt + most))
            said = await asked(w, path, body)
            equal(said, await alone(w, path, body))
            both_ways.append(bool(said["record"]["cuts"] and said["record"]["fetched_tokens"]))

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases)
        def check(case: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(tried(case), loop).result(PATIENCE_SECONDS)

        await asyncio.to_thread(check)
        assert sum(both_ways) > 10
        assert set(w.outcomes) == {"transferred"}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            {"policy": "planner", "split": {"kind": "apart", "min_gain_seconds": 0.0}},
            marks=pytest.mark.nightly,
        ),
        {"split": {"kind": "apart", "min_gain_seconds": 0.0}},
        pytest.param({"split": {"kind": "libra", "min_gain": -1.0}}, marks=pytest.mark.nightly),
        {"split": SplitAt(fraction=0.9)},
    ],
)
async def test_many_at_once(config: dict[str, Any]) -> None:
    most = {"prefix_fetch": SETTINGS | {"max_fetches": 100}, "profile": "independent-sim"}
    async with pulling(*engines(4), **config, **most) as w:
        for n in range(7):
            await asked(w, PATHS[n % 2], body_of(PATHS[n % 2], f"{n} {LONG}", max_tokens=2))
        bodies = [
            (path := PATHS[n % 2], body_of(path, f"{n % 7} {LONG} {n}", max_tokens=400, stream=n % 3 > 0))
            for n in range(32)
        ]
        said = await asyncio.gather(*(asked(w, path, body) for path, body in bodies))
        for (path, body), heard in list(zip(bodies, said, strict=True))[::4]:
            equal(heard, await alone(w, path, body))
        cut, pulled = [
            {n for n, heard in enumerate(said) if heard["record"][name]}
            for name in ("cuts", "fetched_tokens")
        ]
        inside = not isinstance(config["split"], SplitAt)  # it splits inside the prompts
        assert cut & pulled or inside
        assert cut
        assert pulled or inside
        assert set(outcomes(w)) <= {"fetched"}
        assert set(w.outcomes) == {"transferred"}
        assert w.outcomes["transferred"] >= len(cut) + len(pulled)  # and the first transfers


@pytest.mark.parametrize("by", ["recompute", "fetch"])
@pytest.mark.parametrize("path", PATHS)
async def test_and_then_it_moves(by: str, path: str) -> None:
    body = body_at(path, stream=True, max_tokens=150)
    star = {"rebalance": {"kind": "star", "period_seconds": 3600.0}, "migration_by": by}
    async with pulling(*engines(), **CUT, **star) as w:
        _, expected = await ready(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        assert await move(w, 10), mover(w).outcomes
        said = await task
        equal(said, expected)
        assert (len(said["record"]["migrations"]), outcomes(w)) == (1, {"fetched": 1})
        assert mover(w).outcomes == {"migrated": 1}


# Failures.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_holder_that_is_gone(path: str, stream: bool) -> None:
    body = body_at(path, stream=stream)
    async with pulling(*engines(), **CUT) as w:
        holder, expected = await ready(w, path, body)
        await w.kill(holder)
        said = await asked(w, path, body)
        equal(said, expected)
        record = said["record"]
        assert (record["fetch_instance"], record["fetched_tokens"]) == (holder, 0)
        assert computed(w.load(record["instance"])) == expected["usage"]["prompt_tokens"]
        assert (outcomes(w), w.outcomes) == ({"holder_failed": 1}, {"transferred": 1})


@pytest.mark.parametrize("path", PATHS)
async def test_a_slow_holder_is_waited_for_only_so_long(path: str) -> None:
    body = body_at(path, stream=True)
    async with pulling(*engines(max_sequences=1), prefix_fetch_timeout_seconds=0.1, **CUT) as w:
        holder, expected = await ready(w, path, body)
        async with occupied(w, holder):
            task = asyncio.create_task(asked(w, path, body))
            await w.until(lambda: waiting(w, holder))
            await w.until(lambda: outcomes(w))  # its last segment may wait there, too
        equal(await task, expected)
        assert (outcomes(w), w.outcomes) == ({"late": 1}, {"transferred": 1})


async def test_a_full_holder_refuses() -> None:
    body = body_at(COMPLETIONS)
    async with pulling(*engines(max_sequences=1, max_queued_requests=0), **CUT) as w:
        holder, expected = await ready(w, COMPLETIONS, body)
        async with occupied(w, holder):
            said = await asked(w, COMPLETIONS, body)
        equal(said, expected)
        assert outcomes(w) == {"refused": 1}
        assert w.server.fleet.models[0].engines[holder].healthy


async def test_a_holder_that_has_evicted_the_prompt_computes_it() -> None:
    body = body_at(COMPLETIONS)
    async with pulling(*engines(), **CUT) as w:
        holder, expected = await ready(w, COMPLETIONS, body)
        async with w.client.post(w.engines[holder].url + "/reset_prefix_cache") as response:
            assert response.status == 200
        said = await asked(w, COMPLETIONS, body)
        equal(said, expected)
        assert (outcomes(w), w.outcomes) == ({"fetched": 1}, {"transferred": 2})


async def test_what_is_held_too_long_is_not_fetched() -> None:
    body = body_at(COMPLETIONS)
    async with pulling(*engines(), handover_seconds=1e-9, **CUT) as w:
        _, expected = await ready(w, COMPLETIONS, body)
        equal(await asked(w, COMPLETIONS, body), expected)
        assert w.outcomes == {"late": 2}
        assert not any(w.load(name)["fetched_prompt_tokens"] for name in w.engines)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_cannot_fetch_computes_and_hands_on(
    policy: str, path: str, stream: bool
) -> None:
    body = body_at(path, stream=stream)
    async with pulling(*engines(kv_load_failure_policy=policy), **CUT) as w:
        holder, expected = await ready(w, path, body, 5)
        await w.engines[holder]._api._nixl.channel.stop()  # type: ignore[union-attr]
        said = await asked(w, path, body)
        equal(said, expected)
        assert outcomes(w) == {"fetched": 1}
        assert w.outcomes == {"transferred": 2} | ({"broken": 1} if policy == "fail" else {})
        first = said["record"]["instance"]
        assert computed(w.load(first)) == said["record"]["prompt_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_engine_is_gone_when_it_is_its_turn(path: str, stream: bool) -> None:
    body = body_at(path, stream=stream)
    async with pulling(*engines(4), **CUT) as w:
        holder, expected = await ready(w, path, body)
        first = next(name for name in w.engines if name > holder)
        await w.kill(first)
        said = await asked(w, path, body)
        equal(said, expected)
        record = said["record"]
        assert record["tried"] == [first, record["instance"]]
        assert record["outcome"] == "finished"
        # Fetched for the first segment, and again for the next unless that runs on the holder.
        assert outcomes(w) == {"fetched": 1 + (record["instance"] != holder)}


@pytest.mark.parametrize("path", PATHS)
async def test_the_first_engine_dies_in_its_leg(path: str) -> None:
    body = body_at(path, stream=True, max_tokens=60)
    async with pulling(*engines(4, clock_speed=0.5), **CUT) as w:
        holder, expected = await ready(w, path, body, 30)
        others = [name for name in w.engines if name != holder]
        for name in others:
            w.pace(name, SLOWLY)
        task = asyncio.create_task(asked(w, path, body))
        await w.until(lambda: busy(w, others))
        await w.kill(busy(w, others)[0])
        w.resume()
        said = await task
        equal(said, expected)
        assert said["record"]["outcome"] == "finished"
        assert outcomes(w)["fetched"] >= 1


@pytest.mark.parametrize("path", PATHS)
async def test_the_last_engine_is_gone_when_it_is_its_turn(path: str) -> None:
    body = body_at(path, stream=True, max_tokens=60)
    async with pulling(*engines(4, clock_speed=0.5), **CUT) as w:
        holder, expected = await ready(w, path, body, 30)
        task = asyncio.create_task(asked(w, path, body))
        others = [name for name in w.engines if name != holder]
        await w.until(lambda: busy(w, others))
        first = busy(w, others)[0]
        (relay,) = w.server.front.relays
        last = relay.ticket.next_instance  # type: ignore[attr-defined]
        assert last not in (None, first)
        await w.kill(last)
        said = await task
        equal(said, expected)
        assert said["record"]["decode_instance"] not in (None, last)


@pytest.mark.parametrize("when", ["pull", "first leg", "last leg"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(when: str, stream: bool) -> None:
    slow = {"clock_speed": 0.5} | ({"max_sequences": 1} if when == "pull" else {})
    body = body_at(CHAT, stream=stream, max_tokens=400)
    async with pulling(*engines(**slow), **CUT) as w:
        holder, _ = await ready(w, CHAT, body, 30)
        others = [name for name in w.engines if name != holder]
        if when == "pull":
            async with occupied(w, holder):
                task = asyncio.create_task(asked(w, CHAT, body))
                await w.until(lambda: waiting(w, holder))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await w.until(lambda: not waiting(w, holder))
        else:
            task = asyncio.create_task(asked(w, CHAT, body))
            await w.until(lambda: busy(w, others))
            if when == "last leg":
                await w.until(lambda: w.outcomes == {"transferred": 2})
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await w.until(lambda: not busy(w, w.engines))
        await w.until(lambda: not w.in_flight())
        assert stats(w)["failed"]["cancelled"] == 1
        assert outcomes(w) == {"ended" if when == "pull" else "fetched": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 12])
async def test_a_chat_that_an_engine_renders_otherwise(stream: bool, tokens: int) -> None:
    """The engine tokenizes the chat differently from the fetched cache, which only it can see."""
    body = body_at(CHAT, stream=stream)
    async with pulling(*engines(tokenize=False), **CUT) as w:
        for name in w.engines:
            renders_otherwise(w, name)
        cut_at(w, None)
        whole = await asked(w, CHAT, body)
        prompt = whole["record"]["prompt_tokens"]
        cut_at(w, (prompt + tokens - 0.5) / (prompt + body["max_tokens"]))
        said, again = [await asked(w, CHAT, body) for _ in range(2)]
        assert said["record"]["fetch_instance"]
        assert outcomes(w)["fetched"] == 1
        assert w.outcomes["other_tokens"] == 1
        equal(said, whole)
        assert "tokenizes a chat differently" in again["record"]["fetch_reason"]
        assert "tokenizes a chat differently" in again["record"]["split_reason"]
        equal(again, whole)
