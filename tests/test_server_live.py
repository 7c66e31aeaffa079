"""The live page's files and data: who sees what, events, limits, slow viewers, the end."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric import top_screen
from lmetric._core import __version__
from lmetric.server import app
from lmetric.server.api.error_codes import ERRORS
from lmetric.server.background import problems as own_problems
from lmetric.server.background.problems import LATE_SHARE, OwnProblems
from lmetric.server.fleet import queues
from lmetric.server.fleet.engine import _CAUSES
from lmetric.server.fleet.problem import Problem, unix_of
from lmetric.server.http import live as http_live
from lmetric.server.observe import live
from lmetric.server.observe.lateness import Late, Lateness
from lmetric.server.observe.live import EndedRequest, LiveUpdate, point, quantile
from lmetric.server.observe.live_problems import EngineState, of_engines, of_requests
from lmetric.server.observe.live_view import LiveView
from lmetric.server.observe.problems import FIXES
from server_world import STREAM_HEAD, FakeEngine, World, chunk, event, reset, says, token, world
from waiting import PATIENCE_SECONDS, until

ADMIN = {"authorization": "Bearer root-token"}
ALICE = {"authorization": "Bearer sk-alice"}
BOB = {"authorization": "Bearer sk-bob"}
SSE = {"accept": "text/event-stream"}


@pytest.fixture
def closed(tmp_path: Path) -> dict[str, Any]:
    """API keys of two tenants, and an admin token."""
    file = tmp_path / "keys.yaml"
    file.write_text("sk-alice: alice\nsk-bob: bob\n")
    return {"auth": {"keys_file": str(file)}, "admin": {"token": "root-token"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POINT_SECONDS", 0.1)


async def state(it: World, headers: dict[str, str] | None = None) -> dict[str, Any]:
    status, body = await it.get("/debug/live", headers)
    assert status == 200, body
    return dict(orjson.loads(body))


async def ticked(it: World, times: int = 2) -> None:
    shown = it.server.front.live
    assert shown is not None
    goal = shown.ticks + times
    await until(lambda: shown.ticks >= goal, seen=lambda: shown.ticks)


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """The events of a stream."""
    name = ""
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:-1].decode()
        elif line.startswith(b"data: "):
            yield name, orjson.loads(line[6:])


async def over(stream: AsyncIterator[tuple[str, Any]]) -> None:
    """Waits until a stream ends, whole or broken off."""
    with contextlib.suppress(aiohttp.ClientError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for _ in stream:
                pass


async def test_an_administrator_sees_engines_rates_and_requests() -> None:
    async with world(2, policy="lmetric") as it:
        it.server.fleet.models[0].router.report_load("e1", waiting=2, running=3, kv_usage=0.5)
        await it.post({"model": "tiny", "prompt": "a" * 500})
        await it.post({"model": "tiny", "prompt": "a" * 500, "stream": True})
        await ticked(it)
        shown = await state(it)
        assert shown["access"] == "admin"
        assert shown["static"]["engines"]["name"] == ["e0", "e1"]
        assert shown["static"]["engines"]["state"] == ["usable", "usable"]
        assert shown["engines"]["batch"][1] == 5
        assert shown["engines"]["cache"] == [None, 0.5]
        assert [each["status"] for each in shown["requests"]] == [200, 200]
        assert shown["requests"][0]["ttft_seconds"] > 0
        assert shown["requests"][1]["ttft_seconds"] is None  # not a stream
        assert shown["requests"][1]["seconds"] > 0
        whole = sorted(each["seconds"] for each in shown["requests"])
        assert (shown["now"]["e2e_p50"], shown["now"]["e2e_p95"]) == (whole[1], whole[1])
        assert shown["now"]["requests_per_second"] > 0
        assert shown["now"]["hit_rate"] == pytest.approx(4 / 20)
        assert shown["summary"]["usable"] == 2
        fields = shown["history"]["fields"]
        ended = sum(row[fields.index("output_tokens_per_second")] for row in shown["history"]["points"])
        assert ended > 0
        # The list leads to the records, which say why.
        status, body = await it.get(f"/debug/decisions/{shown['requests'][0]['id']}")
        record = orjson.loads(body)
        assert status == 200
        assert record["because"].startswith(f"because {record['instance']} had the least new prefill tokens")


async def test_answers_without_usage_count_as_the_router_predicted() -> None:
    without_usage = says(
        STREAM_HEAD,
        chunk(token("a")) + chunk(token("b", "length")) + chunk(event(b"[DONE]")) + b"0\r\n\r\n",
        then="keep",
    )
    async with world([FakeEngine(behave=without_usage)], policy="lmetric") as it:
        body = {"model": "tiny", "prompt": list(range(640)), "stream": True}
        for _ in range(2):
            assert (await it.post(body))[0] == 200
        await ticked(it)
        second, first = (await state(it))["requests"]
        assert (first["predicted"], first["prompt_tokens"], first["cached_tokens"]) == (True, 640, 0)
        assert second["cached_tokens"] > 500


async def test_problems_name_engines_and_refusals_with_their_reasons() -> None:
    async with world(3, policy="p_token * (bs + 1)", health={"interval": 60}) as it:
        model = it.server.fleet.models[0]
        before = time.time()
        model.engines["e0"].failed("refused", "no connection: Connection refused")
        model.engines["e1"].draining = True
        assert (await it.post({"model": "tiny", "prompt": "a"}))[0] == 200
        for name in ("e1", "e2"):
            model.engines[name].failed("paused", "it sleeps")
        assert (await it.post({"model": "tiny", "prompt": "a"}))[0] == 503
        await ticked(it)
        shown = await state(it)
    assert shown["static"]["router"] == __version__
    assert shown["static"]["models"][0]["policy"] == "p_token * (bs + 1)"
    assert shown["static"]["models"][0]["formula"] is None  # the policy is the formula
    found = {each["what"]: each for each in shown["problems"]}
    down = found["e0: down"]
    assert (down["level"], down["reason"]) == ("bad", "no connection: Connection refused")
    assert down["fix"] == "start the engine, or correct its URL"
    assert before - 1 <= down["since"] <= time.time() + 1
    assert found["e1: draining"]["reason"] == ""
    assert found["e1: draining"]["since"] is None
    assert found["1 request refused in the last 5 minutes"]["reason"].startswith(
        "503 no_engine: no engine of"
    )
    assert [each["level"] for each in shown["problems"]] == ["bad", "bad", "warn", "note"]
    # The list of requests has it, with its reason.
    assert [(each["status"], each["code"]) for each in shown["requests"]] == [(503, "no_engine"), (200, None)]


async def test_a_lost_feed_is_a_problem_and_engines_without_events_a_note() -> None:
    async with world(2, policy="lmetric") as it:
        engines = it.server.fleet.models[0].engines
        engines["e1"].was_exact = True
        await ticked(it)
        shown = await state(it)
    assert shown["static"]["models"][0]["formula"].startswith("p_token * (bs")
    levels = {each["what"]: each["level"] for each in shown["problems"]}
    assert levels == {"e1: approximate": "warn", "e0: approximate": "note"}


IN_TIME = Late(0.0, 0.0)


def update(requests: list[EndedRequest], late: Late = IN_TIME) -> LiveUpdate:
    """The message of another worker."""
    return LiveUpdate(requests, 0, 0, [], {}, late)


def test_only_failures_and_refusals_count_as_errors() -> None:
    """A client that left (499) counted, too, but not among the problems of the same page."""
    requests = [ended(1)._replace(status=status) for status in (200, 404, 429, 499, 500, 503)]
    assert point(requests, 1.0, 0, unix=0.0).errors_per_second == 3


def test_a_message_to_other_workers_has_columns_of_plain_values() -> None:
    """Pickle calls Python for each named tuple, which takes some 4 µs of CPU time per request."""
    message = update([ended(number) for number in range(1, 4)])
    data = pickle.dumps(message)
    assert pickle.loads(data) == message
    assert pickle.loads(pickle.dumps(update([]))) == update([])
    assert all(type(each) is EndedRequest for each in pickle.loads(data).ended)
    assert EndedRequest.__name__.encode() not in data


async def test_a_tenant_sees_the_requests_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker sends its requests up to 2 s after their end."""
    monkeypatch.setattr(live, "POINT_SECONDS", 3600)
    async with world(1) as it:
        shown = it.server.front.live
        assert shown is not None
        shown.send = lambda _: None  # to another worker
        late = ended(1, tenant="a", ended=time.monotonic() - 1.4)
        shown.receive(1, update([late, ended(1)]))
        shown.tick(shown._last + 1.0)
        views = [orjson.loads(await LiveView(shown).snapshot(tenant)) for tenant in "ab"]
        (a,), (b,) = (view["points"] for view in views)
        assert (a[1], b[1]) == (1.0, 0.0)


