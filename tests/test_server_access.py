"""Access to the router's own pages: tokens, bodies, decision records, engine addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import ConfigError, load_config
from lmetric.server.background.replicas import PATH as REPLICAS
from load_messages import message
from server_world import FakeEngine, World, world
from waiting import PATIENCE_SECONDS

ADMIN = {"authorization": "Bearer root-token"}
ALICE = {"authorization": "Bearer sk-alice"}
BOB = {"authorization": "Bearer sk-bob"}
DEBUG = ("/debug/engines", "/debug/indicators", "/debug/discovery", "/debug/replicas")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """An `auth` section with two tenants and their keys."""
    file = tmp_path / "keys.yaml"
    file.write_text("sk-alice: alice\nsk-bob: bob\n")
    return {"keys_file": str(file)}


@asynccontextmanager
async def tenants(keys: dict[str, str], fakes: int = 1, **config: Any) -> AsyncIterator[World]:
    """A router with tenants and an administrator."""
    admin = {"enabled": True, "token": "root-token", **config.pop("admin", {})}
    async with world(fakes, auth=keys, admin=admin, **config) as it:
        yield it


async def send(it: World, head: str, body: bytes = b"", *, leave: bool = False) -> bytes:
    """Sends bytes on a new connection. Returns all bytes until the router closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    await writer.drain()
    if leave:
        writer.transport.abort()
        return b""
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    finally:
        writer.close()


def quiet(capsys: pytest.CaptureFixture[str], *secrets: str) -> None:
    """Fails if the log has a failure of the router, or one of these texts."""
    said = "".join(capsys.readouterr())
    for text in ("Traceback", "internal error", *secrets):
        assert text not in said, said[:2000]


# Request bodies of the router's own pages.


async def test_a_message_of_replicas_needs_its_token_before_its_body_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Reliability C2: without the token, the answer is 401 before any byte of the body."""
    replicas = {"urls": ["http://127.0.0.1:1"], "token": "among-us"}
    async with world(1, replicas=replicas) as it:
        head = f"POST {REPLICAS} HTTP/1.1\nhost: x\nconnection: close\ncontent-length: 28000000\n"
        assert (await send(it, head)).startswith(b"HTTP/1.1 401 ")
        body = b"a secret body " * 2_000_000
        status, _, got = await it.post(body, REPLICAS)
        assert (status, got["error"]["message"]) == (
            401,
            "wrong replica token; set the same replicas.token on all routers",
        )
        status, _, got = await it.post(body, REPLICAS, {"authorization": "Bearer among-us"})
        assert (status, got["error"]["code"]) == (413, "body_too_large")
        assert (await it.post(message(), REPLICAS, {"authorization": "Bearer among-us"}))[0] == 200
    quiet(capsys, "a secret body", "among-us")


async def test_a_body_that_cannot_be_read_is_the_clients_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Reliability C2: a body that is falsely declared as gzip, or is incomplete, is a 400."""
    async with world(1, replicas={"urls": ["http://127.0.0.1:1"]}, admin=True) as it:
        for path in (REPLICAS, "/admin/guard"):
            status, _, got = await it.post(b"no gzip", path, {"content-encoding": "gzip"})
            assert (status, got["error"]["type"]) == (400, "invalid_request_error"), got
            head = f"POST {path} HTTP/1.1\nhost: 127.0.0.1:80\n"
            await send(it, head + "content-length: 9000\n", b"half of it", leave=True)
            await send(it, head + "transfer-encoding: chunked\n", b"5\r\nhalf ", leave=True)
        await it.until(lambda: len(it.server.front.connections) <= 1)
    quiet(capsys, "half of it")


