"""Settings that a gateway makes impossible are errors, not ignored."""

from __future__ import annotations

from typing import Any

import pytest

from lmetric.config import ConfigError, ServerConfig
from lmetric.server.epp.settings import for_gateway

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
