"""The Helm chart: every variant is valid, safe by default, and fits the router's own settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import chart_world as chart
from chart_world import CHART, NAMESPACE, ROOT, TOOLS, VARIANTS, objects, of_kind, only, pod, router
from lmetric.config import load_config
from lmetric.config.schema import ServerConfig
from lmetric.server.epp.settings import for_gateway

CREATE_SECRET = ["create", "secret", "generic"]
EPP = [name for name in VARIANTS if name.startswith("epp")]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@each_variant
def test_helm_finds_no_fault(variant: str) -> None:
    done = chart.lint(variant)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.27.0", "1.37.0"])
def test_the_objects_fit_the_schemas_of_kubernetes(version: str, tmp_path: Path) -> None:
    """kubeconform knows all fields of the oldest and newest Kubernetes and of custom resources."""
    schemas = TOOLS / "schemas"
    if not schemas.is_dir():
        pytest.skip("the schemas are missing: run scripts/chart_tools")
    (rendered := tmp_path / "rendered").mkdir()
    for variant in VARIANTS:
        (rendered / f"{variant}.yaml").write_text(chart.rendered(variant))
    shutil.copy(ROOT / "deploy" / "kubernetes.yaml", rendered)
    assert {"PodMonitor", "ScaledObject"} <= {each["kind"] for each in chart.on_pages()}
    (rendered / "pages.yaml").write_text(yaml.safe_dump_all(chart.on_pages()))
    chart.write_schemas(tmp_path)
    command = [chart.tool("kubeconform"), "-strict", "-summary", "-kubernetes-version", version]
    place = f"{schemas}/{{{{.NormalizedKubernetesVersion}}}}-local{{{{.StrictSuffix}}}}"
    command += ["-schema-location", place + "/{{.ResourceKind}}{{.KindSuffix}}.json"]
    custom = f"{tmp_path}/{{{{.ResourceKind}}}}_{{{{.ResourceAPIVersion}}}}.json"
    command += ["-schema-location", custom, str(rendered)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    valid, skipped = map(int, re.findall(r"(?:Valid|Skipped): (\d+)", done.stdout))
    assert (valid > 50, skipped) == (True, 0), done.stdout


def test_the_packed_chart_is_the_chart(tmp_path: Path) -> None:
    packed = []
    for name in ("first", "second"):
        environment = {**os.environ, "OUT": str(tmp_path / name)}
        subprocess.run([ROOT / "scripts" / "chart"], env=environment, check=True, capture_output=True)
        (file,) = (tmp_path / name).glob("lmetric-router-*.tgz")
        packed.append(file)
    assert packed[0].read_bytes() == packed[1].read_bytes()
    assert chart.rendered("full-values", chart=packed[0]) == chart.rendered("full-values")


@each_variant
def test_the_router_accepts_its_configuration(variant: str, tmp_path: Path) -> None:
    """The rendered router.yaml passes the router's own checks, with the listener of the pod."""
    found = objects(variant)
    file = tmp_path / "router.yaml"
    file.write_text(chart.router_yaml(found))
    if variant == "full-values":  # files of the Secret are read at the start
        settings = yaml.safe_load(file.read_text())
        assert settings["replicas"]["urls"] == ["http://gateway-peers:8080"]
    config = load_config(file, environ={}, overrides={"host": "0.0.0.0"})
    assert isinstance(config, ServerConfig)
    if variant in EPP:
        for_gateway(config)


@each_variant
def test_the_pod_reads_what_the_configuration_names(variant: str) -> None:
    """Each path in router.yaml lies on a mount, and each mount of the Secret has its file."""
    found = objects(variant)
    mounts = {each["mountPath"]: each["name"] for each in router(found)["volumeMounts"]}
    volumes = {each["name"]: each for each in pod(found)["volumes"]}
    assert set(mounts.values()) <= volumes.keys()
    # Workers exchange over sockets, and the root file system is read-only.
    assert "emptyDir" in volumes[mounts["/tmp"]]
    text = chart.router_yaml(found)
    secrets = set(re.findall(r"/etc/lmetric-secrets/(\S+)", text))
    items = volumes["secrets"]["secret"]["items"] if "secrets" in volumes else []
    assert secrets == {item["path"] for item in items}
    assert ("/tokenizers" in text) == ("/tokenizers" in mounts)
    tls = volumes["tls"]["secret"]["secretName"] if "/etc/lmetric-tls" in mounts else None
    assert tls == ("picker-certificate" if "/etc/lmetric-tls/tls.key" in text else None)
    assert "Secret" not in {each["kind"] for each in found}, "the chart makes no secret"
    for step in pod(found).get("initContainers", ()):
        folder = step["args"][step["args"].index("--out") + 1]
        assert folder in text


