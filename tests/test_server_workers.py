"""The worker paths of vllm-router and sglang-router, and the ends of sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from server_world import FakeEngine, World, world
from test_server_programs import body, held, programs, small_cache
from waiting import PATIENCE_SECONDS

KINDS = ["regular", "prefill", "decode", "encode"]
ADMIN = {"authorization": "Bearer root-token"}


async def call(it: World, method: str, path: str, value: Any = None) -> tuple[int, Any]:
    """Returns the status and the answer, as JSON or as text."""
    data = None if value is None else orjson.dumps(value)
    async with it.client.request(method, it.url + path, data=data) as response:
        got = await response.read()
        if response.content_type == "application/json":
            return response.status, orjson.loads(got)
        return response.status, got.decode()


async def urls(it: World) -> set[str]:
    status, listed = await call(it, "GET", "/list_workers")
    assert status == 200
    return set(listed["urls"])


async def joined(it: World, name: str) -> dict[str, Any]:
    """The worker, once the router has asked its engine."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            status, worker = await call(it, "GET", f"/workers/{quote(name, safe='')}")
            assert status == 200
            if worker["is_healthy"] or worker["error"] not in (None, "not checked yet"):
                return worker  # type: ignore[no-any-return]
            await asyncio.sleep(0.02)


async def test_a_trainer_registers_lists_and_removes_workers_by_id() -> None:
    """The calls of slime with sglang-router 0.3."""
    added = FakeEngine()
    await added.start()
    async with world(1, admin=True) as it:
        for _ in range(2):  # a recovered engine registers again
            payload = {"url": added.url, "worker_type": "regular", "priority": 50}
            async with it.client.post(f"{it.url}/workers", json=payload) as response:
                got = await response.json()
                assert response.status == 200
                assert response.headers["location"] == got["location"]
            assert (got["status"], got["success"], got["url"]) == ("accepted", True, added.url)
            assert got["ignored"] == ["priority"]
        assert (await joined(it, got["worker_id"]))["model_id"] == "tiny"
        status, listed = await call(it, "GET", "/workers")
        assert (status, listed["total"]) == (200, 2)
        assert listed["stats"] == {f"{kind}_count": 2 * (kind == "regular") for kind in KINDS}
        (worker,) = [each for each in listed["workers"] if each["url"] == added.url]
        answers = {(await it.post())[1]["x-lmetric-instance"] for _ in range(8)}
        assert answers == {"e0", worker["id"]}
        assert (await call(it, "GET", got["location"]))[1]["url"] == added.url
        status, got = await call(it, "DELETE", f"/workers/{worker['id']}")
        assert (status, got["success"]) == (200, True)
        status, got = await call(it, "DELETE", f"/workers/{worker['id']}")
        assert (status, got["code"]) == (404, "WORKER_NOT_FOUND")
        assert await urls(it) == {it.engines[0].url}
    await added.stop()


async def test_a_trainer_adds_and_removes_workers_by_url() -> None:
    """The calls of slime's own router and of vllm-router."""
    added = FakeEngine()
    await added.start()
    async with world(1, admin=True) as it:
        path = f"worker?url={added.url}"
        status, got = await call(it, "POST", f"/add_{path}")
        assert (status, got) == (200, f"Successfully added worker: {added.url}")
        status, got = await call(it, "POST", f"/add_{path}")
        assert (status, got["code"]) == (400, "ADD_WORKER_FAILED")
        assert "already exists" in got["error"]["message"]
        assert await urls(it) == {it.engines[0].url, added.url}
        by_url = f"/workers/{quote(added.url, safe='')}"
        assert (await call(it, "GET", by_url))[1]["url"] == added.url
        status, got = await call(it, "POST", f"/remove_{path}")
        assert (status, got) == (200, f"Successfully removed worker: {added.url}")
        status, got = await call(it, "POST", f"/remove_{path}")
        assert (status, "nothing was removed" in got) == (200, True)
        assert (await call(it, "GET", by_url))[0] == 404
        assert (await call(it, "POST", f"/add_{path}"))[0] == 200
        assert (await call(it, "DELETE", by_url))[0] == 200
        assert await urls(it) == {it.engines[0].url}
    await added.stop()


