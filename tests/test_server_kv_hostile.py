"""Engines that are not honest about their KV events, or that stop sending them.

Findings: security F5 and F9, bugs 14, ux 4 (the advice for a frozen engine).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric._core import EventFeed
from lmetric.server.fleet import kv_events
from lmetric.server.fleet.engine import Engine
from lmetric.server.upstream.allowed import AllowedEngines
from server_world import FakeEngine, Request, World, answer, plain, world
from test_event_feed import Publisher, publisher, stored

IDS = {"without_tokenizer": True}


class Reporting(FakeEngine):
    """A vLLM that reports these sources of KV events."""

    sources: list[dict[str, Any]]

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        pages = {
            "/version": {"version": "0.32.0"},
            "/kv_event_sources": {str(rank): source for rank, source in enumerate(self.sources)},
        }
        if request.method == "GET" and request.path in pages:
            writer.write(plain(200, orjson.dumps(pages[request.path])))
            return True
        return await super()._answer(request, writer)


@contextlib.asynccontextmanager
async def reporting(*endpoints: str, **source: Any) -> AsyncIterator[Reporting]:
    engine = Reporting()
    engine.sources = [{"endpoint": endpoint, **source} for endpoint in endpoints]
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@contextlib.contextmanager
def stranger() -> Iterator[tuple[socket.socket, int]]:
    """A port of another address of this machine. Nobody may connect to it."""
    with socket.create_server(("127.0.0.2", 0)) as listening:
        listening.setblocking(False)
        yield listening, listening.getsockname()[1]
        with pytest.raises(BlockingIOError):
            listening.accept()


def source_of(engine: Publisher) -> dict[str, Any]:
    # A publisher that listens reports a wildcard.
    return {"endpoint": anywhere(engine.endpoint), "replay_endpoint": engine.replay_endpoint}


def anywhere(endpoint: str) -> str:
    return f"tcp://*:{endpoint.rpartition(':')[2]}"


async def added(w: World, engine: FakeEngine, **more: Any) -> Engine:
    """Adds an engine over /admin, and waits until the router has identified it."""
    body = {"url": engine.url, "name": "new", "model": "tiny", **more}
    status, _, told = await w.post(body, "/admin/engines")
    assert status == 200, told
    new = w.server.fleet.model("tiny").engines["new"]
    await w.until(lambda: new.identified)
    return new


@contextlib.asynccontextmanager
async def routed(*engines: FakeEngine, **config: Any) -> AsyncIterator[World]:
    entries = [{"url": engine.url, "name": f"e{number}"} for number, engine in enumerate(engines)]
    settings = {"policy": "lmetric", "kv_events": IDS, "block_size": 16, "health": {"interval": 0.05}}
    async with world([], engines=entries, **{**settings, **config}) as w:
        yield w


@pytest.mark.parametrize(
    "events",
    [
        {"endpoint": "ipc://FILE", "bind": True},
        {"endpoint": "ipc://FILE"},
        {"endpoint": "tcp://*:5557", "replay_endpoint": "ipc://FILE"},
        {"endpoint": "tcp://127.0.0.1:1", "bind": True},
    ],
)
async def test_administrators_bind_no_address_and_use_no_sockets_of_this_machine(
    events: dict[str, Any], tmp_path: Path
) -> None:
    """security F9: libzmq replaced the file at the path by a socket."""
    file = tmp_path / "keys.yaml"
    file.write_text("secret")
    given = {
        key: str(file).join(value.split("FILE")) if isinstance(value, str) else value
        for key, value in events.items()
    }
    async with world(1, admin=True) as w:
        body = {"url": w.engines[0].url, "name": "new", "model": "m", "kv_events": {**IDS, **given}}
        status, _, told = await w.post(body, "/admin/engines")
        assert (status, told["error"]["code"]) == (403, "engine_not_allowed")
        assert told["error"]["param"] == "kv_events"
    assert file.read_text() == "secret"


@pytest.mark.parametrize("form", ["[::ffff:127.0.0.2]", "[::ffff:7f00:2]", "[::1]"])
async def test_the_rules_for_engines_hold_for_the_endpoints_that_they_report(form: str) -> None:
    """security F9: with `allowed_engines: [127.0.0.1]`, the router connected to these addresses."""
    with stranger() as (_, port):
        async with (
            reporting(f"tcp://{form}:{port}") as away,
            routed(admin={"enabled": True, "allowed_engines": ["127.0.0.1"]}) as w,
        ):
            new = await added(w, away)
            assert new.mode.name == "approximate"
            assert "allowed_engines does not allow" in new.mode.reason
            assert "admin.allowed_engines" in str(new.mode.fix)


async def test_a_look_up_that_ends_after_its_engine_was_removed_leaves_no_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go, resolve = asyncio.Event(), asyncio.Event(), AllowedEngines.resolve

    async def slow(allowed: AllowedEngines, host: str) -> str:
        begun.set()
        await go.wait()
        return await resolve(allowed, host)

    async with (
        reporting("tcp://*:5557") as engine,
        routed(admin={"enabled": True, "allowed_engines": ["127.0.0.1"]}) as w,
    ):
        new = await added(w, engine)
        followed, allowed = w.server.fleet.model("tiny").kv._events, new.upstream.allowed
        assert followed is not None
        assert allowed is not None
        assert "new" in followed._addresses
        monkeypatch.setattr(AllowedEngines, "resolve", slow)
        looking_up = asyncio.create_task(followed.look_up(new, allowed))
        await begun.wait()
        async with w.client.delete(f"{w.url}/admin/engines/new") as response:
            assert response.status == 200
        go.set()
        await looking_up
        assert "new" not in followed._addresses


@pytest.mark.parametrize("form", ["127.0.0.2", "[::ffff:127.0.0.2]", "2130706434", "127.2"])
async def test_a_replay_endpoint_follows_the_rules(form: str) -> None:
    """security F9: any `replay_endpoint` was used. A socket of this machine is no engine's."""
    with stranger() as (_, port), publisher(replay=False) as events:
        rules = {"enabled": True, "allowed_engines": ["127.0.0.1"]}
        replay = f"tcp://{form}:{port}"
        port_of = events.endpoint.rpartition(":")[2]
        async with (
            reporting(f"tcp://*:{port_of}", replay_endpoint=replay) as engine,
            routed(admin=rules) as w,
        ):
            new = await added(w, engine)
            kv = w.server.fleet.model("tiny").kv
            await w.until(lambda: new.mode.name == "exact" and kv.status("new")["ranks"]["0"]["connected"])
            status = kv.status("new")
            assert status is not None
            assert status["ranks"]["0"]["endpoint"] == f"tcp://127.0.0.1:{port_of}"
            assert status["ranks"]["0"]["replay_endpoint"] is None
            # Rules that a reload tightens end the connection.
            config = w.server.fleet.config
            admin = config.admin.model_copy(update={"allowed_engines": ["10.0.0.0/8"]})
            new.configure(config.model_copy(update={"admin": admin}))
            await w.until(lambda: new.mode.name == "approximate")
            assert kv.status("new") == {"ranks": {}, "load": None}
        async with reporting("ipc://@any") as engine, routed(admin=rules) as w:
            new = await added(w, engine)
            assert "unix sockets" in new.mode.reason


