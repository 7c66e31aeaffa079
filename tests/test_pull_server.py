"""Prefixes that engines fetch from each other by the server: clients get one engine's answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmetric.config import PoolSettings, ServerConfig
from lmetric.option_values import parse
from lmetric_lab.emulated import EngineOptions
from moves_world import move, plain
from pd_world import Pd, nixl
from server_world import decision_id
from split_world import CHAT, COMPLETIONS, PROMPTS, alone, asked, body_of, both, equal, split
from waiting import PATIENCE_SECONDS

PATHS = [CHAT, COMPLETIONS]
LONG = "the history of the quiet river and of all who lived by it " * 120
SETTINGS: dict[str, Any] = {"seconds_per_token": 0.0, "fixed_seconds": 0.0, "min_tokens": 64}


@contextlib.asynccontextmanager
async def pulling(*options: EngineOptions, **config: Any) -> AsyncIterator[Pd]:
    """A router that fetches every prefix it can, and asks its engines in turn."""
    kinds = options or (both(clock_speed=2.0), both(clock_speed=2.0))
    given = {"prefix_fetch": SETTINGS, "prefix_fetch_timeout_seconds": 5.0, "at": None}
    async with split(*kinds, **(given | config)) as world:
        yield world
        assert not world.server.fleet.models[0].router.indicators()["fetches"].any()


def outcomes(w: Pd) -> dict[str, int]:
    return dict(w.server.fleet.models[0].fetch_outcomes)


def stats(w: Pd) -> dict[str, Any]:
    return w.server.fleet.models[0].router.stats()


async def heated(w: Pd, path: str = COMPLETIONS) -> str:
    """Has one engine compute the long prompt; which one."""
    said = await asked(w, path, body_of(path, LONG, max_tokens=2))
    holder: str = said["headers"]["x-lmetric-instance"]
    return holder


def computed(load: dict[str, Any]) -> int:
    """Prompt tokens that an engine computed itself."""
    return int(load["prompt_tokens"] - load["cached_prompt_tokens"] - load["fetched_prompt_tokens"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_one_engines(path: str, stream: bool) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    body = body_of(path, LONG + "and then?", stream=stream, **more)
    async with pulling() as w:
        expected = await alone(w, path, body)
        holder = await heated(w, path)
        said = await asked(w, path, body)
        equal(said, expected)
        record = said["record"]
        target = said["headers"]["x-lmetric-instance"]
        assert target != holder
        assert (record["fetch_instance"], said["headers"]["x-lmetric-prefill"]) == (holder, holder)
        pulled = record["fetched_tokens"]
        prompt = expected["usage"]["prompt_tokens"]
        assert prompt - 64 < pulled < prompt
        assert pulled % 16 == 0
        assert record["fetch_reason"] is None
        load = w.load(target)
        assert load["fetched_prompt_tokens"] == pulled
        assert computed(load) == prompt - pulled
        assert (outcomes(w), w.outcomes) == ({"fetched": 1}, {"transferred": 1})
        assert (stats(w)["fetches"], stats(w)["fetched_tokens"]) == (1, pulled)
        page = (await (await w.client.get(f"{w.url}/metrics")).text()).splitlines()
        assert 'lmetric_prefix_fetches_total{model="emulated",outcome="fetched"} 1.0' in page
        assert f'lmetric_prefix_fetched_tokens_total{{model="emulated"}} {pulled}.0' in page


async def test_any_request_whose_front_another_holds() -> None:
    cases = st.fixed_dictionaries(
        {
            "path": st.sampled_from(PATHS),
            "prompt": PROMPTS,
            "words": st.integers(0, 200),
            "max_tokens": st.integers(1, 30),
            "stream": st.booleans(),
            "ids": st.booleans(),
        }
    )
    loop = asyncio.get_running_loop()
    front = (LONG + LONG).split(" ")
    async with pulling(both(clock_speed=2.0), both(clock_speed=2.0), both(clock_speed=2.0)) as w:
        router = w.server.fleet.models[0].router

        async def tried(case: dict[str, Any]) -> None:
            router.configure(
                prefix_fetch=parse("prefix_fetch", SETTINGS)
            )  # what is learned would end it: these engines are fast
            path, prompt = case["path"], " ".join(front[: 300 + case["words"]]) + " " + case["prompt"]
            body = body_of(
                path,
                prompt,
                max_tokens=case["max_tokens"],
                stream=case["stream"],
                return_token_ids=case["ids"],
            )
            equal(await asked(w, path, body), await alone(w, path, body))

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases)
        def check(case: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(tried(case), loop).result(PATIENCE_SECONDS)

        await asyncio.to_thread(check)
        assert outcomes(w)["fetched"] > 4
        assert w.outcomes == {"transferred": outcomes(w)["fetched"]}


async def test_many_at_once() -> None:
    async with pulling(prefix_fetch=SETTINGS | {"max_fetches": 100}) as w:
        await heated(w)
        bodies = [
            (path := PATHS[n // 2 % 2], body_of(path, f"{LONG} {n}", max_tokens=30, stream=n % 3 > 0))
            for n in range(24)
        ]
        said = await asyncio.gather(*(asked(w, path, body) for path, body in bodies))
        for (path, body), heard in list(zip(bodies, said, strict=True))[::4]:
            equal(heard, await alone(w, path, body))
        assert set(outcomes(w)) == {"fetched"}
        assert w.outcomes == {"transferred": outcomes(w)["fetched"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"seed": 3, "temperature": 0.5, "stop": ["zzz"], "max_tokens": None},
        {"presence_penalty": 1.0, "response_format": {"type": "text"}},
    ],
)
async def test_what_cannot_be_cut_can_be_pulled_for(fields: dict[str, Any]) -> None:
    body = body_of(CHAT, LONG, **fields)
    async with pulling() as w:
        expected = await alone(w, CHAT, body)
        await asked(w, CHAT, body)
        said = await asked(w, CHAT, body)
        equal(said, expected)
        assert said["record"]["fetched_tokens"] > 1000
        assert outcomes(w) == {"fetched": 1}


@pytest.mark.parametrize(
    ("fields", "config", "why"),
    [
        ({"n": 2}, {}, "one answer per prompt"),
        ({"echo": True}, {}, "(echo)"),
        ({"prompt": [LONG, LONG]}, {}, "several prompts"),
        ({}, {"tokenizer": "off"}, "not known as token ids"),
        ({"prompt": [7] * 1600}, {"tokenizer": "off"}, "tokenizer is not known"),
    ],
)
async def test_what_is_not_pulled_for_says_why(
    fields: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    async with pulling(**config) as w:
        for _ in range(2):
            status, headers, _ = await w.post(body_of(COMPLETIONS, LONG) | fields)
            assert status == (200 if config else 400)  # these engines have one answer to one prompt
            record = w.server.fleet.models[0].router.explain(decision_id(headers))
            assert record is not None
            assert why in record["fetch_reason"]
            assert record["fetch_instance"] is None
        assert (outcomes(w), stats(w)["fetches"]) == ({}, 0)


@pytest.mark.parametrize("kind", [both(clock_speed=2.0, kv_bidirectional=False), plain()])
async def test_engines_that_cannot_be_cut_inside_a_prompt_compute(kind: EngineOptions) -> None:
    async with pulling(kind, kind) as w:
        await heated(w)
        said = await asked(w, COMPLETIONS, body := body_of(COMPLETIONS, LONG))
        equal(said, await alone(w, COMPLETIONS, body))
        assert (said["record"]["fetch_instance"], stats(w)["fetches"]) == (None, 0)


@pytest.mark.parametrize("by", ["recompute", "fetch"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_with_requests_that_may_move(by: str, path: str, stream: bool) -> None:
    body = body_of(path, LONG + "and then?", stream=stream, max_tokens=40)
    async with pulling(rebalance={"kind": "star", "period_seconds": 3600.0}, migration_by=by) as w:
        expected = await alone(w, path, body)
        await heated(w, path)
        said = await asked(w, path, body)
        equal(said, expected)
        assert w.load(said["headers"]["x-lmetric-instance"])["fetched_prompt_tokens"] > 1000
        assert (outcomes(w), w.outcomes) == ({"fetched": 1}, {"transferred": 1})


async def test_a_stream_that_was_pulled_for_moves() -> None:
    body = body_of(COMPLETIONS, LONG + "and then?", stream=True, max_tokens=120)
    kinds = [both(clock_speed=2.0)] * 3
    star = {"kind": "star", "period_seconds": 3600.0}
    async with pulling(*kinds, rebalance=star, migration_by="recompute") as w:
        expected = await alone(w, COMPLETIONS, body)
        await heated(w)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        assert await move(w, 10)
        said = await task
        equal(said, expected)
        assert (len(said["record"]["migrations"]), outcomes(w)) == (1, {"fetched": 1})


async def test_prefill_and_decode_engines_are_not_pulled_to() -> None:
    def kind(role: str) -> EngineOptions:
        return nixl(role, kv_bidirectional=True, kv_load_failure_policy="recompute", clock_speed=2.0)

    async with pulling(kind("prefill"), kind("prefill"), kind("decode")) as w:
        for _ in range(2):
            said = await asked(w, COMPLETIONS, body_of(COMPLETIONS, LONG, stream=True))
            assert said["record"]["fetch_instance"] is None
        assert w.outcomes == {"transferred": 2}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"prefix_fetch": True}, True),  # YAML's on is true
        ({"policy": "planner"}, True),
        ({"policy": {"name": "planner"}, "split": "none"}, True),
        ({"policy": "planner", "prefix_fetch": "none"}, False),
        ({"policy": "lmetric_pull"}, False),
    ],
)
def test_what_is_pulled_goes_with_the_policy_unless_it_is_said(given: dict[str, Any], expected: bool) -> None:
    config = ServerConfig.model_validate(given)

    def fetches(settings: PoolSettings) -> bool:
        return settings.routing.prefix_fetch is not None

    assert (fetches(config.pool_settings()), config.fetches_prefixes) == (expected, expected)
    own = ServerConfig.model_validate({"models": [{"name": "a", **given}]})
    assert fetches(own.pool_settings(own.models[0])) is expected
    assert (own.fetches_prefixes, fetches(own.pool_settings())) == (expected, False)


def test_pull_that_there_is_not() -> None:
    with pytest.raises(ValidationError, match="expected on, off, auto, or settings"):
        ServerConfig.model_validate({"prefix_fetch": "sometimes"})


def test_settings_that_there_are_not() -> None:
    with pytest.raises(ValidationError, match=r"prefix_fetch.most: 3 is not valid; unknown setting"):
        ServerConfig.model_validate({"prefix_fetch": {"most": 3}})
