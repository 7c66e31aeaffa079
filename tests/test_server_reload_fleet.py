"""Reloads of large fleets: short turns of the event loop, one at a time, nothing half applied.

The guard of turns (`turn_guard.py`) is on: with 10,000 engines, a reload once took a turn of
several seconds.
"""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import ADMIN, CONFIGURED, ConfigError, EngineConfig, ServerConfig
from lmetric.server.app import Reloads
from lmetric.server.discovery.members import Found
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.turns import STEPS_PER_TURN
from server_world import STREAM_HEAD, World, chunk, says, token, world
from waiting import until

MODELS = 4  # at most 4,096 engines each, so that each index has one part
ENGINES = 10_000
SOME = 4 * MODELS * STEPS_PER_TURN


class LargeFleet:
    """A world with any number of engines, which do not exist, and a configuration that changes."""

    def __init__(self, w: World, values: dict[str, Any]) -> None:
        self.w = w
        self.fleet = w.server.fleet
        self.values = values
        self.reads = 0
        self.sizes: list[int] = []  # engines of the fleet at each read of the configuration
        self.reloads = Reloads(w.server, self.read)
        w.server.front.reread = self.reloads.reload

    def read(self) -> ServerConfig:
        self.sizes.append(self.fleet.size)
        return ServerConfig.model_validate(self.values)

    def change(self, numbers: range | None = None, more: Any = None, **settings: Any) -> None:
        self.values = {**self.values, **settings}
        if numbers is not None:
            self.values["models"] = models(numbers, **(more or {}))

    async def reload(self, numbers: range | None = None, more: Any = None, **settings: Any) -> Any:
        self.change(numbers, more, **settings)
        return await self.reloads.reload()

    @property
    def names(self) -> set[str]:
        return {engine.name for engine in self.fleet.engines()}

    async def checked(self) -> None:
        """Waits until all engines were checked."""
        await until(lambda: all(engine.last_error for engine in self.fleet.engines()))


def models(numbers: range, **more: Any) -> list[dict[str, Any]]:
    def engines(model: int) -> list[dict[str, Any]]:
        return [
            {"url": f"unix:///nowhere/{number}", "name": f"e{number}", **more}
            for number in numbers
            if number % MODELS == model
        ]

    return [{"name": f"m{model}", "engines": engines(model)} for model in range(MODELS)]


def named(numbers: range) -> set[str]:
    return {f"e{number}" for number in numbers}


@contextlib.asynccontextmanager
async def large_fleet(numbers: range = range(0), **config: Any) -> AsyncIterator[LargeFleet]:
    values = {"models": models(numbers), "health": {"interval": 3600}, "admin": True, **config}
    async with world(0, **values) as w:
        yield LargeFleet(w, {"port": 0, "experimental": True, "load": {"interval": None}, **values})


