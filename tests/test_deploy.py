"""The deployment files: promises of unit, manifest and image; packages they must not install."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmetric._core import EventFeed
from lmetric.cli import canary, top
from lmetric.config import load_config
from lmetric.config.schema import ServerConfig
from lmetric.server.api.issued import MOST_KEYS, ROOM_FOR_OTHERS
from lmetric.server.background import key_exchange
from lmetric.server.background.replicas import MOST_ADDRESSES, MOST_ANSWER_BYTES
from lmetric.server.http.client_load import UNREAD_BYTES
from lmetric.server.http.connection import SMALL_BODY, SMALL_HEAD
from lmetric.server.http.forwarding import CACHE_BYTES
from lmetric.server.http.tokenizing import LARGE_TEXT_BYTES, MOST_TEXT_BYTES, TOKENIZED_BYTES
from lmetric.server.http.unpacking import PIECE_BYTES
from lmetric.server.observe.logs import QUEUE_BYTES
from lmetric.server.upstream.reading import WAITING_BYTES

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
# Of the interpreter, its libraries and what answers and connections hold.
PROCESS_BYTES = 384 << 20
# Of a record of an issued API key with the longest names; measured with tracemalloc.
RECORD_BYTES = 1_660
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
RUNTIME_EXTRAS = ("epp", "jwt", "kubernetes", "redis")


def manifest() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (document for document in manifest() if document["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("Deployment")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    found: dict[str, Any] = only
    return found


def init_container() -> dict[str, Any]:
    (only,) = pod()["initContainers"]
    found: dict[str, Any] = only
    return found


def unit() -> dict[str, list[str]]:
    """The settings of the unit's [Service] section; a repeated setting has several values."""
    section = (DEPLOY / "lmetric-router.service").read_text().split("[Service]")[1].split("[Install]")[0]
    settings: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def buffers() -> dict[str, int]:
    """Every buffer that clients, engines and other routers can fill, by its row in the docs.

    The values are the most bytes of one pool by the default bounds, its process included.
    """
    config = ServerConfig()
    limits = config.limits
    return {
        "KV index": config.index_bytes,
        "map from engines' block hashes to the index": config.index_bytes,
        "KV events of one engine that wait": EventFeed.MAX_SOURCE_BYTES,
        "tokens of known prompts": config.token_cache_bytes,
        "texts while they are tokenized: at most one above 1 MiB": TOKENIZED_BYTES
        * (MOST_TEXT_BYTES + LARGE_TEXT_BYTES),
        "decision records": config.record_bytes,
        "requests in upload, with their heads; bodies waiting for an engine": limits.max_body_bytes_total,
        "small requests": limits.max_concurrent_requests * SMALL_BODY,
        "small heads of pages": limits.max_connections * SMALL_HEAD,
        "one body while it is unpacked": PIECE_BYTES,
        "answers that clients do not read": UNREAD_BYTES,
        "engines' answers that wait for a turn of the event loop": WAITING_BYTES,
        "clients' addresses that proxies report": CACHE_BYTES,
        "answers of other routers": MOST_ADDRESSES * MOST_ANSWER_BYTES
        + key_exchange.AT_ONCE * key_exchange.MOST_ANSWER_BYTES,
        "API keys of `/admin/keys`": (MOST_KEYS + ROOM_FOR_OTHERS) * RECORD_BYTES,
        "log lines": QUEUE_BYTES,
        "interpreter, connections, answers in transit": PROCESS_BYTES,
    }


def bounded_bytes() -> int:
    """The most bytes that one pool holds by the default bounds, its process included."""
    return sum(buffers().values())


