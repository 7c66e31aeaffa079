"""Engines that join and leave warm: prefixes and streams go first, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from lmetric.server.fleet import changes as module
from lmetric.server.fleet.changes import FleetChanges
from lmetric_lab.emulated import EngineOptions, EngineServer
from pd_world import Pd, nixl
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, both, equal, split

LONG = "the history of the quiet river and of all who lived by it " * 60
WARM = {"kind": "warm", "min_tokens": 64, "seconds_per_token": 0.0, "fixed_seconds": 0.0}


@contextlib.asynccontextmanager
async def fleet(*options: EngineOptions, **config: Any) -> AsyncIterator[Pd]:
    """A router whose engines join and leave warm."""
    given = {"policy": "lmetric", "at": None, "admin": True, "fleet_changes": WARM}
    given["health"] = {"interval": 0.1, "timeout": 2.0}
    async with split(*options, **(given | config)) as world:
        yield world


def changes(w: Pd) -> FleetChanges:
    found = w.server.fleet.models[0].changes
    assert found is not None
    return found


@pytest.mark.parametrize(("tokens", "salt"), [(20, 0), (20, 4000), (2000, 0)])
def test_remembered_prompts_of_any_length_keep_within_the_limit(
    tokens: int, salt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 1 << 17)  # 512 KiB
    remembered = FleetChanges("m", None, {}, None)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        for key in range(3000):
            prompt = np.full(tokens, key, np.uint32)
            for _ in range(2):  # the second time, it only becomes the latest
                remembered.note(key << 32, prompt, f"model {key}", salt=f"{key:0{salt}}" if salt else None)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 4 << 17
    assert len(remembered._prompts) == (1 << 17) // (tokens + salt + 128)
    assert remembered._prompts[2999 << 32].fields["model"] == "model 2999"


def talk(number: int, path: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    """A request of a conversation; all begin with one system prompt."""
    return body_of(path, f"{LONG} conversation {number}: " + f"{number} " * 200, max_tokens=2, **more)


async def admin(w: Pd, name: str, verb: str) -> None:
    status, _, said = await w.post({}, f"/admin/engines/{name}/{verb}")
    assert status == 200, said


def computed(w: Pd, name: str) -> int:
    """Prompt tokens that an engine has computed itself."""
    load = w.load(name)
    return int(load["prompt_tokens"] - load["cached_prompt_tokens"] - load["fetched_prompt_tokens"])


async def added(w: Pd, options: EngineOptions, stack: contextlib.AsyncExitStack, name: str) -> None:
    """Adds an engine to the fleet, and waits until it gets requests."""
    engine = await stack.enter_async_context(EngineServer(options))
    w.engines[name] = engine
    stack.callback(w.stopped.add, name)  # its process ends before the router
    status, _, said = await w.post({"url": engine.url, "name": name}, "/admin/engines")
    assert status == 200, said
    await ready(w, name)


async def ready(w: Pd, name: str) -> None:
    model = w.server.fleet.models[0]
    await w.until(lambda: model.engines[name].in_service and not changes(w).warms(name), 60.0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_new_engine_fetches_prefixes_before_it_gets_requests(path: str) -> None:
    async with fleet(both()) as w, contextlib.AsyncExitStack() as stack:
        for number in range(4):
            await asked(w, path, talk(number, path))
        await added(w, both(), stack, "b1")
        load = w.load("b1")
        # The system prompt that all share, and two of four conversations.
        assert changes(w).outcomes == {"fetched": 3}
        assert load["fetched_prompt_tokens"] > 1000
        assert computed(w, "b1") <= 3 * 16, "only what no whole block covers"
        for number in range(4):
            said = await asked(w, path, talk(number, path))
            equal(said, await alone(w, path, talk(number, path)))
        page = await (await w.client.get(f"{w.url}/metrics")).text()
        assert 'lmetric_fleet_change_fetches_total{model="emulated",outcome="fetched"} 3.0' in page
        engines = await (await w.client.get(f"{w.url}/debug/engines")).json()
        assert [(each["warming"], each["sends_prefixes"]) for each in engines] == [(False, False)] * 2


async def test_the_prefixes_of_an_engine_that_leaves_are_fetched_first() -> None:
    async with fleet(both(), both()) as w:
        homes = {}
        for number in range(6):
            said = await asked(w, COMPLETIONS, talk(number))
            homes[number] = said["headers"]["x-lmetric-instance"]
        gone = homes[0]
        stays = "b1" if gone == "b0" else "b0"
        await admin(w, gone, "drain")
        await w.until(lambda: not changes(w).sends(gone), 60.0)
        fetched = changes(w).outcomes["fetched"]
        assert changes(w).outcomes == {"fetched": fetched}
        assert fetched == sum(home == gone for home in homes.values())
        before = computed(w, stays)
        for number in homes:
            said = await asked(w, COMPLETIONS, talk(number))
            assert said["headers"]["x-lmetric-instance"] == stays
        assert computed(w, stays) - before <= 32 * len(homes), "each prefix was there"
        await admin(w, gone, "undrain")


async def test_the_streams_of_an_engine_that_leaves_move() -> None:
    async with fleet(both(clock_speed=1.0), both(clock_speed=1.0), migration_max_gap_seconds=30.0) as w:
        body = talk(0, stream=True) | {"max_tokens": 400}
        running = asyncio.create_task(asked(w, COMPLETIONS, body))
        await w.until(lambda: w.busy("b0") or w.busy("b1"))
        gone = "b0" if w.busy("b0") else "b1"
        stays = "b1" if gone == "b0" else "b0"
        await asyncio.sleep(0.5)
        await admin(w, gone, "drain")
        await w.until(lambda: not w.busy(gone) and w.busy(stays), 60.0)
        assert not running.done()
        said = await running
        equal(said, await alone(w, COMPLETIONS, body))
        assert said["record"]["migrations"]


async def test_a_fetch_never_crosses_revisions() -> None:
    async with fleet(both(revision="v1")) as w, contextlib.AsyncExitStack() as stack:
        for number in range(4):
            await asked(w, COMPLETIONS, talk(number))
        await added(w, both(revision="v2"), stack, "b1")
        outcomes = changes(w).outcomes
        assert outcomes["other_revision"] > 0
        assert set(outcomes) == {"other_revision"}
        assert w.load("b1")["fetched_prompt_tokens"] == 0


async def test_engines_without_a_transfer_say_so() -> None:
    alone_ = nixl("both", kv_connector="none", clock_speed=20.0)
    async with fleet(alone_) as w, contextlib.AsyncExitStack() as stack:
        for number in range(4):
            await asked(w, COMPLETIONS, talk(number))
        await added(w, alone_.model_copy(), stack, "b1")
        assert set(changes(w).outcomes) == {"no_transfer"}


async def test_a_source_that_dies_delays_nobody() -> None:
    async with fleet(both()) as w, contextlib.AsyncExitStack() as stack:
        for number in range(4):
            await asked(w, COMPLETIONS, talk(number))
        newcomer = await stack.enter_async_context(EngineServer(both()))
        w.engines["b1"] = newcomer
        stack.callback(w.stopped.add, "b1")
        await w.kill("b0")
        status, _, _ = await w.post({"url": newcomer.url, "name": "b1"}, "/admin/engines")
        assert status == 200
        await ready(w, "b1")
        assert (await asked(w, COMPLETIONS, talk(0)))["headers"]["x-lmetric-instance"] == "b1"
        assert "fetched" not in changes(w).outcomes


async def test_a_fetch_that_hangs_ends_with_its_change(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        fleet(both(), fleet_changes=WARM | {"max_seconds": 1}) as w,
        contextlib.AsyncExitStack() as stack,
    ):
        for number in range(4):
            await asked(w, COMPLETIONS, talk(number))
        monkeypatch.setattr(
            w.engines["b0"]._ranks[0].driver, "_schedule", lambda: None
        )  # makes no more steps
        began = time.monotonic()
        await added(w, both(), stack, "b1")
        assert time.monotonic() - began >= 1
        assert set(changes(w).outcomes) == {"late"}


@pytest.mark.nightly
async def test_a_rolling_restart_loses_nothing() -> None:
    """Three engines restart one after another under twenty users."""
    async with fleet(both(), both(), both(), migration_max_gap_seconds=30.0) as w:
        over = asyncio.Event()
        failed: list[str] = []
        turns = 0

        async def user(number: int) -> None:
            nonlocal turns
            prompt = f"{LONG} user {number}: "
            while not over.is_set():
                body = body_of(COMPLETIONS, prompt, max_tokens=20, stream=number % 2 == 0)
                try:
                    said = await asked(w, COMPLETIONS, body)
                except Exception as error:
                    failed.append(f"{number}: {error!r}")
                    return
                if said.get("error") or (said["usage"] and said["usage"]["completion_tokens"] != 20):
                    failed.append(f"{number}: {said}")
                turns += 1
                prompt += said["text"] + f" and turn {turns} "
                await asyncio.sleep(0.05)

        users = [asyncio.create_task(user(number)) for number in range(20)]
        await asyncio.sleep(1.0)
        model = w.server.fleet.models[0]
        for name in ("b0", "b1", "b2"):
            old = w.engines[name]
            engine = model.engines[name]
            await admin(w, name, "drain")
            await w.until(lambda: not engine.running and not changes(w).sends(name), 90.0)  # noqa: B023
            options = old.options.model_copy(update={"port": int(old.url.rpartition(":")[2])})
            await old.stop()
            await w.until(lambda: not engine.healthy, 60.0)  # noqa: B023
            before = changes(w).fetched_tokens
            w.engines[name] = EngineServer(options)
            await w.engines[name].start()
            await ready(w, name)
            assert changes(w).fetched_tokens > before, "prefixes before requests"
            pulled = w.load(name)["fetched_prompt_tokens"]
            assert pulled > 0
            await admin(w, name, "undrain")
            await asyncio.sleep(1.0)
        over.set()
        await asyncio.gather(*users)
        assert failed == []
        assert turns > 100
        for name in ("b0", "b1", "b2"):
            await w.engines[name].stop()
            w.stopped.add(name)


async def test_a_fetch_whose_change_ends_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(both(), both()) as w:
        for number in range(4):
            await asked(w, COMPLETIONS, talk(number))
        monkeypatch.setattr(
            w.engines["b0"]._ranks[0].driver, "_schedule", lambda: None
        )  # makes no more steps
        model = w.server.fleet.models[0]
        changes(w).leaves(model.engines["b0"])
        (task,) = (change.task for change in changes(w)._changes.values())
        assert task is not None

        def fetches() -> list[Any]:
            return [each for each in asyncio.all_tasks() if each.get_name() == "warm fetch"]

        await w.until(fetches)
        with capture_logs() as logs:
            changes(w).forget("b0")
            await asyncio.gather(task, *fetches(), return_exceptions=True)
        assert not changes(w).outcomes
        assert logs == []


async def test_changes_end_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python, section 6, number 7: warm fetches outlived the server."""

    async def hangs(self: FleetChanges, engine: Any, change: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(FleetChanges, "_run", hangs)
    async with fleet(both(), both()) as w:
        await asked(w, COMPLETIONS, talk(1))
        model = w.server.fleet.models[0]
        changes(w).leaves(model.engines["b0"])
        (task,) = (change.task for change in changes(w)._changes.values())
        assert task is not None
        assert not task.done()
    assert task.cancelled()