async def test_bodies_of_administration_are_bounded(keys: dict[str, str]) -> None:
    """Reliability C2: /admin checks the token before the body, and answers 413 above 1 MiB."""
    async with tenants(keys) as it:
        head = "POST /admin/engines HTTP/1.1\nhost: x\nconnection: close\ncontent-length: 28000000\n"
        assert (await send(it, head)).startswith(b"HTTP/1.1 401 ")
        assert (await send(it, head + "authorization: Bearer sk-bob\n")).startswith(b"HTTP/1.1 403 ")
        assert (await send(it, head + "authorization: Bearer root-token\n")).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", [REPLICAS, "/admin/guard"])
async def test_a_body_that_never_comes_is_waited_for_no_longer_than_others(path: str) -> None:
    """Server 7.10 c: such a request once kept its connection forever."""
    config = {"replicas": {"urls": ["http://127.0.0.1:1"]}, "admin": True, "timeouts": {"body": 0.1}}
    async with world(1, **config) as it:
        got = await send(it, f"POST {path} HTTP/1.1\nhost: localhost\ncontent-length: 20\n", b"{")
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"the body is incomplete after 0.1 s" in got


# Credentials.


async def test_a_tenants_key_opens_neither_admin_nor_debug(keys: dict[str, str]) -> None:
    """Reliability H1, server 7.10 d: a tenant's key once gave access to administration."""
    async with tenants(keys) as it:
        pages = [("GET", path) for path in DEBUG]
        pages += [("POST", "/admin/engines"), ("POST", "/admin/guard"), ("POST", "/admin/engines/e0/drain")]
        for method, path in [*pages, ("DELETE", "/admin/engines/e0")]:
            for headers, expected in (
                (BOB, 403),
                ({"x-api-key": "sk-bob"}, 403),
                ({"x-api-key": "root-token"}, 401),
                ({"authorization": "Basic root-token"}, 401),
                ({"authorization": "Bearer root-tokens"}, 401),
                ({}, 401),
            ):
                async with it.client.request(method, it.url + path, headers=headers) as answer:
                    assert answer.status == expected, (path, headers)
        assert not it.server.fleet.models[0].engines["e0"].held
        for path in DEBUG:
            assert (await it.get(path, ADMIN))[0] == 200, path
        status, _, got = await it.post({}, "/admin/engines/e0/drain", ADMIN)
        assert (status, got["draining"]) == (200, True)
        # The admin token is not an API key.
        assert (await it.post(headers=ADMIN))[0] == 401
        assert (await it.get("/v1/models", ADMIN))[0] == 401
        for path in ("/health", "/metrics"):
            assert (await it.get(path))[0] == 200


async def test_debug_is_closed_without_an_admin_token(keys: dict[str, str]) -> None:
    """Reliability H1: with API keys, or off loopback, /debug needs admin.token."""
    for config in ({"auth": keys}, {"host": "0.0.0.0"}):
        async with world(1, **config) as it:
            for headers in (BOB, ADMIN, {}):
                for path in (*DEBUG, "/admin/guard"):
                    status, got = await it.get(path, headers)
                    assert (status, orjson.loads(got)["error"]["code"]) == (403, "no_admin_token"), path
    async with world(1) as it:
        for path in DEBUG:
            assert (await it.get(path))[0] == 200


async def test_a_web_page_cannot_administer_the_router_of_its_reader() -> None:
    """Reliability H1: without a token, a web page in a local browser could add an engine."""
    async with world(1, admin=True) as it:
        assert (await it.post({"on": True}, "/admin/guard"))[0] == 200
        status, _, _ = await it.post({"on": True}, "/admin/guard", {"origin": "https://page.example"})
        assert status == 403


@pytest.mark.parametrize("field", ["X-Forwarded-For", "x-forwarded-host", "Forwarded", "X-Real-IP", "Via"])
async def test_open_pages_refuse_requests_of_proxies(field: str) -> None:
    """Security: a proxy on the router's machine opened /debug and /admin to all of its clients."""
    urls = ["http://127.0.0.1:1"]  # nobody listens
    async with world(1, admin=True, replicas={"urls": urls}) as it:
        for proxied in ({field: "192.0.2.1"}, {field: ""}):
            for path in DEBUG:
                assert [(await it.get(path, headers))[0] for headers in ({}, proxied)] == [200, 403], path
            status, _, got = await it.post({"on": True}, "/admin/guard", proxied)
            assert status == 403
            assert "proxies" in got["error"]["message"]
            assert (await it.post({}, REPLICAS, proxied))[0] == 403
            assert b'"e0"' not in (await it.get("/ready", proxied))[1]
        assert b'"e0"' in (await it.get("/ready"))[1]
        assert (await it.post({}, REPLICAS))[0] == 400