async def test_many_refusals_are_a_problem_until_a_minute_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "POINT_SECONDS", 3600)
    async with world(1) as it:
        shown = it.server.front.live
        assert shown is not None
        shown.send = lambda _: None  # to another worker
        now = shown.began

        def second(*requests: EndedRequest) -> list[Problem]:
            """The problems after a second in which these requests ended on another worker."""
            nonlocal now
            now += 1
            shown.receive(1, update(list(requests)))
            shown.tick(now)
            return [each for each in it.server.fleet.own_problems() if each.what == "refusals"]

        refused = [ended(1, status=429, code="deadline")] * 4 + [ended(1, status=503, code="too_many")] * 2
        assert second(*refused) == []  # 6 requests are too few
        # Not refused by the router: an engine's own error, a failure, and a bad request.
        others = [ended(1, status=429), ended(1, status=504, code="timeout"), ended(1, status=400)]
        (problem,) = second(*others, *[ended(1)] * 51)
        assert problem.cause == "over 5% of the requests in the last minute were refused"
        assert problem.reason == (
            "6 of 60, 4 of them with deadline: the first token would come after its deadline (admission)"
        )
        assert problem.fix == "add engines, or raise admission.ttft_seconds"
        assert problem.since == unix_of(shown.began + 1)
        (status, ready), live_page = await it.get("/ready"), await state(it)
        assert status == 200
        assert problem.shown(True) in orjson.loads(ready)["warnings"]
        line = next(each for each in live_page["problems"] if each["what"] == problem.cause)
        assert (line["level"], line["reason"], line["fix"]) == ("warn", problem.reason, problem.fix)
        # The other reasons have their own lines.
        reasons = [each["reason"].partition(":")[0] for each in live_page["problems"]]
        assert "503 too_many" in reasons
        assert "429 deadline" not in reasons
        assert problem.reason in " ".join(line.plain for line in top_screen._problems(live_page))
        assert second(*[ended(1)] * 60) == []  # 6 of 120: exactly 5%
        assert second(*refused * 4) != []
        now += 58
        assert second() != []
        assert second() == []  # the last refusal was a minute ago


