"""Blame for failed requests, over real sockets: on an engine, the request, or nobody."""

import asyncio
import time
from typing import Any

import pytest

from log_watch import MARKED_PROMPT
from server_world import (
    STREAM_HEAD,
    FakeEngine,
    Request,
    World,
    answer,
    chunk,
    hang,
    plain,
    reset,
    says,
    token,
    world,
)

ERROR = {"error": {"message": "internal error"}}
QUICK = {"interval": 0.05, "ejection": {"base_seconds": 0.2, "probe_timeout": 0.5}}
POISON = {"model": "tiny", "prompt": "POISON"}


def poisoned(by: Any) -> Any:
    """Fails prompts with POISON, and answers the others."""

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        return await (by if b"POISON" in request.body else answer)(engine, request, writer)

    return behave


def states(it: World) -> list[str]:
    return [engine.service.state for engine in it.server.fleet.models[0].engines.values()]


def of_clients(engine: FakeEngine) -> list[Request]:
    """The requests without the router's probes."""
    return [request for request in engine.requests if request.json["prompt"] != "1"]


@pytest.mark.parametrize("by", ["500", "reset"])
async def test_poison_takes_no_engine_from_innocent_clients(by: str) -> None:
    """Reliability H2: engines fail certain prompts; one client sends only such prompts."""
    behave = poisoned(reset if by == "reset" else says(plain(500, ERROR), then="keep"))
    async with world([FakeEngine(behave=behave) for _ in range(2)], health={"interval": 0.05}) as it:
        for _ in range(15):
            got = await asyncio.gather(*(it.post(POISON) for _ in range(3)), it.post())
            *hostile, innocent = (status for status, _, _ in got)
            assert set(hostile) == {500 if by == "500" else 502}
            assert innocent == 200
            assert states(it) == ["HEALTHY", "HEALTHY"]
        outliers = it.server.fleet.models[0].outliers
        assert outliers.suspects == 45
        assert not +outliers.ejected
        sent = sum(b"POISON" in request.body for engine in it.engines for request in engine.requests)
        assert sent <= 2 * 45 + (by == "reset") * 45, "twice each, and again if a kept connection broke"


async def test_a_request_that_fails_twice_says_so_and_is_not_tried_a_third_time() -> None:
    async with world([FakeEngine(behave=reset) for _ in range(3)]) as it:
        status, _, got = await it.post()
        assert (status, got["error"]["code"]) == (502, "failed_twice")
        assert sum(len(engine.requests) for engine in it.engines) == 2


