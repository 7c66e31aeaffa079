"""Pages of a large fleet: they leave the event loop to the requests."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest
from turn_guard import LIMIT_SECONDS, of_reference

from lmetric.config import EngineConfig, ServerConfig
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.summary import summary
from lmetric.server.http.pages.admin import _chosen
from lmetric.server.http.pages.debug import indicators_of
from lmetric.server.observe.lateness import Lateness
from lmetric.server.observe.live import Live
from lmetric.server.observe.live_view import LiveView

ENGINES = 4096


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    engines = [EngineConfig(url="http://127.0.0.1:9", name=f"e{number}") for number in range(ENGINES)]
    fleet = Fleet(ServerConfig(engines=engines, model="model"))
    fleet.build()
    return fleet


@asynccontextmanager
async def short_turns(limit: float = LIMIT_SECONDS / 2) -> AsyncIterator[None]:
    """Fails if a turn of the event loop takes more CPU seconds of the reference machine."""
    turns = [0.0]

    async def watch() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            last, before = time.thread_time(), last
            turns.append(last - before)

    # Else a turn may collect the garbage of all tests before.
    gc.collect()
    gc.disable()
    task = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield
        await asyncio.sleep(0)
    finally:
        task.cancel()
        gc.enable()
    assert len(turns) > 3
    assert of_reference(max(turns)) < limit


async def test_the_page_of_indicators_is_written_beside_the_requests(fleet: Fleet) -> None:
    """The page took 105 ms of the event loop."""
    async with short_turns():
        response = await indicators_of(fleet.models)
    assert isinstance(response.body, bytes)
    (by_engine,) = orjson.loads(response.body).values()
    assert len(by_engine) == ENGINES
    assert by_engine["e7"]["bs"] == 0
    assert by_engine["e7"]["kv_usage"] is None


async def test_the_live_page_is_written_beside_the_requests(fleet: Fleet) -> None:
    """Each second, an open page took 52 ms of the event loop."""
    live = Live(fleet, set(), Lateness())
    view = LiveView(live)
    for number in range(3):
        live.tick(float(number))
        async with short_turns():
            first, again, own = await asyncio.gather(
                view.frames(None, None), view.snapshot(None), view.snapshot("alice")
            )
        assert first[0] == 1, "the fleet did not change"
        state = orjson.loads(again)
        assert state["static"]["engines"]["name"][7] == "e7"
        assert len(state["engines"]["batch"]) == len(state["static"]["engines"]["name"]) == ENGINES
        counts = {key: state["summary"][key] for key in ("engines", "usable", "modes")}
        expected = summary(fleet, names=False)
        assert counts == {key: expected[key] for key in counts} == orjson.loads(own)["summary"]


def test_named_engines_are_found_in_linear_time(fleet: Fleet) -> None:
    """The names were compared with each other: 4,096 of them took 0.3 s."""
    compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(engine.name) for engine in fleet.engines()]
    chosen = _chosen(fleet, names[::-1])
    assert [engine.name for engine in chosen] == [str(name) for name in names]
    assert compared < 8 * ENGINES
