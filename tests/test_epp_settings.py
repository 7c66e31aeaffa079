"""Settings that a gateway makes impossible are errors, not ignored."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from epp_world import picking
from lmetric.config import ConfigError, EngineConfig, ServerConfig
from lmetric.server.discovery.members import Found
from lmetric.server.epp.settings import for_gateway
from waiting import until

FILES = {"certificate_file": "a.pem", "key_file": "a.key"}
ENGINES = [{"url": "http://10.0.0.1:8000"}]


def made(**values: Any) -> ServerConfig:
    return for_gateway(ServerConfig.model_validate({"engines": ENGINES, "experimental": True, **values}))


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"prefix_fetch": "on"}, "prefix_fetch is not possible in `epp`: a gateway cannot fetch prefixes"),
        ({"hedging": {"after_seconds": 1.0}}, "hedging.after_seconds is not possible"),
        (
            {"admission": {"ttft_seconds": 4, "classes": {"quick": {"hedge_after_seconds": 1}}}},
            "admission.classes.quick.hedge_after_seconds is not possible",
        ),
        ({"aliases": {"a": "b"}}, "aliases are not possible"),
        ({"fallbacks": {"a": "b"}}, "fallbacks are not possible"),
        ({"host": "unix:/run/router.sock"}, "host is a unix socket"),
        ({"engines": [{"url": "http://engine:8000"}]}, "engine"),
        (
            {"epp": {"tls": {**FILES, "client_ca_file": "ca.pem", "client_certificates": "optional"}}},
            "epp.tls.client_certificates: optional is not possible",
        ),
        ({"epp": {"tls": {**FILES, "min_version": "1.3"}}}, "epp.tls.min_version: gRPC accepts TLS 1.2"),
    ],
)
def test_impossible_settings_are_errors(values: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        made(**values)
    assert error in str(raised.value)


def test_only_the_gateway_tries_another_engine() -> None:
    config = made(epp={"tls": {**FILES, "client_ca_file": "ca.pem"}}, stream_failover=True)
    retries = config.retries
    assert (retries.attempts, retries.failures, retries.statuses) == (1, set(), set())
    assert not config.stream_failover


def test_workers_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(workers=2).workers == 2
    monkeypatch.setattr("sys.platform", "darwin")
    assert made(workers=1).workers == 1
    with pytest.raises(ConfigError, match="workers = 2: it is not possible in `epp` on this system"):
        made(workers=2)


async def test_engines_without_an_ip_address_do_not_join(tmp_path: Path) -> None:
    """Gateways cannot use the pick of a host name, and would balance such requests themselves."""
    file = tmp_path / "engines.yaml"
    file.write_text("[{url: 'http://vllm-0.vllm:8000'}, {url: 'http://10.0.0.1:8000'}]")
    discovery = [{"file": str(file)}]
    async with picking(discovery=discovery, admin={"enabled": True}) as world, ClientSession() as client:
        names = {"e0", "10.0.0.1:8000"}
        assert {engine.name for engine in world.server.fleet.engines()} == names
        (source,) = world.server._discovery.state()
        assert source["problem"].startswith("engine http://vllm-0.vllm:8000: expected an IP address")
        url = f"http://127.0.0.1:{world.server.port}/admin/engines"
        async with client.post(url, json={"url": "http://vllm-0.vllm:8000"}) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, "url")
            assert "expected an IP address" in error["message"]
        assert {engine.name for engine in world.server.fleet.engines()} == names


async def test_urls_of_reports_are_checked_apart_from_the_loop_and_once_for_merged_reports(
    tmp_path: Path,
) -> None:
    """Each pod that changes is a report of all engines, so that a burst would stop the picks."""
    file = tmp_path / "engines.yaml"
    file.write_text("[{url: 'http://10.0.0.1:8000'}]")
    async with picking(discovery=[{"file": str(file)}]) as world:
        (source,) = world.server._discovery._sources
        check, checks = world.server.fleet.check_url, []

        def checked(url: str) -> None:
            checks.append(threading.current_thread())
            check(url)

        world.server.fleet.check_url = checked
        addresses = [f"http://10.0.0.{number}:8000" for number in range(1, 21)]
        found = [Found(EngineConfig(url=url), "tiny") for url in addresses]
        for _ in range(50):
            source.found(found)
        await until(lambda: len(world.server._discovery.members.of(source.name)) == 20)
        assert len(checks) == 20
        assert threading.main_thread() not in checks
        source.found([Found(EngineConfig(url="http://vllm-0.vllm:8000"), "tiny")])
        await until(lambda: source.wrong is not None)
        assert source.wrong.startswith("engine http://vllm-0.vllm:8000: expected an IP address")
        source.found(found)
        await until(lambda: source.wrong is None)
