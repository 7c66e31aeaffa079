"""Trainers that announce, end and send nonsense: clear refusals, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from turn_guard import of_reference

from lmetric.server.http.pages.call import only_value
from server_world import FakeEngine, World, answer, plain, says, world
from split_world import CHAT
from test_server_programs import body, held, programs, small_cache
from waiting import PATIENCE_SECONDS

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """No fault of a client is an error of the router."""
    yield
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    assert "[error" not in said


async def announce(it: World, **body: Any) -> tuple[int, Any]:
    status, _, got = await it.post(body, "/admin/weights")
    return status, got


async def finish(it: World, session: str) -> int:
    status, _, got = await it.post(b"", f"/finish_session?session_id={session}")
    assert status == 200
    return int(got["programs"])


@pytest.mark.parametrize(
    ("announced", "status"),
    [
        ({"version": "7" * 10 * MIB}, 413),
        ({"version": 7, "engines": ["e0"] * MIB}, 413),
        ({"version": None}, 400),
        ({"version": ["7"]}, 400),
        ({"version": 10**300}, 400),
        ({"version": 7, "engines": ["e0", "nobody", "e1"]}, 404),
        ({"version": 7, "engines": ["x" * 10_000]}, 404),
        ({"version": 7, "engines": []}, 200),
    ],
    ids=["10 MB", "many engines", "null", "list", "large", "unknown between known", "long name", "no engine"],
)
async def test_such_announcements_change_no_engine(announced: dict[str, Any], status: int) -> None:
    async with world(2, admin=True) as it:
        assert (await announce(it, version=6))[0] == 200
        got_status, _, got = await it.post(json.dumps(announced).encode(), "/admin/weights")
        assert got_status == status
        assert status == 200 or len(got["error"]["message"]) < 500
        for _ in range(4):
            assert (await it.post())[1]["x-lmetric-weights"] == "6"


async def test_weights_are_announced_while_requests_run() -> None:
    """Half of the announcements are wrong. Each answer has an announced version."""
    async with world(2, admin=True) as it:
        await announce(it, version=0)
        seen = []

        async def ask() -> None:
            for _ in range(50):
                status, headers, _ = await it.post()
                assert status == 200
                seen.append(int(headers["x-lmetric-weights"]))

        asking = asyncio.gather(*(ask() for _ in range(8)))
        version = 0
        while not asking.done():
            version += 1
            assert (await announce(it, version=version))[0] == 200
            assert (await announce(it, version=-version, engines=["e0", "nobody"]))[0] == 404
        await asking
        assert 0 <= min(seen) <= max(seen) <= version
        assert len(set(seen)) > 1


async def test_the_query_has_one_session() -> None:
    async with world(1) as it:
        for query in (
            "",
            "?session_id=",
            "?session_id=a&session_id=b",
            "?session_id=" + "a&" * 32_000,
            "?a=b",
        ):
            assert (await it.post(b"", f"/finish_session{query}"))[0] == 400, query[:80]
        began = time.thread_time()
        assert not only_value("session_id=" + "a&" * 32_000, "session_id")
        assert not only_value("session_id=" + "%" * 64_000, "session_id")
        assert only_value("session_id=" + "%C3%A9" * 600, "session_id") == "é" * 600
        assert of_reference(time.thread_time() - began) < 0.005


@pytest.mark.parametrize("by_header", [True, False])
async def test_a_session_off_ascii_ends(by_header: bool) -> None:
    async with small_cache(forget_seconds=3600) as it:
        content = orjson.dumps(body(1) | ({} if by_header else {"vllm_xargs": {"session_id": "é"}}))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        head += "x-session-id: é\r\n".encode() if by_header else b""
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(content) + content)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert await finish(it, "é") == 1


async def test_a_session_ends_while_its_request_waits() -> None:
    """The request keeps its place in the queue, and is answered."""
    async with small_cache(forget_seconds=3600) as it:
        assert (await it.post(body(1), headers={"x-session-id": "first"}))[0] == 200
        waiting = asyncio.create_task(it.post(body(2), headers={"x-session-id": "second"}))
        await held(it, 1)
        for _ in range(2):
            await finish(it, "second")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert await finish(it, "first") == 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await waiting)[0] == 200
        await it.settled()
        await finish(it, "second")
        assert (await programs(it))["states"]["held"] == 0


async def test_a_session_ends_while_its_request_runs() -> None:
    go = asyncio.Event()

    async def waits(engine: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await answer(engine, request, writer)

    async with small_cache(forget_seconds=3600) as it:
        it.engines[0].behave = waits
        running = asyncio.create_task(it.post(body(1), headers={"x-session-id": "first"}))
        await it.engines[0].asked(1)
        for _ in range(2):
            await finish(it, "first")
        go.set()
        assert (await running)[0] == 200
        await it.settled()
        # The next turn of the session is a program of its own, which ends as usual.
        assert (await it.post(body(1, 1300), headers={"x-session-id": "first"}))[0] == 200
        assert await finish(it, "first") == 1
        assert await finish(it, "first") == 0


async def test_a_session_that_never_ends_is_forgotten() -> None:
    async with small_cache(forget_seconds=1) as it:
        assert (await it.post(body(1), headers={"x-session-id": "first"}))[0] == 200
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await it.post(body(2), headers={"x-session-id": "second"}))[0] == 200
        assert (await programs(it))["states"]["held"] == 0


@pytest.mark.parametrize(
    "image",
    [None, 3, "text", {}, {"url": None}, {"url": "data:image/png;base64,!!"}, {"url": "file:///etc/passwd"}],
)
async def test_images_that_are_none_get_the_engines_refusal(image: Any) -> None:
    """The engine judges them. Its refusal passes, no other engine is tried, and none is blamed."""
    refusal = {"error": {"message": "cannot identify image", "code": 400}}
    refuses = says(plain(400, refusal), then="keep")
    async with world([FakeEngine(behave=refuses), FakeEngine(behave=refuses)]) as it:
        content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "hi"}]
        for _ in range(4):
            asked = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
            status, _, got = await it.post(asked, CHAT)
            assert (status, got) == (400, refusal)
        assert [len(engine.requests) for engine in it.engines] == [2, 2]
        engines = it.server.fleet.models[0].engines.values()
        assert all(engine.healthy and engine.service.state == "HEALTHY" for engine in engines)
