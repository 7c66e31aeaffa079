"""Laws of `Members`: the fleet equals the reports of its sources, in any order."""

import asyncio
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from lmetric.config import ADMIN, CONFIGURED, EngineConfig, ServerConfig
from lmetric.server.discovery.members import Found, Members
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet

SOURCES = (CONFIGURED, ADMIN, "file:x", "file:y")
CONFIG = ServerConfig.model_validate(
    {
        "discovery": [{"file": "x"}, {"file": "y"}],
        "engines": [{"url": "http://h:0", "name": "n0"}, {"url": "http://h:1", "name": "n1"}],
        "model": "m",
    }
)

FOUND = st.builds(
    lambda name, port, model, ready: Found(
        EngineConfig(url=f"http://h:{port}", name=f"n{name}"), model, ready
    ),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([None, "m", "other"]),
    st.booleans(),
)
LISTS = st.lists(FOUND, max_size=5, unique_by=lambda each: each.config.label)
STEPS = st.lists(st.tuples(st.sampled_from(SOURCES), LISTS, st.sets(st.integers(0, 4))), max_size=12)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_fleet_is_what_the_sources_say(steps: list[tuple[str, list[Found], set[int]]]) -> None:
    asyncio.run(play(steps))


async def play(steps: list[tuple[str, list[Found], set[int]]]) -> None:
    """Runs ``steps``: a source, its report, and the numbers of the busy engines."""
    fleet = Fleet(CONFIG)
    fleet.build()
    came: list[Engine] = list(fleet.engines())
    members = Members(CONFIG, fleet, came.extend)
    told = {source: list(members.of(source)) for source in SOURCES}
    busy: set[str] = set()
    with mock.patch.object(Engine, "running", property(lambda engine: engine.name in busy)):
        for source, found, running in steps:
            busy = {f"n{number}" for number in running}
            before = set(fleet.engines())
            told[source] = found
            await members.update(source, found)
            check(fleet, told, before, busy)
        gone = set(came) - set(fleet.engines())
        assert all(engine.model is None and engine.upstream._closed for engine in gone)
        assert members.removed == len(gone)
        leaving = {engine for engine in fleet.engines() if engine.leaving}
        busy = set()
        for engine in leaving:
            await members.settled(engine)
        assert not leaving & set(fleet.engines())
    await members.stop()


def check(fleet: Fleet, told: dict[str, list[Found]], before: set[Engine], busy: set[str]) -> None:
    expected: dict[str, tuple[str, Found]] = {}
    for source in SOURCES:
        for each in told[source]:
            taken = any(
                owner != source
                and other.config.url == each.config.url
                and (other.model == each.model or None in (other.model, each.model))
                for owner, other in expected.values()
            )
            if each.config.label not in expected and not taken:
                expected[each.config.label] = (source, each)
    engines = list(fleet.engines())
    stay = {engine.name: engine for engine in engines if not engine.leaving}
    assert stay.keys() == expected.keys()
    for name, (source, each) in expected.items():
        engine = stay[name]
        assert (engine.source, engine.config, engine.ready) == (source, each.config, each.ready)
        assert engine.model is fleet.names[each.model or "m"][0]
        assert engine.held is not each.ready
    assert len({engine.name for engine in engines}) == len(engines)
    for engine in engines:
        if engine.leaving:
            assert engine in before, "only what was there leaves"
            assert engine.held
    for model in fleet.models:
        assert sorted(model.router.instances()) == sorted(model.engines)
        live = {name for name, row in model.router.stats()["instances"].items() if not row["draining"]}
        assert live == {name for name, engine in model.engines.items() if not engine.held}
