"""`lmetric-router top`: the state of a running router in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from rich.console import Console

from cli_world import beside, process
from lmetric import top as top_module
from lmetric._core import LmetricError
from lmetric.canary.client import send
from lmetric.server.http.running import REPLACED
from lmetric.top import RouterUnavailableError, _extend, engines, ordered, read_decision, read_once, watch
from lmetric.top_screen import screen, why
from server_world import world
from tls_world import Authority, needs_openssl
from waiting import PATIENCE_SECONDS


async def top(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Runs the command beside the router. Returns its exit code, stdout and stderr."""
    done = await beside("top", *arguments, COLUMNS="110", **environment)
    return done.returncode, done.stdout, done.stderr


async def trusting(authority: Authority, url: str) -> tuple[int, str]:
    """Prints a router once in a process, which trusts an authority. Returns its code and stderr."""
    done = await asyncio.to_thread(process, "top", url, "--once", SSL_CERT_FILE=str(authority.file))
    return done.returncode, done.stderr


async def test_once_prints_engines_and_rates() -> None:
    async with world(3, policy="lmetric") as it:
        model = it.server.fleet.models[0]
        model.router.report_load("e2", waiting=2, running=5, kv_usage=0.25)
        model.engines["e0"].draining = True
        await it.post({"model": "tiny", "prompt": "a", "stream": True})
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (await read_once(it.url))["requests"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
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
    assert "TTFT p50, p95" in out
    assert "Busiest: e2 with batch 7 (2.0x the mean of its role)" in out
    shown = orjson.loads(state)
    assert shown["access"] == "admin"
    # The list of requests has the id for --why.
    assert shown["requests"][0]["id"] in out


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
        shown = text(screen(own))
        assert "2 of 2 engines usable" in shown
        assert "hot" not in shown  # engines are the administrator's
        code, out, _ = await top(it.url, "--once", LMETRIC__ADMIN__TOKEN="root-token")
        assert code == 0
        assert "e1" in out
        code, _, said = await top(it.url, "--once", "--token", "wrong")
        assert code == 1, said
        assert "unknown API key" in said
        assert "wrong" not in said


def text(shown: Any, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


async def test_why_prints_the_reason_the_engines_and_the_alternatives() -> None:
    async with world(3, policy="lmetric") as it:
        for name in ("e0", "e2"):
            it.server.fleet.models[0].router.report_load(name, waiting=2, running=5)
        _, headers, _ = await it.post({"model": "tiny", "prompt": "a" * 500, "stream": True})
        label = headers["x-lmetric-decision"]
        (code, out, _), (json_code, raw, _), (missing, _, said) = await asyncio.gather(
            top(it.url, "--why", label),
            top(it.url, "--why", label, "--json"),
            top(it.url, "--why", "99-00000000000000aa"),
        )
        record = await read_decision(it.url, label)
    assert (code, json_code, missing) == (0, 0, 1)
    assert "Because e1 had the least new prefill tokens x batch size" in " ".join(out.split())
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("e")}
    assert "✓" in lines["e1"]
    assert lines.keys() >= {"e0", "e1", "e2"}
    assert "score (lowest wins)" in out
    assert "p_token" in out
    assert "to first token" in out
    assert orjson.loads(raw)["timeline"] == record["timeline"] != []
    assert "no record of decision 99-00000000000000aa" in said


def test_why_draws_each_part_of_a_request_where_it_was() -> None:
    times = [("e0", "prefill", 0.0, 1.0), (None, "wait", -1.0, 0.0), ("e1", "decode", 1.0, 3.0)]
    keys = ("engine", "kind", "from_seconds", "to_seconds")
    timeline = [dict(zip(keys, each, strict=True)) for each in times]
    record = {"id": "1-a", "because": "because e0 was free.", "outcome": "finished", "timeline": timeline}
    lines = text(why(record)).splitlines()
    assert lines[:2] == ["Request 1-a: finished", "Because e0 was free."]
    bars = {line.split()[0]: (line.find("█"), line.count("█")) for line in lines if "█" in line}
    start = bars["router"][0]
    assert bars == {"router": (start, 8), "e0": (start + 8, 7), "e1": (start + 15, 15)}


async def test_rates_of_the_last_minutes() -> None:
    async with world(2) as it:
        await it.post({"model": "tiny", "prompt": "a", "stream": True})
        state = await read_once(it.url)
    fields = state["history"]["fields"]

    def point(at: float, **values: float | None) -> list[float | None]:
        return [at, *(values.get(name, 0.0) for name in fields[1:])]

    # 4 minutes with 2 requests per second, then 1 minute with 10; hits count by prompt tokens.
    early = {"requests_per_second": 2.0, "ttft_p50": 0.1, "ttft_p95": 0.2, "hit_rate": 1.0}
    late = {"requests_per_second": 10.0, "ttft_p50": 0.3, "ttft_p95": None, "hit_rate": 0.5}
    points = [point(float(at), **early, prompt_tokens_per_second=10.0) for at in range(1, 241)]
    points += [point(float(at), **late, prompt_tokens_per_second=120.0) for at in range(241, 301)]
    state["history"]["points"] = points
    lines = {line[:15].strip(): line for line in text(screen(state)).splitlines()}
    # Quantiles of single seconds give no quantile of minutes: these cells are empty.
    assert lines["TTFT p50, p95"].count(",") == 2, "in the title and in the present value"
    assert lines["requests/s"].split()[-3:-1] == ["10.0", "3.6"]
    assert lines["requests/s"].split()[-1] == "▂" * 12 + "█" * 3
    assert lines["hit rate"].split()[-3:-1] == ["50%", "62%"]  # (240 x 10 + 60 x 60) / (240 x 10 + 60 x 120)


async def test_requests_that_do_not_stream_have_their_end_to_end_time() -> None:
    async with world(1) as it:
        assert (await it.post())[0] == 200
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (state := await read_once(it.url))["requests"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    (request,) = state["requests"]
    request["seconds"] = 1.5
    state["now"] |= {"e2e_p50": 1.5, "e2e_p95": 2.5}
    for width in (80, 110):
        lines = text(screen(state, width=width), width=width).splitlines()
        assert "1.5 s, 2.5 s" in next(line for line in lines if line.startswith("E2E p50, p95"))
        assert "–, –" in next(line for line in lines if line.startswith("TTFT p50, p95"))
        row = next(line for line in lines if line.startswith(request["id"]))
        assert row.rstrip().endswith("200 in 1.5 s")
    # A stream has its TTFT instead, and an error its code.
    refused = {"status": 429, "code": "deadline"}
    for change, end in (({"ttft_seconds": 0.1}, "200"), (refused, "429 deadline")):
        changed = {**state, "requests": [{**request, **change}]}
        row = next(line for line in text(screen(changed)).splitlines() if line.startswith(request["id"]))
        assert row.rstrip().endswith(f"  {end}")


async def test_the_screen_fits_the_terminal() -> None:
    async with world(40) as it:
        for _ in range(30):
            await it.post()
        model = it.server.fleet.models[0]
        for number in range(9):
            model.activity.note(0.0, "handoff", number, "", "e0", "e1", "placed")
        state = await read_once(it.url)
    for height in (24, 40, 60):
        shown = text(screen(state, height=height))
        assert len(shown.splitlines()) <= height, shown
        assert "more engines" in shown
        assert "handoff e0 -> e1" in shown
    assert text(screen(state)).count("e39") == 1


async def test_the_status_comes_first_and_fits_a_narrow_terminal() -> None:
    async with world(2, policy="lmetric") as it:
        engine = it.server.fleet.models[0].engines["e0"]
        engine.failed("refused", "no connection: Connection refused")
        state = await read_once(it.url)
    lines = text(screen(state, width=80), width=80).splitlines()
    (about,) = (number for number, line in enumerate(lines) if line.startswith("tiny: policy lmetric = p_"))
    assert lines[0].startswith("e0: down since "), "problems come before everything else"
    down = 0
    assert "no connection: Connection refused; fix: start the engine" in " ".join(
        " ".join(lines[down : down + 2]).split()
    )
    assert down < about < lines.index(next(line for line in lines if "TTFT p50" in line))
    for line in lines:
        assert len(line.rstrip()) <= 80
        assert "…" not in line
    heads = [line.split() for line in lines if line.startswith("engine ")]
    assert heads == [["engine", "state", "mode", "batch", "queue", "tokens", "cache", "hits", "age"]]


async def test_the_key_q_ends_it() -> None:
    own, terminal = pty.openpty()
    async with world(1) as it:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lmetric.cli", "top", it.url),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(terminal)
        loop, seen = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while b"usable" not in seen:
                seen += await loop.run_in_executor(None, os.read, own, 4096)
            os.write(own, b"q")
            draining = loop.run_in_executor(None, drain, own)
            assert await running.wait() == 0
            await draining
    os.close(own)


def drain(file: int) -> None:
    """Reads until the last process has closed the terminal."""
    with contextlib.suppress(OSError):
        while os.read(file, 4096):
            pass


async def test_watch_yields_an_update_each_second() -> None:
    async with world(2) as it:
        states = []
        async for state in watch(it.url):
            times = [point[0] for point in state["history"]["points"]]
            states.append((state["tick"], len(engines(state)), times))
            if len(states) == 3:
                break
        assert [tick for tick, _, _ in states] == list(range(states[0][0], states[0][0] + 3))
        assert [count for _, count, _ in states] == [2, 2, 2]
        # Each update adds its second to the history once.
        assert [len(times) for _, _, times in states] == [tick for tick, _, _ in states]
        assert states[2][2] == sorted(set(states[2][2]))


async def test_watch_connects_again_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ended without a word when a worker was replaced."""
    monkeypatch.setattr(top_module, "RETRY_SECONDS", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(world(2))
        states = watch(it.url)
        running = it.server.front.running
        phase = running.phase
        async with asyncio.timeout(PATIENCE_SECONDS):
            before = (await anext(states))["tick"]
            running.phase = REPLACED  # its streams end
            shown = it.server.front.live
            assert shown is not None
            while shown.viewers.total():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            running.phase = phase
            state = await anext(states)
            assert (tick := state["tick"]) > before
            times = [point[0] for point in state["history"]["points"]]
            assert times == sorted(set(times))
            for connection in list(it.server.front.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            assert (await anext(states))["tick"] >= tick
        await stack.aclose()
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(RouterUnavailableError, match="check its URL, and that it runs"):
                [state async for state in states]


def test_a_step_back_of_the_clock_stops_no_history() -> None:
    """Points were left out until the clock had caught up."""
    history: list[list[Any]] = [[float(at)] for at in range(90, 103)]
    _extend(history, [*history[-9:], [95.5]])
    assert [point[0] for point in history] == [90, 91, 92, 93, 94, 95, 95.5]
    _extend(history, [*([float(at)] for at in range(95, 103)), [95.5], [96.5]])
    assert [point[0] for point in history[-3:]] == [95, 95.5, 96.5]
    _extend(history, [[95.5], [96.5], [97.5]])
    assert [point[0] for point in history[-3:]] == [95.5, 96.5, 97.5]
    _extend(history, [])
    assert len(history) == 9


async def test_errors_say_what_to_do() -> None:
    code, _, said = await top("127.0.0.1:8080", "--once")
    assert code == 2
    assert "did you mean http://127.0.0.1:8080" in said
    code, _, said = await top("http://127.0.0.1:9", "--once")
    assert code == 1, said
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


@needs_openssl
async def test_a_router_with_tls_says_what_the_client_lacks(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with world(1) as plain, world(1, tls=authority.issue("router").files) as secure:
        http, https = (f"{scheme}://127.0.0.1:{secure.server.port}" for scheme in ("http", "https"))
        other = plain.url.replace("http:", "https:")
        for url, hint in (
            (http, f"if it has TLS, use {https}"),
            (https, "if a private CA signed its certificate, set SSL_CERT_FILE to the file of the CA"),
            (other, f"if it has no TLS, use {plain.url}"),
        ):
            for asks in (read_once(url), send(url, None, "status")):
                with pytest.raises(LmetricError, match=rf"^{url}: no answer .*; {hint}$"):
                    await asks
        assert await trusting(authority, https) == (0, "")


@needs_openssl
async def test_a_router_with_an_expired_certificate_names_the_fix(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with world(1, tls=authority.issue("old", days=-1).files) as it:
        url = f"https://127.0.0.1:{it.server.port}"
        code, said = await trusting(authority, url)
    assert code == 1, said
    assert "certificate has expired" in said
    assert f"renew the files of its `tls`, which it reads again; until then: curl -k {url}/debug/live" in said


def test_engines_that_are_not_usable_come_first() -> None:
    def row(name: str, state: str, batch: float | None) -> dict[str, Any]:
        return {"name": name, "state": state, "batch": batch}

    rows = [row("a", "usable", 1), row("b", "usable", 9), row("c", "down", None), row("d", "usable", None)]
    assert [each["name"] for each in ordered(rows, "batch")] == ["c", "b", "a", "d"]
