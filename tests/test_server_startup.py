"""The start of `serve` and the state of the fleet: one block of text, one event, /ready."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from lmetric.config import ListenerTls, ServerConfig
from lmetric.server.observe.startup import sample_request, startup_block, url_of
from server_world import FakeEngine, world
from test_server_process import RUN, engine, router

ADMIN = {"authorization": "Bearer root-token"}


@contextlib.asynccontextmanager
async def text_router(*flags: str) -> AsyncIterator[list[str]]:
    """A router with text logs. Yields its log up to the end of the start."""
    import sys

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "--port", "0", *flags), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        lines: list[str] = []
        async with asyncio.timeout(60):
            while line := (await process.stderr.readline()).decode():
                lines.append(line.rstrip("\n"))
                if line.startswith("  try "):
                    break
        yield lines
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            rest = (await process.stderr.read()).decode()
            assert await process.wait() == 0, rest
        assert "listening" not in rest
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_start_ends_with_one_block_and_its_command_works() -> None:
    """UX 23: URL, policy, engines with their modes, and a request to paste."""
    async with text_router("--embedded", "2") as lines:
        at = next(n for n, line in enumerate(lines) if line.startswith("lmetric-router "))
        fields = {name: text for name, _, text in (line.strip().partition(" ") for line in lines[at + 1 :])}
        assert fields["URL"].strip().startswith("http://127.0.0.1:")
        assert fields["model"].strip() == "emulated"
        assert fields["policy"].strip() == "total_delay, hot-spot guard on"
        assert fields["engines"].strip() == "2 of 2 usable: 2 exact"
        assert not any(text in line for line in lines for text in ("listening", "engine up", "identified"))
        curl = shlex.split(fields["try"])
        done = await asyncio.create_subprocess_exec(*curl, "-sS", stdout=asyncio.subprocess.PIPE)
        out, _ = await done.communicate()
        assert orjson.loads(out)["object"] == "text_completion"


async def test_engines_below_exact_are_warnings_with_the_fix() -> None:
    """UX, persona 1: a router without tokenizer said so only in an info line."""
    flags = ("--embedded", "2", "--set", "tokenizer=off", "--engine", "http://127.0.0.1:9")
    async with text_router(*flags) as lines:
        block = "\n".join(lines[next(n for n, x in enumerate(lines) if x.startswith("lmetric-router ")) :])
        assert "2 of 3 usable: 2 approximate" in block
        assert "WARNING  embedded-0, embedded-1: approximate: its events hold token ids" in block
        assert "fix: set tokenizer (doctor: --tokenizer)" in block
        assert "WARNING  127.0.0.1:9: not usable: no connection: Connection refused" in block


async def test_json_logs_have_one_event_for_the_start() -> None:
    async with engine() as fake, router("--engine", fake.url) as r:
        await r.listening()
        events = [orjson.loads(line) for line in r.log]
        start = events[-1]
        assert [each["event"] for each in events if "engine" in each["event"]] == []
        assert (start["level"], start["engines"], start["usable"]) == ("warning", 1, 1)
        [problem] = start["warnings"]
        assert (problem["what"], problem["names"]) == ("approximate", [f"127.0.0.1:{fake.port}"])
        assert start["models"][0]["policy"] == "total_delay"


async def test_an_engine_that_comes_later_is_logged_with_its_fix() -> None:
    late = FakeEngine()
    await late.start()
    await late.stop()
    with capture_logs() as logs:
        async with world(
            0, engines=[{"url": late.url, "name": "late"}], health={"interval": 0.02, "timeout": 1.0}
        ) as it:
            await late.start()
            await it.until(it.server.fleet.ready)
            await late.stop()
    [told] = [each for each in logs if each["event"] == "engine identified"]
    assert (told["log_level"], told["mode"]) == ("warning", "approximate")
    assert told["fix"] == "turn on KV events on the engine"


async def test_ready_counts_engines_for_everyone_and_names_them_for_administrators(tmp_path: Path) -> None:
    """/ready is open, so it contains neither names nor addresses without the admin token."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\n")
    engines: list[Any] = [{"url": "http://127.0.0.1:9", "name": "secret-name"}]
    began = time.time() - 1
    config: dict[str, Any] = {"auth": {"keys_file": str(keys)}, "admin": {"token": "root-token"}}
    async with world(1, **config) as it:
        engines.append({"url": it.engines[0].url, "name": "other-name"})
        status, body = await it.get("/ready")
        got = orjson.loads(body)
        assert (status, got["ready"], got["usable"], got["modes"]) == (200, True, 1, {"approximate": 1})
        assert [set(each) for each in got["warnings"]] == [{"what", "cause", "since", "fix", "engines"}]
        assert began <= got["warnings"][0]["since"] <= time.time() + 1
        assert "models" not in got
        got = orjson.loads((await it.get("/ready", ADMIN))[1])
        assert (got["warnings"][0]["names"], got["models"][0]["model"]) == (["e0"], "tiny")
    async with world(0, **config | {"engines": engines[:1]}) as it:
        for headers in ({}, {"authorization": "Bearer sk-alice"}):
            status, body = await it.get("/ready", headers)
            got = orjson.loads(body)
            assert (status, got["ready"], got["error"]["code"]) == (503, False, "not_ready")
            message = "not ready: no usable engine: connection refused (1 of 1 engines)"
            assert got["error"]["message"] == message
            assert b"secret-name" not in body
            assert b"127.0.0.1" not in body
        got = orjson.loads((await it.get("/ready", ADMIN))[1])
        assert got["warnings"][0]["names"] == ["secret-name"]
        assert began <= got["warnings"][0]["since"] <= time.time() + 1


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("router.local", "http://router.local:80"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
    ],
)
def test_urls(host: str, url: str) -> None:
    assert url_of(ServerConfig(host=host), 80) == url
    tls = ListenerTls.model_validate({"certificate_file": "a", "key_file": "b"})
    assert url_of(ServerConfig(host=host, tls=tls), 80) == url.replace("http:", "https:")