@each_variant
def test_the_pod_keeps_the_restricted_profile(variant: str) -> None:
    """No root, no capabilities, a read-only root, no token that discovery does not need."""
    found = objects(variant)
    spec = pod(found)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    discovers = "discovery:" in chart.router_yaml(found)
    tokens = [each["name"] for each in spec["volumes"] if "projected" in each]
    assert tokens == (["api"] if discovers else [])
    steps = [mount["name"] for step in spec.get("initContainers", ()) for mount in step["volumeMounts"]]
    assert "api" not in steps
    roles = [role["rules"] for role in of_kind(found, "Role")]
    expected: chart.Objects = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    if variant in EPP:
        expected += [
            {
                "apiGroups": ["inference.networking.k8s.io"],
                "resources": ["inferencepools"],
                "resourceNames": [pool_name(found)],
                "verbs": ["get"],
            },
            {
                "apiGroups": ["inference.networking.x-k8s.io", "llm-d.ai"],
                "resources": ["inferenceobjectives"],
                "verbs": ["list"],
            },
        ]
    assert roles == ([expected] if discovers and variant != "bare-values" else [])


def pool_name(found: chart.Objects) -> str:
    """Returns the InferencePool that the routers follow."""
    (source,) = yaml.safe_load(chart.router_yaml(found))["discovery"]
    return str(source["kubernetes"]["inference_pool"])