async def test_metrics_may_need_the_token(keys: dict[str, str]) -> None:
    """Reliability H1: /metrics names tenants and counts their requests. No setting protected it."""
    async with tenants(keys, admin={"protect_metrics": True}) as it:
        assert [(await it.get("/metrics", headers))[0] for headers in ({}, BOB, ADMIN)] == [401, 403, 200]
        assert [(await it.get(path))[0] for path in ("/health", "/ready")] == [200, 200]


async def test_tenants_see_their_own_decision_records_alone(keys: dict[str, str]) -> None:
    """Reliability H1: ids were 1, 2, 3, and every tenant's key could read every record."""
    async with tenants(keys) as it:
        label = (await it.post(headers=ALICE))[1]["x-lmetric-decision"]
        path = f"/debug/decisions/{label}"
        for headers in (ALICE, {"x-api-key": "sk-alice"}, ADMIN):
            status, got = await it.get(path, headers)
            assert status == 200
            record = orjson.loads(got)
            assert (record["id"], record["instance"], record["outcome"]) == (label, "e0", "finished")
        assert (await it.get(path))[0] == 401
        status, got = await it.get(path, BOB)
        unknown = label.replace("1-", "2-", 1)
        assert status == 404
        assert (await it.get(f"/debug/decisions/{unknown}", BOB))[1].decode() == got.decode().replace(
            label, unknown
        )
        # No label can be derived from another label, of any tenant.
        number, _, tag = label.rpartition("-")
        second = (await it.post(headers=BOB))[1]["x-lmetric-decision"]
        for guess in (f"{number}-{int(tag, 16) ^ 1:016x}", f"{number}-{second.rpartition('-')[2]}"):
            assert (await it.get(f"/debug/decisions/{guess}", ALICE))[0] == 404
            assert (await it.get(f"/debug/decisions/{guess}", BOB))[0] == 404
        for malformed in ("1", "1-1", "x", tag, f"{label}0", f"-{tag}"):
            assert (await it.get(f"/debug/decisions/{malformed}", ALICE))[0] == 404, malformed


async def test_labels_differ_between_routers() -> None:
    """Reliability H1: the first request of every router had the same id."""
    labels = set()
    for _ in range(2):
        async with world(1) as it:
            label = (await it.post())[1]["x-lmetric-decision"]
            assert (await it.get(f"/debug/decisions/{label}"))[0] == 200
            labels.add(label)
    assert len(labels) == 2


# The configuration.


def load(values: dict[str, Any], environ: dict[str, str] | None = None) -> Any:
    return load_config(None, values, environ=environ or {})