def test_each_refusal_of_the_router_has_a_fix() -> None:
    refusals = {code for code, (status, _) in ERRORS.items() if {"429", "503"} & set(status.split(", "))}
    # Of other pages, of a router that ends, or of engines.
    assert refusals - FIXES.keys() == {"not_ready", "shutting_down", "too_many_viewers", "status"}


def test_each_fix_names_an_action() -> None:
    """An operator does something, rather than to see a log."""
    fixes = [*FIXES.values(), *(fix for _, fix in _CAUSES.values())]
    begins = {fix.partition(" ")[0] for fix in fixes}
    actions = {"add", "allow", "check", "correct", "find", "raise", "restart", "start", "wait"}
    assert begins <= actions | {"POST"}
    failed = of_requests(Counter({(502, "engine_error"): 1, (500, None): 1, (429, None): 1}), 5)
    assert [str(each["fix"]).partition(" ")[0] for each in failed] == ["restart", "restart", "add"]


def test_a_late_timer_counts_with_its_whole_time() -> None:
    late = Lateness()
    late.note(0.0, 0.1, 0.14, 0.14)  # a busy loop, not a late one
    assert late.recent(0.14) == (0, 0)
    late.note(1.0, 1.1, 4.0, 0.3)
    late.note(4.0, 4.1, 4.5, 0.4)
    assert late.recent(4.5) == pytest.approx((3.5, 0.2))
    assert late.recent(12.0) == pytest.approx((2.5, 0.24))  # since 2.0
    assert late.recent(15.0) == (0, 0)