@pytest.mark.parametrize("after_seconds", [0.0, 1.2])
async def test_a_request_that_kills_engines_gets_two_of_them(after_seconds: float) -> None:
    """Their kept connections close, as idle ones do, and the dead processes refuse new ones."""

    async def die(engine: FakeEngine, _: Request, __: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(after_seconds)
        await engine.stop()
        return False

    engines = [FakeEngine(behave=poisoned(die)) for _ in range(3)]
    async with world(engines, health={"interval": 60}) as it:
        for _ in range(3):
            assert (await it.post())[0] == 200
        assert [engine.used_connections for engine in engines] == [1, 1, 1]
        status, _, got = await it.post(POISON)
        assert (status, got["error"]["code"]) == (502, "failed_twice")
        assert sorted(len(engine.requests) for engine in engines) == [1, 2, 2]
        # Without a new connection, only the close is known.
        assert states(it).count("DOWN") == (0 if after_seconds else 2)
        text = (await it.get("/metrics"))[1].decode()
        assert 'lmetric_failures_total{kind="reset",model="tiny"} 2.0' in text
        assert (await it.post())[0] == 200


async def test_an_engine_that_closes_a_kept_connection_late_does_not_get_the_request_again() -> None:
    async def break_late(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(1.2)
        writer.transport.abort()
        return False

    async with world([FakeEngine(behave=poisoned(break_late))], health={"interval": 60}) as it:
        assert (await it.post())[0] == 200
        assert (await it.post(POISON))[0] == 502
        assert len(it.engines[0].requests) == 2


async def test_the_client_gets_the_engines_own_answer_to_poison() -> None:
    behave = poisoned(says(plain(500, ERROR), then="keep"))
    async with world([FakeEngine(behave=behave) for _ in range(2)]) as it:
        status, headers, got = await it.post(POISON)
        assert (status, got) == (500, ERROR)
        assert "x-lmetric-decision" in headers


QUOTING = {"error": {"message": f"input_value={{'text': '{MARKED_PROMPT}'}}"}}


async def test_the_words_of_engines_reach_the_client_and_no_log() -> None:
    """An error of an engine may repeat the prompt. `watched_log` finds it."""
    behave = says(plain(500, QUOTING), then="keep")
    async with world([FakeEngine(behave=behave) for _ in range(2)], health=QUICK) as it:
        assert (await it.post())[2] == QUOTING
        assert it.server.fleet.models[0].outliers.suspects == 1
    async with world([FakeEngine(behave=behave), FakeEngine()], health=QUICK) as it:
        for _ in range(40):
            await it.post()
        assert it.server.fleet.models[0].engines["e0"].service.ejections


async def test_an_engine_that_fails_everything_is_ejected_for_longer_and_longer() -> None:
    """Reliability H2: 500 to all requests, 200 to /health, beside a good engine."""
    broken = FakeEngine(behave=says(plain(500, ERROR), then="keep"))
    async with world([broken, FakeEngine()], health=QUICK) as it:
        engine = it.server.fleet.models[0].engines["e0"]
        for _ in range(40):
            assert (await it.post())[0] == 200, "no client sees the broken engine"
        assert len(of_clients(broken)) <= 6
        await it.until(lambda: engine.service.ejections >= 3)
        for _ in range(10):
            assert (await it.post())[1]["x-lmetric-instance"] == "e1"
        assert len(of_clients(broken)) <= 6
        text = (await it.get("/metrics"))[1].decode()
        for line in (
            'lmetric_ejections_total{model="tiny",rule="consecutive"} 1.0',
            'lmetric_ejections_total{model="tiny",rule="probe"}',
            'lmetric_engine_state{instance="e0",model="tiny",state="EJECTED"} 1.0',
        ):
            assert line in text, line
        broken.behave = answer
        await it.until(lambda: engine.service.state in ("PROBING", "HEALTHY"))
        await it.post()
        await it.post()
        await it.until(lambda: engine.service.state == "HEALTHY")


async def test_an_engine_that_breaks_connections_is_blamed_by_the_answers_of_others() -> None:
    broken = FakeEngine(behave=reset)
    async with world([broken, FakeEngine()], health=QUICK | {"ejection": {"base_seconds": 60}}) as it:
        for _ in range(20):
            assert (await it.post({"model": "tiny", "prompt": "x", "stream": True}))[0] == 200
        assert states(it) == ["EJECTED", "HEALTHY"]


async def test_a_failed_connection_is_no_matter_of_opinion() -> None:
    async with world(2, health={"interval": 60}) as it:
        await it.engines[0].stop()
        for _ in range(4):
            assert (await it.post())[0] == 200
        assert states(it) == ["DOWN", "HEALTHY"]
        assert not +it.server.fleet.models[0].outliers.ejected


# Bodies of a 4xx whose error has no number: of vLLM 0.32 on /v1/messages, of OpenAI, of proxies.
NO_NUMBER: tuple[dict[str, Any], ...] = (
    {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}},
    {"error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": None}},
    {"error": {"message": "too long", "code": "context_length_exceeded"}},
    {"error": {"message": "too long", "code": "400"}},
    {"error": "too long"},
)


