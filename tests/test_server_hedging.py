"""Hedged requests: a second engine gets a stream whose first token is late.

`world` and `pd` check at their end that no request is in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import orjson
import pytest

from lmetric.config import HedgingConfig, ServerConfig
from lmetric.server.fleet.hedging import MOST_SAVED, HedgeBudget
from lmetric.server.fleet.model import Model
from lmetric_lab.emulated import EngineOptions
from pd_world import Pd, pd
from server_world import (
    STREAM_HEAD,
    Behaviour,
    FakeEngine,
    Request,
    World,
    answer,
    chunk,
    decision_id,
    event,
    hang,
    plain,
    reset,
    token,
    usage,
    world,
)
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, equal
from waiting import PATIENCE_SECONDS, until

AFTER = 0.15
STREAM = {"stream": True, "max_tokens": 3}
BODY = {"model": "tiny", "prompt": "a b c"} | STREAM
ANSWER = b"".join(token(text, "length" if text == "c" else None) for text in "abc")


def hedging(after: float = AFTER, ratio: float = 1.0) -> dict[str, float]:
    return {"after_seconds": after, "budget_ratio": ratio}


def later(seconds: float, first: Behaviour = answer) -> Behaviour:
    """An engine that begins to answer after some seconds, unless the router has left."""

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        left = asyncio.ensure_future(engine.until_left(writer))
        await asyncio.wait([left], timeout=seconds)
        if left.done():
            return False
        left.cancel()
        return await first(engine, request, writer)

    return behave


def once(true: Callable[[], object], first: Behaviour = answer) -> Behaviour:
    """An engine that begins to answer once something is true, unless the router has left."""

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        left = asyncio.ensure_future(engine.until_left(writer))
        await until(lambda: left.done() or true())
        if left.done():
            return False
        left.cancel()
        return await first(engine, request, writer)

    return behave


async def refuses(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
    writer.write(plain(500, {"error": {"message": "no"}}))
    return True


async def talks_without_a_token(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
    """Sends comments and a chunk with only the role, then nothing."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    writer.write(STREAM_HEAD + chunk(b": ping\n\n") + chunk(event(role)) + chunk(b": ping\n\n"))
    await engine.until_left(writer)
    return False


@asynccontextmanager
async def two(first: Behaviour, second: Behaviour, **config: Any) -> AsyncIterator[World]:
    """A router before two engines. Requests go to the first, then to the second."""
    engines = [FakeEngine(behave=first), FakeEngine(behave=second)]
    async with world(engines, **({"hedging": hedging()} | config)) as w:
        yield w


def model(w: World | Pd) -> Model:
    return w.server.fleet.models[0]


def loads(w: World) -> list[int]:
    return model(w).router.indicators()["bs"].tolist()


async def test_the_second_engine_answers_for_a_frozen_one() -> None:
    async with two(hang, answer) as w:
        began = time.monotonic()
        status, headers, got = await w.post(BODY)
        assert time.monotonic() - began > AFTER
        assert status == 200
        assert got.startswith(ANSWER)
        assert headers["x-lmetric-instance"] == "e1"
        await w.until(lambda: w.engines[0].left == 1)
        await w.until(lambda: loads(w) == [0, 0])
        assert model(w).hedging.outcomes == {"won": 1}
        assert [engine.service.state for engine in model(w).engines.values()] == ["HEALTHY"] * 2
        assert not +model(w).outliers.ejected
        router = model(w).router
        stats = router.stats()
        assert stats["failed"]["cancelled"] == 1  # the loser, which no engine is blamed for
        # Each decision names the other.
        label = headers["x-lmetric-decision"]
        _, page = await w.get(f"/debug/decisions/{label}")
        other = orjson.loads(page)["other_attempt"]
        _, page = await w.get(f"/debug/decisions/{other}")
        record = orjson.loads(page)
        assert record["other_attempt"] == label
        assert record["instance"] == "e0"
        _, text = await w.get("/metrics")
        assert b'lmetric_hedges_total{model="tiny",outcome="won"} 1.0' in text
        assert b'lmetric_retries_total{model="tiny"} 0.0' in text


async def test_the_first_engine_may_still_answer() -> None:
    async with two(hang, hang) as w:
        w.engines[0].behave = once(lambda: w.engines[1].requests)
        status, headers, got = await w.post(BODY)
        assert (status, headers["x-lmetric-instance"]) == (200, "e0")
        assert got.startswith(ANSWER)
        await w.until(lambda: w.engines[1].left == 1)
        assert model(w).hedging.outcomes == {"lost": 1}


async def test_a_token_in_time_needs_no_hedge() -> None:
    after = 1.0  # a busy machine answers in this time
    async with two(answer, answer, hedging=hedging(after)) as w:
        for _ in range(4):
            assert (await w.post(BODY))[0] == 200
        await asyncio.sleep(1.2 * after)
        assert [len(engine.requests) for engine in w.engines] == [2, 2]
        assert not model(w).hedging.outcomes


async def test_hedging_is_off_by_default() -> None:
    async with two(later(3 * AFTER), answer, hedging={}) as w:
        assert (await w.post(BODY))[1]["x-lmetric-instance"] == "e0"
        assert not w.engines[1].requests


