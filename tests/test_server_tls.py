"""TLS of clients: certificates, their replacement, and connections without a handshake."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
from structlog.testing import capture_logs

from lmetric.config import ConfigError, ServerConfig
from lmetric.server import Server
from lmetric.server.http import tls_listener
from lmetric.server.tls import contexts
from lmetric.server.tls.certificate import expiry
from lmetric_lab.ports import free_ports
from server_world import FakeEngine, World, world
from tls_world import Authority, Pair, needs_openssl, subject_of
from waiting import until

pytestmark = needs_openssl

BODY = {"model": "tiny", "prompt": "a"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def secure_world(
    pair: Pair, *engines: FakeEngine, tls: Any = None, **config: Any
) -> AsyncIterator[World]:
    async with world(list(engines) or 1, tls={**pair.files, **(tls or {})}, **config) as w:
        w.url = f"https://127.0.0.1:{w.server.port}"
        yield w


async def post(w: World, context: ssl.SSLContext, body: Any = None) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client,
        client.post(f"{w.url}/v1/completions", json=body or BODY) as response,
    ):
        return response.status, await response.read()


def metric(page: bytes, start: str) -> float:
    (line,) = [line for line in page.decode().splitlines() if line.startswith(start)]
    return float(line.rpartition(" ")[2])


async def page_of(w: World, context: ssl.SSLContext, path: str = "/metrics") -> bytes:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client,
        client.get(f"{w.url}{path}") as response,
    ):
        assert response.status == 200
        return await response.read()


async def test_requests_over_tls_take_all_paths(authority: Authority) -> None:
    """Plain answers, streams, kept connections, pipelined requests, large bodies."""
    async with secure_world(authority.issue("router")) as w:
        context = authority.client()
        connector = aiohttp.TCPConnector(ssl=context, limit=1)
        async with aiohttp.ClientSession(connector=connector) as client:
            for body in (BODY, BODY | {"stream": True}, BODY | {"prompt": "long " * 100_000}):
                async with client.post(f"{w.url}/v1/completions", json=body) as response:
                    answer = await response.read()
                    assert response.status == 200
                    assert answer.endswith(b"[DONE]\n\n" if "stream" in body else b"}")
            async with client.post(f"{w.url}/v1/completions", data=b"{", chunked=True) as response:
                assert response.status == 400, "through aiohttp"
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port, ssl=context)
        data = orjson.dumps(BODY)
        one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        writer.write(one * 3)
        for _ in range(3):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b" 200 " in head
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
        writer.close()
        assert w.engines[0].requests[-1].headers["x-forwarded-proto"] == "https"
        page = await page_of(w, context)
        assert metric(page, 'lmetric_tls_handshakes_total{outcome="done"}') == 3
        assert abs(metric(page, "lmetric_tls_certificate_expiry") - time.time() - 30 * 86400) < 3600


async def test_clients_that_speak_no_tls_are_closed(authority: Authority) -> None:
    async with secure_world(authority.issue("router")) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" not in await reader.read()
        writer.close()
        old = authority.client()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with_2 = await page_of(w, old, "/health")
        assert with_2 == b""
    async with secure_world(authority.issue("router2"), tls={"min_version": 1.3}) as w:
        with pytest.raises(aiohttp.ClientError):
            await page_of(w, old, "/health")
        page = await page_of(w, authority.client())
        assert metric(page, 'lmetric_tls_handshakes_total{outcome="failed"}') == 1
        assert w.server.front.clients.connections <= 1


async def test_client_certificates(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    known, unknown = authority.issue("known"), other.issue("unknown")
    pair = authority.issue("router")
    tls = {"client_ca_file": str(authority.file)}
    async with secure_world(pair, tls=tls) as w:
        assert (await post(w, authority.client(known)))[0] == 200
        for own in (None, unknown):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await post(w, authority.client(own))
        await until(lambda: w.server.front.clients.connections == 0)
    async with secure_world(pair, tls=tls | {"client_certificates": "optional"}) as w:
        assert (await post(w, authority.client(known)))[0] == 200
        assert (await post(w, authority.client()))[0] == 200
        with pytest.raises((aiohttp.ClientError, OSError)):
            await post(w, authority.client(unknown))


async def test_changed_certificates_are_used_and_bad_ones_are_not(authority: Authority) -> None:
    gate = asyncio.Event()

    async def gated(engine: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        from server_world import STREAM_HEAD, STREAM_TAIL, chunk, token

        writer.write(STREAM_HEAD + chunk(token("a")))
        await gate.wait()
        writer.write(chunk(token("b", "length")) + STREAM_TAIL)
        return True

    first, second = authority.issue("first"), authority.issue("second")
    other = authority.issue("other")
    context = authority.client()
    async with secure_world(first, FakeEngine(behave=gated)) as w:
        stream = asyncio.create_task(post(w, context, BODY | {"stream": True}))
        await w.engines[0].asked(1)
        assert await subject_of(w.server.port, context) == "first"
        first.replace(second)
        tls = w.server.front.tls
        assert tls is not None
        before = tls.context
        await until(lambda: tls.context is not before)
        assert await subject_of(w.server.port, context) == "second"
        with capture_logs() as logs:
            first.key.write_bytes(other.key.read_bytes())
            await until(lambda: tls.failures == 1)
            first.certificate.write_text("no certificate")
            await until(lambda: tls.failures == 2)
        reasons = [line["reason"] for line in logs if line["log_level"] == "error"]
        (problem,) = w.server.fleet.own_problems()
        assert problem.reason == reasons[1]
        assert "the key is not the certificate's" in reasons[0]
        assert "expected PEM files" in reasons[1]
        assert await subject_of(w.server.port, context) == "second"
        assert metric(await page_of(w, context), "lmetric_tls_reload_failures_total") == 2
        gate.set()
        assert (await stream)[1].endswith(b"[DONE]\n\n"), "the stream began under the first certificate"


async def test_a_certificate_that_expires_soon_is_logged(authority: Authority) -> None:
    pair = authority.issue("router", days=5)
    with capture_logs() as logs:
        async with secure_world(pair) as w:
            await until(lambda: any("expires soon" in line["event"] for line in logs))
            assert w.server.front.tls is not None
            w.server.front.tls.refresh()
            (problem,) = w.server.fleet.own_problems()
            assert (problem.what, problem.is_bad) == ("certificate", False)
            assert str(pair.certificate) in problem.reason
    (line,) = [line for line in logs if "expires soon" in line["event"]]
    assert 4.9 < line["days"] <= 5.0
    assert line["certificate"] == str(pair.certificate)


async def test_an_expired_certificate_is_logged_and_its_successor_is_used(authority: Authority) -> None:
    old, new = authority.issue("old", days=-1), authority.issue("new")
    unchecked = authority.client()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    expiry_metric = "lmetric_tls_certificate_expiry"
    with capture_logs() as logs:
        async with secure_world(old) as w:
            with pytest.raises(aiohttp.ClientError, match="certificate has expired"):
                await post(w, authority.client())
            assert (await post(w, unchecked))[0] == 200, "clients decide whether they accept it"
            assert metric(await page_of(w, unchecked), expiry_metric) < time.time()
            await until(lambda: any("has expired" in line["event"] for line in logs))
            (problem,) = w.server.fleet.own_problems()
            assert "expired on 20" in problem.reason
            old.replace(new)
            tls = w.server.front.tls
            assert tls is not None
            await until(lambda: tls.expires_at > time.time())
            assert (await post(w, authority.client()))[0] == 200
            assert metric(await page_of(w, authority.client()), expiry_metric) > time.time()
    assert len([line for line in logs if "has expired" in line["event"]]) == 1


def with_clock(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, wall: Callable[[], float], monotonic: Callable[[], float]
) -> contexts.TlsContext:
    """The context of a listener that reads these clocks."""
    clock = SimpleNamespace(time=wall, monotonic=monotonic, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(contexts, "time", clock)
    config = ServerConfig.model_validate({"tls": pair.files, "embedded": 1})
    assert config.tls is not None
    return contexts.listener_context(config.tls)


def test_a_wall_clock_that_is_set_back_hides_no_warning(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning of a clock that was a year ahead is no reason for a year without warnings."""
    pair = authority.issue("router", days=5)
    began, ahead, later = time.time(), 365 * 86_400.0, 0.0
    context = with_clock(monkeypatch, pair, lambda: began + ahead + later, lambda: 1e6 + later)
    with capture_logs() as logs:
        context.refresh()
        ahead, later = 0.0, 2 * 86_400.0
        context.refresh()
    assert ["expired" in line["event"] for line in logs] == [True, False], logs


