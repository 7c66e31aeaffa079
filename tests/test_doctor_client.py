"""The client of `doctor`, `calibrate` and gateways on engines and proxies that answer oddly."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import EngineConfig, PoolSettings
from lmetric.doctor import Level, Target, examine
from lmetric.doctor import client as doctor_client
from lmetric.doctor import handover as doctor_handover
from lmetric.doctor import priority as doctor_priority
from lmetric.doctor import run as doctor_run
from lmetric.doctor.client import StreamingClient
from lmetric.doctor.subject import Subject
from lmetric.engines.adapter import MAX_BODY_BYTES
from lmetric.engines.http import EngineClient, Unanswered
from lmetric_lab.calibrate.ask import Asker
from lmetric_lab.calibrate.plan import CalibrationError
from lmetric_lab.emulated import EngineOptions, EngineServer
from waiting import until

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


@contextlib.asynccontextmanager
async def altered(
    url: str,
    change: Callable[[str, bytes], bytes | None],
    before_stream: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
    **headers: str,
) -> AsyncIterator[str]:
    """A proxy before an engine: its URL. It replaces bodies by path, and headers of all answers.

    ``before_stream``: called with the body of each streamed request before its first event.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            sent = {name: value for name, value in request.headers.items() if name != "Host"}
            body = await request.read()
            async with session.request(request.method, url + request.path_qs, data=body, headers=sent) as got:
                kind = got.headers.get("Content-Type", "text/plain")
                if kind.startswith("text/event-stream"):
                    response = web.StreamResponse(headers={"Content-Type": kind})
                    await response.prepare(request)
                    begun = before_stream is None
                    async for piece in got.content.iter_any():
                        if before_stream is not None and not begun:
                            await before_stream(json.loads(body))
                            begun = True
                        await response.write(piece)
                    return response
                content = await got.read()
                content = content if (new := change(request.path, content)) is None else new
                return web.Response(
                    status=got.status, body=content, headers={"Content-Type": kind, **headers}
                )

        async with answering(forward) as proxy:
            yield proxy


@contextlib.asynccontextmanager
async def served(**options: Any) -> AsyncIterator[str]:
    """An emulated engine: its URL."""
    async with EngineServer(EngineOptions(port=0, clock_speed=20, **options)) as engine:
        yield engine.url


def without_change(path: str, body: bytes) -> bytes | None:
    return None


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


@pytest.mark.parametrize(
    "date",
    [
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 01 Jan 2026 00:00:00 +99999999999999999999",
        "Mon, 01 Jan 0001 00:00:00 -0000",
        "yesterday",
    ],
)
async def test_a_date_beyond_all_bounds(date: str) -> None:
    async with served() as url, altered(url, without_change, Date=date) as proxy:
        [found] = await examine([Target(EngineConfig(url=proxy))])
    clock = found.verdicts["clock"]
    assert clock.outcome in ("not offered", "fail"), clock
    assert "the check ended with" not in clock.seen
    assert not found.wanting(Level.APPROXIMATE)


@pytest.mark.parametrize("bad", ["17", -1, 2**32, True, 1.5, None])
async def test_token_ids_that_are_none(bad: object) -> None:
    def change(path: str, body: bytes) -> bytes | None:
        if path != "/tokenize":
            return None
        told = json.loads(body)
        return json.dumps(told | {"tokens": [*told["tokens"][:-1], bad]}).encode()

    options = {"kv_events_endpoint": "tcp://*:0", "kv_events_replay_endpoint": "tcp://*:0"}
    async with served(**options) as url, altered(url, change) as proxy:
        [found] = await examine([Target(EngineConfig(url=proxy), None, PoolSettings(tokenizer="off"))])
    verdict = found.verdicts["prefix_cache"]
    assert (verdict.outcome, "returns no token IDs" in verdict.seen) == ("not offered", True), verdict


async def test_a_completion_without_text_ends_no_other_check() -> None:
    def change(path: str, body: bytes) -> bytes | None:
        if path != "/v1/completions":
            return None
        told = json.loads(body)
        return json.dumps({**told, "choices": [{}]}).encode()

    pair = {"kv_connector": "nixl", "model": "pair"}
    async with (
        served(**pair, role="prefill") as one,
        served(**pair, role="decode") as two,
        served() as sound,
        altered(one, change) as proxy,
    ):
        found = await examine([Target(EngineConfig(url=url)) for url in (proxy, two, sound)])
    for each in found[:2]:
        handover = each.verdicts["handover"]
        assert (handover.outcome, "a completion without a text" in handover.seen) == ("fail", True), handover
    assert found[2].level is Level.APPROXIMATE


