"""The access log: one line per request, with the fields that identify it."""

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import structlog
from structlog.testing import capture_logs

from lmetric.server.observe import refusals
from server_world import STREAM_HEAD, FakeEngine, chunk, reset, says, token, world
from test_server_process import BODY, engine, router
from waiting import PATIENCE_SECONDS

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorials" / "first_deployment.md"
LOG: dict[str, Any] = {"log": {"access": True}}


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    with capture_logs() as caught:
        yield caught


def lines(logs: list[structlog.typing.EventDict]) -> list[structlog.typing.EventDict]:
    return [each for each in logs if each["event"] == "request"]


async def test_the_line_of_a_plain_answer_has_its_tokens(logs: list[structlog.typing.EventDict]) -> None:
    """UX, access log: answers without streaming had `output_tokens: 0` despite their tokens."""
    async with world(1, **LOG) as it:
        _, headers, _ = await it.post(headers={"x-request-id": "mine"})
        await it.settled()
        (line,) = lines(logs)
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (10, 4, 3)
        assert (line["request_id"], line["decision"]) == ("mine", headers["x-lmetric-decision"])
        assert (line["engine"], line["status"], line["model"]) == ("e0", 200, "tiny")
        assert line["path"] == "/v1/completions"
        # The fields that one reads first come first, and none is empty.
        assert list(line)[:2] == ["status", "engine"]
        assert not {"tenant", "note", "trace_id"} & line.keys()
        # A plain answer comes at once, so the time of its first token is unknown.
        assert "ttft_seconds" not in line
        assert 0 < line["duration_seconds"] < 60


async def test_the_line_of_a_stream_has_its_ttft(
    logs: list[structlog.typing.EventDict], tmp_path: Path
) -> None:
    """UX, access log: request id, decision, instance, TTFT and client were missing."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("secret: team")
    async with world([FakeEngine(pace=0.01)], auth={"keys_file": keys}, **LOG) as it:
        _, headers, _ = await it.post(BODY, headers={"authorization": "Bearer secret"})
        await it.settled()
        (line,) = lines(logs)
        assert line["request_id"] == headers["x-request-id"]
        assert (line["tenant"], line["engine"], line["output_tokens"]) == ("team", "e0", 3)
        assert 0 < line["ttft_seconds"] < line["duration_seconds"]
        host, port = line["client"].split(":")
        assert (host, 0 < int(port) < 65536) == ("127.0.0.1", True)
        # The tutorial shows some of the fields, in the order of the line.
        (shown,) = re.findall(r"^\[info\] request (.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
        names = re.findall(r"(\w+)=", shown)
        assert names == [name for name in line if name in names]


async def test_lines_of_requests_that_were_refused_failed_or_left(
    logs: list[structlog.typing.EventDict],
) -> None:
    """UX, access log: requests that reached no engine have a line, too.

    Other lines name the engine.
    """
    hanging = says(STREAM_HEAD, chunk(token("a")), then="hang")
    async with world([FakeEngine(behave=hanging)], **LOG) as it:
        await it.post(b"{")
        await it.post({"model": "no", "prompt": "x"})
        it.engines[0].behave = reset
        await it.post()
        it.engines[0].behave = hanging
        stream = await it.client.post(it.url + "/v1/completions", json=BODY)
        await stream.content.readany()
        stream.close()
        await it.settled()
        refused, unknown, failed, left = lines(logs)
        # UX, section 3, number 10: a refused request had no reason.
        assert "JSON" in refused["note"]
        assert (unknown["status"], unknown["code"]) == (404, "model_not_found")
        assert refused["status"] == 400
        assert not {"decision", "engine", "ttft_seconds", "output_tokens"} & refused.keys()
        assert (failed["status"], failed["engine"], failed["code"]) == (502, "e0", "reset")
        assert failed["decision"] is not None
        assert (left["status"], left["engine"], left["note"]) == (200, "e0", "the client left")
        assert left["client"].startswith("127.0.0.1:")
        assert all(each["duration_seconds"] >= 0 and each["client"] for each in (refused, failed))


async def test_access_lines_of_the_process_are_json() -> None:
    """UX, access log: the fields as a log shipper gets them, with the event loop of production."""
    flags = ("--set", "log.access=true")
    async with engine() as fake, router("--engine", fake.url, *flags) as r, aiohttp.ClientSession() as client:
        await r.listening()
        async with client.post(r.url + "/v1/completions", json=BODY | {"stream": False}) as response:
            assert response.status == 200
            decision = response.headers["x-lmetric-decision"]
        r.process.send_signal(signal.SIGTERM)
        assert await r.ended() == 0
        told = [orjson.loads(line) for line in "".join(r.log).splitlines()]
        (line,) = [each for each in told if each["event"] == "request"]
        assert (line["decision"], line["output_tokens"], line["cached_tokens"]) == (decision, 3, 4)
        assert line["client"].startswith("127.0.0.1:")


async def test_a_client_that_leaves_before_its_answer_is_named() -> None:
    """UX, access log: a client's address is logged although its connection is closed."""
    flags = ("--set", "log.access=true")
    body = orjson.dumps(BODY)
    async with engine(behave=says(then="hang")) as fake, router("--engine", fake.url, *flags) as r:
        await r.listening()
        _, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rsplit(":", 1)[1]))
        port = writer.get_extra_info("sockname")[1]
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await fake.asked(1)
        writer.transport.abort()
        assert r.process.stderr is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (said := orjson.loads(await r.process.stderr.readline()))["event"] != "request":
                pass
        assert (said["status"], said["client"]) == (499, f"127.0.0.1:{port}")


async def test_refusals_are_logged_with_their_reason_once_a_minute(
    logs: list[structlog.typing.EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """UX, at 3 am: without the access log, nothing said why requests were refused."""
    async with world(1, health={"interval": 3600}) as it:
        (each,) = it.server.fleet.models[0].engines.values()
        each.failed("refused", "no connection: Connection refused")
        for _ in range(3):
            assert (await it.post())[0] == 503
        monkeypatch.setattr(refusals, "LOG_SECONDS", 0.0)
        assert (await it.post())[0] == 503
        await it.settled()
    first, last = [each for each in logs if each["event"] == "requests refused"]
    assert (first["status"], first["reason"], first["requests"], first["model"]) == (
        503,
        "no_engine",
        1,
        "tiny",
    )
    assert "no usable engine: connection refused" in first["message"]
    assert last["requests"] == 3  # with those since the first line
