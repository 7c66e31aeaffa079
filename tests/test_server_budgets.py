"""Budgets of tenants over real sockets: reservations, settlements, refusals, headers."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import orjson
import pytest

from lmetric._core import BudgetRefusal, BudgetReservation, Budgets
from lmetric.config import ConfigError, ServerConfig, load_config
from lmetric.server.app import Reloads
from lmetric.server.observe import budgets as tenant_budgets
from lmetric.server.observe.budgets import TenantBudgets
from server_world import (
    STREAM_HEAD,
    FakeEngine,
    World,
    answer,
    chunk,
    hang,
    plain,
    reset,
    token,
    usage,
    world,
)

PROMPT = [5] * 10  # the engines report 10 tokens, 4 of them cached, and 3 output tokens


def budget(counts: str, limit: int, per: str = "hour", **more: Any) -> dict[str, Any]:
    return {"counts": counts, "limit": limit, "per": per, **more}


def tenants(*budgets: dict[str, Any]) -> dict[str, Any]:
    return {"a": {"budgets": list(budgets)}, "b": {}}


async def ask(w: World, tenant: str = "a", **body: Any) -> tuple[int, dict[str, Any], Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, **body}
    return await w.post(body, headers={"x-tenant": tenant} if tenant else {})


def left(headers: dict[str, Any], what: str = "tokens") -> int:
    return int(headers[f"x-ratelimit-remaining-{what}"])


async def test_a_tenant_has_a_maximum_number_of_requests() -> None:
    async with world(1, tenants=tenants(budget("requests", 3))) as w:
        results = await asyncio.gather(*(ask(w) for _ in range(5)))
        assert Counter(status for status, _, _ in results) == {200: 3, 429: 2}
        assert sorted(left(headers, "requests") for _, headers, _ in results) == [0, 0, 0, 1, 2]
        for status, headers, got in results:
            assert headers["x-ratelimit-limit-requests"] == "3"
            assert headers["x-ratelimit-reset-requests"].startswith(("1h0m", "1h1m"))
            if status == 429:
                assert (got["error"]["code"], got["error"]["type"]) == (
                    "rate_limit_exceeded",
                    "rate_limit_error",
                )
                assert "'requests per hour'" in got["error"]["message"]
                assert 3590 < int(headers["retry-after"]) <= 3661
        _, headers, _ = await ask(w, "b")
        assert "x-ratelimit-limit-requests" not in headers
        assert (await ask(w, ""))[0] == 200
        held = w.server.fleet.models[0].held
        assert held.refused == {("a", "budget"): 2}


async def test_a_request_reserves_its_most_and_settles_by_the_engines_usage() -> None:
    windows = (
        budget("total_tokens", 1000),
        budget("uncached_input_tokens", 500, name="uncached"),
        budget("input_tokens", 400, name="weighted", cached_weight=0.25),
    )
    for number, (window, reserved, used) in enumerate(zip(windows, (60, 10, 10), (13, 6, 7), strict=True)):
        async with world(1, tenants=tenants(window)) as w:
            limit = window["limit"]
            _, headers, _ = await ask(w, max_tokens=50)
            assert left(headers) == limit - reserved, number
            _, headers, _ = await ask(w, max_tokens=50)
            assert left(headers) == limit - used - reserved
            # A stream without usage for its client is settled, too.
            _, headers, _ = await ask(w, max_tokens=50, stream=True)
            assert left(headers) == limit - 2 * used - reserved


async def test_a_request_is_refused_while_reservations_of_others_run_and_fits_afterwards() -> None:
    open_ = asyncio.Event()

    async def behave(engine: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        await open_.wait()
        return await answer(engine, request, writer)

    async with world([FakeEngine(behave=behave)], tenants=tenants(budget("output_tokens", 100))) as w:
        running = asyncio.create_task(ask(w, max_tokens=80))
        await w.engines[0].asked(1)
        status, headers, got = await ask(w, max_tokens=21)
        assert (status, left(headers)) == (429, 20)
        assert "asks for 21 output_tokens, 80 of 100 per hour are used" in got["error"]["message"]
        open_.set()
        assert (await running)[0] == 200
        assert (await ask(w, max_tokens=97))[0] == 200


async def test_requests_without_an_answer_give_everything_back() -> None:
    async def refuse(_: FakeEngine, __: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(400, {"error": {"message": "no"}}))
        return True

    window = tenants(budget("total_tokens", 1000), budget("requests", 10))
    for behave, status in ((refuse, 400), (reset, 502)):
        async with world([FakeEngine(behave=behave)], tenants=window) as w:
            for _ in range(3):
                assert (await ask(w))[0] == status
            await w.settled()
            w.engines[0].behave = answer
            w.engines[0].hurt = False
            found = reserve(w.server.front.budgets.core)
            assert isinstance(found, BudgetReservation)
            assert b"remaining-requests: 9\r\n" in found.lines
            assert b"remaining-tokens: 987\r\n" in found.lines


async def test_a_client_that_leaves_pays_nothing_before_and_the_tokens_so_far_after_the_first_token() -> None:
    async def two(_: FakeEngine, __: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(token("a")) + chunk(token("b")))
        await asyncio.Event().wait()
        return False

    for behave, used in ((hang, 0), (two, 12)):
        async with world([FakeEngine(behave=behave)], tenants=tenants(budget("total_tokens", 1000))) as w:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 50, "stream": True}
            request = w.client.post(f"{w.url}/v1/completions", json=body, headers={"x-tenant": "a"})
            task = asyncio.create_task(_first(request))
            await w.engines[0].asked(1)
            if used:
                (await task).close()
            else:
                task.cancel()
            await w.settled()
            found = reserve(w.server.front.budgets.core)
            assert isinstance(found, BudgetReservation)
            assert b"remaining-tokens: %d\r\n" % (987 - used) in found.lines


async def _first(request: Any) -> Any:
    response = await request
    read = b""
    while b'"b"' not in read:
        read += await response.content.readany()
    return response


def reserve(core: Budgets) -> BudgetReservation | BudgetRefusal | None:
    return core.reserve("a", ("tiny", "", ""), (10, 3), (time.monotonic(), time.time()))


@pytest.mark.parametrize("reported", [usage(-5, -3, -2), usage(10**15, 10**15, 10**15), usage(10, 3, 99)])
async def test_impossible_usage_of_an_engine_gives_no_tenant_room_and_takes_none(reported: Any) -> None:
    async def lie(_: FakeEngine, __: Any, writer: asyncio.StreamWriter) -> bool:
        choices = [{"index": 0, "text": "a", "finish_reason": "length"}]
        writer.write(plain(200, {"id": "x", "choices": choices, "usage": reported}))
        return True

    windows = (budget("total_tokens", 1000), budget("requests", 100))
    async with world([FakeEngine(behave=lie)], tenants=tenants(*windows)) as w:
        for number in range(1, 5):
            _, headers, _ = await ask(w)
            assert left(headers, "requests") == 100 - number
            assert 1000 - 13 * number <= left(headers) <= 1000 - 10 * number - 3


async def test_a_failover_is_charged_once() -> None:
    broken, good = FakeEngine(behave=reset), FakeEngine()
    async with world(
        [broken, good], tenants=tenants(budget("requests", 10), budget("total_tokens", 100))
    ) as w:
        await asyncio.gather(*(ask(w) for _ in range(4)))
        assert len(broken.requests) + len(good.requests) > 4
        _, headers, _ = await ask(w)
        assert (left(headers, "requests"), left(headers)) == (5, 100 - 4 * 13 - 13)


async def test_a_request_above_the_limit_is_told_not_to_try_again() -> None:
    async with world(1, tenants=tenants(budget("total_tokens", 20))) as w:
        status, headers, got = await ask(w, max_tokens=11)
        assert (status, headers["x-should-retry"], "retry-after" in headers) == (429, "false", False)
        assert "it never fits" in got["error"]["message"]


@pytest.mark.parametrize("per_key", [False, True])
async def test_keys_of_a_tenant_have_counts_of_their_own_if_the_budget_says_so(
    tmp_path: Path, per_key: bool
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("one: a\ntwo: a\n")
    window = budget("requests", 1, per_key=per_key)
    config: dict[str, Any] = {"auth": {"keys_file": str(file)}, "admin": {"enabled": True, "token": "secret"}}
    async with world(1, tenants=tenants(window), **config) as w:
        statuses = [(await by_key(w, key))[0] for key in ("one", "two", "one")]
        assert statuses == ([200, 200, 429] if per_key else [200, 429, 429])
        _, page = await w.get("/admin/usage", {"authorization": "Bearer secret"})
        keys = [hashlib.sha256(key.encode()).hexdigest()[:12] for key in ("one", "two")]
        assert {row["key"] for row in orjson.loads(page)} == set(keys[: 1 + per_key])


async def by_key(w: World, key: str) -> tuple[int, dict[str, Any], Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
    return await w.post(body, headers={"authorization": f"Bearer {key}"})


async def test_a_budget_of_a_class_leaves_a_part_of_another_budget_to_other_classes() -> None:
    windows = budget("requests", 5), budget("requests", 3, slo_class="batch")
    admission = {"ttft_seconds": 60, "classes": {"batch": {"ttft_seconds": 3600}}}
    async with world(1, tenants=tenants(*windows), admission=admission) as w:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}

        async def batch() -> tuple[int, Any]:
            status, _, got = await w.post(body, headers={"x-tenant": "a", "x-slo-class": "batch"})
            return status, got

        assert [(await batch())[0] for _ in range(4)] == [200, 200, 200, 429]
        assert "budget 'requests per hour (batch)'" in (await batch())[1]["error"]["message"]
        assert [(await ask(w))[0] for _ in range(3)] == [200, 200, 429]


async def test_a_shadow_budget_counts_and_refuses_nothing() -> None:
    window = budget("requests", 1, shadow=True, name="trial")
    async with world(1, tenants=tenants(window)) as w:
        assert [(await ask(w))[0] for _ in range(3)] == [200, 200, 200]
        _, text = await w.get("/metrics")
        assert b'lmetric_tenant_budget_exceeded_total{budget="trial",tenant="a"} 2.0' in text


async def test_a_changed_limit_holds_at_once_and_keeps_the_counts() -> None:
    async with world(1, tenants=tenants(budget("requests", 2))) as w:
        assert [(await ask(w))[0] for _ in range(3)] == [200, 200, 429]
        changed = w.server.config.model_copy(
            update={
                "tenants": ServerConfig.model_validate({"tenants": tenants(budget("requests", 3))}).tenants
            }
        )
        await w.server.apply(w.server.prepare(changed))
        assert [(await ask(w))[0] for _ in range(2)] == [200, 429]


async def test_a_reload_reads_its_time_zones_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, threads = tenant_budgets._offsets, []

    def noted(name: str) -> list[tuple[float, float]]:
        threads.append((name, threading.current_thread()))
        return offsets(name)

    monkeypatch.setattr(tenant_budgets, "_offsets", noted)
    async with world(1, tenants=tenants(budget("requests", 2))) as w:
        given = {"tenants": tenants(budget("requests", 1, "day", time_zone="Asia/Tokyo"))}
        changed = w.server.config.model_copy(update={"tenants": ServerConfig.model_validate(given).tenants})
        await Reloads(w.server, lambda: changed).reload()
        assert [(await ask(w))[0] for _ in range(2)] == [200, 429]
    ((name, thread),) = threads
    assert name == "Asia/Tokyo"
    assert thread is not threading.main_thread()


@pytest.mark.parametrize("name", ["Asia/Gaza", "America/New_York", "Australia/Lord_Howe"])
def test_the_changes_of_a_time_zone_are_found_in_few_steps(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    steps = 0

    class Counted(ZoneInfo):
        def fromutc(self, dt: datetime) -> datetime:
            nonlocal steps
            steps += 1
            return super().fromutc(dt)

    monkeypatch.setattr(tenant_budgets, "ZoneInfo", Counted)
    found = tenant_budgets._offsets.__wrapped__(name)
    assert steps < 4000  # of 10,980 days
    zone = ZoneInfo(name)

    def offset(at: float) -> float:
        after = datetime.fromtimestamp(at, UTC).astimezone(zone).utcoffset()
        assert after is not None
        return after.total_seconds()

    for at, after in found[1:]:
        assert offset(at) == after != offset(at - 1)
    for day in range(30 * 365):
        at = found[0][0] + day * 86_400
        assert offset(at) == [after for since, after in found if since <= at][-1]


async def test_the_openai_client_understands_a_refusal() -> None:
    import openai

    async with world(1, tenants=tenants(budget("requests", 1, "day", time_zone="Europe/Berlin"))) as w:
        client = openai.AsyncOpenAI(
            base_url=f"{w.url}/v1", api_key="any", max_retries=0, default_headers={"x-tenant": "a"}
        )
        raw = await client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=3)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as error:
            await client.completions.create(model="tiny", prompt="a", max_tokens=3)
        assert error.value.code == "rate_limit_exceeded"
        assert "budget 'requests per day'" in error.value.message
        midnight = datetime.now(ZoneInfo("Europe/Berlin")).replace(hour=0, minute=0, second=0, microsecond=0)
        seconds = ((midnight + timedelta(days=1)).astimezone(UTC) - datetime.now(UTC)).total_seconds()
        assert abs(int(error.value.response.headers["retry-after"]) - seconds) < 60
        await client.close()


async def test_the_openai_client_waits_as_the_refusal_says_and_repeats_no_request_that_never_fits() -> None:
    import openai

    windows = budget("requests", 1, "second"), budget("total_tokens", 50)
    async with world(1, tenants=tenants(*windows)) as w:
        client = openai.AsyncOpenAI(
            base_url=f"{w.url}/v1", api_key="any", max_retries=2, default_headers={"x-tenant": "a"}
        )
        held = w.server.fleet.models[0].held
        began = 0.0
        while not held.refused[("a", "budget")]:  # the first request of a second is granted
            began = time.monotonic()
            await client.completions.create(model="tiny", prompt="a", max_tokens=3)
        assert time.monotonic() - began >= 1.0  # retry-after: at least a second
        before = held.refused[("a", "budget")]
        with pytest.raises(openai.RateLimitError, match="it never fits"):
            await client.completions.create(model="tiny", prompt="a", max_tokens=60)
        assert held.refused[("a", "budget")] == before + 1
        await client.close()


def test_calendar_days_of_many_years_begin_at_midnight() -> None:
    zone = ZoneInfo("America/New_York")
    config = ServerConfig.model_validate(
        {"tenants": tenants(budget("requests", 1, "day", time_zone="America/New_York"))}
    )
    core = TenantBudgets(config.tenants).core
    start = datetime.now(zone).replace(hour=0, minute=0, second=0, microsecond=0)

    def granted(at: datetime) -> bool:
        unix = at.timestamp()
        made = core.reserve("a", ("tiny", "", ""), (1, 1), (time.monotonic(), unix))
        if isinstance(made, BudgetReservation):
            made.settle((1, 0, 1), (time.monotonic(), unix))
            return True
        return False

    def midnights() -> Iterator[datetime]:
        for day in (*range(1, 370), *range(4000, 4370)):
            date = (start + timedelta(days=day)).date()
            yield datetime(date.year, date.month, date.day, tzinfo=zone)

    for midnight in midnights():
        # A second of Unix time before midnight belongs to the day before.
        before = datetime.fromtimestamp(midnight.timestamp() - 1, zone)
        granted(before)
        assert not granted(before), midnight
        assert granted(midnight), midnight


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{counts: requests, limit: 0, per: hour}", "limit = 0: expected at least 1"),
        ("{counts: words, limit: 1, per: hour}", "counts"),
        ("{counts: requests, limit: 1, per: week}", "per"),
        ("{counts: requests, limit: 1, per: day, time_zone: Mars}", "unknown time zone 'Mars'"),
        ("{counts: requests, limit: 1, per: day, time_zone: ../x}", "unknown time zone '../x'"),
        ("{counts: requests, limit: 1, per: day, cached_weight: 0.5}", "requests has no weight"),
        ("{counts: requests, limit: 1, per: day, slo_class: batch}", "no model has the class 'batch'"),
        (
            "{counts: requests, limit: 1, per: day}, {counts: requests, limit: 2, per: day}",
            "two budgets are named 'requests per day'",
        ),
    ],
)
def test_bad_budgets_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"tenants: {{a: {{budgets: [{text}]}}}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert message in str(error.value)
    assert "tenants.a.budgets" in str(error.value)


def test_two_tenants_with_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("tenants: {a: {weight: 1}, a: {weight: 2}}\n")
    with pytest.raises(ConfigError, match="a"):
        load_config(file)
