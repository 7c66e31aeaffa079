"""Engines in pods, with an API server over real HTTP that lists, watches, forgets and refuses."""

import asyncio
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from discovery_world import ApiServer, following, keys, pod, reload_key
from lmetric.config import ConfigError, DiscoverySource
from lmetric.server.discovery import followed, kubernetes
from lmetric.server.discovery.kubernetes import Pods
from server_world import FakeEngine, world


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PACE_SECONDS", 0.02)
    monkeypatch.setattr(followed, "_PAUSES", (0.02, 0.1))
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


def section(server: ApiServer, tmp_path: Path, **values: Any) -> dict[str, Any]:
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(server.kubeconfig()))
    return {"kubernetes": {"selector": "app=vllm", "port": "http", "kubeconfig": file, **values}}


def source(server: ApiServer, tmp_path: Path, **values: Any) -> Pods:
    config = DiscoverySource.model_validate(section(server, tmp_path, **values))
    assert config.kubernetes is not None
    return Pods(config.kubernetes, config)


async def test_pods_are_listed_then_watched(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.put(pod("a", "http://10.0.0.1:8000"), pod("b", phase="Pending"))
        api.put({**pod("c"), "status": {"phase": "Running"}})
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: told.names == ["a.fleet"])
            assert told.lists[0][0].config.url == "http://10.0.0.1:8000"
            api.put(pod("b", "http://[fd00::1]:8001", ready=False))
            await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
            assert [(each.config.url, each.ready) for each in told.lists[-1]][1] == (
                "http://[fd00::1]:8001",
                False,
            )
            api.put(pod("b", "http://[fd00::1]:8001"))
            await told.until(lambda: all(each.ready for each in told.lists[-1]))
            times = len(told.lists)
            api.put(pod("b", "http://[fd00::1]:8001", labels={"seen": "1"}))
            leaving = pod("a", "http://10.0.0.1:8000")
            leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            api.put(leaving)
            await told.until(lambda: told.names == ["b.fleet"])
            assert len(told.lists) == times + 1, "what changes no engine is not told"
            api.delete("a")
            api.delete("b")
            await told.until(lambda: told.lists[-1] == [])
            assert (api.lists, api.selectors, told.problems) == (1, {"app=vllm"}, [])


async def test_a_long_list_is_read_in_parts(tmp_path: Path) -> None:
    """To read the list of 4,000 pods at once takes more than 0.3 s."""
    async with ApiServer() as api:
        api.put(*(pod(f"p{number}", f"http://10.0.0.1:{8000 + number}") for number in range(250)))
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: told.lists)
            assert len(told.names) == 250
            assert (api.lists, api.page_pods) == (1, [100, 100, 50])
            api.put(pod("p250", "http://10.0.0.1:9000"))
            await told.until(lambda: len(told.names) == 251)
            assert (api.lists, told.problems) == (1, [])


@pytest.mark.parametrize("by_status", [False, True])
async def test_a_history_that_is_forgotten_is_listed_again(by_status: bool, tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.gone_by_status = by_status
        api.put(pod("a"))
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: api.watches == 1)
            api.put(pod("b", "http://10.0.0.2:1"))
            await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
            api.hang_up()
            await told.until(lambda: api.watches == 2)
            assert api.lists == 1, "a watch that ended goes on from its last version"
            api.delete("a")
            api.put(pod("c", "http://10.0.0.3:1"))
            api.forget()
            api.hang_up()
            await told.until(lambda: told.names == ["b.fleet", "c.fleet"])
            await told.until(lambda: api.lists == 2)
            assert all(told.lists), "the engines known stay meanwhile"
            assert not told.problems


async def test_bookmarks_move_the_version_on(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.put(pod("a"))
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: api.watches == 1)
            api.forget()
            api.bookmark()
            await asyncio.sleep(0.05)
            api.hang_up()
            await told.until(lambda: api.watches == 2)
            api.put(pod("b", "http://10.0.0.2:1"))
            await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
            assert api.lists == 1


