"""Admission by load: requests that wait in the router, and requests that it refuses.

Every world checks at its end that no request is in flight and none waits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric.config import ConfigError, load_config
from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.fleet.admission import MOST_REFUSED
from lmetric.server.fleet.model import Model
from lmetric.server.http.waiting import HeldRequest
from lmetric_lab.emulated import EngineOptions
from pd_world import Pd, pd
from server_world import FakeEngine, Request, World, answer, decision_id, hang, world
from test_server_hedging import later
from test_server_programs import SETTINGS, body, programs
from test_server_programs import held as programs_held
from test_server_reload_settings import reloaded
from waiting import PATIENCE_SECONDS

PROMPT_TOKENS = 3000  # 0.3 s of prefill on an engine at speed 1
TWO_TENANTS: dict[str, Any] = {"a": {}, "b": {}}


def model(w: World | Pd) -> Model:
    return w.server.fleet.models[0]


def waiting(w: World | Pd) -> int:
    assert sum(model(w).held.waiting().values()) == model(w).router.waiting
    return model(w).router.waiting


@asynccontextmanager
async def emulated(engines: int = 1, **config: Any) -> AsyncIterator[Pd]:
    """A router before emulated engines that prefill 10,000 tokens/s each, as their profile says."""
    options = [EngineOptions.model_validate({"port": 0, "clock_speed": 1.0})] * engines
    given = {"policy": "least_requests", "profile": "independent-sim"}
    async with pd(*options, **(given | config)) as w:
        yield w
        await w.until(lambda: not w.in_flight() and not w.server.front.relays)
        assert not waiting(w)


@asynccontextmanager
async def small(fakes: int | list[FakeEngine] = 1, **config: Any) -> AsyncIterator[World]:
    async with world(fakes, **config) as w:
        yield w
        await w.settled()
        assert not waiting(w)


def long(number: int, tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """Returns a request with a prompt that no other number has."""
    prompt = [(i * (2 * number + 3)) % 1499 + 10 for i in range(tokens)]
    return {"model": "emulated", "prompt": prompt, "max_tokens": 2, "stream": True}


async def stream(w: Pd, asked: dict[str, Any], tenant: str = "", slo: str = "") -> tuple[int, float, Any]:
    """Returns the status, the seconds until the first token, and the head or the error."""
    headers = {"x-tenant": tenant} if tenant else {}
    headers |= {"x-slo-class": slo} if slo else {}
    began = time.monotonic()
    async with w.client.post(f"{w.url}/v1/completions", json=asked, headers=headers) as response:
        if response.status != 200:
            return response.status, 0.0, ((await response.json())["error"], response.headers)
        first = 0.0
        async for line in response.content:
            if line.startswith(b"data") and not first:
                first = time.monotonic() - began
        return 200, first, response.headers


async def learned(w: Pd) -> None:
    """Lets the router learn the engines' prefill rate."""
    for number in range(3):
        assert (await stream(w, long(1000 + number)))[0] == 200


