"""The steps of the Kubernetes page: its values and Helm commands, and a router that serves pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

import chart_world as chart
from discovery_world import ApiServer, pod
from lmetric.config import load_config
from lmetric.server.discovery import followed, kubernetes
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.migrate import import_config
from server_world import World, world

STOCK = EngineOptions(clock_speed=20, kv_events=False, cached_tokens=False)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PACE_SECONDS", 0.02)
    monkeypatch.setattr(followed, "_PAUSES", (0.02, 0.1))
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


def rendered(folder: Path) -> list[chart.Objects]:
    """The objects after each `helm install` and `helm upgrade` of the page, in order."""
    chart.write_page_values(folder)
    found = []
    for verb, release, place, *flags in chart.page_commands("helm"):
        if verb not in ("install", "upgrade"):
            continue
        assert chart.ROOT / place == chart.CHART
        named = [str(folder / flag) if flag.endswith(".yaml") else flag for flag in flags]
        done = chart.helm("template", release, str(chart.CHART), *named)
        assert done.returncode == 0, done.stderr
        found.append([each for each in yaml.safe_load_all(done.stdout) if each])
    return found


def settings(objects: chart.Objects) -> dict[str, Any]:
    return dict(yaml.safe_load(chart.router_yaml(objects)))


def test_each_step_changes_what_the_page_says(tmp_path: Path) -> None:
    steps = rendered(tmp_path)
    tried = {"policy": "total_delay"}
    assert [
        {key: settings(each).get(key) for key in ("policy", "shadow", "canary", "tokenizer")}
        for each in steps
    ] == [
        {"policy": "round_robin", "shadow": None, "canary": None, "tokenizer": None},
        {"policy": "round_robin", "shadow": tried, "canary": None, "tokenizer": None},
        {"policy": "round_robin", "shadow": None, "canary": tried | {"share": 0.1}, "tokenizer": None},
        {"policy": "total_delay", "shadow": None, "canary": None, "tokenizer": None},
        {"policy": "total_delay", "shadow": None, "canary": None, "tokenizer": "/tokenizers/qwen"},
    ]
    for objects in steps:
        (tmp_path / "router.yaml").write_text(chart.router_yaml(objects))
        load_config(tmp_path / "router.yaml", environ={}, overrides={"host": "0.0.0.0"})
        assert chart.only(objects, "Deployment")["metadata"]["name"] == "lmetric-lmetric-router"
        assert chart.router(objects)["image"].startswith("registry.example.com/")
    hashes = [chart.only(each, "Deployment")["spec"]["template"]["metadata"] for each in steps]
    assert len({each["annotations"]["checksum/config"] for each in hashes}) == len(steps), "pods restart"


def test_the_values_find_the_pods_of_the_imported_service(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(SERVICE)
    imported = import_config(tmp_path / "service.yaml").settings
    (source,) = settings(rendered(tmp_path)[0])["discovery"]
    (expected,) = imported["discovery"]
    assert {key: source["kubernetes"][key] for key in ("selector", "port")} == {
        key: expected["kubernetes"][key] for key in ("selector", "port")
    }


SERVICE = (
    "apiVersion: v1\nkind: Service\nmetadata: {name: vllm, namespace: default}\n"
    "spec: {ports: [{name: http, port: 80, targetPort: http}], selector: {app: vllm}}\n"
)


async def test_a_router_serves_the_pods_at_each_step(tmp_path: Path) -> None:
    """Stock engines in pods, found through the API: round robin, shadow, canary, new policy."""
    *steps, _ = rendered(tmp_path)
    async with ApiServer() as api, EmbeddedEngines(options=[STOCK] * 2) as engines:
        for name, url in zip("ab", engines.urls, strict=True):
            api.put(pod(name, url))
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(api.kubeconfig()))
        for objects in steps:
            async with world(0, **runnable(settings(objects), tmp_path / "kubeconfig")) as it:
                await serves(it, settings(objects))


def runnable(found: dict[str, Any], kubeconfig: Path) -> dict[str, Any]:
    """The settings with an account of this machine, and without the files of the Secret."""
    found.pop("replicas")
    found["discovery"][0]["kubernetes"] |= {"kubeconfig": kubeconfig}
    return found | {"admin": {"enabled": True}}


async def serves(it: World, found: dict[str, Any]) -> None:
    """The router is ready, `approximate`, and runs the policies of its settings."""
    await it.until(lambda: len([*it.server.fleet.engines()]) == 2 and it.server.fleet.ready())
    for number in range(4):
        body = {"model": "emulated", "prompt": f"prompt {number}", "max_tokens": 4}
        assert (await it.post(body))[0] == 200
    status, page = await it.get("/metrics")
    assert status == 200
    modes = [line for line in page.decode().splitlines() if line.startswith("lmetric_engine_mode{")]
    assert len(modes) == 2
    assert all('mode="approximate"' in line for line in modes), modes
    _, body = await it.get("/admin/canary")
    (state,) = orjson.loads(body)
    assert state["stable_policy"] == found["policy"]
    assert (state["state"] == "running") == ("canary" in found), state
    assert (state.get("shadow") is not None) == ("shadow" in found), state