async def test_answers_without_streaming_are_not_hedged() -> None:
    async with two(later(3 * AFTER), answer) as w:
        status, headers, _ = await w.post(BODY | {"stream": False})
        assert (status, headers["x-lmetric-instance"]) == (200, "e0")
        assert not w.engines[1].requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_comments_and_roles_are_no_tokens(path: str) -> None:
    async with two(talks_without_a_token, answer) as w:
        body = (
            BODY
            if path == COMPLETIONS
            else {"model": "tiny", "messages": [{"role": "user", "content": "a"}]} | STREAM
        )
        status, headers, got = await w.post(body, path)
        assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        assert got.startswith(ANSWER)
        assert b"role" not in got
        assert model(w).hedging.outcomes == {"won": 1}


async def test_both_answer_at_once() -> None:
    """The client gets one answer, whichever engine is first."""
    async with two(later(AFTER + 0.03), later(0.03)) as w:
        for _ in range(3):
            answers = await asyncio.gather(*(w.post(BODY) for _ in range(10)))
            for status, _, got in answers:
                assert status == 200
                assert got == ANSWER + event({"choices": [], "usage": usage()}) + event(b"[DONE]")
        outcomes = model(w).hedging.outcomes
        assert outcomes["won"] + outcomes["lost"] == sum(outcomes.values()) > 0
        await w.until(lambda: loads(w) == [0, 0])


async def test_the_budget_bounds_hedges() -> None:
    async with two(hang, hang, hedging=hedging(ratio=0.1)) as w:
        hedges = model(w).hedging

        def all_are_late() -> bool:
            attempts = sum(len(engine.requests) for engine in w.engines)
            return attempts + hedges.unsent.total() == 2 * 20

        for engine in w.engines:
            engine.behave = once(all_are_late)
        answers = await asyncio.gather(*(w.post(BODY) for _ in range(20)))
        assert {status for status, _, _ in answers} == {200}
        assert sum(hedges.outcomes.values()) == 3  # one at the start, and 10% of 20
        assert hedges.unsent == {"budget": 17}
        assert sum(len(engine.requests) for engine in w.engines) == 23


def test_a_budget_saves_a_bounded_number_of_hedges() -> None:
    budget = HedgeBudget(0.05)
    sent = 0
    for requests in (0, 0, 100, 100, 100_000):
        while budget.allows(requests):
            budget.spend()
            sent += 1
        assert sent <= 1 + 0.05 * requests
    assert sent == 1 + 5 + MOST_SAVED
    for first in range(1, 20):  # the rounding of shares costs no hedge
        budget, sent = HedgeBudget(0.1), 0
        for requests in (first, 20):
            while budget.allows(requests):
                budget.spend()
                sent += 1
        assert sent == 3, first
    assert not HedgeBudget(0.0).allows(1000)


async def test_a_client_that_leaves_ends_both_attempts() -> None:
    async with two(hang, hang) as w:
        task = asyncio.create_task(w.post(BODY))
        for engine in w.engines:
            await engine.asked(1)
        task.cancel()
        await w.until(lambda: [engine.left for engine in w.engines] == [1, 1])
        await w.settled()
        assert model(w).hedging.outcomes == {"ended": 1}


async def test_the_hedge_continues_if_the_first_engine_fails() -> None:
    async with two(hang, later(AFTER)) as w:
        w.engines[0].behave = once(lambda: w.engines[1].requests, reset)
        status, headers, _ = await w.post(BODY)
        assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        assert model(w).hedging.outcomes == {"won": 1}
        assert not +model(w).retry_budget.outcomes
        assert [len(engine.requests) for engine in w.engines] == [1, 1]


async def test_a_hedge_that_fails_costs_nothing() -> None:
    async with two(hang, refuses) as w:
        w.engines[0].behave = once(lambda: model(w).hedging.outcomes)
        status, headers, _ = await w.post(BODY)
        assert (status, headers["x-lmetric-instance"]) == (200, "e0")
        assert model(w).hedging.outcomes == {"failed": 1}


async def test_two_engines_that_fail_alike_end_the_request() -> None:
    engines = [FakeEngine() for _ in range(3)]
    async with world(engines, hedging=hedging()) as w:
        first, *others = engines
        first.behave = once(lambda: sum(len(each.requests) for each in others), reset)
        for each in others:
            each.behave = once(lambda: model(w).hedging.outcomes, reset)
        status, _, got = await w.post(BODY)
        assert (status, got["error"]["code"]) == (502, "failed_twice")
        assert sum(len(engine.requests) for engine in engines) == 2


async def test_one_engine_gets_no_hedge() -> None:
    async with world(1, hedging=hedging()) as w:
        w.engines[0].behave = once(lambda: model(w).hedging.unsent)
        assert (await w.post(BODY))[0] == 200
        assert model(w).hedging.unsent == {"no_engine": 1}
        _, text = await w.get("/metrics")
        assert b'lmetric_hedges_not_sent_total{model="tiny",reason="no_engine"} 1.0' in text
        assert b'lmetric_failures_total{kind="refused",model="tiny"} 0.0' in text
        for total in ("retries", "no_instance"):
            assert b'lmetric_%b_total{model="tiny"} 0.0' % total.encode() in text
        assert cast(dict[str, Any], model(w).router.stats())["failed"]["refused"] == 1  # of the hedge


