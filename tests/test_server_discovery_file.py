"""Engines from a watched file: ways of writing it, its faults, and service discovery."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import structlog
import yaml
from pydantic import SecretStr

from discovery_world import following, keys, reload_key
from lmetric.config import DiscoverySource
from lmetric.server.discovery.file import WatchedFile
from server_world import FakeEngine, Request, World, answer, world


def source(file: Path, **more: object) -> WatchedFile:
    return WatchedFile(file, DiscoverySource.model_validate({"file": file, **more}))


def replace(file: Path, text: str) -> None:
    """Writes like a careful program: to another file, then a rename over the old file."""
    beside = file.with_name("beside")
    beside.write_text(text)
    beside.rename(file)


@contextlib.asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[FakeEngine]]:
    fakes = [FakeEngine(name=f"f{number}") for number in range(count)]
    for fake in fakes:
        await fake.start()
    try:
        yield fakes
    finally:
        for fake in fakes:
            await fake.stop()


def listing(*fakes: FakeEngine) -> str:
    return yaml.safe_dump([{"url": fake.url, "name": fake.name} for fake in fakes])


def names(it: World) -> set[str]:
    return {engine.name for engine in it.server.fleet.engines()}


@pytest.mark.parametrize("suffix", ["yaml", "json"])
async def test_every_way_of_writing_is_seen(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"engines.{suffix}"
    dump = (lambda value: orjson.dumps(value).decode()) if suffix == "json" else yaml.safe_dump
    file.write_text(dump([{"url": "http://a:1"}]))
    async with following(source(file)) as told:
        await told.until(lambda: told.names == ["a:1"])
        replace(file, dump({"engines": [{"url": "http://a:1"}, {"url": "http://b:1", "model": "m"}]}))
        await told.until(lambda: told.names == ["a:1", "b:1"])
        assert {each.model for each in told.lists[-1]} == {None, "m"}
        file.write_text(dump([{"url": "http://c:1", "name": "c"}]))
        await told.until(lambda: told.names == ["c"])
        file.write_text(dump([]))
        await told.until(lambda: told.lists[-1] == [])
        assert not told.problems


async def test_a_mounted_config_map_is_swapped_by_a_link(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "engines.yaml").write_text(f"- url: http://h:{number}")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "engines.yaml").symlink_to("..data/engines.yaml")
    async with following(source(tmp_path / "engines.yaml")) as told:
        await told.until(lambda: told.names == ["h:1"])
        (tmp_path / "next").symlink_to("..2")
        (tmp_path / "next").rename(tmp_path / "..data")
        await told.until(lambda: told.names == ["h:2"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("e.yaml", "- url: http://a:1\n- uri: http://b:1\n", "e.yaml:2: uri = 'http://b:1': unknown key"),
        ("e.yaml", "engines:\n- url: http://a:1\n  name: [\n", "e.yaml:4: "),
        ("e.yaml", "- url: http://a:1\n\n- {url: 'http://b:1', role: cook}", "e.yaml:3: role = 'cook'"),
        ("e.yaml", "- url: http://a:1\n  url: http://b:1", "e.yaml:2: duplicate key 'url'"),
        ("e.yaml", "- url: http://a:1\n- url: http://a:1", "e.yaml:2: a second engine named 'a:1'"),
        ("e.yaml", "- ftp://a:1", "e.yaml:1: "),
        ("e.yaml", "", "e.yaml: expected a list of engines"),
        ("e.yaml", "engine: []", "e.yaml:1: expected a list of engines"),
        ("e.yaml", "engines: {}", "e.yaml:1: expected a list of engines"),
        ("e.yaml", "a\udcff", "e.yaml: not UTF-8 at byte 1"),
        ("e.json", '[{"url": "http://a:1"},\n {"url"', "e.json:2: "),
        ("e.json", '[{"url": "http://a:1"}, {"url": 3}]', "e.json: [1]: url = 3"),
        ("e.json", '{"url": 3}', "e.json: expected a list of engines"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_told_by_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text, errors="surrogateescape")
    async with following(source(file)) as told:
        await told.until(lambda: told.problems)
        assert says in told.problems[0]
        assert not told.lists
        replace(file, "[]")
        await told.until(lambda: told.lists == [[]])


async def test_keys_are_the_sources_unless_the_file_has_them(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text("[{url: 'http://a:1'}, {url: 'http://b:1', api_key: own, model: n, role: prefill}]")
    async with following(source(file, api_key="all", model="m")) as told:
        await told.until(lambda: told.lists)
        a, b = told.lists[0]
        assert (a.config.api_key, a.model, a.config.role) == (None, "m", None)
        assert (b.config.api_key, b.model, b.config.role) == (SecretStr("own"), "n", "prefill")


async def test_a_reload_changes_the_keys_that_the_file_does_not_have(tmp_path: Path) -> None:
    def content(*names: str) -> str:
        engines = [{"url": f"unix:///nowhere/{name}", "name": name} for name in names]
        return yaml.safe_dump([*engines, {"url": "unix:///nowhere/own", "name": "own", "api_key": "old"}])

    file = tmp_path / "e.yaml"
    file.write_text(content("a"))
    given = {"file": file, "model": "m"}
    async with world(0, discovery=[{**given, "api_key": "old"}]) as it:
        assert keys(it.server) == {"a": "old", "own": "old"}
        assert await reload_key(it.server, given, "new") == ["a"]
        assert keys(it.server) == {"a": "new", "own": "old"}
        replace(file, content("a", "b"))
        await it.until(lambda: keys(it.server) == {"a": "new", "b": "new", "own": "old"})
        # A report that waits while another one is applied, and the key changes.
        (source,) = it.server.front.discovery._sources
        found = source._engines
        source.found(found[1:])
        await asyncio.sleep(0)
        source.found(found[:1])
        await reload_key(it.server, given, "newer")
        await it.until(lambda: keys(it.server) == {"a": "newer"})


async def test_the_fleet_follows_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    with structlog.testing.capture_logs() as logs:
        async with (
            engines(3) as (a, b, c),
            world(0, discovery=[{"file": file}], health={"interval": 0.05}) as it,
        ):
            assert (await it.get("/ready"))[0] == 503
            failed = [entry for entry in logs if entry["event"] == "discovery failed"]
            assert len(failed) == 1
            assert "cannot be read: No such file" in failed[0]["reason"]
            file.write_text(listing(a, b))
            await it.until(it.server.fleet.ready)
            await it.until(lambda: names(it) == {"f0", "f1"})
            whole = listing(b, c)
            with file.open("w") as written:  # in place, in two pieces
                written.write(whole[:-30] + ": [")
                written.flush()
                await it.until(lambda: len([e for e in logs if e["event"] == "discovery failed"]) == 2)
                assert names(it) == {"f0", "f1"}
                assert (await it.post())[0] == 200
                state = orjson.loads((await it.get("/debug/discovery"))[1])
                assert "engines.yaml:" in state[0]["problem"]
                assert abs(state[0]["problem_since"] - time.time()) < 60
                assert state[0]["engines"] == 2
            file.write_text(listing(a, b))  # the old content: no news, but no problem any more
            await it.until(lambda: [entry["event"] for entry in logs].count("discovery works again") == 2)
            file.write_text(whole)
            await it.until(lambda: names(it) == {"f1", "f2"})
            state = orjson.loads((await it.get("/debug/discovery"))[1])
            assert (state[0]["problem"], state[0]["source"]) == (None, f"file:{file}")
            assert state[0]["problem_since"] is None
            rows = orjson.loads((await it.get("/debug/engines"))[1])
            assert {row["source"] for row in rows} == {f"file:{file}"}
            metrics = (await it.get("/metrics"))[1].decode()
            label = f'{{source="file:{file}"}}'
            for line in (
                f"lmetric_discovery_engines{label} 2.0",
                f"lmetric_discovery_up{label} 1.0",
                f"lmetric_discovery_updates_total{label} 3.0",
                "lmetric_engines_added_total 3.0",
                "lmetric_engines_removed_total 1.0",
            ):
                assert line in metrics, line
            assert 'instance="f0"' not in metrics


async def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.mkdir()
    async with following(source(file)) as told:
        await told.until(lambda: told.problems)
        assert "e.yaml: cannot be read: Is a directory" in told.problems[0]


async def test_a_folder_that_is_missing_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "later" / "e.yaml"
    async with following(source(file)) as told:
        await told.until(lambda: told.problems)
        assert "e.yaml: cannot be read: there is no folder" in told.problems[0]
        file.parent.mkdir()
        file.write_text("[{url: 'http://a:1'}]")
        await told.until(lambda: told.names == ["a:1"])


class Gate:
    """A behavior that answers when a test allows it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await self.open.wait()
        return await answer(engine, request, writer)