def test_administration_needs_a_token_where_others_can_reach_it(tmp_path: Path) -> None:
    """Reliability H1: the rule and its short form."""
    keys = str(tmp_path / "keys.yaml")
    assert load({"admin": "true"}).admin.enabled
    assert load({"admin": True, "host": "localhost"}).admin.enabled
    for values, why in (
        ({"host": "0.0.0.0"}, "the router listens on '0.0.0.0', not on loopback"),
        ({"host": "::"}, "not on loopback"),
        ({"auth.keys_file": keys}, "clients have API keys or tokens"),
    ):
        with pytest.raises(ConfigError, match=f"admin.enabled needs admin.token or admin.token_file.*{why}"):
            load({"admin": True, **values})
        assert load({"admin": True, "admin.token": "x", **values}).admin.enabled
        assert not load(values).admin.enabled
    # The short form works together with a token from elsewhere, in either order.
    config = load({"admin": True}, {"LMETRIC__ADMIN__TOKEN": "x"})
    assert (config.admin.enabled, config.admin.token.get_secret_value()) == (True, "x")
    config = load({"admin.token": "x"}, {"LMETRIC__ADMIN": "true"})
    assert (config.admin.enabled, config.admin.token.get_secret_value()) == (True, "x")
    with pytest.raises(ConfigError, match="protect_metrics needs a token"):
        load({"admin.protect_metrics": True})
    with pytest.raises(ConfigError, match="set one of token and token_file, not both") as refused:
        load({"admin.token": "hunter2", "admin.token_file": keys})
    assert "hunter2" not in str(refused.value)
    # The environment overrides the file, also in the other form.
    file = tmp_path / "router.yaml"
    file.write_text(f"admin: {{enabled: true, token_file: {keys}}}\n")
    config = load_config(file, {}, {"LMETRIC__ADMIN__TOKEN": "x"})
    assert (config.admin.token.get_secret_value(), config.admin.token_file) == ("x", None)
    file.write_text("admin: {enabled: true, token: x}\n")
    config = load_config(file, {}, {"LMETRIC__ADMIN__TOKEN_FILE": str(keys)})
    assert (config.admin.token, str(config.admin.token_file)) == (None, str(keys))
    with pytest.raises(
        ConfigError, match=r"admin\.allowed_engines\[0\] = '10.0.0.0/33': expected an IP address"
    ):
        load({"admin.allowed_engines": ["10.0.0.0/33"]})


@pytest.mark.parametrize("key", ["admin.token", "replicas.token", "auth.salt_secret"])
def test_no_message_shows_a_token(key: str) -> None:
    """Reliability H1: an error about a token does not show the token."""
    with pytest.raises(ConfigError, match="visible ASCII") as caught:
        load({key: "my secret"})
    assert "my secret" not in str(caught.value)


async def test_tokens_come_from_files(tmp_path: Path, keys: dict[str, str]) -> None:
    """Reliability H1, H4: a mounted secret is sufficient."""
    file = tmp_path / "token"
    file.write_text("root-token\n")
    admin = {"enabled": True, "token_file": str(file)}
    replicas = {"urls": ["http://127.0.0.1:1"], "token_file": str(file)}
    async with world(1, auth=keys, admin=admin, replicas=replicas) as it:
        assert (await it.get("/debug/engines", ADMIN))[0] == 200
        assert (await it.post({}, REPLICAS))[0] == 401
        assert (await it.post({}, REPLICAS, ADMIN))[0] == 400
    for text in ("", "two tokens"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="token: the content is not a token") as caught:
            async with world(1, auth=keys, admin=admin):
                pass
        assert "two" not in str(caught.value)


def test_replicas_need_a_token_unless_all_is_loopback() -> None:
    """Reliability H4: without a token, any client could report loads to the router."""
    for values in (
        {"replicas.urls": ["http://routers:8080"]},
        {"replicas.urls": ["http://127.0.0.1:8080", "http://10.0.0.1:8080"]},
        {"replicas.urls": ["http://127.0.0.1:8080"], "host": "0.0.0.0"},
    ):
        with pytest.raises(ConfigError, match=r"replicas\.token is needed because '.*' is not a loopback"):
            load(values)
        assert load({**values, "replicas.token": "x"}).replicas.urls
    assert load({"replicas.urls": ["http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:2"]})


# Paths.


async def test_pages_are_found_under_their_own_names_alone(keys: dict[str, str]) -> None:
    """Reliability M6: requests could pass a proxy that blocks /admin and /debug by prefix."""
    async with tenants(keys) as it:
        for path in (
            "/debug%2fengines",
            "/%64ebug/engines",
            "/debug/engine%73",
            "/%61dmin/guard",
            "/%6detrics",
            "/v1%2fmodels",
        ):
            got = await send(it, f"GET {path} HTTP/1.1\nhost: x\nconnection: close\n{auth(ADMIN)}")
            assert got.startswith(b"HTTP/1.1 404 "), path
            assert b"unknown_path" in got