async def second_priority(after: float) -> int:
    """Returns the priority of a tenant's second request. The first one is hedged in time."""
    settings = {"priority": "vtc", "tenants": {"a": {}}, "hedging": hedging(after)}
    async with two(answer, hang, **settings) as w:
        if after == AFTER:
            w.engines[0].behave = once(lambda: w.engines[1].requests)
        tenant = {"x-tenant": "a"}
        _, headers, _ = await w.post(BODY, headers=tenant)
        assert headers["x-lmetric-instance"] == "e0"
        assert model(w).hedging.outcomes == ({"lost": 1} if after == AFTER else {})
        w.engines[1].behave = answer
        _, headers, _ = await w.post(BODY, headers=tenant)
        record = model(w).router.explain(decision_id(headers))
        assert record is not None
        assert record["priority"] is not None
        return record["priority"]


async def test_a_tenant_is_charged_once() -> None:
    assert await second_priority(AFTER) == await second_priority(60.0) > 0


async def test_a_reload_changes_hedging() -> None:
    async with two(later(3 * AFTER), answer, hedging={}) as w:
        config = w.server.config
        new = ServerConfig.model_validate(
            config.model_dump(by_alias=True) | {"hedging": {"after_seconds": AFTER}}
        )
        await w.server.apply(w.server.prepare(new))
        assert model(w).hedging.after_seconds == AFTER
        _, headers, _ = await w.post(BODY)
        assert headers["x-lmetric-instance"] == "e1"


def test_settings_have_bounds() -> None:
    for wrong in ({"after_seconds": 0}, {"after": 1}):
        with pytest.raises(ValueError, match=r"after"):
            HedgingConfig.model_validate(wrong)


# -- emulated engines
# ----------------------------------------------------------------


def engine(speed: float) -> EngineOptions:
    return EngineOptions.model_validate({"port": 0, "clock_speed": speed})


@asynccontextmanager
async def slow_and_fast(**config: Any) -> AsyncIterator[Pd]:
    given = {"tokenizer": None, "policy": "round_robin", "hedging": hedging()}
    async with pd(engine(0.001), engine(5.0), **(given | config)) as w:
        engines = model(w).engines
        await w.until(lambda: all(each.identified for each in engines.values()))
        yield w


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("ids", [False, True])
async def test_a_hedged_answer_is_that_of_one_engine(path: str, ids: bool) -> None:
    """The first engine is slowed to a thousandth. It drops the request when the other answers."""
    async with slow_and_fast() as w:
        body = body_of(path, stream=True, max_tokens=40, return_token_ids=ids)
        expected = await alone(w, path, body)
        said = await asked(w, path, body)
        equal(said, expected)
        assert model(w).hedging.outcomes == {"won": 1}
        await w.until(lambda: not w.busy("b0"))
        assert said["record"]["instance"] == "b1"


async def test_a_flood_of_hedges_leaves_nothing_behind() -> None:
    """Some clients leave in the middle. In the end no engine has a request."""
    async with slow_and_fast(policy="least_requests") as w:
        body = body_of(COMPLETIONS, stream=True, max_tokens=20)

        async def one(number: int) -> bool:
            try:
                async with asyncio.timeout(0.05 * number if number % 3 == 0 else PATIENCE_SECONDS):
                    async with w.client.post(w.url + COMPLETIONS, json=body) as response:
                        return b"[DONE]" in await response.read()
            except (TimeoutError, aiohttp.ClientError):
                return number % 3 == 0

        # The budget saves up ten hedges. On a busy machine, the fast engine's may be late, too.
        assert all(await asyncio.gather(*(one(number) for number in range(1, 11))))
        await w.until(lambda: not w.in_flight())
        await w.until(lambda: not w.busy("b0") and not w.busy("b1"))
        assert model(w).hedging.outcomes["won"] > 0


async def test_a_hedged_request_is_charged_once() -> None:
    budgets = [{"counts": "requests", "limit": 10, "per": "hour"}]
    budgets += [{"counts": "total_tokens", "limit": 1000, "per": "hour"}]
    engines = [FakeEngine(behave=hang), FakeEngine()]
    settings: dict[str, Any] = {"tenants": {"a": {"budgets": budgets}}, "hedging": hedging()}
    async with world(engines, policy="round_robin", **settings) as w:
        for number in range(1, 5):
            status, headers, _ = await w.post(BODY, headers={"x-tenant": "a"})
            assert status == 200
            assert headers["x-ratelimit-remaining-requests"] == f"{10 - number}"
        assert sum(len(engine.requests) for engine in engines) > 4
        # The next request sees the settled use of four requests: 10 tokens in and 3 out, each.
        _, headers, _ = await w.post(BODY, headers={"x-tenant": "a"})
        reserved = 1000 - 4 * 13 - int(headers["x-ratelimit-remaining-tokens"])
        assert 0 < reserved < 13 + 10
