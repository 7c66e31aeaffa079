"""TLS to engines: own CAs, names, client certificates, unchecked certificates."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from lmetric.config import ConfigError, DiscoverySource, EngineConfig, PoolSettings, ServerConfig
from lmetric.doctor import Target, examine
from lmetric.server import Server
from lmetric.server.discovery.dns import DnsNames
from server_world import FakeEngine, world
from tls_world import Authority, needs_openssl
from waiting import PATIENCE_SECONDS, until

pytestmark = needs_openssl


class SecureEngine(FakeEngine):
    """An engine behind TLS. ``names``: the names that clients sent as SNI."""

    context: ssl.SSLContext
    names: list[str | None]

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"

    async def start(self) -> None:
        self.names = []
        self.context.sni_callback = lambda _, name, __: self.names.append(name)
        self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]


def secure_engine(context: ssl.SSLContext) -> SecureEngine:
    engine = SecureEngine()
    engine.context = context
    return engine


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def entry(engine: FakeEngine, tls: Any = None) -> dict[str, Any]:
    return {"url": engine.url, "name": "e0", **({"tls": tls} if tls is not None else {})}


async def started(engine: SecureEngine) -> SecureEngine:
    """Starts an engine to learn its port. `world` then starts it on this port."""
    await engine.start()
    await engine.stop()
    return engine


async def test_engines_of_an_own_ca(authority: Authority) -> None:
    engine = await started(secure_engine(authority.server(authority.issue("engine"))))
    ca = {"ca_file": str(authority.file)}
    for config in (
        {"engines": [entry(engine, ca)]},
        {"engines": [entry(engine)], "engine_tls": ca},
        {"models": [{"name": "tiny", "engine_tls": ca, "engines": [entry(engine)]}], "engines": []},
    ):
        async with world([engine], **config) as w:
            assert (await w.post())[0] == 200
            assert w.server.fleet.ready(), "health checks use the CA, too"
    async with world([engine], engines=[entry(engine)]) as w:
        status, _, answer = await w.post()
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert "certificate is not valid" in answer["error"]["message"]


async def test_the_name_in_an_engines_certificate(authority: Authority) -> None:
    pair = authority.issue("named", names="DNS:engine.internal")
    engine = await started(secure_engine(authority.server(pair)))
    ca = {"ca_file": str(authority.file)}
    async with world([engine], engines=[entry(engine, ca)]) as w:
        assert "certificate is not valid" in (await w.post())[2]["error"]["message"]
    async with world([engine], engines=[entry(engine, ca | {"server_name": "engine.internal"})]) as w:
        assert (await w.post())[0] == 200
        assert set(engine.names) == {"engine.internal"}


async def test_engines_that_require_a_certificate(authority: Authority) -> None:
    context = authority.server(authority.issue("engine"), asks_clients=True)
    engine = await started(secure_engine(context))
    ca = {"ca_file": str(authority.file)}
    own = authority.issue("router")
    async with world([engine], engines=[entry(engine, ca | own.files)]) as w:
        assert (await w.post())[0] == 200
        # The router's certificate changes: new connections use the new one.
        tls = w.server.fleet.models[0].engines["e0"].upstream.tls
        assert tls is not None
        before = tls.context
        own.replace(authority.issue("router2"))
        await until(lambda: tls.context is not before)
        w.server.fleet.models[0].engines["e0"].upstream.clear()
        assert (await w.post())[0] == 200
    async with world([engine], engines=[entry(engine, ca)]) as w:
        assert (await w.post())[0] == 503


async def test_an_engine_with_an_expired_certificate_is_out_and_another_serves(authority: Authority) -> None:
    """The expired one is named with the reason, and serves again with a new certificate."""
    expired = authority.server(authority.issue("expired", days=-1))
    engines = [
        await started(secure_engine(context))
        for context in (expired, authority.server(authority.issue("good")))
    ]
    ca = {"ca_file": str(authority.file)}
    entries = [entry(engine, ca) | {"name": f"e{n}"} for n, engine in enumerate(engines)]
    with capture_logs() as logs:
        async with world(engines, engines=entries, health={"interval": 0.05}) as w:
            assert [(await w.post())[0] for _ in range(4)] == [200] * 4
            assert [len(engine.requests) for engine in engines] == [0, 4]
            pair = authority.issue("renewed")
            expired.load_cert_chain(pair.certificate, pair.key)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not engines[0].requests:
                    assert (await w.post())[0] == 200
                    await asyncio.sleep(0.02)
    assert any("certificate has expired" in str(line) for line in logs), logs


async def test_a_certificate_that_expires_under_load_loses_no_request(authority: Authority) -> None:
    """New connections fail before the request is sent, and another engine serves."""
    contexts = [authority.server(authority.issue(f"engine{n}")) for n in range(2)]
    engines = [await started(secure_engine(context)) for context in contexts]
    ca = {"ca_file": str(authority.file)}
    entries = [entry(engine, ca) | {"name": f"e{n}"} for n, engine in enumerate(engines)]
    async with world(engines, engines=entries) as w:
        assert [(await w.post())[0] for _ in range(4)] == [200] * 4
        assert all(engine.requests for engine in engines)
        old = authority.issue("old", days=-1)
        contexts[0].load_cert_chain(old.certificate, old.key)
        pooled = w.server.fleet.models[0].engines["e0"]
        pooled.upstream.clear()
        assert [(await w.post())[0] for _ in range(6)] == [200] * 6
        await until(lambda: not pooled.healthy)


async def test_unchecked_certificates_are_logged(authority: Authority) -> None:
    engine = await started(secure_engine(authority.server(authority.issue("x", names="DNS:other"))))
    with capture_logs() as logs:
        async with world([engine], engines=[entry(engine, {"verify": False})]) as w:
            assert (await w.post())[0] == 200
    (line,) = [line for line in logs if "not checked" in line["event"]]
    assert (line["engines"], line["log_level"]) == (["e0"], "warning")


def test_wrong_settings_are_errors_of_the_configuration(authority: Authority) -> None:
    engine = {"url": "https://127.0.0.1:1", "tls": {"ca_file": "/nowhere.pem"}}
    with pytest.raises(ConfigError, match=r"tls.ca_file: /nowhere.pem: No such file"):
        Server(ServerConfig.model_validate({"engines": [engine], "model": "m"})).build()
    for tls, said in (
        ({"certificate_file": "a"}, "both"),
        ({"verify": False, "ca_file": "a"}, "ignores ca_file"),
    ):
        with pytest.raises(ValueError, match=said):
            EngineConfig.model_validate({"url": "https://x", "tls": tls})


async def test_doctor_uses_the_same_settings(authority: Authority) -> None:
    pair = authority.issue("named", names="DNS:engine.internal")
    engine = secure_engine(authority.server(pair, asks_clients=True))
    await engine.start()
    tls = {"ca_file": str(authority.file), "server_name": "engine.internal", **pair.files}
    listed = EngineConfig.model_validate(entry(engine, tls))
    model = PoolSettings.model_validate({"engine_tls": tls})
    for target, works in (
        (Target(listed), True),
        (Target(EngineConfig(url=engine.url), settings=model), True),
        (Target(EngineConfig(url=engine.url)), False),
    ):
        (found,) = await examine([target])
        assert (found.verdicts["reachable"].outcome == "pass") is works
    await engine.stop()


def test_discovered_engines_may_have_https_urls() -> None:
    source = {"dns": {"name": "engines", "port": 8000}, "scheme": "https"}
    section = DiscoverySource.model_validate(source)
    assert section.dns is not None
    assert DnsNames(section.dns, section)._engine("::1", 8000).config.url == "https://[::1]:8000"
    with pytest.raises(ValueError, match="remove scheme"):
        DiscoverySource.model_validate({"file": "a.yaml", "scheme": "https"})