def test_the_pod_keeps_the_restricted_profile() -> None:
    """Reliability M8: seccomp, no root, no capabilities, a read-only root."""
    security = pod()["securityContext"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["runAsNonRoot"] is True
    assert pod()["enableServiceLinks"] is False
    for each in (container(), init_container()):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_port_is_one() -> None:
    """python.md 6.9: `top` and `canary` looked at 8000, the engines' port, and `serve` has 8080."""
    port = str(ServerConfig().port)
    url = f"http://127.0.0.1:{port}"
    assert inspect.signature(top.command).parameters["url"].default == canary._URL == url
    args = container()["args"]
    assert args[args.index("--port") + 1] == port
    assert container()["ports"] == [{"name": "http", "containerPort": int(port)}]
    assert f'"--port", "{port}"' in (DEPLOY / "Dockerfile").read_text()
    assert f"EXPOSE {port}\n" in (DEPLOY / "Dockerfile").read_text()
    assert f"ListenStream={port}\n" in (DEPLOY / "lmetric-router.socket").read_text()
    chart = DEPLOY / "helm" / "lmetric-router" / "templates"
    assert f"containerPort: {port}" in (chart / "deployment.yaml").read_text()
    assert f'- "{port}"' in (chart / "deployment.yaml").read_text()
    assert f"-peers:{port}" in (chart / "_helpers.tpl").read_text()
    pages = [ROOT / "README.md", *(ROOT / "docs" / "tutorials").glob("*.md")]
    assert not [page for page in pages if "serve" in (text := page.read_text()) and "127.0.0.1:8000" in text]


def test_the_image_is_one_version() -> None:
    """Reliability M8: the manifest names the release's image, never a tag that moves."""
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert container()["image"] == f"lmetric-router:{version}"
    assert init_container()["image"] == f"lmetric-router-tokenizer:{version}"


def test_the_init_container_exports_the_configured_tokenizer() -> None:
    """The router reads the folder that the init container writes, on a read-only root."""
    command, _, option, folder = init_container()["args"]
    config = yaml.safe_load(of_kind("ConfigMap")["data"]["router.yaml"])
    assert (command, option, folder) == ("tokenizer", "--out", config["tokenizer"])
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["name"]: mount for mount in init_container()["volumeMounts"]}
    assert all("emptyDir" in volumes[name] for name in mounts)
    assert folder.startswith(mounts["tokenizers"]["mountPath"] + "/")
    values = {entry["name"]: entry.get("value") for entry in init_container()["env"]}
    assert str(values["HF_HOME"]).startswith(mounts["tmp"]["mountPath"] + "/")
    mounted = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert "emptyDir" in volumes[mounted["/tmp"]], "workers exchange over sockets"
    (read,) = (mount for mount in container()["volumeMounts"] if mount["name"] == "tokenizers")
    assert read == {**mounts["tokenizers"], "readOnly": True}
    (token,) = (
        entry["valueFrom"]["secretKeyRef"] for entry in init_container()["env"] if "valueFrom" in entry
    )
    assert token["optional"] is True
    assert f"--from-literal={token['key']}=" in (DEPLOY / "kubernetes.yaml").read_text()