async def test_a_late_event_loop_is_a_problem_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_problems, "LATE_SHARE", LATE_SHARE)
    async with world(1) as it:
        shown, problems = it.server.front.live, it.server.fleet.own_problems
        assert shown is not None
        assert isinstance(problems, OwnProblems)
        now = time.monotonic() + 3600  # after all that the server measures
        problems.clock = lambda: now
        late = it.server.metrics.lateness
        for began in (now - 9, now - 7):
            late.note(began, began + 0.1, began + 2, 2.0)
        assert [*problems()] == []  # a burst: 4 of 10 s
        late.note(now - 3, now - 2.9, now, 3.0)
        (problem,) = problems()
        assert problem.cause == "the router's event loop is late: the router adds time to each request"
        assert problem.reason == "late by over 50 ms for 7 of the last 10 s; its CPU core was busy"
        assert problem.fix == "raise workers (now 1), or start another router"
        await ticked(it)
        assert problem.cause in [each["what"] for each in (await state(it))["problems"]]
        assert problem.shown(True) in orjson.loads((await it.get("/ready"))[1])["warnings"]
        now += 6
        assert [*problems()] == []
        # Another worker, which may take no new connection for this page.
        now = time.monotonic()
        shown.receive(1, update([], Late(8.0, 0.2)))
        (problem,) = problems()
        assert problem.reason.endswith("for 8 of the last 10 s; other processes of this machine had the CPU")
        assert problem.fix is not None
        assert "workers" not in problem.fix  # they would get no CPU either
        now += 7200
        assert [*problems()] == []  # it has ended