def test_the_command_quotes_model_names() -> None:
    words = shlex.split(sample_request("http://h:1", 'it\'s $HOME "x"', keys_needed=True))
    assert orjson.loads(words[-1])["model"] == 'it\'s $HOME "x"'
    assert "authorization: Bearer $API_KEY" in words


@pytest.mark.parametrize(
    ("config", "is_open"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "auth": {}}, False),
        ({"host": ""}, True),
    ],
)
async def test_the_block_says_that_there_are_no_keys(
    config: dict[str, Any], is_open: bool, tmp_path: Path
) -> None:
    """ux.md 3, smaller: `serve --host 0.0.0.0` without keys said nothing."""
    if "auth" in config:
        keys = tmp_path / "keys.yaml"
        keys.write_text("sk-0123456789abcdef: alice\n")
        config = config | {"auth": {"keys_file": str(keys)}}
    with capture_logs() as log:
        async with world(1, **config):
            pass
    (event,) = (each for each in log if each["event"] == "listening")
    assert ("NOTE     there are no API keys" in startup_block(event)) is is_open


def test_long_lists_of_engines_are_cut() -> None:
    problem: dict[str, Any] = {"what": "approximate", "reason": "why", "fix": "this", "engines": 9}
    problem["names"] = list("abcdefghi")
    event = {"version": "1", "url": "u", "host": "h", "port": 1, "policy": "p", "models": [], "engines": 9}
    event["page"] = "u/ui"
    text = startup_block(
        event | {"usable": 9, "modes": {}, "warnings": [problem], "open": False, "curl": None, "workers": 1}
    )
    assert "WARNING  a, b, c, d and 5 more: approximate: why\n           fix: this" in text
    assert "  policy   p\n  page     u/ui\n" in text
