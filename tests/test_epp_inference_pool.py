"""InferencePool and InferenceObjective as sources, from an API server over real HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from structlog.testing import capture_logs

from discovery_world import ApiServer, following, keys, pod, reload_key
from epp_world import PROMPT, TRUSTED, exchange, picking, request_body, request_head
from lmetric.config import DiscoverySource
from lmetric.server.discovery import followed, inference_pool, kubernetes
from lmetric.server.discovery.inference_pool import PoolEngines
from server_world import world
from waiting import until

V1 = "/apis/inference.networking.k8s.io/v1/namespaces/fleet/inferencepools/chat"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/fleet/inferenceobjectives"
NEW_OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/fleet/inferenceobjectives"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PACE_SECONDS", 0.02)
    monkeypatch.setattr(inference_pool, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(followed, "_PAUSES", (0.02, 0.1))
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


def pool(*ports: int, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "chat", "namespace": "fleet"},
        "spec": {
            "selector": {"matchLabels": labels or {"app": "vllm"}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "lmetric-router", "port": {"number": 9002}},
        },
    }


def objective(name: str, priority: int | None, of: str = "chat") -> dict[str, Any]:
    spec: dict[str, Any] = {"poolRef": {"name": of}}
    return {"metadata": {"name": name}, "spec": spec if priority is None else spec | {"priority": priority}}


def section(api: ApiServer, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(api.kubeconfig()))
    return {"kubernetes": {"inference_pool": "chat", "kubeconfig": str(file)}}


def source(api: ApiServer, tmp_path: Path, objectives: dict[str, int] | None = None) -> PoolEngines:
    config = DiscoverySource.model_validate(section(api, tmp_path))
    made = followed.make_source(config, objectives)
    assert isinstance(made, PoolEngines)
    return made


async def test_the_pods_of_a_pool_are_followed_and_its_changes(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.custom[V1] = pool(8000)
        api.put(pod("a", "http://10.0.0.1:1"), pod("b", "http://10.0.0.2:1", ready=False))
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
            assert [each.config.url for each in told.lists[-1]] == [
                "http://10.0.0.1:8000",
                "http://10.0.0.2:8000",
            ]
            api.custom[V1] = pool(8000, 8001, app="vllm", tier="gold")
            await told.until(lambda: "a.fleet-8001" in told.names)
            assert told.names == ["a.fleet-8000", "a.fleet-8001", "b.fleet-8000", "b.fleet-8001"]
            assert api.selectors == {"app=vllm", "app=vllm,tier=gold"}
            api.delete("b")
            await told.until(lambda: told.names == ["a.fleet-8000", "a.fleet-8001"])
            assert not told.problems


async def test_a_pool_is_read_without_a_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with ApiServer() as api:
        api.custom[V1] = pool(8000)
        api.put(pod("a"))
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: told.names == ["a.fleet"])
            assert not told.problems


async def test_a_missing_or_invalid_pool_is_reported(tmp_path: Path) -> None:
    async with ApiServer() as api, following(source(api, tmp_path)) as told:
        await told.until(lambda: told.problems)
        assert told.problems[0].startswith("the InferencePool chat of fleet: status 404")
        broken = pool(8000)
        del broken["spec"]["selector"]
        api.custom[V1] = broken
        await told.until(
            lambda: told.problems[-1] == "the InferencePool chat is not valid: KeyError('selector')"
        )
        api.custom[V1] = pool(8000)
        api.put(pod("a"))
        await told.until(lambda: told.names == ["a.fleet"])


async def test_errors_of_the_pods_are_reported(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.allowed = False
        api.custom[V1] = pool(1, 2)
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: told.problems)
            assert "the pods of fleet: status 403" in told.problems[0]


@pytest.mark.parametrize("path", [OBJECTIVES, NEW_OBJECTIVES])
async def test_objectives_of_the_pool_are_priorities(path: str, tmp_path: Path) -> None:
    found: dict[str, int] = {"of-another-source": 3}
    async with ApiServer() as api:
        api.custom[V1] = pool(8000)
        items = [
            objective("fast", 10),
            objective("batch", -1),
            objective("plain", None),
            objective("no", 1, "x"),
        ]
        api.custom[path] = {"items": items}
        async with following(source(api, tmp_path, found)):
            wanted = {"of-another-source": 3, "fast": 10, "batch": -1, "plain": 0}
            await until(lambda: found == wanted, seen=lambda: found)
            api.custom[path] = {"items": items[:1]}
            await until(lambda: found == {"of-another-source": 3, "fast": 10}, seen=lambda: found)


async def test_objectives_without_permission_are_logged_once(tmp_path: Path) -> None:
    found: dict[str, int] = {}
    async with ApiServer() as api:
        api.custom[V1] = pool(8000)
        api.put(pod("a"))
        api.forbidden = {OBJECTIVES}
        api.custom[NEW_OBJECTIVES] = {"items": [objective("fast", 10)]}
        with capture_logs() as logs:
            async with following(source(api, tmp_path, found)) as told:
                await until(lambda: found == {"fast": 10}, seen=lambda: found)
                api.custom[NEW_OBJECTIVES] = {"items": []}
                await until(lambda: found == {}, seen=lambda: found)
                assert not told.problems
        assert [line["group"] for line in logs] == ["inference.networking.x-k8s.io"]


async def test_a_reloaded_key_stays_when_a_pod_changes(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.custom[V1] = pool(1, 2)
        api.put(pod("a", "http://127.0.0.1:1"), pod("b", "http://127.0.0.2:1"))
        given = section(api, tmp_path)
        names = {f"{name}.fleet-{port}" for name in "ab" for port in (1, 2)}
        async with world(0, discovery=[{**given, "api_key": "old"}]) as it:
            await until(lambda: keys(it.server) == dict.fromkeys(names, "old"))
            assert set(await reload_key(it.server, given, "new")) == names
            api.put(pod("b", "http://127.0.0.2:1", ready=False))
            await until(lambda: sum(engine.ready for engine in it.server.fleet.engines()) == 2)
            assert keys(it.server) == dict.fromkeys(names, "new")


@pytest.mark.parametrize("invalid", [False, True])
async def test_an_error_of_the_objectives_stops_neither_pods_nor_priorities(
    invalid: bool, tmp_path: Path
) -> None:
    found: dict[str, int] = {}
    async with ApiServer() as api:
        api.custom[V1] = pool(8000)
        api.put(pod("a"))
        good = api.custom[OBJECTIVES] = {"items": [objective("fast", 10)]}
        async with following(source(api, tmp_path, found)) as told:
            await told.until(lambda: told.names == ["a.fleet"] and found == {"fast": 10})
            if invalid:
                api.custom[OBJECTIVES] = {"items": [{**objective("fast", 9), "metadata": {}}]}
            else:
                api.failing = {OBJECTIVES}
            await told.until(lambda: told.problems)
            reports = len(told.lists)
            api.put(pod("b", "http://10.0.0.2:1"))
            await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
            expected = " are not valid: KeyError('name')" if invalid else ": status 500: etcdserver: request"
            assert all(
                each.startswith(f"the InferenceObjectives of fleet{expected}") for each in told.problems
            )
            assert (len(told.lists), len(told.problems)) == (reports + 1, 2), "one report for each change"
            assert found == {"fast": 10}
            api.custom[OBJECTIVES], api.failing = good, set()
            await told.until(lambda: len(told.lists) == reports + 2)
            assert (len(told.problems), api.lists) == (2, 1), "the pods were followed all the time"


async def test_pods_are_followed_if_the_objectives_never_were_read(tmp_path: Path) -> None:
    async with ApiServer() as api:
        api.custom[V1] = pool(8000)
        api.failing = {NEW_OBJECTIVES}
        api.put(pod("a"))
        async with following(source(api, tmp_path)) as told:
            await told.until(lambda: told.names == ["a.fleet"])
            api.put(pod("b", "http://10.0.0.2:1"))
            await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
            assert api.lists == 1


async def test_a_picker_serves_an_inference_pool(tmp_path: Path) -> None:
    async with ApiServer() as api, picking(1) as engines:
        api.custom[V1] = pool(engines.engines[0].port)
        api.custom[OBJECTIVES] = {"items": [objective("batch", -1)]}
        api.put(pod("a", "http://127.0.0.1:1"))
        tenants = {"t": {"max_concurrent": 1}}
        async with (
            picking(0, discovery=[section(api, tmp_path)], tenants=tenants, forwarded=TRUSTED) as world,
            exchange(world.target) as first,
            exchange(world.target) as second,
        ):
            await until(lambda: world.server.fleet.ready())
            place, _, _ = await first.ask(head=request_head(x_tenant="t"))
            assert place == engines.places[0]
            head = request_head(x_tenant="t", x_gateway_inference_objective="batch")
            await second.send(head, request_body(orjson.dumps(PROMPT), True))
            assert (await second.refused())[0] == 429


@pytest.mark.parametrize(
    "values",
    [{"inference_pool": "chat", "port": 80}, {"selector": "a=b"}, {"port": 80}, {}],
)
def test_a_source_has_a_pool_or_a_selector(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set either inference_pool, or both selector and port"):
        DiscoverySource.model_validate({"kubernetes": values})