WAITING = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny"} 8.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="tiny"} %d.0
"""
VLLM = {"/version": (200, b'{"version": "0.32.0"}')}


async def test_queues_at_all_engines_are_a_problem_while_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "WAIT_SECONDS", 1.5)
    engines = [FakeEngine(metrics=WAITING % count, extra_pages=VLLM) for count in (0, 30, 7)]
    async with world(engines, admin=True, load={"interval": 0.05}) as it:
        shown, problems = it.server.front.live, it.server.fleet.own_problems
        router = it.server.fleet.models[0].router
        assert shown is not None
        for _ in range(3):
            await it.post({"model": "tiny", "prompt": "a", "stream": True})

        def waiting() -> list[float]:
            return [float(each) for each in router.indicators(names=["reported_waiting"])["reported_waiting"]]

        await it.until(lambda: waiting() == [0, 30, 7])
        began = time.monotonic()
        await it.until(lambda: time.monotonic() - began > 4)
        assert [*problems()] == [], "an engine has room"
        # An engine that gets no requests does not count.
        assert (await it.post({}, "/admin/engines/e0/drain"))[0] == 200
        drained = time.time()
        await it.until(lambda: [*problems()])
        (problem,) = problems()
        assert problem.cause.startswith("all engines of a model have waiting requests")
        assert problem.reason.startswith("tiny: 37 requests wait at all 2 engines; TTFT p50 ")
        assert problem.fix is not None
        assert problem.fix.startswith("add engines, or set admission.ttft_seconds")
        assert problem.since is not None
        assert drained - 1 <= problem.since <= time.time() - 1
        status, ready = await it.get("/ready")
        assert (status, orjson.loads(ready)["ready"]) == (200, True)
        assert problem.shown(True) in orjson.loads(ready)["warnings"]
        assert b"37 requests wait at all 2 engines" in (await it.get("/", {"accept": "text/html"}))[1]
        await ticked(it)
        live_page = await state(it)
        line = next(each for each in live_page["problems"] if each["what"] == problem.cause)
        assert (line["level"], line["since"], line["fix"]) == ("warn", problem.since, problem.fix)
        assert "37 requests wait" in " ".join(each.plain for each in top_screen._problems(live_page))
        # A late event loop costs less time than the queues.
        monkeypatch.setattr(own_problems, "LATE_SHARE", LATE_SHARE)
        shown.receive(1, update([], Late(8.0, 0.9)))
        assert [each.what for each in problems()] == ["queue", "cpu"]
        assert [(each.fix or "").partition(",")[0] for each in problems()] == [
            "add engines",
            "first add engines",
        ]
        engines[2].metrics = WAITING % 0
        await it.until(lambda: "queue" not in [each.what for each in problems()])


def test_many_engines_with_one_reason_are_one_problem() -> None:
    states = [EngineState(f"e{n}", "down", "refused", "start it", 100.0 + n, "bad") for n in range(5)]
    (shown,) = of_engines(states)
    assert shown["what"] == "e0, e1, e2 and 2 more: down"
    assert (shown["since"], shown["count"]) == (100.0, 5)


async def test_running_requests_are_listed_without_a_status() -> None:
    async with world(1) as it:
        it.engines[0].pace = 0.3
        running = asyncio.create_task(it.post({"model": "tiny", "prompt": "a", "stream": True}))
        await it.until(lambda: it.in_flight())
        first = (await state(it))["requests"][0]
        assert first["status"] is None
        assert first["instance"] == "e0"
        await running
        await ticked(it)
        assert (await state(it))["requests"][0]["status"] == 200


async def test_tenants_see_only_their_own_requests_and_no_engines(closed: dict[str, Any]) -> None:
    async with world(2, **closed) as it:
        for key, times in ((ALICE, 2), (BOB, 3)):
            for _ in range(times):
                assert (await it.post(headers=key))[0] == 200
        it.server.fleet.models[0].activity.note(time.monotonic(), "fetch", 1, "bob", "e0", "e1", "fetched")
        await ticked(it)
        everything = await state(it, ADMIN)
        assert {each["tenant"] for each in everything["requests"]} == {"alice", "bob"}
        assert len(everything["events"]) == 1
        for key, name, times in ((ALICE, "alice", 2), (BOB, "bob", 3)):
            own = await state(it, key)
            assert own["access"] == "tenant"
            assert [each["tenant"] for each in own["requests"]] == [name] * times
            assert len(own["events"]) == (name == "bob")
            assert own["now"]["in_flight"] is None
            assert not {"static", "engines", "guard", "fleet"} & own.keys()
            assert own["history"]["points"] == []
            assert own["summary"].keys() == {"engines", "usable", "modes"}
            label = own["requests"][0]["id"]
            assert (await it.get(f"/debug/decisions/{label}", key))[0] == 200
            assert (await it.get(f"/debug/decisions/{label}", BOB if key is ALICE else ALICE))[0] == 404
        for headers in (None, {"authorization": "Bearer wrong"}):
            assert (await it.get("/debug/live", headers))[0] == 401
            assert (await it.get("/debug/live", {**SSE, **(headers or {})}))[0] == 401


async def test_tenants_read_no_names_of_engines_if_these_are_hidden(closed: dict[str, Any]) -> None:
    """Security L: the live view and a tenant's own record named engines, with scores."""
    async with world(2, errors={"show_engines": False}, **closed) as it:
        assert (await it.post(headers=ALICE))[0] == 200
        it.server.fleet.models[0].activity.note(time.monotonic(), "fetch", 1, "alice", "e0", "e1", "fetched")
        await ticked(it)
        own = await state(it, ALICE)
        label = own["requests"][0]["id"]
        status, body = await it.get(f"/debug/decisions/{label}", ALICE)
        record = orjson.loads(body)
        assert status == 200
        assert record["outcome"] == "finished"
        assert record["prompt_tokens"] > 0
        for shown in (own, record):
            assert not re.search(r'"e[01]"|127\.0\.0\.1', orjson.dumps(shown).decode())
        label = (await state(it, ADMIN))["requests"][0]["id"]
        admin = orjson.loads((await it.get(f"/debug/decisions/{label}", ADMIN))[1])
        assert admin["instance"] in ("e0", "e1")
        assert len(admin["best"]) == 2