class Gate:
    """Lets an engine answer when it is opened, and counts concurrent requests."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.running = self.most = 0

    async def __call__(self, engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        self.running += 1
        self.most = max(self.most, self.running)
        left = asyncio.ensure_future(engine.until_left(writer))
        opened = asyncio.ensure_future(self.open.wait())
        try:
            await asyncio.wait([left, opened], return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
            self.running -= 1
        if left.done():
            return False
        left.cancel()
        return await answer(engine, request, writer)


def post(w: World, tenant: str = "", **changes: Any) -> asyncio.Task[Any]:
    headers = {"x-tenant": tenant} if tenant else {}
    headers |= {"x-slo-class": changes.pop("slo")} if "slo" in changes else {}
    return asyncio.create_task(w.post({"model": "tiny", "prompt": "a b c"} | changes, headers=headers))


# -- deadlines
# ----------------------------------------------------------------


async def test_requests_that_would_be_late_are_refused_with_a_time() -> None:
    """Twelve seconds of work come at once. The deadline is 1.5 s."""
    async with emulated(admission={"ttft_seconds": 1.5}) as w:
        await learned(w)
        results = await asyncio.gather(*(stream(w, long(number)) for number in range(40)))
        served = [seconds for status, seconds, _ in results if status == 200]
        refused = [more for status, _, more in results if status == 429]
        assert len(served) >= 2
        assert len(refused) >= 20
        assert len(served) + len(refused) == 40
        # On the engine's clock: the delays of a busy machine are not in it.
        (engine,) = w.engines.values()
        async with w.client.get(f"{engine.url}/metrics") as page:
            name = "vllm:time_to_first_token_seconds_bucket"
            buckets = [line for line in (await page.text()).splitlines() if line.startswith(name)]
        (early,) = (float(line.split()[-1]) for line in buckets if 'le="2.5"' in line)
        assert early == 3 + len(served)  # with those of `learned`
        for error, headers in refused:
            assert error["code"] == "deadline"
            assert error["type"] == "rate_limit_error"
            assert 1 <= int(headers["retry-after"]) <= 60
        assert model(w).held.refused == {("", "deadline"): len(refused)}
        async with w.client.get(f"{w.url}/metrics") as page:
            text = await page.text()
        name = 'lmetric_refused_requests_total{model="emulated",reason="deadline",tenant=""}'
        assert f"{name} {float(len(refused))}" in text


async def test_ever_new_tenants_make_no_further_counts() -> None:
    """Issuers of tokens may name any number of tenants."""
    async with small([FakeEngine()], admission={"ttft_seconds": 1.0}) as w:
        held = model(w).held
        for number in range(MOST_REFUSED + 5):
            held.count_refused(f"t{number}", "queue")
        assert len(held.refused) == MOST_REFUSED + 1
        assert held.refused[OTHER_TENANTS, "queue"] == 5


async def test_a_held_request_is_refused_when_its_deadline_can_no_longer_be_met() -> None:
    """The engine freezes, which nothing predicts."""
    limits = {"a": {"max_concurrent": 1}}
    async with small([FakeEngine(behave=hang)], admission={"ttft_seconds": 1.0}, tenants=limits) as w:
        first = post(w, "a", stream=True)
        await w.engines[0].asked(1)
        began = time.monotonic()
        status, headers, got = await post(w, "a", stream=True)
        assert time.monotonic() - began > 0.3
        assert (status, got["error"]["code"]) == (429, "deadline")
        assert int(headers["retry-after"]) >= 1
        assert model(w).held.refused == {("a", "deadline"): 1}
        assert len(w.engines[0].requests) == 1
        first.cancel()


async def test_a_stream_whose_head_is_out_gets_the_refusal_as_an_event() -> None:
    limits = {"a": {"max_concurrent": 1}}
    async with small([FakeEngine(behave=hang)], admission={"ttft_seconds": 3.0}, tenants=limits) as w:
        model(w).held.keep_alive_seconds = 0.2
        first = post(w, "a", stream=True)
        await w.engines[0].asked(1)
        status, _, got = await post(w, "a", stream=True)
        assert status == 200
        assert got.startswith(b": held for")
        error = orjson.loads(got.split(b"\n\n")[-3].removeprefix(b"data: "))["error"]
        assert error["code"] == "deadline"
        assert got.endswith(b"data: [DONE]\n\n")
        first.cancel()


# -- tenants
# ----------------------------------------------------------------


async def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    """Nine seconds of work of one tenant wait. Another tenant's request is next."""
    async with emulated(admission={"room_seconds": 0.3}, tenants=TWO_TENANTS) as w:
        await learned(w)
        flood = [asyncio.create_task(stream(w, long(number), "a")) for number in range(30)]
        await w.until(lambda: waiting(w) > 20)
        for number in range(3):
            before = sum(task.done() for task in flood)
            assert (await stream(w, long(100 + number), "b"))[0] == 200
            # Two requests were on the engine, and one may have been let in at the same time.
            assert sum(task.done() for task in flood) - before <= 4
        assert {status for status, _, _ in await asyncio.gather(*flood)} == {200}
        snapshot = model(w).held.snapshot()
        assert snapshot is not None
        assert snapshot["admitted"] >= 20
        assert snapshot["held_seconds"] > 5.0