async def test_a_metadata_address_is_nobodys_event_source() -> None:
    """security F9: also without rules, an engine cannot name a link-local or metadata address."""
    for host in ("[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[fe80::1]", "[fd00:ec2::254]"):
        async with reporting(f"tcp://{host}:5557") as engine, routed(engine) as w:
            [known] = w.server.fleet.engines()
            assert known.mode.name == "approximate"
            assert "link-local or metadata address" in known.mode.reason


async def test_an_engine_over_a_limit_becomes_approximate_alone() -> None:
    """security F5: the others stay exact, and the advice names the cause."""
    with publisher(replay=False) as bad, publisher(replay=False) as good:
        async with (
            reporting(anywhere(bad.endpoint)) as one,
            reporting(anywhere(good.endpoint)) as two,
            routed(one, two) as w,
        ):
            engines = {engine.name: engine for engine in w.server.fleet.engines()}
            await w.until(lambda: bad.heard() and good.heard())
            bad.publish(bytes(EventFeed.MAX_MESSAGE_BYTES))
            await w.until(lambda: engines["e0"].mode.name == "approximate")
            assert engines["e0"].mode.cause == "its KV events exceed a limit of the router"
            assert "4194304 bytes" in engines["e0"].mode.reason
            assert "version has KV events" in str(engines["e0"].mode.fix)
            good.publish(stored([1], [1] * 16))
            kv = w.server.fleet.model("tiny").kv
            await w.until(lambda: kv.counts("e1")["batches"] == 1)
            assert engines["e1"].mode.name == "exact"


async def test_a_frozen_engine_is_not_told_to_check_its_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """ux 4: requests without a first token are no computed prompts, so no event is missing."""
    monkeypatch.setattr(kv_events, "SILENT_SECONDS", 0.5)
    frozen = asyncio.Event()

    async def hangs(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if frozen.is_set():
            await asyncio.Event().wait()
        return await answer(engine, request, writer)

    with publisher() as events:
        async with reporting() as engine:
            engine.sources, engine.behave = [source_of(events)], hangs
            async with routed(engine) as w:
                [known] = w.server.fleet.engines()
                kv = w.server.fleet.model("tiny").kv
                await w.until(lambda: (events.answer(), kv.status("e0")["ranks"]["0"]["state"] == "live")[1])
                events.publish(stored([1], [1] * 16))
                await w.until(lambda: kv.counts("e0")["batches"] == 1)
                frozen.set()
                bodies = [{"model": "tiny", "prompt": [seed] * 400} for seed in range(3)]
                waiting = [asyncio.create_task(w.post(body)) for body in bodies]
                await engine.asked(3)
                await asyncio.sleep(4 * kv_events.SILENT_SECONDS + 1)
                assert known.mode.name == "exact"
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                # It computes again, but its publisher is silent: the port and the topic are right.
                frozen.clear()
                for seed in range(10, 14):
                    await w.post({"model": "tiny", "prompt": [seed] * 400})
                await w.until(lambda: known.mode.name == "approximate")
                assert "its KV events have stopped" in known.mode.reason
                assert "restart the engine" in str(known.mode.fix)


async def test_a_broken_event_connection_makes_the_router_check_the_engine() -> None:
    """bugs 14: blocks of a process that is gone counted until the next check, here a minute."""
    with publisher() as events:
        async with reporting() as engine:
            engine.sources = [source_of(events)]
            async with routed(engine, health={"interval": 60}) as w:
                [known] = w.server.fleet.engines()
                kv, router = w.server.fleet.model("tiny").kv, w.server.fleet.model("tiny").router
                await w.until(lambda: (events.answer(), kv.status("e0")["ranks"]["0"]["state"] == "live")[1])
                events.publish(stored([1, 2], [7] * 32))
                await w.until(lambda: router.stats()["instances"]["e0"]["index_blocks"] == 2)
                await engine.stop()
                events.close()
                await w.until(lambda: not known.healthy)
                assert known.last_failure == "refused"
                assert router.stats()["instances"]["e0"]["index_blocks"] == 0