async def test_viewers_of_one_tenant_leave_places_for_others(closed: dict[str, Any]) -> None:
    """Security L: one tenant's viewers took all places of tenants."""
    async with world(1, ui={"viewers": 8}, **closed) as it:
        held = [await it.client.get(f"{it.url}/debug/live", headers=SSE | ALICE) for _ in range(2)]
        assert (await it.get("/debug/live", SSE | ALICE))[0] == 503
        held += [await it.client.get(f"{it.url}/debug/live", headers=SSE | BOB) for _ in range(2)]
        held += [await it.client.get(f"{it.url}/debug/live", headers=SSE | ADMIN) for _ in range(4)]
        assert {answer.status for answer in held} == {200}
        assert (await it.get("/debug/live", SSE | ADMIN))[0] == 503
        for answer in held:
            answer.close()
        shown = it.server.front.live
        await until(lambda: shown is not None and not shown.viewers)


async def test_without_keys_only_the_administrator_sees_the_data() -> None:
    async with world(1, admin={"token": "root-token"}) as it:
        assert (await it.get("/debug/live"))[0] == 401
        assert (await it.get("/debug/live", {"x-tenant": "alice"}))[0] == 401
        assert (await state(it, ADMIN))["access"] == "admin"
        assert (await it.get("/ui"))[0] == 200  # the page has no data of its own
    async with world(1) as it:
        status, body = await it.get("/debug/live", {"origin": "http://elsewhere.example"})
        assert status == 403, body


async def test_the_stream_sends_the_fleet_only_when_it_changes() -> None:
    async with world(2) as it, it.client.get(f"{it.url}/debug/live", headers=SSE) as answer:
        assert answer.content_type == "text/event-stream"
        stream = events(answer)
        names = [(await anext(stream))[0] for _ in range(6)]
        assert names == ["hello", "fleet", "history", "update", "update", "update"]
        it.server.fleet.models[0].engines["e1"].draining = True
        found: dict[str, Any] = {}
        async for name, data in stream:
            if name == "fleet":
                found = data
                break
        assert found["engines"]["state"] == ["usable", "draining"]
        assert found["engines"]["reason"] == [None, "draining"]
        _, update = await anext(stream)
        assert update["fleet"] == found["version"]


async def test_viewers_are_bounded_and_leave() -> None:
    async with world(1, ui={"viewers": 2}) as it:
        shown = it.server.front.live
        assert shown is not None
        held = [await it.client.get(f"{it.url}/debug/live", headers=SSE) for _ in range(2)]
        status, body = await it.get("/debug/live", SSE)
        assert status == 503
        assert orjson.loads(body)["error"]["code"] == "too_many_viewers"
        assert (await it.get("/debug/live"))[0] == 200  # a single look is no viewer
        for answer in held:
            answer.close()
        await until(lambda: not shown.viewers, seen=lambda: shown.viewers)
        async with it.client.get(f"{it.url}/debug/live", headers=SSE) as answer:
            assert answer.status == 200


