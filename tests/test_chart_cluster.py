"""The chart, the manifest and discovery on a real API server (after scripts/kube_tools)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import chart_world as chart
from chart_world import ROOT, VARIANTS
from discovery_world import following
from epp_world import exchange, picking, request_head
from kube_world import Cluster, cluster
from lmetric.config import DiscoverySource
from lmetric.server.discovery import followed, inference_pool, kubernetes
from lmetric_lab.embedded import EmbeddedEngines
from server_world import world
from test_chart_steps import STOCK, runnable, serves
from test_docs import steps
from test_docs_run import missing
from waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
OBJECTIVE = "inference.networking.x-k8s.io/v1alpha2"
NEW_OBJECTIVE = "llm-d.ai/v1alpha2"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


@pytest.fixture
def api(started: Cluster) -> Iterator[Cluster]:
    """The API server. It must not warn, for example of deprecated fields or of a pod's rights."""
    started.warnings.clear()
    yield started
    assert started.warnings == []


def installed(api: Cluster, variant: str, namespace: str, *settings: str) -> chart.Objects:
    """Installs a variant with helm as the release `lm`. Returns the objects."""
    further = [text for setting in settings for text in ("--set-json", setting)]
    values = ["--values", str(path)] if (path := VARIANTS[variant]) else []
    notes = _helm(api, "install", "lm", str(chart.CHART), "--namespace", namespace, *values, *further)
    assert "Wait for the routers" in notes
    manifest = _helm(api, "get", "manifest", "lm", "--namespace", namespace)
    return [each for each in yaml.safe_load_all(manifest) if each]


def _helm(api: Cluster, *arguments: str) -> str:
    done = chart.helm("--kubeconfig", str(api.kubeconfig()), *arguments)
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stderr, done.stderr
    return done.stdout


def admit(api: Cluster, objects: chart.Objects, namespace: str) -> None:
    """The API server admits the pod of the Deployment to a namespace of the restricted profile."""
    template = chart.only(objects, "Deployment")["spec"]["template"]
    body = {"metadata": {**template["metadata"], "generateName": "pod-"}, "spec": template["spec"]}
    api.create(f"/api/v1/namespaces/{namespace}/pods", body, "&dryRun=All")


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_installs_every_variant(variant: str, api: Cluster) -> None:
    """The API server accepts all objects and the pod. Afterwards, helm removes them."""
    home, engines = f"install-{variant.removesuffix('-values')}", "engines"
    path = api.namespace(home)
    api.create(f"{path}/serviceaccounts", {"metadata": {"name": "existing"}})
    if api.call("GET", f"/api/v1/namespaces/{engines}")[0] == 404:
        api.namespace(engines)
    objects = installed(api, variant, home)
    assert {each["kind"] for each in objects} >= {"Deployment", "Service", "ConfigMap"}
    for each in objects:
        api.apply(each, home)  # with strict checks of fields
    admit(api, objects, home)
    _helm(api, "uninstall", "lm", "--namespace", home)
    for each in objects:
        status, _ = api.call("GET", f"{api.path_of(each, home)}/{each['metadata']['name']}")
        assert status == 404, each


def test_the_manifest_is_accepted(api: Cluster) -> None:
    api.namespace("manifest")
    objects = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    for each in objects:
        api.apply(each, "manifest")
    admit(api, objects, "manifest")


def test_the_objects_on_the_pages_are_accepted(api: Cluster) -> None:
    """Every whole object on a how-to page has known fields and valid values."""
    api.namespace("pages")
    found = chart.on_pages()
    assert {each["kind"] for each in found} >= {"PodMonitor", "ScaledObject"}
    for each in found:
        api.apply(each, "pages")


@pytest.mark.parametrize("variant", ["default", "epp-values", "epp-full-values"])
def test_the_account_may_do_what_the_role_says_and_no_more(variant: str, api: Cluster) -> None:
    namespace = f"role-{variant.removesuffix('-values')}"
    api.namespace(namespace)
    objects = installed(api, variant, namespace)
    token = api.token(namespace, chart.pod(objects)["serviceAccountName"])
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    answer = api.create(path, {"spec": {"namespace": namespace}}, token=token)
    # Rights of every account: questions about oneself, and public certificates.
    everyone = {"authorization.k8s.io", "authentication.k8s.io", "certificates.k8s.io"}
    rules = [rule for rule in answer["status"]["resourceRules"] if not everyone & {*rule["apiGroups"]}]

    def plain(rule: dict[str, Any]) -> dict[str, set[str]]:
        return {key: {*rule[key]} for key in sorted(rule)}

    assert [plain(rule) for rule in rules] == [plain(rule) for rule in chart.only(objects, "Role")["rules"]]


