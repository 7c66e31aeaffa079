"""Engines added, drained and removed over /admin under load, without effects on clients."""

import asyncio
from collections import Counter

import aiohttp
import orjson
import pytest

from constants import with_constants
from lmetric.config import ServerConfig
from lmetric.config.schema import Load
from lmetric.server import Server
from lmetric.server.fleet import fleet
from lmetric_lab.embedded import EmbeddedEngines
from server_world import FakeEngine, World, answer, hang, world
from waiting import PATIENCE_SECONDS


async def test_removal_waits_for_running_requests() -> None:
    async with world(2, admin=True) as it:
        a, b = it.engines
        go = asyncio.Event()

        async def wait(engine: FakeEngine, request: object, writer: asyncio.StreamWriter) -> bool:
            await go.wait()
            return await answer(engine, request, writer)  # type: ignore[arg-type]

        a.behave = b.behave = wait
        running = asyncio.create_task(it.post())
        await it.until(lambda: a.requests or b.requests)
        busy, idle = (a, b) if a.requests else (b, a)
        idle.behave = answer
        removal = asyncio.create_task(remove(it, busy.name, "?drain=20"))
        engine = it.server.fleet.models[0].engines[busy.name]
        await it.until(lambda: engine.leaving)
        for _ in range(4):
            assert (await it.post())[1]["x-lmetric-instance"] == idle.name
        assert not removal.done()
        go.set()
        status, got = await removal
        assert (status, got["removed"], got["running"]) == (200, True, 0)
        assert (await running)[0] == 200
        assert (await remove(it, busy.name))[0] == 404


async def test_a_server_of_two_models_is_two_engines() -> None:
    async with world([FakeEngine(cards=[{"id": "a"}, {"id": "b"}, {"id": "c"}])], admin=True) as it:
        url = it.engines[0].url
        models = [{"name": name, "engines": [{"url": url, "name": f"at/{name}"}]} for name in ("a", "b")]
        async with world(0, models=models, admin=True) as both:
            assert (await both.post({"url": url, "name": "c"}, "/admin/engines"))[0] == 409
            assert (await both.post({"url": url, "name": "c", "model": "a"}, "/admin/engines"))[0] == 409
            status, _, got = await both.post({"url": url, "name": "at/c", "model": "c"}, "/admin/engines")
            assert (status, got["model"]) == (200, "c")
            assert {engine.name for engine in both.server.fleet.engines()} == {"at/a", "at/b", "at/c"}
            for name in ("a", "b"):
                status, headers, _ = await both.post({"model": name, "prompt": "x"})
                assert (status, headers["x-lmetric-instance"]) == (200, f"at/{name}")
            assert (await both.post({}, "/admin/engines/at/a/drain"))[2]["draining"] is True
            assert (await both.post({"model": "a", "prompt": "x"}))[0] == 503
            assert (await remove(both, "at/b"))[1]["removed"] is True
            assert (await both.post({}, "/admin/engines/at/a/stop"))[0] == 404


async def test_removal_ends_when_its_time_is_up_and_adding_again_ends_it_too() -> None:
    async with world(1, admin=True) as it:
        (a,) = it.engines
        a.behave = hang
        running = asyncio.create_task(it.post())
        await a.asked(1)
        removal = asyncio.create_task(remove(it, "e0", "?drain=20"))
        engine = it.server.fleet.models[0].engines["e0"]
        await it.until(lambda: engine.leaving)
        status, _, got = await it.post({"url": a.url, "name": "e0"}, "/admin/engines")
        assert (status, got["leaving"], got["source"]) == (200, False, "admin")
        assert (await removal)[1]["removed"] is False
        status, got = await remove(it, "e0", "?drain=0.1")
        assert (status, got["removed"], got["running"]) == (200, True, 1)
        assert not running.done()
        running.cancel()
        await it.until(lambda: a.left == 1)


@pytest.mark.parametrize(
    "query", ["?drain=x", "?drain=-1", "?drain=nan", "?drain=", "?drian=3", "?drain=1&drain=2"]
)
async def test_a_removals_query_is_checked(query: str) -> None:
    async with world(1, admin=True) as it:
        status, got = await remove(it, "e0", query)
        assert status == 400
        assert "drain=SECONDS" in got["error"]["message"]
        assert (await it.post())[0] == 200


async def test_connections_of_a_removed_engine_close() -> None:
    async with world(1, admin=True) as it:
        upstream = it.server.fleet.models[0].engines["e0"].upstream
        go = asyncio.Event()

        async def wait(engine: FakeEngine, request: object, writer: asyncio.StreamWriter) -> bool:
            await go.wait()
            return await answer(engine, request, writer)  # type: ignore[arg-type]

        it.engines[0].behave = wait
        running = asyncio.create_task(it.post())
        await it.engines[0].asked(1)
        await remove(it, "e0")
        go.set()
        assert (await running)[0] == 200
        await it.until(lambda: not it.engines[0]._writers)
        assert (upstream.in_use, len(upstream._open), len(upstream._idle)) == (0, 0, 0)