async def test_a_slow_viewer_misses_updates_and_costs_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as it:
        shown = it.server.front.live
        assert shown is not None
        model = it.server.fleet.models[0]
        for number in range(1000):
            model.activity.note(time.monotonic(), "guard", 0, "", None, None, f"{number}" + "x" * 10_000)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", it.server.port))
        await loop.sock_sendall(
            client, b"GET /debug/live HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n"
        )

        def buffered() -> int:
            transports = [each.transport for each in it.server.front.connections if each.transport]
            return sum(each.get_write_buffer_size() for each in transports)

        await until(buffered)  # its socket takes no more
        waiting = buffered()
        await ticked(it, 8)
        assert buffered() <= waiting
        assert waiting < 2 * len(await shown.view.snapshot(None))

        # Once it reads again, it gets the latest update, not the missed ones.
        missed = shown.ticks
        async with asyncio.timeout(PATIENCE_SECONDS):
            while shown.dropped < 6:
                await loop.sock_recv(client, 1 << 20)
        assert shown.ticks - missed < 40
        monkeypatch.setattr(http_live, "STALLED_SECONDS", 0.3)
        await until(lambda: not shown.viewers, seen=lambda: shown.viewers)
        client.close()


async def test_viewers_do_not_delay_the_end_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STOP_SECONDS", 3600.0)  # nothing waits for it
    async with world(1) as it, it.client.get(f"{it.url}/debug/live", headers=SSE) as answer:
        stream = events(answer)
        await anext(stream)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await it.server.stop()
        await over(stream)


async def test_a_reload_with_other_keys_ends_streams_of_removed_keys(closed: dict[str, Any]) -> None:
    async with (
        world(1, **closed) as it,
        it.client.get(f"{it.url}/debug/live", headers={**SSE, **ALICE}) as answer,
    ):
        stream = events(answer)
        await anext(stream)
        await asyncio.to_thread(Path(closed["auth"]["keys_file"]).write_text, "sk-bob: bob\n")
        await it.server.apply(it.server.prepare(it.server.config))
        await over(stream)


async def test_files_have_a_strict_policy_and_an_etag() -> None:
    async with world(1) as it:
        async with it.client.get(f"{it.url}/ui") as page:
            text = await page.text()
            policy = page.headers["content-security-policy"]
            assert page.content_type == "text/html"
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http:" not in text
        assert "https:" not in text
        for name, kind in (
            ("page.js", "text/javascript"),
            ("page.css", "text/css"),
            ("uplot.js", "text/javascript"),
        ):
            async with it.client.get(f"{it.url}/ui/{name}") as answer:
                assert (answer.status, answer.content_type) == (200, kind)
                assert answer.headers["x-content-type-options"] == "nosniff"
                tag = answer.headers["etag"]
            async with it.client.get(f"{it.url}/ui/{name}", headers={"if-none-match": tag}) as again:
                assert (again.status, await again.read()) == (304, b"")
        for name in ("README.md", "nothing.js", "..%2fapp.py", "%2e%2e/app.py"):
            assert (await it.get(f"/ui/{name}"))[0] == 404, name


async def test_the_page_can_be_off() -> None:
    async with world(1, ui={"enabled": False}) as it:
        assert it.server.front.live is None
        assert [*it.server.fleet.own_problems()] == []
        assert (await it.post())[0] == 200
        for path in ("/ui", "/ui/page.js", "/debug/live"):
            status, body = await it.get(path)
            assert status == 404
            assert "set ui.enabled: true" in orjson.loads(body)["error"]["message"]
        assert "/ui" not in orjson.loads((await it.get("/"))[1])["pages"]