async def test_engines_have_short_queues_while_requests_wait() -> None:
    """Without admission, the median would be 7, with fifteen requests at each engine."""
    async with emulated(2, admission={"room_seconds": 0.3}) as w:
        await learned(w)
        flood = [asyncio.create_task(stream(w, long(number))) for number in range(30)]
        lengths = []
        while not all(task.done() for task in flood):
            lengths += [w.load(name)["waiting"] for name in w.engines]
            await asyncio.sleep(0.02)
        assert {status for status, _, _ in await asyncio.gather(*flood)} == {200}
        assert sorted(lengths)[len(lengths) // 2] <= 3


async def test_a_tenant_has_a_maximum_of_concurrent_requests() -> None:
    gate = Gate()
    tenants = {"a": {"max_concurrent": 2}, "b": {}}
    async with small([FakeEngine(behave=gate)], tenants=tenants) as w:
        mine = [post(w, "a") for _ in range(6)]
        await w.until(lambda: waiting(w) == 4)
        others = [post(w, "b") for _ in range(3)]
        await w.engines[0].asked(5)
        assert gate.running == 5
        _, text = await w.get("/metrics")
        assert b'lmetric_waiting_requests{model="tiny",tenant="a"} 4.0' in text
        _, page = await w.get("/debug/admission")
        assert orjson.loads(page)["tiny"]["waiting_by_tenant"] == {"a": 4}
        gate.open.set()
        assert {(await task)[0] for task in (*mine, *others)} == {200}
        assert gate.most == 5


@pytest.mark.parametrize("most", [0, 2])
async def test_a_tenant_has_a_maximum_of_waiting_requests(most: int) -> None:
    gate = Gate()
    tenants = {"a": {"max_concurrent": 1, "max_waiting": most}}
    async with small([FakeEngine(behave=gate)], tenants=tenants) as w:
        tasks = [post(w, "a")]
        await w.engines[0].asked(1)
        tasks += [post(w, "a") for _ in range(most)]
        await w.until(lambda: waiting(w) == most)
        status, headers, got = await post(w, "a")
        assert (status, got["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after"]) >= 1
        gate.open.set()
        assert {(await task)[0] for task in tasks} == {200}


async def test_the_queue_has_a_bound_and_the_longest_line_loses() -> None:
    gate = Gate()
    tenants = {name: {"max_concurrent": 1} for name in "ab"}
    admission = {"max_waiting": 4, "room_seconds": 3600}
    async with small([FakeEngine(behave=gate)], admission=admission, tenants=tenants) as w:
        running = [post(w, name) for name in "ab"]
        await w.engines[0].asked(2)
        mine = [post(w, "a") for _ in range(4)]
        await w.until(lambda: waiting(w) == 4)
        other = post(w, "b")
        await w.until(lambda: any(task.done() for task in mine))
        assert waiting(w) == 4
        gate.open.set()
        assert (await other)[0] == 200
        results = [await task for task in mine]
        assert sorted(status for status, _, _ in results) == [200, 200, 200, 429]
        assert {(await task)[0] for task in running} == {200}


# -- requests that end while they wait
# ----------------------------------------------------------------


async def test_a_client_that_leaves_while_it_waits_frees_its_place() -> None:
    gate = Gate()
    tenants = {"a": {"max_concurrent": 1, "max_waiting": 1}}
    async with small([FakeEngine(behave=gate)], tenants=tenants) as w:
        first = post(w, "a")
        await w.engines[0].asked(1)
        second = post(w, "a")
        await w.until(lambda: waiting(w) == 1)
        second.cancel()
        await w.until(lambda: waiting(w) == 0)
        third = post(w, "a")
        await w.until(lambda: waiting(w) == 1)
        gate.open.set()
        assert [(await task)[0] for task in (first, third)] == [200, 200]
        assert len(w.engines[0].requests) == 2


async def test_a_client_that_leaves_its_engine_lets_the_next_one_run() -> None:
    async with small([FakeEngine(behave=hang)], tenants={"a": {"max_concurrent": 1}}) as w:
        first = post(w, "a")
        await w.engines[0].asked(1)
        second = post(w, "a")
        await w.until(lambda: waiting(w) == 1)
        first.cancel()
        await w.engines[0].asked(2)
        second.cancel()


async def test_a_held_request_ends_at_the_longest_duration() -> None:
    engines = [FakeEngine(behave=hang)]
    async with small(engines, tenants={"a": {"max_concurrent": 1}}, timeouts={"request": 1.5}) as w:
        first = post(w, "a")
        await w.engines[0].asked(1)
        second = post(w, "a")
        await w.until(lambda: waiting(w) == 1)
        (held,) = (relay for relay in w.server.front.relays if isinstance(relay, HeldRequest))
        assert held.why == "its tenant has the maximum number of requests on the engines"
        for task in (first, second):
            status, _, got = await task
            assert (status, got["error"]["code"]) == (504, "timeout")


async def test_an_engine_that_dies_leaves_the_others_to_those_who_wait() -> None:
    async with emulated(2, admission={"room_seconds": 0.3}, health={"interval": 0.1}) as w:
        await learned(w)
        flood = [asyncio.create_task(stream(w, long(number))) for number in range(16)]
        await w.until(lambda: waiting(w) > 5)
        await w.kill("b0")
        results = await asyncio.gather(*flood)
        assert {status for status, _, _ in results} == {200}


async def test_without_an_engine_nobody_waits() -> None:
    engines = [FakeEngine(behave=later(0.5))]
    async with small(engines, tenants={"a": {"max_concurrent": 1}}, health={"interval": 0.1}) as w:
        tasks = [post(w, "a") for _ in range(4)]
        await w.until(lambda: waiting(w) == 3)
        await w.engines[0].stop()
        results = [await task for task in tasks]
        assert {status for status, _, _ in results} <= {200, 502, 503}
        assert waiting(w) == 0


async def test_a_server_that_stops_ends_held_requests() -> None:
    async with small([FakeEngine(behave=hang)], tenants={"a": {"max_concurrent": 1}}) as w:
        tasks = [post(w, "a") for _ in range(2)]
        await w.until(lambda: waiting(w) == 1)
        for relay in list(w.server.front.relays):
            relay.stop()
        assert {(await task)[0] for task in tasks} == {503}


async def test_a_storm_leaves_nothing_behind() -> None:
    """Clients of three tenants leave at random moments. All counts return to zero."""
    tenants = {
        "a": {"max_concurrent": 3},
        "b": {"max_waiting": 5},
        "c": {"budgets": [{"counts": "requests", "limit": 20, "per": "second"}]},
    }
    admission = {"ttft_seconds": 4.0, "max_waiting": 30}
    async with emulated(2, admission=admission, tenants=tenants) as w:

        async def one(number: int) -> int:
            try:
                async with asyncio.timeout(0.1 * (number % 7) if number % 4 == 0 else 30):
                    return (await stream(w, long(number, 500 + number * 20), "abc"[number % 3]))[0]
            except (TimeoutError, aiohttp.ClientError):
                return 0

        statuses = set(await asyncio.gather(*(one(number) for number in range(90))))
        assert statuses <= {0, 200, 429}
        assert 200 in statuses
        await w.until(lambda: not w.in_flight() and not waiting(w))
        indicators = model(w).router.indicators()
        assert not indicators["bs"].any()
        snapshot = model(w).held.snapshot()
        assert snapshot is not None
        assert snapshot["waiting"] == 0
        assert not snapshot["waiting_by_tenant"]
        # Every tenant may run again.
        for tenant in "abc":
            assert (await stream(w, long(500 + ord(tenant)), tenant))[0] == 200


# -- settings
# ----------------------------------------------------------------


async def test_a_reload_changes_limits_while_requests_wait(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(behave=gate)
    async with reloaded(tmp_path, engine, tenants={"a": {"max_concurrent": 1}}) as r:
        tasks = [post(r.w, "a") for _ in range(5)]
        await r.w.until(lambda: waiting(r.w) == 4)
        assert (await r.change(tenants={"a": {"max_concurrent": 3}}))["tenants_changed"] == ["a"]
        await engine.asked(3)
        assert waiting(r.w) == 2
        await r.change(tenants={}, admission={"max_waiting": 10})
        await engine.asked(5)
        await r.change(admission=None)
        assert model(r.w).held.snapshot() is None
        gate.open.set()
        assert {(await task)[0] for task in tasks} == {200}


async def test_a_class_has_its_own_deadline() -> None:
    classes = {"interactive": {"ttft_seconds": 0.4}, "batch": {"ttft_seconds": 3600}}
    config = {
        "admission": {"ttft_seconds": 1.0, "classes": classes},
        "tenants": {"a": {"max_concurrent": 1, "slo_class": "batch"}},
    }
    gate = Gate()
    async with small([FakeEngine(behave=gate)], **config) as w:
        first = post(w, "a")
        await w.engines[0].asked(1)
        second = post(w, "a")  # the tenant's class
        status, _, got = await post(w, "a", slo="interactive")
        assert (status, got["error"]["code"]) == (429, "deadline")
        status, _, got = await post(w, "a", slo="fast")
        assert (status, got["error"]["code"]) == (400, "unknown_slo_class")
        assert got["error"]["message"].endswith("has no class 'fast'; known: interactive, batch")
        third = post(w, "a", slo="")  # as if absent: a gateway may always send the header
        await asyncio.sleep(1.2)
        assert waiting(w) == 2
        gate.open.set()
        assert [(await task)[0] for task in (first, second, third)] == [200, 200, 200]


async def test_a_class_has_its_own_time_to_a_hedge() -> None:
    classes = {"interactive": {"hedge_after_seconds": 0.1}}
    config = {"admission": {"classes": classes, "room_seconds": 3600}, "hedging": {"budget_ratio": 1.0}}
    async with small([FakeEngine(behave=later(1.0)), FakeEngine()], **config) as w:
        _, headers, _ = await post(w, stream=True, slo="interactive")
        assert headers["x-lmetric-instance"] == "e1"
        assert model(w).hedging.outcomes == {"won": 1}
        w.engines[1].behave = later(1.0)
        await post(w, stream=True)
        assert model(w).hedging.outcomes == {"won": 1}


async def test_without_classes_the_header_has_no_meaning() -> None:
    async with small() as w:
        assert (await post(w, slo="anything"))[0] == 200
        assert w.engines[0].requests[0].headers["x-slo-class"] == "anything"


async def test_a_hold_of_a_program_does_not_count_against_the_deadline() -> None:
    """One queue: the program gets its place in the cache after a second, then its request runs."""
    settings = {**SETTINGS, "forget_seconds": 1}
    config = {"cache_blocks": 100, "programs": settings, "admission": {"ttft_seconds": 0.5}}
    async with small(1, **config) as w:
        assert (await w.post(body(1)))[0] == 200
        task = asyncio.create_task(w.post(body(2)))
        await programs_held(w, 1)
        assert waiting(w) == 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, headers, _ = await task
        assert status == 200
        record = model(w).router.explain(decision_id(headers))
        assert record is not None
        assert record["held_seconds"] > 0.5
        assert (await programs(w))["admitted"] == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("tenants: {a: {slo_class: fast}}", "no model has the class 'fast'; known: none"),
        ("admission: {ttft: 2}", "did you mean 'ttft_seconds'"),
        ("admission: {ttft_seconds: 0}", "above 0"),
        ("tenants: {a: {max_concurrent: 0}}", "at least 1"),
    ],
)
def test_wrong_settings_are_errors(tmp_path: Path, values: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(values)
    with pytest.raises(ConfigError) as error:
        load_config(file, environ={})
    assert said in str(error.value)


class Prefills:
    """An engine that prefills one prompt after the other, 10,000 tokens/s, and uses no CPU."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.late_seconds = 0.0  # what a busy machine has added to its prefills

    async def __call__(self, engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        async with self._turn:
            begun, seconds = time.monotonic(), len(request.json["prompt"]) / 10_000
            await asyncio.sleep(seconds)
            self.late_seconds += time.monotonic() - begun - seconds
        return await answer(engine, request, writer)


async def test_one_tenants_overload_does_not_delay_another() -> None:
    """Attack 49 of the security review, which was not decided: its engines shared the cores.

    Tenant a sends six times of what the engines can do. Each of 15 requests of tenant b gets its
    first token within the deadline of 4 s. The time that a busy machine adds to the engine's
    prefills does not count.
    """
    prefills = {f"e{number}": Prefills() for number in range(2)}
    engines = [FakeEngine(behave=each) for each in prefills.values()]
    settings = {"profile": "independent-sim", "policy": "least_requests", "tenants": TWO_TENANTS}
    deadline = 4.0
    refused = 0
    async with small(engines, **settings, admission={"ttft_seconds": deadline}) as w:

        async def one(number: int, tenant: str) -> tuple[int, float]:
            begun, late = time.monotonic(), {name: each.late_seconds for name, each in prefills.items()}
            sent = {**long(number), "model": "tiny"}
            status, headers, _ = await w.post(sent, headers={"x-tenant": tenant})
            if status != 200:
                return status, 0.0
            name = headers["x-lmetric-instance"]
            return status, time.monotonic() - begun - (prefills[name].late_seconds - late[name])

        async def floods(first: int) -> None:
            nonlocal refused
            for number in itertools.count(first, 100):
                status, _ = await one(number, "a")
                if status == 429:
                    refused += 1
                    await asyncio.sleep(0.5)

        flood = [asyncio.create_task(floods(number)) for number in range(40)]
        try:
            await w.until(lambda: refused)
            waits = [await one(100_000 + number, "b") for number in range(15)]
        finally:
            for each in flood:
                each.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
        assert [status for status, _ in waits] == [200] * 15
        assert max(seconds for _, seconds in waits) < deadline