def test_a_drained_or_lost_node_takes_one_router() -> None:
    """Reliability M8: a disruption budget and a spread over nodes and zones, of these very pods."""
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    budget = of_kind("PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["selector"]["matchLabels"]) == (1, labels)
    spread = pod()["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    assert all(each["labelSelector"]["matchLabels"] == labels for each in spread)


def test_the_network_policy_covers_the_router_in_both_directions() -> None:
    """Reliability M8: clients reach only the HTTP port; the router only engines, DNS, the API."""
    policy = of_kind("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == of_kind("Deployment")["spec"]["selector"]["matchLabels"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = policy["ingress"]
    (port,) = container()["ports"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": port["name"]}]
    assert {"namespaceSelector": {}} not in ingress["from"]
    engines, routers, dns, api = policy["egress"]
    (to,) = engines["to"]
    selector = to["podSelector"]["matchLabels"]
    (source,) = yaml.safe_load(of_kind("ConfigMap")["data"]["router.yaml"])["discovery"]
    assert source["kubernetes"]["selector"] == ",".join(f"{key}={value}" for key, value in selector.items())
    assert [port["port"] for rule in (routers, dns, api) for port in rule["ports"]] == [
        "http", 53, 53, 443, 6443,
    ]  # fmt: skip


def test_whoever_listens_on_all_addresses_asks_for_keys(tmp_path: Path) -> None:
    """Reliability M8, H4: on all addresses, API keys and the replica token come from the Secret."""
    assert container()["args"][:3] == ["serve", "--host", "::"]
    (tmp_path / "router.yaml").write_text(of_kind("ConfigMap")["data"]["router.yaml"])
    (token,) = container()["env"]
    reference = token["valueFrom"]["secretKeyRef"]
    config = load_config(tmp_path / "router.yaml", environ={token["name"]: "from-the-Secret"})
    assert config.replicas.token is not None
    assert config.replicas.token.get_secret_value() == "from-the-Secret"
    assert config.auth.keys_file is not None
    (mount,) = (each for each in container()["volumeMounts"] if each["name"] == "secrets")
    (volume,) = (each["secret"] for each in pod()["volumes"] if each["name"] == "secrets")
    (item,) = volume["items"]
    assert str(config.auth.keys_file) == f"{mount['mountPath']}/{item['path']}"
    assert volume["secretName"] == reference["name"]
    # Neither may be missing, and the manifest brings no secret of its own.
    assert not reference.get("optional")
    assert not volume.get("optional")
    assert "Secret" not in [document["kind"] for document in manifest()]
    head = (DEPLOY / "kubernetes.yaml").read_text().split("apiVersion")[0]
    assert f"--from-literal={reference['key']}=" in head
    assert f"--from-file={item['key']}" in head


def test_memory_limits_hold_what_the_default_bounds_add_up_to() -> None:
    """Reliability M8: the pod and the unit are not killed for reaching the router's own bounds."""
    assert size(container()["resources"]["limits"]["memory"]) >= bounded_bytes()
    (most,) = unit()["MemoryMax"]
    assert size(most) >= bounded_bytes()


def test_the_documentation_names_every_buffer() -> None:
    """Security F2, F5, F11, F13, F14: the table of the memory section has the rows of `buffers`."""
    text = (ROOT / "docs" / "how-to" / "deploying.md").read_text()
    table = text.split("## Memory")[1].split("\n\n")[2]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == list(buffers())


def test_the_unit_is_confined() -> None:
    """Reliability M8: the unit limits syscalls, capabilities, address families, files, memory."""
    settings = unit()
    assert settings["CapabilityBoundingSet"] == [""]
    assert settings["AmbientCapabilities"] == [""]
    assert settings["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert settings["RestrictAddressFamilies"] == ["AF_INET AF_INET6 AF_UNIX AF_NETLINK"]
    for name in ("DynamicUser", "NoNewPrivileges", "RestrictNamespaces", "ProtectHome", "PrivateDevices"):
        assert settings[name] == ["yes"], name
    assert settings["ProtectSystem"] == ["strict"]
    assert "WatchdogSec" not in settings, "the router sends no watchdog notifications"


def test_the_unit_gives_the_service_its_own_copy_of_the_keys() -> None:
    """Reliability M8: no file with secrets needs to be readable by everybody."""
    settings = unit()
    assert settings["LoadCredential"] == [
        "router.yaml:/etc/lmetric/router.yaml",
        "keys.yaml:/etc/lmetric/keys.yaml",
    ]
    keys, cache = settings["Environment"]
    assert keys == "LMETRIC__AUTH__KEYS_FILE=%d/keys.yaml"
    (folder,) = settings["CacheDirectory"]  # the only folder that the service can write
    assert cache == f"HF_HOME=%C/{folder}"
    (command,) = settings["ExecStart"]
    assert command.endswith("serve --config %d/router.yaml")
    name, _, path = keys.partition("=")
    assert str(load_config(environ={name: path}).auth.keys_file) == path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit() -> None:
    """Reliability M8: systemd knows every setting, and rates the exposure below 2 of 10."""
    service, listener = (str(DEPLOY / f"lmetric-router.{kind}") for kind in ("service", "socket"))
    verify = ["systemd-analyze", "verify", service, listener]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert [line for line in said if "lmetric" in line] == []
    review = ["systemd-analyze", "security", "--offline=true", "--threshold=20", service]
    done = subprocess.run(review, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_example_for_envoy_waits_for_the_picker() -> None:
    """`stream_idle_timeout` also ends streams that the picker holds."""
    config = yaml.safe_load((ROOT / "examples" / "envoy" / "envoy.yaml").read_text())
    (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    picker = manager["http_filters"][0]["typed_config"]
    idle, held = manager["stream_idle_timeout"], picker["message_timeout"]
    assert float(idle.removesuffix("s")) > float(held.removesuffix("s"))


def locked(file: str) -> set[tuple[str, str]]:
    return set(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE))


def test_the_image_installs_what_runs_and_nothing_for_tests() -> None:
    """Reliability M8: the runtime lock has the declared packages, hashes, no developer tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    wanted = {
        re.split(r"[<>=!~;\[ ]", text)[0].lower().replace("_", "-")
        for text in [
            *project["project"]["dependencies"],
            *(each for extra in RUNTIME_EXTRAS for each in optional[extra]),
        ]
    }
    developers = {
        re.split(r"[<>=!~;\[ ]", text)[0].lower().replace("_", "-")
        for text in project["dependency-groups"]["dev"]
        if isinstance(text, str)
    } - wanted
    runtime = {name for name, _ in locked("requirements-runtime.lock")}
    assert wanted <= runtime
    assert runtime & developers == set()
    assert {"pytest", "mypy", "onnxruntime"} <= developers
    tokenizer = {name for name, _ in locked("requirements-tokenizer.lock")}
    assert "transformers" in tokenizer - runtime
    assert "torch" not in tokenizer
    everything = dict(locked("requirements.lock"))
    for file in ("requirements-runtime.lock", "requirements-tokenizer.lock", "requirements-build.lock"):
        text = (ROOT / file).read_text()
        assert text.count("==") <= text.count("--hash=sha256:")
        assert "://" not in text
        if file != "requirements-build.lock":
            assert locked(file) <= locked("requirements.lock"), f"run scripts/lock: {file} differs"
        else:  # Zig and uv are for releases only
            assert dict(locked(file))["maturin"] == everything["maturin"], f"run scripts/lock: {file} differs"


def test_the_image_holds_the_runtime_lock_and_a_wheel_only() -> None:
    """Reliability M8: the build image can be pinned by digest, the image itself has no base, and
    only locked packages with hashes and the wheel are installed."""
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^FROM (?:--platform=\S+ )?(\S+)(?: AS (\S+))?", text, re.MULTILINE) == [
        ("${BUILD_IMAGE}", "build"),
        ("build", "build-tokenizer"),
        ("build", "build-router"),
        ("scratch", "base"),
        ("base", "tokenizer"),
        ("base", ""),
    ]
    locks = ("requirements-runtime.lock", "requirements-tokenizer.lock")
    copied = set(" ".join(re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE)).split())
    assert copied == {*locks, "deploy/make_rootfs", "dist/*.whl"}
    context = (ROOT / ".dockerignore").read_text().split()
    assert context == ["*", *(f"!{path}" for path in (*locks, "deploy/make_rootfs", "dist/*.whl"))]
    assert re.findall(r"^RUN deploy/make_rootfs (.*)$", text, re.MULTILINE) == [
        '/rootfs "$TARGETARCH" target/*.whl requirements-tokenizer.lock',
        '/rootfs "$TARGETARCH" target/*.whl',
    ]
    make = (DEPLOY / "make_rootfs").read_text()
    steps = re.findall(r'^"\$\{pip\[@\]\}" (.*)$', make, re.MULTILINE)
    assert steps == ['--require-hashes -r "$lock"', '--no-deps --upgrade "$wheel"']
    assert "--no-warn-conflicts" in make, "this machine's packages are not those of the image"
    assert "requirements-runtime.lock" in make
    assert int(re.findall(r"^USER (\d+)", text, re.MULTILINE)[0]) == pod()["securityContext"]["runAsUser"]
