"""The order of requests: the priorities that the router gives, and their use by engines."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

import lmetric as lm
from lmetric import _core
from lmetric.option_values import parse
from lmetric.server.background import monitor as health
from lmetric.server.fleet.priority import Priorities
from lmetric_lab.emulated import EngineOptions
from pd_world import BODY, Pd, pd

SHORT, LONG = "a river " * 4, "the history of the quiet river and of all who lived by it " * 60


def ordered(kind: str, **settings: float) -> _core.Router:
    router = _core.Router("lmetric")
    router.add_instance("a")
    router.configure(priority=parse("priority", {"kind": kind, **settings}))
    return router


def given(router: _core.Router, tokens: int, now: float, **more: Any) -> tuple[int, _core.Ticket]:
    decision, ticket = router.route(lm.Request(prompt_tokens=tokens, **more), now=now)
    assert decision.priority is not None
    return decision.priority, ticket


# -- the router ------------------------------------------------------------------------------------


def test_boosted_arrivals_by_hand() -> None:
    router = ordered("uniboost", gamma=0.1, adaptive=0.0, clock_offset_seconds=1e9)
    # 8,000 tokens/s until an instance was seen to prefill: 512 tokens are 0.064 s of work.
    # Against 1,024 tokens, 0.128 s.
    boost = (math.log(1 - math.exp(-0.1 * 0.128)) - math.log(1 - math.exp(-0.1 * 0.064))) / 0.1
    decision, ticket = router.route(lm.Request(prompt_tokens=700), now=50.0)
    assert decision.priority == round((1e9 + 50.0 - boost) * 1e3)
    learned = router.learned()
    assert (learned["gamma"], learned["gamma_estimates"]) == (0.1, 0)
    ticket.segment_done(now=51.0)
    told = router.explain(decision.id)
    assert told is not None
    assert told["boost_seconds"] == pytest.approx(boost)
    assert told["priority"] == decision.priority
    # Cached tokens are no work: the same prompt comes again, a longer new one does not pass it.
    first, _ = given(router, 4096, 60.0, handicap_seconds=30.0)
    assert first - given(router, 4096, 60.0)[0] == 30_000
    assert ordered("none").route(lm.Request(prompt_tokens=10))[0].priority is None


def test_numbers_compare_whatever_gamma_was_when_they_were_given() -> None:
    # A prompt of 1,024 tokens has its arrival; shorter ones go before it, longer ones behind it.
    for gamma in (0.01, 0.1, 1.0):
        router = ordered("uniboost", gamma=gamma, adaptive=0.0)
        assert given(router, 1024, 70.0)[0] == 70_000
        assert given(router, 600, 70.0)[0] < 70_000 < given(router, 3000, 70.0)[0]


def test_no_boost_is_larger_than_the_most_so_nobody_starves() -> None:
    router = ordered("uniboost", gamma=0.1, adaptive=0.0, max_boost_seconds=20.0)
    waits, _ = given(router, 100_000, 100.0)
    later = [given(router, 1, 100.0 + seconds)[0] for seconds in (1.0, 15.0, 30.0)]
    assert later[0] < waits
    assert later[2] > waits


def test_gamma_is_learned_from_ends() -> None:
    router = ordered("uniboost")
    now = 0.0
    # End-to-end times of which e^-t/10 s take longer than t.
    for i in range(2048):
        now += 1000.0
        _, ticket = given(router, 100, now)
        ticket.first_token(now=now)
        ticket.segment_done(now=now - 10 * math.log(1 - (i % 512 + 0.5) / 512))
    learned = router.learned()
    assert learned["gamma"] == pytest.approx(0.1, rel=0.15)
    assert learned["gamma_estimates"] > 20


def test_tenants_are_served_in_turn() -> None:
    router = ordered("vtc")
    bulk = [given(router, 1000, 0.0, tenant="bulk") for _ in range(4)]
    assert [priority for priority, _ in bulk] == [0, 1_000_000, 2_000_000, 3_000_000]
    other, ticket = given(router, 100, 1.0, tenant="chat", tenant_weight=2.0)
    assert other == 0
    assert given(router, 100, 1.0, tenant="chat", tenant_weight=2.0)[0] == 50_000
    # 30 answer tokens cost 60 virtual tokens, half of that with this weight, from any source.
    ticket.segment_done(output_tokens=30, now=2.0)
    assert given(router, 100, 2.0, tenant="chat", tenant_weight=2.0)[0] == 130_000
    # Requests in flight show the service so far; a new tenant begins there, and not at 0.
    for _, each in bulk:
        each.segment_done(now=2.5)
    assert given(router, 1, 3.0, tenant="new")[0] == 3_000_000
    assert router.in_flight() == 0


def test_what_cannot_be_is_named() -> None:
    router = ordered("none")
    for kind, settings, told in (
        ("fastest", {}, "uniboost"),
        (
            "uniboost",
            {"gama": 1.0},
            "priority.gama: .*did you mean 'gamma'",
        ),
        ("uniboost", {"gamma": math.nan}, "gamma"),
        ("uniboost", {"gamma": -1.0}, "gamma"),
        ("uniboost", {"smoothing": 2.0}, "smoothing"),
        ("uniboost", {"window": 500.5}, "window: 500.5 is not valid; .*an integer"),
        ("uniboost", {"bin_tokens": 0.5}, "bin_tokens: 0.5 is not valid; .*an integer"),
        (
            "uniboost",
            {"window": 200.0, "min_requests": 300.0},
            "min_requests: 300 is not valid",
        ),
        ("uniboost", {"adaptive": 0.5}, "adaptive: 0.5 is not valid; .*true or false"),
        ("uniboost", {"hysteresis_seconds": 1.0}, "priority.hysteresis_seconds: .*unknown setting"),
        ("uniboost", {"max_boost_seconds": -1.0}, "max_boost_seconds"),
        ("vtc", {"gamma": 1.0}, "nothing"),
    ):
        with pytest.raises(lm.BadValueError, match=told):
            router.configure(priority=parse("priority", {"kind": kind, **settings}))
    router.configure(priority=lm.UniBoost(window=100.0))  # fewer than there must be without it
    router.configure(priority=lm.FairShares())
    with pytest.raises(lm.BadValueError, match="weight"):
        router.route(lm.Request(prompt_tokens=1, tenant="a", tenant_weight=0.0))
    assert router.in_flight() == 0


# -- the server ------------------------------------------------------------------------------------


def one_at_a_time(**changes: Any) -> EngineOptions:
    """An engine with a place for one request."""
    given = {"port": 0, "clock_speed": 2.0, "max_sequences": 1, "order": "priority"}
    return EngineOptions.model_validate(given | changes)


async def order_of(w: Pd, requests: list[tuple[str, dict[str, str]]]) -> list[int]:
    """The order in which requests end, sent one by one while another has the only slot."""
    ended: list[int] = []

    async def ask(number: int, prompt: str, headers: dict[str, str]) -> None:
        body = {"model": "emulated", "prompt": prompt, "max_tokens": 8}
        async with w.client.post(f"{w.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            ended.append(number)

    # Keeps the place until all wait, however long that takes.
    holder = asyncio.create_task(w.post({"model": "emulated", "prompt": "wait", "max_tokens": 20_000}))
    await w.until(lambda: w.load("b0")["running"] == 1)
    tasks = []
    for number, (prompt, headers) in enumerate(requests):
        tasks.append(asyncio.create_task(ask(number, f"{number} {prompt}", headers)))
        await w.until(lambda n=number: w.load("b0")["waiting"] == n + 1)  # type: ignore[misc]
    holder.cancel()
    await asyncio.gather(*tasks)
    return ended


async def test_short_prompts_pass_long_ones_and_are_passed_by_nobody_for_ever() -> None:
    async with pd(one_at_a_time(), priority={"kind": "uniboost", "gamma": 0.1}) as w:
        await w.until(lambda: all(e.identified for e in w.server.fleet.engines()))
        ended = await order_of(w, [(LONG, {}), (LONG, {}), (SHORT, {}), (SHORT, {})])
        assert ended == [2, 3, 0, 1]
        page = await (await w.client.get(f"{w.url}/debug/engines")).json()
        assert (
            page[0]["priority"]
            == "sent as a header; it does not report whether its queue is ordered by priority"
        )
        metrics = await (await w.client.get(f"{w.url}/metrics")).text()
        assert 'lmetric_priority_gamma{model="emulated"} 0.1' in metrics
        _, headers, _ = await w.post()
        told = await (await w.client.get(f"{w.url}/debug/decisions/{headers['x-lmetric-decision']}")).json()
        assert abs(told["priority"] / 1e3 + told["boost_seconds"] - time.time()) < 60
        assert told["priority_sent"] == page[0]["priority"]


async def test_priorities_follow_a_wall_clock_that_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reliability L: routers whose clocks are set right agree again on uniboost's priorities."""

    async def priority_of_a_request(w: Pd) -> float:
        _, headers, _ = await w.post()
        told = await (await w.client.get(f"{w.url}/debug/decisions/{headers['x-lmetric-decision']}")).json()
        return told["priority"] / 1e3 + told["boost_seconds"]

    step, looks, read, follow = 0.0, 0, time.time, Priorities.follow

    def counted(*args: Any) -> None:
        nonlocal looks
        follow(*args)
        looks += 1

    monkeypatch.setattr(health, "CLOCK_SECONDS", 0.02)
    monkeypatch.setattr(time, "time", lambda: read() + step)
    monkeypatch.setattr(Priorities, "follow", counted)
    fixed = {"clock_offset_seconds": 1e6}
    for settings, follows in (({}, True), (fixed, False)):
        step = 0.0
        async with pd(one_at_a_time(), priority={"kind": "uniboost", **settings}) as w:
            await w.until(lambda: all(e.identified for e in w.server.fleet.engines()))
            before = await priority_of_a_request(w)
            assert (abs(before - time.time()) < 60) == follows
            step, seen = 5e5, looks
            await w.until(lambda seen=seen: looks > seen)  # type: ignore[misc]
            later = await priority_of_a_request(w)
            assert (later - before > 4e5) == follows