async def test_models_roles_and_ports_come_from_the_pod(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.put(pod("a", annotations={"model": "org/big"}, labels={"model": "small", "role": "decode"}))
        api.put(pod("b", "http://10.0.0.2:1", labels={"role": "cook"}))
        nameless = pod("c", "http://10.0.0.3:1")
        nameless["spec"]["containers"][1]["ports"].pop()
        api.put(nameless)
        async with following(source(api, tmp_path, model_key="model", role_key="role")) as told:
            await told.until(lambda: told.lists)
            (a,) = told.lists[0]
            assert (a.model, a.config.role) == ("org/big", "decode")
            assert told.problems == [
                "pod b: role = 'cook': expected 'both', 'prefill', 'decode' or 'encode' (and 1 more)"
            ]
            api.delete("b")
            await told.until(lambda: told.problems[-1] == "pod c has no container port named 'http'")
        async with following(source(api, tmp_path, port=9000)) as told:
            await told.until(lambda: told.lists)
            assert {each.config.url for each in told.lists[0]} == {
                "http://127.0.0.1:9000",
                "http://10.0.0.3:9000",
            }


async def test_a_refusal_is_told_once_and_asked_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    await engine.start()
    async with ApiServer() as api:
        api.allowed = False
        api.put(pod("a", engine.url))
        with structlog.testing.capture_logs() as logs:
            async with world(0, discovery=[section(api, tmp_path)]) as it:
                (state,) = it.server._discovery.state()
                await it.until(lambda: it.server._discovery.state()[0]["failures"] > 3)
                assert state["problem"] == (
                    "the pods of fleet: status 403: "
                    'pods is forbidden: User "router" cannot list resource "pods";'
                    " give the router's service account a Role that allows list and watch on pods"
                )
                assert (await it.get("/ready"))[0] == 503
                assert (
                    b'lmetric_discovery_up{source="kubernetes:/app=vllm"} 0.0'
                    in (await it.get("/metrics"))[1]
                )
                api.allowed = True
                await it.until(it.server.fleet.ready)
                assert (await it.post())[1]["x-lmetric-instance"] == "a.fleet"
        assert [entry["event"] for entry in logs].count("discovery failed") == 1
        assert [entry["event"] for entry in logs].count("discovery works again") == 1
    await engine.stop()


async def test_an_api_server_that_is_down_takes_no_engine_away(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.put(pod("a"))
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: api.watches == 1)
            await api.stop()
            await told.until(lambda: told.problems)
            assert "does not answer: no connection: Connection refused" in told.problems[-1]
            api.put(pod("b", "http://10.0.0.2:1"))
            await api.start()
            await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
            assert all(told.lists)


async def test_credentials_that_changed_are_read_again(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.put(pod("a"))
        pods = source(api, tmp_path)
        api.token = "next"
        async with following(pods) as told:
            await told.until(lambda: told.problems)
            assert "status 401: Unauthorized; the credentials are not accepted" in told.problems[0]
            (tmp_path / "kubeconfig").write_text(yaml.safe_dump(api.kubeconfig()))
            await told.until(lambda: told.names == ["a.fleet"])


@pytest.mark.parametrize("text", [None, "", "{", "contexts: 3", "current-context: x"])
async def test_credentials_that_cannot_be_read(text: str | None, tmp_path: Path) -> None:
    async with ApiServer() as api:
        pods = source(api, tmp_path)
        file = tmp_path / "kubeconfig"
        file.unlink() if text is None else file.write_text(text)
        async with following(pods) as told:
            await told.until(lambda: told.problems)
            assert told.problems[0].startswith("no credentials for the API server: ")


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    monkeypatch.delitem(sys.modules, kubernetes.__name__)
    config = DiscoverySource.model_validate({"kubernetes": {"selector": "a", "port": 1}})
    with pytest.raises(ConfigError, match=r"pip install 'kubernetes-asyncio>="):
        followed.make_source(config)


async def test_the_api_server_is_asked_without_a_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8,.svc,.cluster.local")
    monkeypatch.setenv("no_proxy", "127.0.0.0/8,.svc,.cluster.local")
    async with ApiServer() as server:
        server.put(pod("a"))
        async with following(source(server, tmp_path)) as told:
            await told.until(lambda: told.names == ["a.fleet"])
            assert not told.problems


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
async def test_in_a_pod_the_service_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key", tmp_path / "ca.crt"
    subprocess.run(  # noqa: ASYNC221 (before anything else runs)
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "1", "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1",
         "-addext", "keyUsage=critical,digitalSignature,keyCertSign", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    (tmp_path / "namespace").write_text("fleet\n")
    (tmp_path / "token").write_text("from-the-pod")
    from kubernetes_asyncio.config import incluster_config

    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setattr(kubernetes, "NAMESPACE_FILE", tmp_path / "namespace")
    async with ApiServer("from-the-pod", tls) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.put(pod("a"))
        async with following(source(api, tmp_path, kubeconfig=None)) as told:
            await told.until(lambda: told.names == ["a.fleet"])


async def test_a_reloaded_key_stays_when_a_pod_changes(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.put(pod("a", "http://127.0.0.1:1"), pod("b", "http://127.0.0.1:2"))
        given = section(api, tmp_path)
        async with world(0, discovery=[{**given, "api_key": "old"}]) as it:
            assert keys(it.server) == {"a.fleet": "old", "b.fleet": "old"}
            for key in ("new", None, "newer"):
                assert sorted(await reload_key(it.server, given, key)) == ["a.fleet", "b.fleet"]
                assert keys(it.server) == {"a.fleet": key, "b.fleet": key}
                (b,) = (engine for engine in it.server.fleet.engines() if engine.name == "b.fleet")
                ready = not b.ready
                api.put(pod("b", "http://127.0.0.1:2", ready=ready))
                await it.until(lambda b=b, ready=ready: b.ready is ready)
                assert keys(it.server) == {"a.fleet": key, "b.fleet": key}
            api.put(pod("c", "http://127.0.0.1:3"))
            await it.until(lambda: keys(it.server).get("c.fleet") == "newer")


async def test_the_fleet_follows_the_pods_without_an_error_for_clients(tmp_path: Path) -> None:
    fakes = [FakeEngine(pace=0.01) for _ in range(3)]
    for fake in fakes:
        await fake.start()
    a, b, c = (pod(name, fake.url) for name, fake in zip("abc", fakes, strict=True))
    async with ApiServer() as api:
        api.put(a)
        async with world(0, discovery=[section(api, tmp_path)], health={"interval": 0.1}) as it:
            statuses: list[int] = []

            async def client() -> None:
                while not done.is_set():
                    statuses.append((await it.post({"prompt": "x", "stream": True}))[0])

            done = asyncio.Event()
            clients = [asyncio.create_task(client()) for _ in range(8)]
            fleet = it.server.fleet
            api.put(b, c)
            await it.until(lambda: sum(engine.healthy for engine in fleet.engines()) == 3)
            api.put(pod("b", fakes[1].url, ready=False))
            await it.until(lambda: fleet.models[0].engines["b.fleet"].held)
            api.delete("a")
            await it.until(lambda: "a.fleet" not in fleet.models[0].engines)
            asked = len(fakes[0].requests), len(fakes[1].requests)
            await it.until(lambda: len(statuses) > 100)
            assert (len(fakes[0].requests), len(fakes[1].requests)) == asked, "held and removed: nothing new"
            api.put(pod("b", fakes[1].url))
            await it.until(lambda: not fleet.models[0].engines["b.fleet"].held)
            await it.until(lambda: len(fakes[1].requests) > asked[1])
            done.set()
            await asyncio.gather(*clients)
            assert set(statuses) == {200}
            await it.settled()
            rows = fleet.models[0].router.stats()["instances"]
            assert {name: row["bs"] for name, row in rows.items()} == {"b.fleet": 0, "c.fleet": 0}
            assert all(engine.running == 0 for engine in fleet.engines())
    for fake in fakes:
        await fake.stop()