@each_variant
def test_selectors_and_ports_fit_the_pods(variant: str) -> None:
    found = objects(variant)
    labels = only(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in router(found)["ports"]}
    selectors = [only(found, "Deployment")["spec"]["selector"]["matchLabels"]]
    for service in of_kind(found, "Service"):
        selectors.append(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for budget in of_kind(found, "PodDisruptionBudget"):
        selectors.append(budget["spec"]["selector"]["matchLabels"])
    for spread in pod(found).get("topologySpreadConstraints", ()):
        selectors.append(spread["labelSelector"]["matchLabels"])
    for policy in of_kind(found, "NetworkPolicy"):
        selectors.append(policy["spec"]["podSelector"]["matchLabels"])
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert named == ports
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    for scaler in of_kind(found, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == only(found, "Deployment")["metadata"]["name"]
        assert "replicas" not in only(found, "Deployment")["spec"]


@pytest.mark.parametrize("variant", ["full-values", "epp-full-values"])
def test_prometheus_finds_each_router_once(variant: str) -> None:
    """The monitor selects only the headless Service, and gives the job the name for the alerts."""
    found = objects(variant)
    monitor = only(found, "ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    (service,) = (each for each in of_kind(found, "Service") if wanted <= each["metadata"]["labels"].items())
    assert service["spec"]["clusterIP"] == "None"
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "lmetric-router"}]
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
    assert only(found, "PrometheusRule")["spec"] == rules
    (text,) = (
        each["data"]["lmetric-router.json"] for each in of_kind(found, "ConfigMap")
        if "lmetric-router.json" in each["data"]
    )  # fmt: skip
    assert text.strip() == (ROOT / "deploy" / "grafana" / "lmetric-router.json").read_text().strip()


def test_the_alert_finds_the_job_of_the_monitors_on_the_pages() -> None:
    """Without a relabeling, the operator names the job after the namespace and the monitor."""
    rules = (ROOT / "deploy" / "prometheus" / "rules.yaml").read_text()
    (job,) = re.findall(r'up\{job=~"(lmetric-router[^"]*)"\}', rules)
    monitors = of_kind(chart.on_pages(), "PodMonitor")
    assert monitors
    for monitor in monitors:
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            names = {rule["targetLabel"]: rule["replacement"] for rule in endpoint.get("relabelings", ())}
            assert re.fullmatch(job, names.get("job", f"{NAMESPACE}/{monitor['metadata']['name']}"))


def test_the_shown_values_use_the_secret_and_the_registry_of_the_page(tmp_path: Path) -> None:
    text = chart.PAGE.read_text()
    (secret,) = {words[3] for words in chart.page_commands("kubectl") if words[:3] == CREATE_SECRET}
    blocks = re.findall(r"^```yaml\n(# values\.yaml\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [yaml.safe_load(block).get("mode") for block in blocks] == [None, "epp"]
    for block in blocks:
        (tmp_path / "values.yaml").write_text(block)
        done = chart.helm("template", "lmetric", str(CHART), "--values", str(tmp_path / "values.yaml"))
        assert done.returncode == 0, done.stderr
        spec = pod([each for each in yaml.safe_load_all(done.stdout) if each])
        volumes = {each["name"]: each for each in spec["volumes"]}
        assert volumes["secrets"]["secret"]["secretName"] == secret
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["image"].startswith("registry.example.com/")


def test_the_runbooks_of_all_alerts_have_one_address() -> None:
    wiki = "https://wiki.example/lmetric?page=runbooks"
    found = objects("full-values", f'prometheusRule.runbookUrl="{wiki}"')
    groups = only(found, "PrometheusRule")["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"{wiki}#{rule['alert'].lower()}"
    for broken in ("", "https://wiki.example/lmetric#alerts", "two words"):
        done = chart.template("full-values", f'prometheusRule.runbookUrl="{broken}"')
        assert done.returncode != 0
        assert "runbookUrl" in done.stderr


@pytest.mark.parametrize("variant", EPP)
def test_the_picker_and_the_gateway_use_one_pool(variant: str) -> None:
    """The gateway finds the picker's port through the InferencePool that the picker follows."""
    found = objects(variant)
    assert router(found)["args"][0] == "epp"
    for route in of_kind(found, "HTTPRoute"):
        ((target,),) = (rule["backendRefs"] for rule in route["spec"]["rules"])
        assert (target["kind"], target["name"]) == ("InferencePool", pool_name(found))
    if variant == "epp-pool-values":
        assert (pool_name(found), of_kind(found, "InferencePool")) == ("qwen", [])
        (role,) = of_kind(found, "Role")
        assert role["metadata"]["namespace"] == "engines"
        return
    made = only(found, "InferencePool")
    assert made["metadata"]["name"] == pool_name(found)
    pool = made["spec"]
    reference = pool["endpointPickerRef"]
    (service,) = (each for each in of_kind(found, "Service") if each["metadata"]["name"] == reference["name"])
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"], port["appProtocol"]) == (9002, "grpc", "http2")
    assert reference["port"] == {"number": port["port"]}
    (container_port,) = (each for each in router(found)["ports"] if each["name"] == "grpc")
    assert container_port["containerPort"] == 9002
    (engines,) = (
        peer["podSelector"]
        for rule in only(found, "NetworkPolicy")["spec"]["egress"]
        for peer in rule.get("to", ())
        if "ports" not in rule
    )
    assert engines == pool["selector"]


def test_the_chart_agrees_with_the_manifest() -> None:
    """deploy/kubernetes.yaml and the chart's default have the same pod, but for names and token."""
    manifest = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    plain = pod(manifest)
    tokenizer = 'tokenizers=[{"name":"model","model":"Qwen/Qwen3-8B"}]'
    found = objects("default", tokenizer)
    ours = pod(found)
    for key in ("securityContext", "terminationGracePeriodSeconds"):
        assert ours[key] == plain[key]
    for key in ("args", "readinessProbe", "livenessProbe", "resources", "securityContext", "ports"):
        assert router(found)[key] == plain["containers"][0][key], key
    (step,) = ours["initContainers"]
    for key in ("args", "image", "resources", "securityContext", "volumeMounts"):
        assert step[key] == plain["initContainers"][0][key], key
    settings = yaml.safe_load(chart.router_yaml(found))
    theirs = yaml.safe_load(chart.router_yaml(manifest))
    settings["replicas"] = theirs["replicas"] = None  # names of Services; the token in a file
    assert settings == theirs
    assert [rule["ports"] for rule in only(found, "NetworkPolicy")["spec"]["egress"][1:]] == [
        rule["ports"] for rule in only(manifest, "NetworkPolicy")["spec"]["egress"][1:]
    ]


def test_the_version_is_that_of_the_release() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    description = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (description["version"], description["appVersion"]) == (version, version)
    assert router(objects("default"))["image"] == f"lmetric-router:{version}"
    assert router(objects("full-values"))["image"].startswith("registry.example.com/lmetric-router@sha256:")


def test_routers_scale_on_cpu_below_a_full_core() -> None:
    """The target is the 0.6 of a core per router in docs/how-to/deploying.md."""
    spec = only(objects("epp-full-values"), "HorizontalPodAutoscaler")["spec"]
    (metric,) = spec["metrics"]
    target = metric["resource"]
    assert target == {"name": "cpu", "target": {"type": "AverageValue", "averageValue": "600m"}}
    assert "at most 0.6 of a core" in (ROOT / "docs" / "how-to" / "deploying.md").read_text()
    assert spec["maxReplicas"] <= 64  # routers that exchange their load
    drain = spec["behavior"]["scaleDown"]
    assert drain["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mode=\"proxy\""], "mode"),
        (["replica=3"], "replica"),
        (["replicas=65"], "replicas"),
        (["engines.matchLabels=null"], "matchLabels"),
        (["config.timeouts.drain=90"], "terminationGracePeriodSeconds is 60, but draining takes 95 s"),
        (['engines.fixed=[{"url":"http://10.0.0.1:8000"}]'], "networkPolicy.extraEgress"),
        (['tokenizers=[{"name":"A_b","model":"x"}]'], "tokenizers"),
        (["serviceMonitor={\"enabled\":true,\"adminToken\":true}"], "set admin.enabled to true"),
        (['epp.tls.secret="certificate"'], "set mode to epp"),
        (["httpRoute.enabled=true"], "set httpRoute.parentRefs"),
        (['mode="epp"', 'engines.namespace="else"'], 'pods of its own namespace "gateway"'),
        (['autoscaling={"enabled":true,"minReplicas":9}'], "above autoscaling.maxReplicas 8"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(settings: list[str], message: str) -> None:
    done = chart.template("default", *settings)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_drain_of_zero_seconds_is_no_default() -> None:
    none = ["config.timeouts.drain=0", "config.timeouts.drain_grace=0", "terminationGracePeriodSeconds=10"]
    done = chart.template("default", *none)
    assert done.returncode == 0, done.stderr


def test_every_value_is_documented_and_checked() -> None:
    """values.schema.json has each key of values.yaml and no other."""

    def keys(value: Any, prefix: str = "") -> set[str]:
        if not isinstance(value, dict):
            return set()
        return {f"{prefix}{key}" for key in value} | {
            each for key, inner in value.items() for each in keys(inner, f"{prefix}{key}.")
        }

    def described(schema: dict[str, Any], prefix: str = "") -> set[str]:
        known = schema.get("properties", {})
        return {f"{prefix}{key}" for key in known} | {
            each for key, inner in known.items() for each in described(inner, f"{prefix}{key}.")
        }

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = described(yaml.safe_load((CHART / "values.schema.json").read_text()))
    assert schema - keys(values) == {"global"}
    free = {"resources", "tokenizer.resources", "engines.matchLabels", "dashboard.labels"}
    extra = {key for key in keys(values) - schema if not any(key.startswith(f"{each}.") for each in free)}
    assert extra == set()


@pytest.mark.parametrize("variant", ["default", "epp-values", "fixed-values"])
def test_the_notes_name_the_secret(variant: str, tmp_path: Path) -> None:
    """Helm renders notes only with a cluster, so a copy of the chart has them in an object."""
    copy = Path(shutil.copytree(CHART, tmp_path / "chart"))
    (copy / "templates" / "NOTES.txt").rename(copy / "templates" / "_NOTES.txt")
    text = '{{- include (print $.Template.BasePath "/_NOTES.txt") . | nindent 2 }}'
    (copy / "templates" / "notes.yaml").write_text(f"kind: Notes\ntext: |\n  {text}\n")
    notes = only(objects(variant, chart=copy), "Notes")["text"]
    assert "the Secret lm-lmetric-router has these keys" in notes
    assert ("keys.yaml" in notes) == (variant != "epp-values")
    assert "replicas-token" in notes
    assert ("WARNING: `tokenizers` is empty" in notes) == (variant != "epp-values")
    assert ("lm-lmetric-router.gateway:9002" in notes) == (variant == "epp-values")