async def test_names_in_paths_may_be_encoded() -> None:
    """Reliability M6: names of engines and models may still be encoded."""
    engine = FakeEngine(model="a b/c")
    await engine.start()
    async with world(0, engines=[{"url": engine.url, "name": "at/a"}], admin=True) as it:
        await it.until(lambda: it.server.fleet.names)
        assert b'"a b/c"' in await send(it, "GET /v1/models/a%20b%2Fc HTTP/1.1\nhost: x\nconnection: close\n")
        for path, draining in (("at%2Fa/drain", b"true"), ("at/a/undrain", b"false")):
            got = await send(
                it,
                f"POST /admin/engines/{path} HTTP/1.1\nhost: [::1]\nconnection: close\ncontent-length: 0\n",
            )
            assert b'"draining": ' + draining in got
        got = await send(
            it,
            "POST /admin/engines/at%2Fa%2Fdrain HTTP/1.1\nhost: [::1]\nconnection: close\n",
        )
        assert got.startswith(b"HTTP/1.1 404 ")
    await engine.stop()


def auth(headers: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in headers.items())


# Engine addresses.


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",  # the same address, as inet_aton reads it
        "0xa9fea9fe",
        "169.254.43518",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "100.100.100.200",
        "168.63.129.16",
    ],
)
async def test_an_engine_is_not_added_at_a_clouds_metadata_address(host: str) -> None:
    """Reliability H1: the router accepted every address and probed it with health checks."""
    async with world(1, admin=True) as it:
        status, _, got = await it.post({"url": f"http://{host}:80", "model": "m"}, "/admin/engines")
        assert (status, got["error"]["code"]) == (403, "engine_not_allowed")
        events = {"endpoint": f"tcp://{host}:5557"}
        body = {"url": it.engines[0].url, "name": "other", "model": "m", "kv_events": events}
        assert (await it.post(body, "/admin/engines"))[0] == 403
        assert [engine.name for engine in it.server.fleet.engines()] == ["e0"]


async def test_allowed_engines_are_addresses_networks_and_names() -> None:
    """Reliability H1: rules of `admin.allowed_engines`."""
    engine = FakeEngine()
    await engine.start()
    body = {"url": engine.url, "name": "new"}
    for rules, url, status in (
        (["10.0.0.0/8", "engines-*.example"], engine.url, 403),
        ([], engine.url, 403),
        (["127.0.0.0/8"], engine.url, 200),
        (["127.0.0.1"], f"http://localhost:{engine.port}", 200),
        (["LOCAL*"], f"http://localhost:{engine.port}", 200),
        (["local*"], engine.url, 403),
        (None, engine.url, 200),
    ):
        async with world(1, admin={"enabled": True, "allowed_engines": rules}) as it:
            got, _, answer = await it.post({**body, "url": url}, "/admin/engines")
            assert got == status, (rules, url, answer)
    await engine.stop()


async def test_an_engines_address_is_checked_again_when_it_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reliability H1: the address of a name may change after the engine was added."""
    engine = FakeEngine()
    await engine.start()

    async def lies(*_: Any) -> str:
        """A look-up that returns an allowed address."""
        return "10.0.0.1"

    monkeypatch.setattr("lmetric.server.upstream.allowed.AllowedEngines.resolve", lies)
    admin = {"enabled": True, "allowed_engines": ["10.0.0.0/8"]}
    async with world(1, admin=admin, health={"interval": 0.02}) as it:
        assert (await it.post({"url": engine.url, "name": "new", "model": "m"}, "/admin/engines"))[0] == 200
        added = it.server.fleet.model("m").engines["new"]
        await it.until(lambda: added.last_error)
        assert added.last_error == "admin.allowed_engines does not allow 127.0.0.1"
        assert not added.healthy
        assert (await it.post({"model": "m", "prompt": "x"}))[0] == 503
    assert not engine.requests
    await engine.stop()