async def test_without_priorities_arrival_counts_or_what_clients_say() -> None:
    async with pd(one_at_a_time()) as w:
        assert await order_of(w, [(LONG, {}), (SHORT, {})]) == [0, 1]
        urgent = {"X-Vllm-Priority": "-5"}
        assert await order_of(w, [(LONG, {}), (LONG, urgent)]) == [1, 0]


async def test_a_client_cannot_push_in_where_the_router_orders() -> None:
    async with pd(one_at_a_time(), priority="uniboost") as w:
        await w.until(lambda: all(e.identified for e in w.server.fleet.engines()))
        pushing = {"X-Vllm-Priority": str(-(2**62)), "x-tenant": "vip"}
        assert await order_of(w, [(LONG, {}), (LONG, pushing)]) == [0, 1]


async def test_bulk_tenants_stand_back() -> None:
    tenants = {"bulk": {"handicap_seconds": 500.0}, "chat": {}}
    async with pd(one_at_a_time(), priority="uniboost", tenants=tenants) as w:
        await w.until(lambda: all(e.identified for e in w.server.fleet.engines()))
        bulk, chat = {"x-tenant": "bulk"}, {"x-tenant": "chat"}
        assert await order_of(w, [(SHORT, bulk), (SHORT, bulk), (LONG, chat)]) == [2, 0, 1]
        page = await (await w.client.get(f"{w.url}/metrics")).text()
        assert 'tenant="bulk"' in page