@pytest.mark.parametrize("said", NO_NUMBER, ids=["anthropic", "null", "word", "text_number", "text"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/completions"])
async def test_mistakes_of_clients_are_no_failures_of_engines(path: str, said: dict[str, Any]) -> None:
    """The error counted as a 500 if it had no code, so five clients could eject an engine."""
    behave = poisoned(says(plain(400, said), then="keep"))
    body = POISON | {"messages": [{"role": "user", "content": "POISON"}]}
    tenants: dict[str, Any] = {f"tenant-{number}": {} for number in range(12)}
    async with world([FakeEngine(behave=behave), FakeEngine(behave=behave)], tenants=tenants) as it:
        for tenant in tenants:
            status, _, got = await it.post(body, path, {"x-tenant": tenant})
            assert (status, got) == (400, said)
        assert states(it) == ["HEALTHY", "HEALTHY"]
        services = [engine.service for engine in it.server.fleet.models[0].engines.values()]
        assert [service.tally.failures for service in services] == [0, 0]
        assert not +it.server.fleet.models[0].outliers.ejected


async def test_errors_without_a_number_inside_a_whole_200_are_failures_of_the_engine() -> None:
    async with world([FakeEngine(behave=says(plain(200, NO_NUMBER[1]), then="keep"))]) as it:
        assert (await it.post())[0] == 200
        (engine,) = it.server.fleet.models[0].engines.values()
        assert engine.service.tally.failures == 1


# -- saturation ------------------------------------------------------------------------------------


def busy(seconds: int, status: int = 503) -> Any:
    return says(plain(status, ERROR, b"retry-after: %d\r\n" % seconds), then="keep")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_engine_rests_for_its_retry_after_and_is_not_blamed(status: int) -> None:
    full = FakeEngine(behave=busy(1, status))
    async with world([full, FakeEngine()]) as it:
        began = time.monotonic()
        for _ in range(20):
            assert (await it.post())[0] == 200
        if time.monotonic() - began < 0.9:
            assert len(full.requests) == 1
        assert states(it) == ["HEALTHY", "HEALTHY"]
        await it.until(lambda: time.monotonic() - began > 1.6)
        await it.post()
        await it.post()
        assert len(full.requests) >= 2


async def test_if_all_engines_are_full_the_client_gets_the_longest_retry_after() -> None:
    async with world([FakeEngine(behave=busy(7)), FakeEngine(behave=busy(17))]) as it:
        for _ in range(2):
            status, headers, _ = await it.post()
            assert (status, headers["retry-after"]) == (503, "17")
    async with world([FakeEngine(behave=busy(86400))]) as it:
        assert (await it.post())[1]["retry-after"] == "60"


async def test_the_only_engines_429_reaches_the_client() -> None:
    async with world([FakeEngine(behave=busy(9, 429))]) as it:
        status, headers, got = await it.post()
        assert (status, headers["retry-after"], got) == (429, "9", ERROR)


# -- the retry budget ------------------------------------------------------------------------------


async def test_without_budget_the_client_gets_the_failure_at_once() -> None:
    none = {"budget_ratio": 0, "min_per_second": 0}
    async with world([FakeEngine(behave=reset), FakeEngine(behave=reset)], retries=none) as it:
        status, headers, got = await it.post()
        assert (status, got["error"]["code"]) == (503, "retry_budget")
        assert int(headers["retry-after"]) in (1, 2, 3)
        assert sum(len(engine.requests) for engine in it.engines) == 1
        text = (await it.get("/metrics"))[1].decode()
        assert 'lmetric_retry_budget_total{model="tiny",outcome="refused"} 1.0' in text


async def test_counts_of_failures_begin_at_zero() -> None:
    """Prometheus sees no increase in a series' first value: the first burst raised no alert."""
    async with world(1) as it:
        text = (await it.get("/metrics"))[1].decode()
        for line in (
            'lmetric_ejections_total{model="tiny",rule="consecutive"} 0.0',
            'lmetric_ejections_prevented_total{limit="max_share",model="tiny"} 0.0',
            'lmetric_retry_budget_total{model="tiny",outcome="refused"} 0.0',
        ):
            assert line in text


async def test_an_engine_that_never_answered_has_metrics() -> None:
    """Its model is unknown, so it was in no series, and no alert could name it."""
    async with world([FakeEngine(), FakeEngine(health=503)]) as it:
        assert [*it.server.fleet.unplaced] == ["e1"]
        text = (await it.get("/metrics"))[1].decode()
        assert 'lmetric_instance_healthy{instance="e0",model="tiny"} 1.0' in text
        assert 'lmetric_instance_healthy{instance="e1",model=""} 0.0' in text
        assert 'lmetric_instance_draining{instance="e1",model=""} 0.0' in text
        assert 'lmetric_engine_state{instance="e1",model="",state="DOWN"} 1.0' in text


async def test_the_requests_of_a_lost_engine_need_no_budget() -> None:
    few = {"budget_ratio": 0, "min_per_second": 0.2}  # two in 10 s
    engines = [FakeEngine(behave=hang), FakeEngine()]
    async with world(engines, retries=few, policy="least_requests", health={"interval": 60}) as it:
        model = it.server.fleet.models[0]
        model.router.update_instance("e1", draining=True)
        running = [asyncio.create_task(it.post()) for _ in range(12)]
        await engines[0].asked(12)
        model.router.update_instance("e1", draining=False)
        await engines[0].stop()
        assert [(await each)[0] for each in running] == [200] * 12
        assert +model.retry_budget.outcomes == {"charged": 2, "free": 10}


# -- the watchdog ----------------------------------------------------------------------------------

STREAM = {"model": "tiny", "prompt": "x", "stream": True}


class Freezing(FakeEngine):
    """Sends two tokens, then stops. While `frozen`, it answers only /health."""

    frozen = True

    def __init__(self) -> None:
        super().__init__(behave=self.freeze)

    async def freeze(self, _: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if not self.frozen:
            return await answer(self, request, writer)
        if request.json.get("stream"):
            writer.write(STREAM_HEAD + chunk(token("a")))
            await asyncio.sleep(0.6)  # the sweep is every half second
            writer.write(chunk(token("b")))
        return await hang(self, request, writer)


WATCHED = {"interval": 0.1, "stall_seconds": 0.5, "ejection": {"probe_timeout": 0.3}}


async def test_an_engine_that_stops_generating_is_taken_out_and_comes_back() -> None:
    """engine-hooks 7: a stopped vLLM engine core answers 200 on /health, and requests hang."""
    frozen = Freezing()
    async with world([frozen, FakeEngine()], health=WATCHED) as it:
        engine = it.server.fleet.models[0].engines["e0"]
        stream = asyncio.create_task(it.post(STREAM))
        await frozen.asked(1)
        waiting = asyncio.create_task(it.post(STREAM | {"prompt": "y"}))
        await asyncio.sleep(0)
        got = await stream
        assert b"stopped" in got[2] or b"no token" in got[2] or b"failed in the middle" in got[2]
        assert (await waiting)[0] == 200
        assert (engine.service.state, engine.last_failure) == ("DOWN", "stalled")
        for _ in range(4):
            assert (await it.post())[1]["x-lmetric-instance"] == "e1"
        await asyncio.sleep(0.5)
        assert not engine.healthy, "its /health is still 200"
        # One check without an answer proves nothing: the next one asks for a token again.
        engine.failed("timeout", "no answer within 1 s")
        assert engine.stalled
        await asyncio.sleep(0.5)
        assert not engine.healthy
        frozen.frozen = False
        await it.until(lambda: engine.healthy)
        engine.failed("timeout", "no answer within 1 s")
        assert not engine.stalled


async def test_a_silent_stream_of_an_engine_that_works_goes_on() -> None:
    """An engine may pause a stream, for a tool call or another request's prefill."""

    async def pause(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if not request.json.get("stream"):
            return await answer(engine, request, writer)
        writer.write(STREAM_HEAD + chunk(token("a")))
        await asyncio.sleep(2.5)
        return await says(chunk(token("b", "length")) + b"0\r\n\r\n")(engine, request, writer)

    paused = FakeEngine(behave=pause)
    async with world([paused], health=WATCHED) as it:
        status, _, got = await it.post(STREAM)
        assert (status, b'"b"' in got) == (200, True)
        assert states(it) == ["HEALTHY"]
        assert sum(request.json["prompt"] == "1" for request in paused.requests) >= 1


class Pausing(FakeEngine):
    """A vLLM in development mode."""

    paused = False
    version = "0.32.0"

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        pages: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "tiny", "owned_by": "vllm"}]},
            "/version": {"version": self.version},
            "/server_info?config_format=json": {"vllm_config": {}},
            "/is_paused": {"is_paused": self.paused},
            "/is_sleeping": {"is_sleeping": False},
        }
        if request.method == "GET" and request.path in pages:
            writer.write(plain(200, pages[request.path]))
            return True
        return await super()._answer(request, writer)


async def test_a_paused_vllm_gets_no_requests() -> None:
    """engine-hooks 7: a paused vLLM answers 200 on /health, and new requests wait."""
    async with world([Pausing(), FakeEngine()], health={"interval": 0.05}) as it:
        engine, fake = it.server.fleet.models[0].engines["e0"], it.engines[0]
        assert isinstance(fake, Pausing)
        fake.paused = True
        await it.until(lambda: not engine.healthy)
        assert engine.last_failure == "paused"
        assert (await it.post())[1]["x-lmetric-instance"] == "e1"
        fake.paused = False
        await it.until(lambda: engine.healthy)