@pytest.mark.parametrize(
    ("place", "check"),
    [
        ("check_reachable", "reachable"),
        ("check_model", "model"),
        ("check_token_gaps", "token_gaps"),
        ("check_load_and_cancel", "load"),
        ("check_tokenizer", "tokenizer"),
        ("check_cache", "prefix_cache"),
        ("check_priority", "priority"),
    ],
)
async def test_an_error_in_a_check_is_a_verdict_on_its_engine(
    place: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any unforeseen error lost the verdicts on all engines."""
    async with served() as url, served() as other:
        sound = getattr(doctor_run, place)

        def fails(subject: Subject, *rest: Any, **more: Any) -> Any:
            if subject.client.url == url:
                raise LookupError("odd")
            return sound(subject, *rest, **more)

        monkeypatch.setattr(doctor_run, place, fails)
        bad, good = await examine(
            [Target(EngineConfig(url=each), token_seconds=1.0) for each in (url, other)]
        )
    verdict = bad.verdicts[check]
    assert verdict.outcome == "fail"
    assert verdict.seen.startswith("the check ended with LookupError: odd (test_doctor_client.py:")
    assert good.level is Level.APPROXIMATE


async def test_an_error_in_the_check_of_a_transfer_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> str:
        raise LookupError("odd")

    monkeypatch.setattr(doctor_handover, "_hand_over", fails)
    pair = {"kv_connector": "nixl", "model": "pair"}
    async with served(**pair) as one, served(**pair) as two:
        found = await examine([Target(EngineConfig(url=url)) for url in (one, two)])
    assert all("LookupError: odd" in each.verdicts["handover"].seen for each in found)


@pytest.mark.parametrize("block", [16, 64, 528])
@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_a_drafter_computes_the_last_block_again(block: int, api: str) -> None:
    """vLLM 0.32 with EAGLE or MTP drops the last block of each hit, which was a FAIL."""
    reported = []

    def change(path: str, body: bytes) -> bytes | None:
        if path != "/v1/completions":
            return None
        told = json.loads(body)
        details = told["usage"]["prompt_tokens_details"]
        if details["cached_tokens"]:
            details["cached_tokens"] -= block
            reported.append(details["cached_tokens"])
        return json.dumps(told).encode()

    options = {"kv_events_endpoint": "tcp://*:0", "kv_events_replay_endpoint": "tcp://*:0", "api": api}
    async with served(**options, block_tokens=block) as url, altered(url, change) as proxy:
        [found] = await examine([Target(EngineConfig(url=proxy))])
    assert not found.wanting(Level.EXACT), found
    assert reported == [{16: 48, 64: 128, 528: 1056}[block]]
    for check in ("cached_tokens", "block_hashes"):
        assert "as with a drafter (EAGLE, MTP)" in found.verdicts[check].seen


@pytest.mark.parametrize("less", [1, 8, 32, 64])
async def test_a_wrong_number_of_cached_tokens_fails(less: int) -> None:
    def change(path: str, body: bytes) -> bytes | None:
        if path != "/v1/completions":
            return None
        told = json.loads(body)
        details = told["usage"]["prompt_tokens_details"]
        details["cached_tokens"] = max(0, details["cached_tokens"] - less)
        return json.dumps(told).encode()

    options = {"kv_events_endpoint": "tcp://*:0", "kv_events_replay_endpoint": "tcp://*:0"}
    async with served(**options) as url, altered(url, change) as proxy:
        [found] = await examine([Target(EngineConfig(url=proxy))])
    assert found.wanting(Level.EXACT) == ["cached_tokens", "block_hashes"]


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_ranks_without_events_are_asked_by_name(api: str) -> None:
    """The second prompt reached another rank, whose cache was empty: FAIL of a sound engine."""
    async with served(api=api, ranks=3, order="priority") as url:
        [found] = await examine([Target(EngineConfig(url=url))])
    assert not found.wanting(Level.APPROXIMATE), found
    assert found.verdicts["cached_tokens"].seen == "64 of 73 reported, as expected"


@pytest.mark.parametrize(
    ("disturbed", "says"),
    [
        (1, "and its queue follows them: an urgent request overtook 8 of the 8 that waited"),
        (99, "order not certain: an urgent request overtook 0 to 8 of the 8 that waited, in the last of 3"),
    ],
)
async def test_late_events_are_no_order_of_the_queue(
    disturbed: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first event of the urgent request was late: FAIL of an engine that follows priorities."""
    monkeypatch.setattr(doctor_priority, "LOT_SECONDS", 0.2)
    monkeypatch.setattr(doctor_priority, "QUEUED_SECONDS", 0.1)
    begun, urgent = 0, 0

    async def late(body: dict[str, Any]) -> None:
        nonlocal begun, urgent
        if body.get("priority", 1) > 0:  # lower values first: a patient request
            begun += 1
            return
        urgent += 1
        expected = begun + 8
        if urgent <= disturbed:
            await until(lambda: begun >= expected)

    options = EngineOptions(port=0, clock_speed=0.5, order="priority", max_sequences=8)
    async with EngineServer(options) as engine, altered(engine.url, without_change, late) as proxy:
        [found] = await examine([Target(EngineConfig(url=proxy))], thorough=True)
    verdict = found.verdicts["priority"]
    assert (verdict.outcome, says in verdict.seen) == ("pass", True), verdict
    assert urgent == min(disturbed + 1, doctor_priority.TRIALS)
