"""Priority levels of waiting requests, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import AdmissionConfig, TenantConfig
from lmetric.server.fleet.levels import Levels
from lmetric.why import because
from server_world import FakeEngine, decision_id, hang, world
from test_server_admission import Gate, emulated, learned, long, model, post, small, stream, waiting
from test_server_programs import SETTINGS as PROGRAMS
from test_server_programs import body, held
from test_server_reload_settings import reloaded
from waiting import PATIENCE_SECONDS

# A prompt takes 0.3 s, and an engine has room for about two.
ADMISSION: dict[str, Any] = {"room_seconds": 0.3}


def record_of(w: Any, headers: Any) -> Any:
    record = model(w).router.explain(decision_id(headers))
    assert record is not None
    return record


async def test_a_higher_level_goes_first() -> None:
    """Six seconds of work of a low tenant with a high share wait. Then a high tenant sends some."""
    tenants = {"low": {"level": -1, "weight": 100}, "high": {"level": 2}}
    async with emulated(admission=ADMISSION, tenants=tenants) as w:
        await learned(w)
        flood = [asyncio.create_task(stream(w, long(number), "low")) for number in range(20)]
        await w.until(lambda: waiting(w) > 12)
        before = sum(task.done() for task in flood)
        first = [asyncio.create_task(stream(w, long(100 + number), "high")) for number in range(6)]
        await w.until(lambda: model(w).held.waiting_by_level()[2] > 3)
        async with w.client.get(f"{w.url}/debug/admission") as page:
            high, low = (await page.json())["emulated"]["levels"]
        assert (high["level"], low["level"], low["aged_levels"]) == (2, -1, 0)
        assert low["oldest_seconds"] > high["oldest_seconds"]
        async with w.client.get(f"{w.url}/metrics") as page:
            text = await page.text()
        for level in (2, -1):
            assert f'lmetric_level_waiting_requests{{level="{level}",model="emulated"}} ' in text
        results = await asyncio.gather(*first)
        # Two requests were on the engine, and two may have been let in at the same time.
        assert sum(task.done() for task in flood) - before <= 4
        assert {status for status, _, _ in (*results, *await asyncio.gather(*flood))} == {200}
        record = record_of(w, results[-1][2])
        assert (record["level"], record["aged_levels"]) == (2, 0)
        assert f"; it waited {record['held_seconds']:.3g} s at level 2." in because(record)


async def test_a_low_level_rises_while_it_waits() -> None:
    """The high tenant always has requests that wait. The low one is two levels below."""
    tenants = {"low": {}, "high": {"level": 2}}
    admission = {**ADMISSION, "aging_seconds": 0.4}
    async with emulated(admission=admission, tenants=tenants) as w:
        await learned(w)
        numbers = itertools.count()

        async def floods() -> None:
            while True:
                assert (await stream(w, long(next(numbers)), "high"))[0] == 200

        flood = [asyncio.create_task(floods()) for _ in range(12)]
        try:
            await w.until(lambda: waiting(w) > 8)
            status, _, headers = await stream(w, long(5000), "low")
        finally:
            for each in flood:
                each.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
        assert status == 200
        record = record_of(w, headers)
        assert (record["level"], record["aged_levels"]) == (0, 2)
        assert 0.8 <= record["held_seconds"] < 10.0
        assert because(record).endswith("s at level 0, which aging had raised to 2.")
        async with w.client.get(f"{w.url}/debug/decisions/{headers['x-lmetric-decision']}") as page:
            shown = await page.json()
        assert (shown["level"], shown["aged_levels"]) == (0, 2)
        assert "aging had raised" in shown["because"]


async def test_a_full_queue_loses_the_last_request_of_the_lowest_level() -> None:
    gate = Gate()
    tenants = {name: {"max_concurrent": 1, "level": level} for name, level in (("low", -1), ("high", 1))}
    admission = {"max_waiting": 4, "room_seconds": 3600}
    async with small([FakeEngine(behave=gate)], admission=admission, tenants=tenants) as w:
        running = [post(w, name) for name in tenants]
        await w.engines[0].asked(2)
        low = []
        for number in range(4):
            low.append(post(w, "low"))
            await w.until(lambda: waiting(w) == number + 1)  # noqa: B023
        high = [post(w, "high") for _ in range(4)]
        lost = [await task for task in reversed(low)]
        assert [status for status, _, _ in lost] == [429] * 4
        assert {got["error"]["code"] for _, _, got in lost} == {"queue_full"}
        assert all(int(headers["retry-after"]) >= 1 for _, headers, _ in lost)
        # No lower request is left, and none of a lower level takes a place.
        for name in tenants:
            assert (await post(w, name))[0] == 429
        gate.open.set()
        assert {(await task)[0] for task in (*running, *high)} == {200}


async def test_a_reload_changes_the_levels_of_waiting_requests(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(behave=gate)
    config: dict[str, Any] = {"admission": {"max_waiting": 9}, "tenants": {"a": {}, "b": {}}}
    async with reloaded(tmp_path, engine, profile="independent-sim", **config) as r:
        prompts = {name: long(number)["prompt"] for number, name in enumerate("ab")}
        tasks = [post(r.w, "a", prompt=prompts["a"], stream=True)]
        await engine.asked(1)
        for name in "bbaa":
            tasks.append(post(r.w, name, prompt=prompts[name], stream=True))
            await r.w.until(lambda: waiting(r.w) == len(tasks) - 1)
        assert model(r.w).held.waiting_by_level() == {}
        await r.change(tenants={"a": {"level": -3}, "b": {"level": 3}})
        assert model(r.w).held.waiting_by_level() == {-3: 2, 3: 2}
        assert [each["level"] for each in model(r.w).held.snapshot()["levels"]] == [3, -3]
        await r.change(tenants={"a": {"level": 4}, "b": {"level": 3}})
        gate.open.set()
        results = [await task for task in tasks]
        assert {status for status, _, _ in results} == {200}
        order = ["a" if request.json["prompt"] == prompts["a"] else "b" for request in engine.requests]
        # The engine may have had room for one before the last reload.
        assert "".join(order) in ("aaabb", "abaab")
        assert [record_of(r.w, headers)["level"] for _, headers, _ in results[1:]] == [3, 3, 4, 4]
        await r.change(tenants={"a": {}, "b": {}})
        _, headers, _ = await post(r.w, "a")
        assert record_of(r.w, headers)["level"] is None


async def test_a_client_cannot_raise_itself_above_its_tenant() -> None:
    config = {
        "admission": {"classes": {"urgent": {"level": 9}, "batch": {"level": -9}}},
        "tenants": {"a": {"level": 1}},
    }
    async with small(1, **config) as w:
        levels = []
        for tenant, slo in (("a", "urgent"), ("a", "batch"), ("b", "urgent")):
            _, headers, _ = await post(w, tenant, slo=slo)
            levels.append(record_of(w, headers)["level"])
        _, headers, _ = await post(w, "b")
        record = record_of(w, headers)
        assert [*levels, record["level"]] == [1, -9, 9, 0]
        assert "; it had level 0 and did not wait" in because(record)


async def test_without_levels_records_and_pages_have_none() -> None:
    gate = Gate()
    async with small([FakeEngine(behave=gate)], tenants={"a": {"max_concurrent": 1}}) as w:
        first, second = post(w, "a"), post(w, "a")
        await w.until(lambda: waiting(w) == 1)
        _, page = await w.get("/debug/admission")
        assert orjson.loads(page)["tiny"]["levels"] == []
        _, text = await w.get("/metrics")
        assert b"lmetric_level_waiting_requests{" not in text
        gate.open.set()
        for task in (first, second):
            status, headers, _ = await task
            assert status == 200
            record = record_of(w, headers)
            assert record["level"] is record["aged_levels"] is None
            assert " level " not in because(record)


async def test_a_client_that_leaves_frees_a_place_of_its_level() -> None:
    tenants = {"a": {"max_concurrent": 1, "level": 1}}
    async with small([FakeEngine(behave=hang)], admission={}, tenants=tenants) as w:
        tasks = [post(w, "a") for _ in range(3)]
        await w.until(lambda: waiting(w) == 2)
        for task in tasks:
            task.cancel()
        await w.until(lambda: waiting(w) == 0)
        assert model(w).held.waiting_by_level() == {}


@pytest.mark.parametrize(
    ("tenant", "slo_class", "level"),
    [("", "", 0), ("a", "", 3), ("a", "high", 3), ("a", "low", -3), ("b", "high", 5), ("z", "low", -3)],
)
def test_the_lower_level_of_tenant_and_class_holds(tenant: str, slo_class: str, level: int) -> None:
    admission = AdmissionConfig.model_validate({"classes": {"high": {"level": 5}, "low": {"level": -3}}})
    tenants = {"a": TenantConfig(level=3), "b": TenantConfig()}
    assert Levels(admission, tenants, holds=True).of(tenant, slo_class) == level
    assert not Levels(None, tenants, holds=False).on
    assert not Levels(AdmissionConfig(), {"b": TenantConfig()}, holds=True).on


async def test_held_programs_have_levels_without_admission() -> None:
    settings = {**PROGRAMS, "forget_seconds": 1}
    tenants = {"low": {}, "high": {"level": 2}}
    async with world(1, cache_blocks=100, programs=settings, tenants=tenants) as w:
        assert (await w.post(body(1)))[0] == 200
        low = asyncio.create_task(w.post(body(2), headers={"x-tenant": "low"}))
        await held(w, 1)
        high = asyncio.create_task(w.post(body(3), headers={"x-tenant": "high"}))
        await held(w, 2)
        page = (await w.get("/metrics"))[1].decode()
        for level in (0, 2):
            assert f'lmetric_level_waiting_requests{{level="{level}",model="tiny"}} 1.0' in page
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, headers, _ = await high
            assert (status, low.done()) == (200, False)
            assert (await low)[0] == 200
        record = record_of(w, headers)
        assert record["level"] == 2
        assert f"; it waited {record['held_seconds']:.3g} s at level 2" in because(record)