def test_the_end_of_a_certificate_is_logged_when_it_comes(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning of the last day does not delay the error, and no text has days below 0."""
    pair = authority.issue("router", days=1)
    began, later = time.time(), 0.0
    context = with_clock(monkeypatch, pair, lambda: began + later, lambda: 1e6 + later)
    with capture_logs() as logs:
        for later in (86_000.0, 86_500.0, 86_600.0):  # noqa: B007 (the clock reads it)
            context.refresh()
    assert [(line["log_level"], line["event"].rpartition(" ")[2]) for line in logs] == [
        ("warning", "soon"),
        ("error", "expired"),
    ]
    assert logs[0]["days"] == 0.0
    assert logs[1]["expired"] == context.expiry_text()


async def test_connections_without_a_handshake_are_bounded(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_SECONDS", 1.0)
    limits = {"max_connections": 12, "max_client_share": 0.25}
    async with secure_world(authority.issue("router"), limits=limits) as w:
        front = w.server.front
        idle = [await asyncio.open_connection("127.0.0.1", w.server.port) for _ in range(3)]
        await until(lambda: front.clients.connections == 3)
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        assert await reader.read() == b""
        writer.close()
        assert front.clients.refused["connections_per_client"] == 1
        await until(lambda: front.clients.connections == 0)
        assert front.handshakes.outcomes["timeout"] == 3
        for _, writer in idle:
            writer.close()
        assert (await post(w, authority.client()))[0] == 200
        # A client that leaves in the middle of its handshake.
        _, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        writer.write(b"\x16\x03\x01\x02\x00")
        await until(lambda: front.clients.connections == 1)
        writer.close()
        await until(lambda: front.clients.connections == 0)


async def test_the_server_stops_while_clients_shake_hands(authority: Authority) -> None:
    async with secure_world(authority.issue("router")) as w:
        _, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        await until(lambda: len(w.server.front.handshakes.running) == 1)
    assert not w.server.front.handshakes.running
    writer.close()


def test_bad_files_are_errors_of_the_configuration(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("good"), authority.issue("other")
    secret = tmp_path / "secret.key"
    secret.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for files, said in (
        ({"certificate_file": "/nowhere.pem"}, r"tls.certificate_file: /nowhere.pem: No such file"),
        ({"key_file": "/nowhere.pem"}, r"tls.key_file: /nowhere.pem: No such file"),
        ({"key_file": str(other.key)}, "the key is not the certificate's"),
        ({"key_file": str(secret)}, "without a password"),
        ({"client_ca_file": str(good.key)}, "no certificate"),
        ({"client_ca_file": "/nowhere.pem"}, "tls.client_ca_file: /nowhere.pem: No such file"),
    ):
        config = ServerConfig.model_validate({"tls": {**good.files, **files}, "embedded": 1})
        with pytest.raises(ConfigError, match=said):
            Server(config).build()


def test_the_end_of_a_certificate_is_read(authority: Authority, tmp_path: Path) -> None:
    for days in (1, 400, 20_000):  # 20,000: the year has four digits
        pair = authority.issue(f"d{days}", days=days)
        assert abs(expiry(pair.certificate) - time.time() - 86400 * days) < 3600
    for text in ("", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        file = tmp_path / "bad.pem"
        file.write_text(text)
        with pytest.raises(ValueError, match="certificate"):
            expiry(file)


async def test_routers_exchange_their_load_over_tls(authority: Authority) -> None:
    pair = authority.issue("router")
    tls = {"ca_file": str(authority.file), **pair.files, "server_name": "localhost"}
    listener = {**pair.files, "client_ca_file": str(authority.file)}
    ports = free_ports(2)
    urls = [f"https://127.0.0.1:{port}" for port in ports]
    replicas = {"urls": urls, "interval": 0.02, "tls": tls}
    async with world(tls=listener, replicas=replicas, port=ports[0]) as a:
        engines = [{"url": engine.url, "name": engine.name} for engine in a.engines]
        config = {"tls": listener, "replicas": replicas, "port": ports[1], "engines": engines}
        async with world([], **config) as b:
            await until(lambda: a.server.front.replicas.received and b.server.front.replicas.received)