async def test_a_retry_is_an_event_and_part_of_the_record() -> None:
    async with world(2) as it:
        it.engines[0].behave = it.engines[1].behave = reset
        it.engines[1].behave = type(it.engines[1])().behave
        headers = [(await it.post())[1] for _ in range(2)]
        await ticked(it)
        shown = [event for event in (await state(it))["events"] if event["kind"] == "retry"]
        assert [(event["source"], event["target"], event["outcome"]) for event in shown] == [
            ("e0", "e1", "reset")
        ]
        labels = {answer["x-lmetric-decision"] for answer in headers}
        assert shown[0]["id"] in labels
        record = orjson.loads((await it.get(f"/debug/decisions/{shown[0]['id']}"))[1])
        assert [event["kind"] for event in record["events"]] == ["retry"]
        assert 0 <= record["events"][0]["after_seconds"] <= record["e2e_seconds"]
        assert "e0 did not serve it, so e1 was next" in record["because"]


def ended(number: int, **values: Any) -> EndedRequest:
    given = {
        "ended": 10.0,
        "started": 8.0,
        "tenant": "",
        "model": "tiny",
        "model_index": 0,
        "number": number,
        "instance": "e0",
        "status": 200,
        "first_token_at": None,
        "prompt_tokens": None,
        "cached_tokens": None,
        "predicted": False,
        "output_tokens": 0,
        "request_id": "r",
        "alias": None,
        "fallback_from": None,
        "fallback_reason": None,
        "code": None,
    }
    return EndedRequest(**{**given, **values})


def test_points_count_what_engines_reported() -> None:
    requests = [
        ended(1, first_token_at=8.5, prompt_tokens=100, cached_tokens=25, output_tokens=4),
        ended(2, first_token_at=9.0, prompt_tokens=100, output_tokens=11),  # the hit is not known
        ended(3, status=503, started=9.99),
        ended(4, status=400, started=9.99),
        ended(5, started=4.0, output_tokens=0),  # not a stream
    ]
    got = point(requests, 2.0, 7, 1000.0, more=5)
    assert got.requests_per_second == 5.0
    assert got.errors_per_second == 0.5
    assert got.prompt_tokens_per_second == 100.0
    assert got.output_tokens_per_second == 7.5
    assert got.hit_rate == 0.25
    assert (got.ttft_p50, got.ttft_p95) == (1.0, 1.0)
    assert (got.tpot_p50, got.tpot_p95) == (0.5, 0.5)
    assert (got.e2e_p50, got.e2e_p95) == (2.0, 6.0)  # errors do not count
    assert got.in_flight == 7
    assert point([], 1.0, 0, 0.0).hit_rate is None
    assert point([ended(1, status=429)], 1.0, 0, 0.0).e2e_p50 is None


async def test_the_times_of_all_workers_are_one_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POINT_SECONDS", 60)
    async with world(1) as it:
        shown = it.server.front.live
        assert shown is not None
        shown.send = lambda _: None  # to another worker
        await it.post()
        slow = ended(1, started=0.0, ended=40.0)
        shown.receive(1, update([slow]))
        shown.tick(shown.began + 10)
        own = next(each for each in shown.requests if each is not slow)
        assert own.first_token_at is None
        assert shown.points[-1].e2e_p95 == 40.0
        shown.receive(1, update([slow] * 2))
        shown.tick(shown.began + 20)
        assert shown.points[-1].e2e_p50 == 40.0


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile([], 0.5) is None
    assert quantile([1.0], 0.95) == 1.0
    assert quantile(list(map(float, range(100))), 0.95) == 95.0


async def test_more_requests_than_the_bound_are_counted_without_their_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "NEW_KEPT", 3)
    monkeypatch.setattr(live, "POINT_SECONDS", 60)
    async with world(1) as it:
        for _ in range(5):
            await it.post()
        shown = it.server.front.live
        assert shown is not None
        shown.tick(shown.began + 10)
        assert len(shown.requests) == 3
        assert shown.points[-1].requests_per_second == pytest.approx(0.5)
