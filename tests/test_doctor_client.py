"""The client of `doctor`, `calibrate` and gateways on engines and proxies that answer oddly."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import EngineConfig
from lmetric.doctor import Target, examine
from lmetric.doctor import client as doctor_client
from lmetric.doctor.client import StreamingClient
from lmetric.engines.http import MAX_BODY_BYTES, EngineClient, Unanswered
from lmetric_lab.calibrate.ask import Asker
from lmetric_lab.calibrate.plan import CalibrationError
from lmetric_lab.emulated import EngineOptions, EngineServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[str]:
    """A server with one handler for all pages: its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def test_an_endless_body_is_refused() -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            sent += 65536

    async with answering(endless) as url, aiohttp.ClientSession() as session:
        client = EngineClient(session, url)
        with pytest.raises(Unanswered, match="GET /metrics: a body of more than 16 MiB"):
            await client.get("/metrics", seconds=20)
    assert sent < 4 * MAX_BODY_BYTES


async def test_a_body_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(MAX_BODY_BYTES), 9)
    asked = []

    async def packed(request: web.Request) -> web.Response:
        asked.append(request.headers["accept-encoding"])
        return web.Response(body=bomb, headers={"content-encoding": "gzip"})

    async with answering(packed) as url, aiohttp.ClientSession() as session:
        with pytest.raises(Unanswered, match=r"GET /v1/models: a compressed body \(gzip\)"):
            await EngineClient(session, url).page("/v1/models")
    assert asked == ["identity"]


async def test_redirects_are_named_and_not_followed() -> None:
    async with EngineServer(EngineOptions(port=0, clock_speed=20)) as engine:

        async def elsewhere(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"location": engine.url + request.path})

        async with answering(elsewhere) as url, aiohttp.ClientSession() as session:
            said = f"redirects to {engine.url}/v1/models: use that URL"
            [found] = await examine([Target(EngineConfig(url=url))])
            assert "(status 307: redirects to" in found.verdicts["reachable"].seen
            model = found.verdicts["model"]
            assert (model.outcome, model.seen) == ("fail", f"GET /v1/models: status 307: {said}")
            with pytest.raises(CalibrationError, match=said):
                await Asker(session, url).facts(None)
            # Other pages are optional: an engine may redirect /metrics to /metrics/.
            assert (await EngineClient(session, url).page("/metrics"))[0] == 307
            with pytest.raises(Unanswered, match=f"status 307: redirects to {engine.url}"):
                async with StreamingClient(session, url).stream({"model": "tiny", "prompt": "a"}):
                    pass


async def test_an_error_page_without_end_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_client, "PATIENCE_SECONDS", 0.5)

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=503)
        await response.prepare(request)
        while True:
            await response.write(b"overloaded ")
            await asyncio.sleep(0.05)

    async with answering(trickle) as url, aiohttp.ClientSession() as session, asyncio.timeout(10):
        with pytest.raises(Unanswered, match="status 503: overloaded"):
            async with StreamingClient(session, url).stream({"model": "tiny", "prompt": "a"}):
                pass


@pytest.mark.parametrize(("status", "outcome"), [(200, "pass"), (404, "pass"), (499, "pass"), (500, "fail")])
async def test_health_is_what_the_server_takes_for_healthy(status: int, outcome: str, tmp_path: Path) -> None:
    asked = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.Response(status=status)

    file = tmp_path / "router.yaml"
    async with answering(page) as url:
        file.write_text(yaml.safe_dump({"engines": [{"url": url}], "health": {"path": "/up?deep=1"}}))
        for arguments in (["--config", str(file)], ["--config", str(file), url]):
            shown = await asyncio.to_thread(
                CliRunner().invoke, build(["doctor"]), ["doctor", "--json", *arguments]
            )
            assert asked[0] == "/up?deep=1"
            asked.clear()
            assert f'"GET /up?deep=1{":" if outcome == "fail" else ""} ' in shown.stdout
        [found] = await examine([Target(EngineConfig(url=url))])
    verdict = found.verdicts["reachable"]
    assert (asked[0], verdict.outcome) == ("/health", outcome), verdict