@contextlib.contextmanager
def each_turn(look: Callable[[], object]) -> Iterator[None]:
    """Calls a function in each turn of the event loop."""
    loop, on = asyncio.get_running_loop(), True

    def turn() -> None:
        if on:
            look()
            loop.call_soon(turn)

    turn()
    yield
    on = False


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.nightly
async def test_reloads_of_10000_engines_take_short_turns() -> None:
    half = range(ENGINES // 2)
    async with large_fleet() as it:
        await it.reload(range(ENGINES))
        await it.checked()
        assert it.names == named(range(ENGINES))
        assert (await it.reload())["changed"] == []
        assert (await it.reload(timeouts={"connect": 7.0}))["changed"] == ["timeouts"]
        assert (await it.reload(range(ENGINES), {"api_key": "k"}))["engine_keys_changed"][:2] == ["e0", "e4"]
        await it.reload(half, {"api_key": "k"})
        assert it.names == named(half)
        await it.reload(half, {"api_key": "k", "group": "other"})
        await it.checked()
        assert it.names == named(half)
        with pytest.raises(ConfigError, match=r"nowhere\.pem"):
            await it.reload(range(ENGINES), engine_tls={"ca_file": "/nowhere.pem"})
        assert it.names == named(half)


async def test_a_turn_changes_few_engines_and_each_is_old_or_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of engines that one turn changes does not grow with the fleet."""
    calls = [0]

    def counted(owner: type, method: str) -> None:
        call = getattr(owner, method)

        def count(*values: Any, **more: Any) -> Any:
            calls[-1] += 1
            return call(*values, **more)

        monkeypatch.setattr(owner, method, count)

    mixed: list[str] = []

    def look() -> None:
        calls.append(0)
        for engine in it.fleet.engines():
            new = engine.upstream._connect_seconds == 7.0
            if new != (engine.health.down_after == 9):
                mixed.append(engine.name)

    async with large_fleet(range(SOME)) as it:
        for method in ("add", "remove"):
            counted(Fleet, method)
        for method in ("configure", "set_key"):
            counted(Engine, method)
        with each_turn(look):
            await it.reload(timeouts={"connect": 7.0}, health={"interval": 3600, "down_after": 9})
            await it.reload(range(SOME), {"api_key": "k"})
            await it.reload(range(SOME), {"api_key": "k", "group": "g"})
            await it.reload(range(SOME, 2 * SOME))
    # Each reload configures all engines; a replaced engine is removed and added.
    assert sum(calls) == (1 + 2 + 3 + 3) * SOME
    assert max(calls) <= 2 * STEPS_PER_TURN
    assert mixed == []


async def test_neither_engines_nor_requests_need_the_garbage_collector() -> None:
    """Large changes exempt the present objects from it; those in cycles would stay forever."""
    # A thread of an earlier test may end only now, and leave that test's router in cycles.
    gc.collect()
    gc.freeze()
    async with world(2, model="tiny") as w:
        for stream in (False, True):
            assert (await w.post({"model": "tiny", "prompt": "p", "stream": stream}))[0] == 200
        gc.collect()
        gc.disable()
        try:
            for stream in (False, True):
                assert (await w.post({"model": "tiny", "prompt": "p", "stream": stream}))[0] == 200
            for each in w.engines:  # a stream that breaks off
                each.behave = says(STREAM_HEAD + chunk(token("a")), then="reset")
            assert (await w.post({"model": "tiny", "prompt": "p", "stream": True}))[0] == 200
            for refused in ({"model": "other", "prompt": "p"}, b"no object"):
                assert (await w.post(refused))[0] in (400, 404)
            async with w.client.get(f"{w.url}/v1/responses/unknown") as answer:
                assert answer.status == 404
            members = w.server.front.discovery.members
            engine = weakref.ref(next(w.server.fleet.engines()))
            await members.update(CONFIGURED, [])
            assert not w.server.fleet.size
            await until(lambda: engine() is None)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            # The closed connections of asyncio's own event loop are in cycles.
            modules = {getattr(each, "__module__", None) or type(each).__module__ for each in gc.garbage}
            assert not [module for module in modules if module.startswith("lmetric")]
            assert not gc.garbage or "asyncio.selector_events" in modules
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()


async def test_many_new_engines_are_exempt_from_garbage_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full collection of 10,000 new engines took 150 ms of one turn."""
    frozen: list[int] = []
    async with large_fleet() as it:
        monkeypatch.setattr(gc, "freeze", lambda: frozen.append(it.fleet.size))
        await it.reload(range(100))
        await it.reload(range(1700))
    assert frozen == [600, 1100, 1600]


@pytest.mark.parametrize("wrong", [{"limits": {"idle_seconds": -1}}, {"engine_tls": {"ca_file": "/no.pem"}}])
async def test_a_refused_reload_changes_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """TLS settings are checked for engines of `discovery`, too."""
    listed = tmp_path / "engines.json"
    listed.write_bytes(orjson.dumps([{"url": "https://127.0.0.1:1", "name": "found"}]))
    async with large_fleet(discovery=[{"file": str(listed), "model": "m0"}]) as it:
        config, models = it.w.server.config, list(it.fleet.models)
        before = [(engine, engine.config, vars(engine.upstream).copy()) for engine in it.fleet.engines()]
        policies = [model.policies for model in models]
        assert len(before) == 1
        with pytest.raises((ValueError, ConfigError)):
            await it.reload(timeouts={"connect": 7.0}, policy="least_requests", **wrong)
        assert it.w.server.config is config
        assert [(each, each.config, vars(each.upstream)) for each in it.fleet.engines()] == before
        assert [model.policies for model in models] == policies
        assert [model.retry_budget for model in models] == [model.retry_budget for model in it.fleet.models]


async def test_a_second_reload_waits_for_the_first() -> None:
    async with large_fleet() as it:
        it.change(range(SOME))
        first = asyncio.create_task(it.reloads.reload())
        await until(lambda: 0 < it.fleet.size < SOME)
        it.change(range(8))
        second = asyncio.create_task(it.reloads.reload())
        assert not first.done(), "the second one came while the first one ran"
        await asyncio.gather(first, second)
        assert it.sizes == [0, SOME], "the second one read the configuration after the first one's end"
        assert it.names == named(range(8))


async def test_changes_of_other_sources_wait_and_none_is_lost(tmp_path: Path) -> None:
    """Administrators and sources change the fleet while a reload runs."""
    async with large_fleet() as it:
        members = it.w.server.front.discovery.members
        it.change(range(SOME))
        reload = asyncio.create_task(it.reloads.reload())
        await until(lambda: 0 < it.fleet.size < SOME)
        bodies = [{"url": f"http://127.0.0.1:{port}", "name": f"a{port}", "model": "m0"} for port in (1, 2)]
        added = [asyncio.create_task(it.w.post(body, "/admin/engines")) for body in (*bodies, bodies[0])]
        status = [(await each)[0] for each in added]
        await reload
        assert sorted(status) == [200, 200, 409]
        assert it.names == named(range(SOME)) | {"a1", "a2"}
        # A client that leaves stops no change.
        change = asyncio.create_task(members.change(ADMIN, lambda _: [], 0.0))
        await turns(2)
        change.cancel()
        await until(lambda: it.names == named(range(SOME)))


async def test_of_reports_that_come_during_a_change_the_last_one_is_applied(tmp_path: Path) -> None:
    """Kubernetes reports all engines after each change of one pod."""
    listed = tmp_path / "engines.json"
    listed.write_text("[]")
    async with large_fleet(discovery=[{"file": str(listed), "model": "m0"}]) as it:
        (source,) = it.w.server.front.discovery._sources
        await until(lambda: source.reported.is_set())
        sizes: set[int] = set()
        found = [
            Found(EngineConfig(url=f"unix:///nowhere/{each}", name=f"e{each}"), "m0") for each in range(9)
        ]
        with each_turn(lambda: sizes.add(it.fleet.size)):
            for count in range(10):
                source.found(found[:count])
            source.problem("the file is gone")
            await until(lambda: it.fleet.size == 9 and source.wrong is not None)
        assert it.names == named(range(9))
        assert source.wrong == "the file is gone"
        assert (source.updates, source.failures) == (11, 1)
        assert sizes == {0, 9}


@pytest.mark.parametrize("again", [True, False])
async def test_a_report_that_cannot_be_applied_is_a_problem_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The next report of Kubernetes may come hours later."""
    listed = tmp_path / "engines.json"
    listed.write_text("[]")
    async with large_fleet(discovery=[{"file": str(listed), "model": "m0"}]) as it:
        (source,) = it.w.server.front.discovery._sources
        await until(lambda: source.reported.is_set() and source._applying is None)
        found = [
            Found(EngineConfig(url=f"unix:///nowhere/{each}", name=f"e{each}"), "m0") for each in range(2)
        ]
        members = it.w.server.front.discovery.members
        change = members.change

        async def fails_once(*given: Any) -> list[str]:
            monkeypatch.setattr(members, "change", change)
            if again:
                source.found(found)
            raise KeyError("a defect")

        monkeypatch.setattr(members, "change", fails_once)
        source.found(found[:1])
        await until(lambda: source._applying is None)
        assert it.names == ({"e0", "e1"} if again else set())
        assert source.wrong == (None if again else "cannot apply its engines: KeyError; see the log")
        source.found(found)
        await until(lambda: it.names == {"e0", "e1"} and source.wrong is None)


async def test_a_shutdown_in_the_middle_of_a_reload_is_clean() -> None:
    async with large_fleet(range(SOME)) as it:
        kept = list(it.fleet.engines())
        it.change(range(SOME // 2, 2 * SOME), timeouts={"connect": 7.0})
        reload = asyncio.create_task(it.reloads.reload())
        await until(lambda: "e0" not in it.names and f"e{2 * SOME - 1}" not in it.names)
        await it.w.client.close()
        await it.w.server.stop()
        with pytest.raises(asyncio.CancelledError):
            await reload
        size = it.fleet.size
        await turns(100)
        assert it.fleet.size == size, "nothing goes on"
        assert f"e{2 * SOME - 1}" not in it.names
        assert all(engine.upstream._closed for engine in (*kept, *it.fleet.engines()))
        assert not [
            task for task in asyncio.all_tasks() if task.get_name() in ("reload", "change of engines")
        ]