def engine_pod(name: str, port: int) -> dict[str, Any]:
    """A pod that the restricted profile allows."""
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    ports = [{"name": "http", "containerPort": port}]
    return {
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "vllm", "image": "vllm", "ports": ports, "securityContext": own}],
        },
    }


def run_pod(api: Cluster, home: str, name: str, address: str, port: int = 8000) -> None:
    """Makes a pod, and reports it as a kubelet does once it is ready."""
    api.create(f"{home}/pods", engine_pod(name, port))
    ready = {"type": "Ready", "status": "True"}
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [ready]}
    api.patch(f"{home}/pods/{name}/status", {"status": status})


def objective(version: str, name: str, priority: int, pool: str) -> dict[str, Any]:
    spec = {"priority": priority, "poolRef": {"name": pool}}
    return {"apiVersion": version, "kind": "InferenceObjective", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PACE_SECONDS", 0.02)
    monkeypatch.setattr(inference_pool, "POLL_SECONDS", 0.1)
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


def section(api: Cluster, objects: chart.Objects, namespace: str) -> dict[str, Any]:
    """The source of the rendered router.yaml, with the token of the chart's service account."""
    (source,) = yaml.safe_load(chart.router_yaml(objects))["discovery"]
    token = api.token(namespace, chart.pod(objects)["serviceAccountName"])
    source["kubernetes"]["kubeconfig"] = str(api.kubeconfig(namespace, token))
    return dict(source)


@pytest.mark.usefixtures("_fast")
async def test_the_picker_follows_the_pool_of_the_chart(api: Cluster) -> None:
    """Pods, ports and objectives, with the permissions of the chart's Role and no others."""
    home = api.namespace("fleet")
    objects = installed(api, "epp-values", "fleet")
    pool = chart.only(objects, "InferencePool")["metadata"]["name"]
    path = f"/apis/inference.networking.k8s.io/v1/namespaces/fleet/inferencepools/{pool}"
    run_pod(api, home, "a", "10.1.0.1")
    api.create(f"{home}/pods", engine_pod("starting", 8000))
    api.apply(objective(OBJECTIVE, "batch", -1, pool), "fleet")
    api.apply(objective(OBJECTIVE, "other", 7, "other-pool"), "fleet")
    priorities: dict[str, int] = {}
    source = followed.make_source(DiscoverySource.model_validate(section(api, objects, "fleet")), priorities)
    async with following(source) as told:
        await told.until(lambda: told.names == ["a.fleet"])
        assert told.lists[-1][0].config.url == "http://10.1.0.1:8000"
        assert told.lists[-1][0].ready
        await until(lambda: priorities == {"batch": -1}, seen=lambda: priorities)
        run_pod(api, home, "b", "fd00::1")
        await told.until(lambda: told.names == ["a.fleet", "b.fleet"])
        api.delete(f"{home}/pods/a")
        await told.until(lambda: told.names == ["b.fleet"])
        api.patch(path, {"spec": {"targetPorts": [{"number": 8000}, {"number": 8001}]}})
        await told.until(lambda: told.names == ["b.fleet-8000", "b.fleet-8001"])
        assert not told.problems
        api.delete("/apis/rbac.authorization.k8s.io/v1/namespaces/fleet/rolebindings/lm-lmetric-router")
        await told.until(lambda: told.problems)
        assert re.search(r"status 403: .*give the router's service account a Role", told.problems[0])


@pytest.mark.usefixtures("_fast")
async def test_the_steps_of_the_page(api: Cluster, tmp_path: Path) -> None:
    """Helm and the API server carry out the page's commands. After each, a router serves the pods
    with the chart's configuration and account. Then each step is undone."""
    home = api.namespace("steps")
    chart.write_page_values(tmp_path)

    def objects() -> chart.Objects:
        manifest = _helm(api, "get", "manifest", "lmetric", "--namespace", "steps")
        return [each for each in yaml.safe_load_all(manifest) if each]

    def policy() -> tuple[str, list[str]]:
        settings = yaml.safe_load(chart.router_yaml(objects()))
        return settings["policy"], sorted(settings.keys() & {"shadow", "canary", "tokenizer"})

    async with EmbeddedEngines(options=[STOCK] * 2) as engines:
        for name, url in zip("ab", engines.urls, strict=True):
            run_pod(api, home, name, "127.0.0.1", int(url.rpartition(":")[2]))
        passed = []
        texts = (shown for line, shown in steps(chart.PAGE) if line.startswith("helm "))
        for verb, release, place, *flags in chart.page_commands("helm"):
            named = [str(tmp_path / flag) if flag.endswith(".yaml") else flag for flag in flags]
            output = _helm(api, verb, release, str(ROOT / place), "--namespace", "steps", *named)
            shown = next(texts)
            assert not missing(shown, output), output
            admit(api, objects(), "steps")
            passed.append(policy())
            settings = yaml.safe_load(chart.router_yaml(objects()))
            if "tokenizer" not in settings:  # the export needs a Hub
                settings["discovery"] = [section(api, objects(), "steps")]
                kubeconfig = settings["discovery"][0]["kubernetes"]["kubeconfig"]
                async with world(0, **runnable(settings, kubeconfig)) as it:
                    await serves(it, settings)
    _helm(api, "rollback", "lmetric", "--namespace", "steps")
    assert policy() == passed[-2]
    for revision in range(len(passed) - 2, 0, -1):
        _helm(api, "rollback", "lmetric", str(revision), "--namespace", "steps")
        assert policy() == passed[revision - 1]
    _helm(api, "uninstall", "lmetric", "--namespace", "steps")


async def test_the_service_of_the_page_leads_to_the_router_and_back(api: Cluster) -> None:
    home = api.namespace("service")
    before = {"app": "vllm"}
    port = {"name": "http", "port": 80, "targetPort": "http"}
    api.create(
        f"{home}/services", {"metadata": {"name": "vllm"}, "spec": {"selector": before, "ports": [port]}}
    )
    there, back = [
        json.loads(words[-1]) for words in chart.page_commands("kubectl") if words[:2] == ["patch", "service"]
    ]
    api.patch(f"{home}/services/vllm", there)
    selector = api.get(f"{home}/services/vllm")["spec"]["selector"]
    _helm(api, "install", "lmetric", str(chart.CHART), "--namespace", "service")
    manifest = _helm(api, "get", "manifest", "lmetric", "--namespace", "service")
    found = [each for each in yaml.safe_load_all(manifest) if each]
    assert selector == chart.only(found, "Deployment")["spec"]["selector"]["matchLabels"]
    api.patch(f"{home}/services/vllm", back)
    assert api.get(f"{home}/services/vllm")["spec"]["selector"] == before


@pytest.mark.usefixtures("_fast")
async def test_the_picker_reads_objectives_of_llm_d(api: Cluster) -> None:
    """llm-d's group has the kind of the extension. Its definition is in no Go module here."""
    kind = next(each for each in chart.definitions() if each["spec"]["names"]["kind"] == "InferenceObjective")
    kind["metadata"] = {"name": "inferenceobjectives.llm-d.ai"}
    kind["spec"]["group"] = "llm-d.ai"
    api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", kind)
    api.namespace("llm-d")
    objects = installed(api, "epp-values", "llm-d")
    pool = chart.only(objects, "InferencePool")["metadata"]["name"]
    objectives = "/apis/llm-d.ai/v1alpha2/namespaces/llm-d/inferenceobjectives"
    await until(lambda: api.call("GET", objectives)[0] == 200)
    api.apply(objective(NEW_OBJECTIVE, "fast", 10, pool), "llm-d")
    priorities: dict[str, int] = {}
    source = followed.make_source(DiscoverySource.model_validate(section(api, objects, "llm-d")), priorities)
    async with following(source):
        await until(lambda: priorities == {"fast": 10}, seen=lambda: priorities)


@pytest.mark.usefixtures("_fast")
async def test_a_picker_serves_the_pool_of_the_chart(api: Cluster) -> None:
    home = api.namespace("serving")
    async with picking(1) as engines:
        port = engines.engines[0].port
        objects = installed(api, "epp-values", "serving", f"engines.portNumber={port}")
        run_pod(api, home, "a", "127.0.0.1", port)
        discovery = [section(api, objects, "serving")]
        async with picking(0, discovery=discovery) as world, exchange(world.target) as stream:
            await until(lambda: world.server.fleet.ready())
            place, _, _ = await stream.ask(head=request_head())
            assert place == engines.places[0]