async def test_an_engine_that_vanishes_ends_its_requests_first(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    async with engines(2) as (a, b):
        gate = a.behave = Gate()
        file.write_text(listing(a))
        async with world(0, discovery=[{"file": file, "model": "tiny"}]) as it:
            running = asyncio.create_task(it.post())
            await a.asked(1)
            file.write_text(listing(b))
            await it.until(lambda: names(it) == {"f0", "f1"} and it.server.fleet.models[0].engines["f0"].held)
            await it.until(lambda: it.server.fleet.models[0].engines["f1"].healthy)
            for _ in range(4):
                assert (await it.post())[1]["x-lmetric-instance"] == "f1"
            row = orjson.loads((await it.get("/debug/engines"))[1])[0]
            assert (row["name"], row["leaving"], row["running"]) == ("f0", True, 1)
            assert not running.done()
            gate.open.set()
            assert (await running)[0] == 200
            await it.until(lambda: names(it) == {"f1"})
            assert it.server.fleet.models[0].router.instances() == ["f1"]


async def test_an_engine_that_comes_back_in_time_never_left(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    async with engines(1) as (a,):
        gate = a.behave = Gate()
        file.write_text(listing(a))
        async with world(0, discovery=[{"file": file}]) as it:
            model = it.server.fleet.models[0]
            engine = model.engines["f0"]
            running = asyncio.create_task(it.post())
            await a.asked(1)
            file.write_text("[]")
            await it.until(lambda: engine.leaving)
            assert (await it.post())[0] == 503
            file.write_text(listing(a))
            await it.until(lambda: not engine.leaving)
            gate.open.set()
            assert (await it.post())[0] == (await running)[0] == 200
            assert model.engines["f0"] is engine


async def test_another_engine_under_the_same_name_takes_its_place_at_once(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    async with engines(2) as (a, b):
        gate = a.behave = Gate()
        b.name = a.name
        file.write_text(listing(a))
        async with world(0, discovery=[{"file": file, "model": "tiny"}]) as it:
            running = asyncio.create_task(it.post())
            await a.asked(1)
            file.write_text(listing(b))
            engines_of = it.server.fleet.models[0].engines
            await it.until(lambda: engines_of["f0"].config.url == b.url and engines_of["f0"].healthy)
            assert (await it.post())[0] == 200
            assert (len(a.requests), len(b.requests)) == (1, 1)
            gate.open.set()
            assert (await running)[0] == 200


async def test_an_engine_that_does_not_end_is_forgotten_in_time_and_its_request_runs_on(
    tmp_path: Path,
) -> None:
    file = tmp_path / "engines.yaml"
    async with engines(1) as (a,):
        gate = a.behave = Gate()
        file.write_text(listing(a))
        async with world(0, discovery=[{"file": file}], timeouts={"engine_drain": 0.2}) as it:
            running = asyncio.create_task(it.post())
            await a.asked(1)
            file.write_text("[]")
            await it.until(lambda: not names(it))
            assert not running.done()
            gate.open.set()
            assert (await running)[0] == 200


async def test_an_engine_that_two_sources_name_is_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    async with engines(2) as (a, b):
        one.write_text(listing(a))
        two.write_text(yaml.safe_dump([{"url": a.url}, {"url": b.url, "name": "f0"}]))
        sources = [{"file": one}, {"file": two}]
        with structlog.testing.capture_logs() as logs:
            async with world(0, discovery=sources, admin=True, policy="lmetric") as it:
                assert [(e.name, e.source) for e in it.server.fleet.engines()] == [("f0", f"file:{one}")]
                assert f"file:{two} and file:{one} both list an engine f0; file:{one}'s is used" in [
                    entry.get("reason") for entry in logs
                ]
                async with it.client.delete(it.url + "/admin/engines/f0") as response:
                    assert response.status == 409
                    assert "remove it there" in (await response.json())["error"]["message"]
                assert (await it.post({"url": a.url, "name": "x"}, "/admin/engines"))[0] == 409
                one.write_text("[]")
                await it.until(lambda: {e.source for e in it.server.fleet.engines()} == {f"file:{two}"})
                fleet = {e.name: e.config.url for e in it.server.fleet.engines()}
                assert fleet == {a.url.removeprefix("http://"): a.url, "f0": b.url}