async def test_a_repeated_registration_with_another_field_is_refused() -> None:
    """It once got a 200, and the router kept the old API key."""
    async with world(1, admin=True) as it:
        first = {"url": "http://127.0.0.1:9", "api_key": "one", "model_id": "tiny", "worker_type": "prefill"}
        for _ in range(2):
            assert (await call(it, "POST", "/workers", first))[0] == 200
        for name, value in (("api_key", "two"), ("worker_type", "decode"), ("worker_type", "regular")):
            status, got = await call(it, "POST", "/workers", {**first, name: value})
            assert (status, got["code"], got["error"]["param"]) == (400, "ADD_WORKER_FAILED", name)
            assert f"already exists with another {name}; remove it first" in got["error"]["message"]
        assert (await call(it, "POST", "/workers", {"url": first["url"]}))[0] == 200
        status, got = await call(it, "POST", "/workers", {**first, "model_id": "large"})
        assert (status, "already exists" in got["error"]["message"]) == (400, True)
        # The model of an engine that was added without one is not known yet.
        unnamed = {"url": "http://127.0.0.1:7"}
        assert (await call(it, "POST", "/workers", unnamed))[0] == 200
        status, got = await call(it, "POST", "/workers", {**unnamed, "model_id": "tiny"})
        assert (status, got["error"]["param"]) == (400, "model_id")


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_worker_has_its_role(kind: str) -> None:
    added = FakeEngine()
    await added.start()
    async with world(1, admin=True) as it:
        for _ in range(2):
            status, got = await call(it, "POST", "/workers", {"url": added.url, "worker_type": kind})
            assert (status, got.get("success")) == (200, True), got
        worker = (await call(it, "GET", f"/workers/{got['worker_id']}"))[1]
        assert worker["worker_type"] == kind
        page = (await call(it, "GET", "/admin/engines"))[1]
        (engine,) = [each for each in page if each["url"] == added.url]
        assert engine["role"] == ("both" if kind == "regular" else kind)
        stats = (await call(it, "GET", "/workers"))[1]["stats"]
        assert stats == {f"{each}_count": (each == kind) + (each == "regular") for each in KINDS}
    await added.stop()