async def test_virtual_tokens_share_between_tenants() -> None:
    tenants: dict[str, Any] = {"bulk": {}, "chat": {}}
    async with pd(one_at_a_time(), priority="vtc", tenants=tenants) as w:
        await w.until(lambda: all(e.identified for e in w.server.fleet.engines()))
        bulk, chat = {"x-tenant": "bulk"}, {"x-tenant": "chat"}
        ended = await order_of(w, [(LONG, bulk), (LONG, bulk), (LONG, bulk), (SHORT, chat), (SHORT, chat)])
        assert set(ended[:3]) == {0, 3, 4}


async def test_a_key_decides_whose_a_request_is(tmp_path: Path) -> None:
    """A header that says otherwise is not believed."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("bulk-key: bulk\nchat-key: chat\n")
    tenants = {"bulk": {"handicap_seconds": 500.0}, "chat": {}}
    auth = {"keys_file": str(keys)}
    async with pd(one_at_a_time(), auth=auth, priority="uniboost", tenants=tenants) as w:
        given = []
        for key in ("bulk-key", "chat-key"):
            headers = {"authorization": f"Bearer {key}", "x-tenant": "chat"}
            async with w.client.post(f"{w.url}/v1/completions", json=BODY, headers=headers) as response:
                assert response.status == 200
                label = response.headers["x-lmetric-decision"]
            async with w.client.get(f"{w.url}/debug/decisions/{label}", headers=headers) as response:
                given.append((await response.json())["priority"])
        assert given[0] - given[1] == pytest.approx(500_000, abs=60_000)


async def test_engines_that_take_none_get_none() -> None:
    fcfs = one_at_a_time(order="fcfs", kv_connector="nixl")  # vLLM reports it in development mode
    async with pd(fcfs, priority="uniboost") as w:
        await w.until(lambda: all(e.identified for e in w.server.fleet.engines()))
        assert await order_of(w, [(LONG, {}), (SHORT, {})]) == [0, 1]
        page = await (await w.client.get(f"{w.url}/debug/engines")).json()
        assert page[0]["priority"] == "not sent: its queue is not ordered by priority"


async def test_sglang_is_sent_a_field_with_the_larger_value_first() -> None:
    sglang = one_at_a_time(api="sglang")
    async with pd(sglang, priority={"kind": "uniboost", "gamma": 0.1}) as w:
        await w.until(lambda: all(e.identified for e in w.server.fleet.engines()))
        page = await (await w.client.get(f"{w.url}/debug/engines")).json()
        assert page[0]["priority"] == "sent as a field; its queue is ordered by priority"
        assert await order_of(w, [(LONG, {}), (SHORT, {})]) == [1, 0]
        # A client's own field does not win.
        body = {"model": "emulated", "prompt": "a", "max_tokens": 2, "priority": 2**40}
        assert (await w.post(body))[0] == 200