async def test_a_model_that_nothing_serves_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    other = FakeEngine(model="other")
    await other.start()
    async with world(1, admin=True, health={"interval": 0.03}) as it:
        await it.post({"url": other.url, "name": "x"}, "/admin/engines")
        body = {"model": "other", "prompt": "x"}

        def serves() -> bool:
            known = it.server.fleet.names.get("other")
            return known is not None and known[0].engines["x"].healthy

        await it.until(serves)
        label = (await it.post(body))[1]["x-lmetric-decision"]
        assert label.startswith("1-1-")
        assert orjson.loads((await it.get(f"/debug/decisions/{label}"))[1])["model"] == "other"
        await remove(it, "x")
        await asyncio.sleep(0.1)
        assert (await it.post(body))[0] == 503, "it may come back"
        live, refusals = it.server.front.live, it.server.front.running.refusals
        assert live is not None
        live._fresh_events()
        assert "other" in live._events
        assert "other" in {model for model, _ in refusals._reasons}
        monkeypatch.setattr(fleet, "UNSERVED_SECONDS", 0.05)
        await it.until(lambda: "other" not in it.server.fleet.names)
        assert "other" not in live._events
        assert "other" not in {model for model, _ in refusals._reasons}
        assert (await it.post(body))[0] == 404
        assert [card["id"] for card in orjson.loads((await it.get("/v1/models"))[1])["data"]] == ["tiny"]
        assert (await it.get(f"/debug/decisions/{label}"))[0] == 404
        await it.post({"url": other.url, "name": "x"}, "/admin/engines")
        await it.until(serves)
        assert (await it.post(body))[1]["x-lmetric-decision"].startswith("2-1-")
        assert (await it.post())[0] == 200
    await other.stop()


async def test_a_model_of_the_configuration_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "UNSERVED_SECONDS", 0.01)
    async with world(
        0, models=[{"name": "tiny", "adapters": ["a"]}], admin=True, health={"interval": 0.02}
    ) as it:
        await asyncio.sleep(0.2)
        assert set(it.server.fleet.names) == {"tiny", "a"}


async def remove(it: World, name: str, query: str = "") -> tuple[int, dict[str, object]]:
    async with it.client.delete(f"{it.url}/admin/engines/{name}{query}") as response:
        return response.status, await response.json()


async def test_engines_come_and_go_under_load_and_no_client_notices() -> None:
    async with EmbeddedEngines(3) as embedded:
        config = ServerConfig.model_validate(
            {
                "port": 0,
                "admin": True,
                "health": {"interval": 0.2},
                "load": with_constants(Load, interval=None, from_answers=False),  # bs: the router's own
                "policy": "least_requests",  # each engine gets some, also if another has them cached
                "engines": [{"url": embedded.urls[0], "name": "e0"}],
            }
        )
        server = Server(config)
        await server.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client:
                await churn(server, client, embedded.urls)
        finally:
            await server.stop()


async def churn(server: Server, client: aiohttp.ClientSession, urls: list[str]) -> None:
    """Adds, drains and removes engines repeatedly while 16 clients send requests."""
    served: Counter[str] = Counter()
    wrong: list[str] = []
    done = asyncio.Event()

    async def ask(number: int) -> None:
        stream = number % 2 == 0
        while not done.is_set():
            body = {"prompt": f"Tell me of {number}. " * 30, "max_tokens": 8, "stream": stream}
            async with client.post("/v1/completions", json=body) as response:
                text = await response.text()
                served[response.headers.get("x-lmetric-instance", "")] += 1
                if response.status != 200 or (stream and "[DONE]" not in text) or '"error"' in text:
                    wrong.append(f"{response.status} {text[:300]}")

    async def admin(method: str, path: str, **body: object) -> dict[str, object]:
        async with client.request(method, f"/admin/engines{path}", json=body or None) as response:
            assert response.status == 200, await response.text()
            answered: dict[str, object] = await response.json()
            return answered

    async def more_of(name: str, requests: int = 20) -> None:
        aim = served[name] + requests
        async with asyncio.timeout(PATIENCE_SECONDS):
            while served[name] < aim:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    clients = [asyncio.create_task(ask(number)) for number in range(16)]
    await more_of("e0")
    for _ in range(2):
        for number in (1, 2):
            await admin("POST", "", url=urls[number], name=f"e{number}")
        await more_of("e1")
        await more_of("e2")
        await admin("POST", "/e0/drain")
        await more_of("e1")
        await admin("POST", "/e0/undrain")
        await more_of("e0")
        assert (await admin("DELETE", "/e1?drain=10"))["running"] == 0
        assert (await admin("DELETE", "/e2"))["removed"] is True
        await more_of("e0")
    done.set()
    await asyncio.gather(*clients)
    assert wrong == []
    (model,) = server.fleet.models
    assert model.router.in_flight() == 0
    rows = model.router.stats()["instances"]
    assert {name: row["bs"] for name, row in rows.items()} == {"e0": 0}
    async with client.get("/metrics") as response:
        text = await response.text()
    assert 'instance="e1"' not in text
    assert "lmetric_engines_added_total 4.0" in text
    async with client.get("/debug/engines") as response:
        assert [row["running"] for row in orjson.loads(await response.read())] == [0]


async def test_an_engine_that_returns_from_a_drain_is_identified_again() -> None:
    """It can restart with other settings between two health checks, for example with KV events."""
    async with world(1, admin={"enabled": True}) as it:
        [engine] = it.engines
        [known] = it.server.fleet.engines()
        await it.until(lambda: known.identified)
        assert (await it.post({}, "/admin/engines/e0/undrain"))[0] == 200
        assert known.identified, "nothing was drained"
        assert (await it.post({}, "/admin/engines/e0/drain"))[0] == 200
        before = engine.page_reads.count("/version")
        assert (await it.post({}, "/admin/engines/e0/undrain"))[0] == 200
        await it.until(lambda: known.identified and engine.page_reads.count("/version") > before)
        assert (await it.post())[0] == 200