async def test_both_vocabularies_show_the_same_engines() -> None:
    async with world(1, admin=True) as it:
        assert (await call(it, "POST", "/admin/engines/e0/drain"))[0] == 200
        _, worker = await call(it, "GET", "/workers/e0")
        assert worker["error"] == "draining"
        assert (await call(it, "POST", "/workers", {"url": "http://127.0.0.1:9"}))[0] == 200
        _, engines = await call(it, "GET", "/admin/engines")
        assert {each["name"] for each in engines} == {"e0", "127.0.0.1:9"}
        assert (await joined(it, "127.0.0.1:9"))["is_healthy"] is False
        async with it.client.delete(f"{it.url}/admin/engines/127.0.0.1:9") as response:
            assert response.status == 200
        assert await urls(it) == {it.engines[0].url}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "url"),
        ({"url": 3}, "url"),
        ({"url": "nonsense"}, "url"),
        ({"url": "http://127.0.0.1:9/\u0000"}, "url"),
        ({"url": "unix:///tmp/x"}, "unix sockets"),
        ({"url": "http://127.0.0.1:9", "worker_type": "encoder"}, "worker_type"),
        ({"url": "http://127.0.0.1:9", "worker_type": []}, "worker_type"),
        ({"url": "http://127.0.0.1:9", "model_id": 3}, "model_id"),
        ({"url": "http://127.0.0.1:9", "model_id": "x" * 10_000}, ""),
        ([], "object"),
        ("x", "object"),
    ],
)
async def test_bad_workers_are_refused(value: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with world(1, admin=True) as it:
        status, got = await call(it, "POST", "/workers", value)
        assert status in (400, 403), got
        assert text in got["error"]["message"]
        assert await urls(it) == {it.engines[0].url}
    assert "Traceback" not in "".join(capsys.readouterr())


async def test_bad_queries_are_refused() -> None:
    async with world(1, admin=True) as it:
        for path in ("/add_worker", "/remove_worker", "/finish_session"):
            name = "session_id" if path == "/finish_session" else "url"
            many = "?" + "&".join(f"{name}{number}=a" for number in range(20))
            for query in ("", f"?{name}=", f"?{name}=a&{name}=b", f"?{name}=a&more=1", "?other=1", many):
                status, got = await call(it, "POST", path + query)
                assert (status, got["error"]["param"]) == (400, name), (path, query)
        assert (await call(it, "POST", "/add_worker?url=not-a-url"))[0] == 400
        for name in ("nobody", "http%3A%2F%2F127.0.0.1%3A9", "%00", "..%2F..%2Fetc", "{name}"):
            status, got = await call(it, "GET", f"/workers/{name}")
            assert (status, got["code"]) == (404, "WORKER_NOT_FOUND")


async def test_a_worker_of_another_model_gets_no_requests() -> None:
    liar = FakeEngine(model="other")
    await liar.start()
    async with world(1, admin=True) as it:
        status, got = await call(it, "POST", "/workers", {"url": liar.url, "model_id": "tiny"})
        assert status == 200
        worker = await joined(it, got["worker_id"])
        assert worker["is_healthy"] is False
        assert "other" in worker["error"]
        assert {(await it.post())[1]["x-lmetric-instance"] for _ in range(6)} == {"e0"}
        assert liar.requests == []
    await liar.stop()


async def test_discovered_workers_are_not_removed(tmp_path: Path) -> None:
    async with world(1, admin=True) as it:
        file = tmp_path / "engines.yaml"
        file.write_text(f"engines:\n  - {{url: '{it.engines[0].url}', name: found}}\n")
        async with world(0, admin=True, discovery=[{"file": str(file)}]) as other:
            await other.until(lambda: other.server.fleet.engine("found") is not None)
            status, got = await call(other, "POST", f"/remove_worker?url={it.engines[0].url}")
            assert (status, got["error"]["code"]) == (409, "discovered")


async def test_workers_have_the_access_rules_of_admin() -> None:
    pages = [
        ("GET", "/workers"),
        ("GET", "/workers/e0"),
        ("GET", "/list_workers"),
        ("POST", "/workers"),
        ("DELETE", "/workers/e0"),
        ("POST", "/add_worker?url=http://127.0.0.1:9"),
        ("POST", "/remove_worker?url=http://127.0.0.1:9"),
    ]
    async with world(1) as it:
        for method, path in pages:
            status, got = await call(it, method, path)
            assert (status, "administration is off" in got["error"]["message"]) == (403, True)
    async with world(1, admin={"enabled": True, "token": "root-token"}) as it:
        for method, path in pages:
            assert (await call(it, method, path))[0] == 401, path
        async with it.client.get(f"{it.url}/workers", headers=ADMIN) as response:
            assert response.status == 200
        for path in ("/liveness", "/readiness", "/health_generate"):
            assert (await call(it, "GET", path))[0] == 200
        assert (await call(it, "POST", "/finish_session?session_id=a"))[0] == 200


async def test_health_paths_follow_the_engines() -> None:
    async with world(1, admin=True) as it:
        assert await call(it, "GET", "/liveness") == (200, "OK")
        ready = {"status": "ready", "healthy_workers": 1, "total_workers": 1}
        assert await call(it, "GET", "/readiness") == (200, ready)
        assert (await call(it, "GET", "/health_generate"))[0] == 200
        assert (await call(it, "DELETE", "/workers/e0"))[0] == 200
        assert await call(it, "GET", "/liveness") == (200, "OK")
        status, got = await call(it, "GET", "/readiness")
        assert (status, got["status"]) == (503, "not ready")
        assert (await call(it, "GET", "/health_generate"))[0] == 503


async def test_a_finished_session_frees_the_place_of_its_program() -> None:
    async with small_cache(forget_seconds=3600) as it:
        status, _, _ = await it.post(body(1), headers={"x-session-id": "first"})
        assert status == 200
        waiting = asyncio.create_task(it.post(body(2), headers={"x-session-id": "second"}))
        await held(it, 1)
        for session, count in (("nobody", 0), ("first", 1), ("first", 0)):
            got = await call(it, "POST", f"/finish_session?session_id={session}")
            assert got == (200, {"status": "ok", "session_id": session, "programs": count})
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await waiting)[0] == 200
        assert (await programs(it))["states"]["held"] == 0
        await it.settled()


async def test_tenants_end_only_their_own_sessions(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("sk-alice: alice\nsk-bob: bob\n")
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    async with world(1, auth={"keys_file": str(file)}, programs={"kind": "observe", "min_tokens": 100}) as it:
        assert (await it.post(body(1), headers={**alice, "x-session-id": "s"}))[0] == 200
        path = "/finish_session?session_id=s"
        assert (await it.post(b"", path))[0] == 401
        assert (await it.post(b"", path, bob))[2]["programs"] == 0
        assert (await it.post(b"", path, alice))[2]["programs"] == 1
