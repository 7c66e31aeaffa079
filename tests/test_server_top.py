"""`lmetric-router top`: the state of a running router in the terminal."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from rich.console import Console

from lmetric.top import RouterUnavailableError, engines, ordered, read_once, screen, watch
from server_world import world


async def top(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Runs the command. Returns its exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lmetric.cli", "top", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "110", **environment},
    )
    out, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), said.decode()


async def test_once_prints_engines_and_rates() -> None:
    async with world(3, policy="lmetric") as it:
        pool = it.server.fleet.pools[0]
        pool.router.report_load("e2", waiting=2, running=5, kv_usage=0.25)
        pool.engines["e0"].draining = True
        await it.post({"model": "tiny", "prompt": "a", "stream": True})
        (code, out, _), (json_code, state, _) = await asyncio.gather(
            top(it.url, "--once"), top(it.url + "/", "--json")
        )
    assert (code, json_code) == (0, 0)
    lines = [line.split() for line in out.splitlines() if line.strip().startswith("e")]
    # The draining engine is first, then the fullest one.
    assert [line[0] for line in lines if line[0] in ("e0", "e1", "e2")] == ["e0", "e2", "e1"]
    assert next(line for line in lines if line[0] == "e0")[1] == "draining"
    assert "7" in next(line for line in lines if line[0] == "e2")
    assert "25%" in out
    assert "2 of 3 engines usable" in out
    assert "TTFT" in out
    assert orjson.loads(state)["access"] == "admin"


async def test_credentials(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\n")
    closed = {"auth": {"keys_file": str(keys)}, "admin": {"token": "root-token"}}
    async with world(2, **closed) as it:
        with pytest.raises(RouterUnavailableError, match=r"status 401: no API key.*; give --token"):
            await read_once(it.url)
        own = await read_once(it.url, "sk-alice")
        assert own["access"] == "tenant"
        assert engines(own) == []
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(screen(own))
        assert "2 of 2 engines usable" in console.export_text()
        code, out, _ = await top(it.url, "--once", LMETRIC_ADMIN__TOKEN="root-token")
        assert code == 0
        assert "e1" in out
        code, _, said = await top(it.url, "--once", "--token", "wrong")
        assert code == 1
        assert "unknown API key" in said
        assert "wrong" not in said


async def test_watch_yields_an_update_each_second() -> None:
    async with world(2) as it:
        states = []
        async for state in watch(it.url):
            states.append((state["tick"], len(engines(state))))
            if len(states) == 2:
                break
        assert states[1][0] == states[0][0] + 1
        assert [count for _, count in states] == [2, 2]


async def test_errors_say_what_to_do() -> None:
    code, _, said = await top("127.0.0.1:8000", "--once")
    assert code == 2
    assert "did you mean http://127.0.0.1:8000" in said
    code, _, said = await top("http://127.0.0.1:9", "--once")
    assert code == 1
    assert "check its URL, and that it runs" in said
    assert "Traceback" not in said


async def test_another_server_is_not_a_router() -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(text="<html>", status=404)

    async def broken(_: web.BaseRequest) -> web.Response:
        return web.Response(text="{", content_type="application/json")

    for handler, expected in (
        (answer, "status 404: the answer is not from lmetric-router"),
        (broken, "no answer"),
    ):
        runner = web.ServerRunner(web.Server(handler))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            with pytest.raises(RouterUnavailableError, match=expected):
                await read_once(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()


def test_engines_that_are_not_usable_come_first() -> None:
    def row(name: str, state: str, batch: float | None) -> dict[str, Any]:
        return {"name": name, "state": state, "batch": batch}

    rows = [row("a", "usable", 1), row("b", "usable", 9), row("c", "down", None), row("d", "usable", None)]
    assert [each["name"] for each in ordered(rows, "batch")] == ["c", "b", "a", "d"]
