"""Errors for clients, and logs for operators, when no engine can answer."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import structlog
from structlog.testing import capture_logs

from lmetric.server.background import monitor as health
from lmetric.server.http.running import REFUSING, SERVING
from server_world import STREAM_HEAD, FakeEngine, World, chunk, plain, reset, says, token, world

QUICK: dict[str, Any] = {"health": {"interval": 0.02, "timeout": 1.0}}


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    with capture_logs() as caught:
        yield caught


def reminders(logs: list[structlog.typing.EventDict]) -> list[structlog.typing.EventDict]:
    return [each for each in logs if each["event"] == "no usable engine"]


async def engine_that_refuses() -> FakeEngine:
    """An engine that refuses connections, until it is started."""
    engine = FakeEngine(model="tiny")
    await engine.start()
    await engine.stop()
    return engine


async def test_no_usable_engine_is_logged_again_and_again_with_its_reason(
    logs: list[structlog.typing.EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """UX C8: dead engines caused one warning, and then no further one."""
    monkeypatch.setattr(health, "REMINDER_SECONDS", 0.05)
    dead = await engine_that_refuses()
    engines = [{"url": dead.url, "name": "dead"}]
    async with world(0, engines=engines, **QUICK) as it:
        [start] = [each for each in logs if each["event"] == "listening"]
        [problem] = start["warnings"]
        assert (start["log_level"], problem["names"], problem["cause"]) == (
            "warning",
            ["dead"],
            "connection refused",
        )
        await it.until(lambda: len(reminders(logs)) >= 3)
        first = reminders(logs)[0]
        assert (first["log_level"], first["reason"].split(": ")[0]) == ("warning", "dead")
        assert "no connection" in first["reason"]
        await dead.start()
        await it.until(it.server.fleet.ready)
        logs.clear()
        checks = it.server.fleet.models[0].engines["dead"]
        await it.until(lambda: checks.healthy)
        assert (await it.post())[0] == 200
        assert not reminders(logs)
        await dead.stop()
        await it.until(lambda: len(reminders(logs)) >= 2)
        assert {each["model"] for each in reminders(logs)} == {"tiny"}


async def test_reminders_come_at_most_every_30_seconds(logs: list[structlog.typing.EventDict]) -> None:
    """UX C8: reminders follow the clock, not the health checks."""
    dead = await engine_that_refuses()
    async with world(0, engines=[{"url": dead.url}], health={"interval": 0.01}) as it:
        engine = next(iter(it.server.fleet.unplaced.values()))
        await it.until(lambda: engine.failures > 5)
    assert not reminders(logs)
    assert [each["usable"] for each in logs if each["event"] == "listening"] == [0]
    assert health.REMINDER_SECONDS == 30


async def refusal(it: World, **body: Any) -> tuple[int, str]:
    status, headers, got = await it.post({"model": "tiny", "prompt": "x", **body})
    assert (headers["retry-after"], got["error"]["code"]) == ("2", "no_engine")
    return status, got["error"]["message"]


@pytest.mark.parametrize("show", [True, False])
async def test_the_503_says_why_no_engine_is_usable(show: bool) -> None:
    """UX C8: `503 no engine has told its model yet` hid the known reason."""
    dead = await engine_that_refuses()
    engines = [{"url": dead.url, "name": f"gpu-{n}"} for n in range(7)]
    async with world(0, engines=engines, errors={"show_engines": show}) as it:
        status, message = await refusal(it)
        assert status == 503
        known = "no usable engine: connection refused (7 of 7 engines)"
        if show:
            assert message.startswith(f"{known} (gpu-0: no connection: ")
            assert message.endswith("; and 2 more)")
            assert "gpu-5" not in message
        else:
            assert message == known


async def test_the_503_of_a_known_model_says_why() -> None:
    """UX C8: the error names lost and drained engines, with the reason."""
    async with world(2, admin=True, **QUICK) as it:
        await it.engines[0].stop()
        await it.until(lambda: not it.server.fleet.models[0].engines["e0"].healthy)
        async with it.client.post(it.url + "/admin/engines/e1/drain") as response:
            assert response.status == 200
        _, message = await refusal(it)
        summary = "connection refused (1 of 2 engines); draining (1 of 2 engines)"
        assert message.startswith(f"tiny: no usable engine: {summary} (e0: no connection: ")
        assert message.endswith("; e1: draining)")


@pytest.mark.parametrize("show", [True, False])
async def test_engines_are_named_to_clients_only_if_that_is_wanted(show: bool) -> None:
    """Reliability, table L: the 504 message and x-lmetric-instance showed engines' host:port."""
    cut = says(STREAM_HEAD, chunk(token("a")), then="reset")
    too_long_to_pass = plain(503, b"x" * 2_000_000)
    fakes = [FakeEngine(behave=reset), FakeEngine(behave=says(too_long_to_pass))]
    async with world(fakes, errors={"show_engines": show}) as it:
        status, headers, got = await it.post()
        assert status in (502, 503)
        message = got["error"]["message"]
        assert message.startswith("no engine could answer")
        assert ("e0: " in message and "e1: status 503" in message) == show
        for engine in it.engines:
            engine.behave = cut
        status, headers, got = await it.post({"model": "tiny", "prompt": "x", "stream": True})
        assert (status, "x-lmetric-instance" in headers) == (200, show)
        assert "x-lmetric-decision" in headers
        broken = orjson.loads(got.split(b"data: ")[2])["error"]
        assert broken["message"].startswith("the engine failed in the middle of its answer")
        assert (" (e" in broken["message"]) == show


async def test_codes_of_errors_are_strings_or_null(logs: list[structlog.typing.EventDict]) -> None:
    """UX, section 3, code: it was an integer for 400, 401 and 503, and a string for others."""
    async with world(1, limits={"max_body_bytes": 2000}) as it:
        codes = []
        for body, path in (
            (b"{", "/v1/completions"),
            ({"prompt": "a", "kv_transfer_params": {}}, "/v1/completions"),
            ({"model": "no", "prompt": "x"}, "/v1/completions"),
            ({"prompt": "x" * 3000}, "/v1/completions"),
            ({}, "/v1/nothing"),
            ({}, "/v1/models"),
            ({}, "/debug/engines"),
        ):
            status, _, got = await it.post(body, path=path)
            assert status >= 400
            codes.append(got["error"]["code"])
        async with it.client.get(it.url + "/v1/completions") as response:
            codes.append((await response.json())["error"]["code"])
        assert codes == [None, None, "model_not_found", "body_too_large", "unknown_path", None, None, None]
        it.server.front.running.phase = REFUSING
        status, _, got = await it.post()
        assert (status, got["error"]["code"]) == (503, "shutting_down")
        it.server.front.running.phase = SERVING


async def test_requests_without_a_key_get_a_null_code(tmp_path: Any) -> None:
    """UX, section 3, code: a 401 without a key had the integer 401."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("secret: team")
    async with world(1, auth={"keys_file": keys}) as it:
        for headers, code in (({}, None), ({"authorization": "Bearer no"}, "invalid_api_key")):
            status, _, got = await it.post(headers=headers)
            assert (status, got["error"]["code"]) == (401, code)
