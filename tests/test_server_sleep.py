"""Engines that sleep get no requests, and wake up with an empty index."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from server_world import FakeEngine, Request, World, plain, world
from test_server_blame import Pausing

PROMPT = {"model": "tiny", "prompt": [*range(640)], "max_tokens": 3}
STATES = ("awake", "weights_offloaded", "discard_all")
LEVELS = {0: "none of them", 1: "weights_offloaded", 2: "discard_all"}


class Sleeping(Pausing):
    """A vLLM in development mode, with its metric of sleep."""

    def turn(self, level: int | None) -> None:
        """Sleeps at a level; None: wakes up."""
        self.paused = level is not None
        state = "awake" if level is None else LEVELS[level]
        self.metrics = b"".join(
            b'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="%b"} %d.0\n'
            % (name.encode(), name == state)
            for name in STATES
        )


async def told(it: World) -> int:
    """Predicted cached tokens of the prompt."""
    status, headers, _ = await it.post(PROMPT)
    assert status == 200
    _, record = await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
    return int(orjson.loads(record)["predicted_cached_tokens"])


@pytest.mark.parametrize(("level", "keeps"), [(0, True), (1, False), (2, False)])
async def test_an_engine_that_slept_comes_back_with_an_empty_index(level: int, keeps: bool) -> None:
    fake = Sleeping()
    fake.turn(None)
    async with world([fake], health={"interval": 0.05}, admin=True, policy="lmetric") as it:
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        assert await told(it) == 0
        assert await told(it) > 500
        fake.turn(level)
        await it.until(lambda: not engine.healthy)
        status, _, refused = await it.post(PROMPT)
        assert (status, refused["error"]["code"]) == (503, "no_engine")
        assert "paused or asleep" in refused["error"]["message"]
        (shown,) = orjson.loads((await it.get("/debug/engines"))[1])
        assert shown["last_error"].startswith("paused: GET" if keeps else "asleep: GET")
        fake.turn(None)
        await it.until(lambda: engine.healthy)
        assert (await told(it) > 500) is keeps
        assert await told(it) > 500


async def test_requests_go_to_engines_that_are_awake() -> None:
    fake = Sleeping()
    async with world([fake, FakeEngine()], health={"interval": 0.05}) as it:
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        fake.turn(1)
        await it.until(lambda: not engine.healthy)
        assert {(await it.post(PROMPT))[1]["x-lmetric-instance"] for _ in range(5)} == {"e1"}


async def test_the_weights_of_a_sleeping_engine_are_announced_after_it_wakes_up() -> None:
    fake = Sleeping()
    async with world([fake, FakeEngine()], health={"interval": 3600.0}, admin=True) as it:
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        fake.turn(1)
        check = it.server.fleet.check(engine)
        assert check is not None
        await check
        status, _, refused = await it.post({"version": 7}, "/admin/weights")
        assert (status, refused["error"]["code"]) == (409, "engine_asleep")
        assert refused["error"]["message"] == "e0 is asleep; announce its weights after /wake_up"
        assert [each.weights for each in it.server.fleet.engines()] == [None, None]
        # It is asked anew: the trainer need not wait for the next check.
        fake.turn(None)
        status, _, got = await it.post({"version": 7}, "/admin/weights")
        assert (status, [each["weights"] for each in got]) == (200, ["7", "7"])


async def test_a_paused_engine_gets_new_weights() -> None:
    """Trainers pause, update, announce and resume."""
    fake = Sleeping()
    async with world([fake], health={"interval": 0.05}, admin=True) as it:
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        fake.paused = True
        await it.until(lambda: not engine.healthy)
        assert (await it.post({"version": 8}, "/admin/weights"))[0] == 200


async def test_an_engine_is_back_at_once_when_its_drain_ends() -> None:
    fake = Sleeping()
    async with world([fake], health={"interval": 3600.0}, admin=True) as it:
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        assert (await it.post({}, "/admin/engines/e0/drain"))[0] == 200
        fake.turn(1)
        check = it.server.fleet.check(engine)
        assert check is not None
        await check
        assert not engine.healthy
        fake.turn(None)
        status, _, got = await it.post({}, "/admin/engines/e0/undrain")
        assert (status, got["healthy"], got["draining"]) == (200, True, False)
        assert (await it.post(PROMPT))[0] == 200


async def test_a_page_of_metrics_that_fails_shows_a_pause() -> None:
    class Broken(Sleeping):
        async def _answer(self, request: Request, writer: Any) -> bool:
            if request.path == "/metrics" and self.paused:
                writer.write(plain(500, {}))
                return True
            return await super()._answer(request, writer)

    fake = Broken()
    async with world([fake], health={"interval": 0.05}) as it:
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        fake.turn(2)
        await it.until(lambda: not engine.healthy)
        assert (engine.last_failure, engine.asleep) == ("paused", False)


async def test_an_engine_that_restarts_while_it_is_paused_is_identified_anew() -> None:
    """It is down already when its process ends, and each end of a process empties its index."""
    fake = Pausing()
    async with world([fake], health={"interval": 0.05}, policy="lmetric") as it:
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        assert await told(it) == 0
        assert await told(it) > 500
        fake.paused = True
        await it.until(lambda: engine.last_failure == "paused" and engine.identified)
        await fake.stop()
        await it.until(lambda: engine.last_failure == "refused")
        fake.paused, fake.version = False, "0.33.0"
        await fake.start()
        await it.until(lambda: engine.healthy)
        assert engine.capabilities.version == "0.33.0"
        assert not engine.lost_blocks
        assert await told(it) == 0
        assert await told(it) > 500
        await fake.stop()
        await it.until(lambda: not engine.healthy)
        assert engine.cold
        await fake.start()
        await it.until(lambda: engine.healthy)
        assert await told(it) == 0


async def test_entries_of_one_url_share_a_read_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each data-parallel rank has an entry: a check of 32 ranks once read the metrics 32 times."""
    asked, gate = 0, asyncio.Event()
    page = Fleet.page

    async def counted(fleet: Fleet, engine: Engine, path: str, *, paused: bool = False) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        return await page(fleet, engine, path, paused=paused)

    class Gated(Sleeping):
        reads = 0

        async def _answer(self, request: Request, writer: Any) -> bool:
            if request.path == "/metrics" and self.paused:
                self.reads += 1
                await gate.wait()
            return await super()._answer(request, writer)

    fake = Gated()
    fake.turn(None)
    await fake.start()
    entries = [{"url": fake.url, "name": f"e{number}"} for number in range(4)]
    async with world(0, engines=entries, health={"interval": 3600.0}) as it:
        monkeypatch.setattr(Fleet, "page", counted)
        fake.turn(1)
        engines = list(it.server.fleet.engines())
        checks = [asyncio.ensure_future(check) for each in engines if (check := it.server.fleet.check(each))]
        await it.until(lambda: asked == 4)
        gate.set()
        await asyncio.gather(*checks)
        assert all(each.asleep for each in engines)
        assert fake.reads == 1
    await fake.stop()


async def test_metrics_read_before_an_engine_slept_do_not_show_it_awake() -> None:
    gate = asyncio.Event()

    class Gated(Sleeping):
        reads = 0

        async def _answer(self, request: Request, writer: Any) -> bool:
            if request.path == "/metrics":
                self.reads += 1
                if self.reads == 1:
                    writer.write(plain(200, self.metrics)[:-1])  # of before it sleeps
                    rest = self.metrics[-1:]
                    await gate.wait()
                    writer.write(rest)
                    return True
            return await super()._answer(request, writer)

    fake = Gated()
    fake.turn(None)
    async with world([fake], health={"interval": 3600.0}, load={"interval": None}) as it:
        fleet = it.server.fleet
        [engine] = fleet.engines()
        fake.reads = 0
        load = asyncio.ensure_future(fleet.page(engine, "/metrics"))
        await it.until(lambda: fake.reads == 1)
        fake.turn(1)
        check = fleet.check(engine)
        assert check is not None
        await it.until(lambda: fake.reads == 2)
        gate.set()
        await asyncio.gather(load, check)
        assert engine.asleep
