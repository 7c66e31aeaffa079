"""`import-config`: without one of its settings, an example has another result, or other remarks."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crossplane
import pytest
import yaml

from lmetric.config import ConfigError
from lmetric_lab.migrate import import_config
from lmetric_lab.migrate.commands import Flags, commands
from test_import_config import EXAMPLES, EXPECTED

MANIFESTS = {"vllm_router_manifest.yaml", "production_stack_pods.yaml"}
# Flags whose value in an example is the other router's default.
DEFAULT_FLAGS = {
    ("sglang_workers.sh", "--policy"),
    ("sglang_workers.sh", "--port"),
    ("sglang_pd.sh", "--prefill-policy"),
    ("vllm_router_pd.sh", "--prefill-policy"),
    ("smg_thresholds.sh", "--policy"),
    ("vllm_router_mooncake.sh", "--host"),
    ("vllm_router_mooncake.sh", "--intra-node-data-parallel-size"),
    ("vllm_router_manifest.yaml", "--policy"),
    ("production_stack_pods.yaml", "--host"),
    ("production_stack_pods.yaml", "--k8s-port"),
    ("production_stack_pods.yaml", "--service-discovery"),
    ("production_stack_static.sh", "--routing-logic"),
    ("production_stack_static.sh", "--service-discovery"),
}
# Keys that one remark names, with all that they contain.
WHOLE = {
    "fallbacks",
    "context_window_fallbacks",
    "model_group_alias",
    "success_callback",
    "alerting",
    "model_info",
    "modelSpec",
    "dataLayer",
    "tokenProcessorConfig",
    "indexerConfig",
    "vllm",
    "deciders",
    "poolRef",
    "targetModels",
}
# Parts of llm-d's scheduler that this router has by itself, and that no setting changes.
PARTS = {
    "decode-filter",
    "prefill-filter",
    "max-score-picker",
    "single-profile-handler",
    "metrics-data-source",
    "core-metrics-extractor",
    "endpoint-notification-source",
}
KINDS_AND_NAMES = {"apiVersion", "kind", "metadata"}
# Keys without an effect: defaults of the other router, or overridden, or of the deployment.
WITHOUT_EFFECT = {
    "litellm_load_balancing.yaml": {
        "litellm_settings.num_retries",  # router_settings has it, too
        "litellm_settings.request_timeout",
        "router_settings.routing_strategy",
    },
    # One port, and defaults of Kubernetes.
    "kubernetes_service.yaml": {
        "spec.type",
        "spec.sessionAffinity",
        "spec.ports.0.name",
        "spec.ports.0.protocol",
    },
    "litellm_vllm.yaml": {"model_list.1.litellm_params.api_key"},
    "llmd_affinity.yaml": {"schedulingProfiles.0.name"},  # the only profile
    "llmd_precise.yaml": {"schedulingProfiles.0.name"},
    "llmd_prefix.yaml": {"schedulingProfiles.0.name"},
    "llmd_session.yaml": {"schedulingProfiles.0.name"},
    "production_stack_disaggregated.yaml": {
        "servingEngineSpec.containerPort",
        "routerSpec.enableRouter",
        "routerSpec.replicaCount",
        "routerSpec.containerPort",
    },
    "production_stack_dynamic.yaml": {"service_discovery"},
    "production_stack_session.yaml": {"routerSpec.enableRouter"},
}

Result = tuple[object, ...]


def result(file: Path, text: str, folder: Path) -> Result:
    """Returns what the import makes of a changed text of the file."""
    (folder / "changed").write_text(text)
    try:
        draft = import_config(folder / "changed", EXPECTED[file.name][0])
    except ConfigError as error:
        return (str(error),)
    return draft.settings, draft.notes, draft.remarks


def each(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda file: file.name)


@each([file for file in EXAMPLES if file.suffix == ".sh" or file.name in MANIFESTS])
def test_no_flag_disappears(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    [command] = commands(text, list(yaml.safe_load_all(text)) if file.name in MANIFESTS else [])
    programs = {"vllm_router_manifest.yaml": "vllm-router"}  # the manifest has only arguments
    program = programs.get(file.name, command.program)
    program = f"python -m {program}" if "." in program else program

    def imported(flags: Flags) -> Result:
        words = [word for flag, given in flags.items() for values in given for word in (flag, *values)]
        return result(file, shlex.join([*program.split(), *words]), tmp_path)

    whole = imported(command.flags)
    assert len(command.flags) >= 3
    for flag in command.flags:
        rest = {other: given for other, given in command.flags.items() if other != flag}
        assert (imported(rest) == whole) == ((file.name, flag) in DEFAULT_FLAGS), flag


def settings(value: Any, named: set[str], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of keys and list items, but not inside those with a remark as a whole."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, content in inner:
        plugin = {content.get("type"), content.get("pluginRef")} if isinstance(content, dict) else set()
        if key in KINDS_AND_NAMES or plugin & PARTS or (plugin & named and "pluginRef" in content):
            continue
        if (key, content) != ("weight", 1):  # the default
            yield (*path, key)
        if key not in WHOLE and not plugin & named:
            yield from settings(content, named, (*path, key))


def without(documents: list[Any], path: tuple[Any, ...]) -> str:
    changed = copy.deepcopy(documents)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return yaml.safe_dump_all(changed, sort_keys=False)


@each([file for file in EXAMPLES if file.suffix == ".yaml" and file.name not in MANIFESTS])
def test_no_key_disappears(file: Path, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    whole = result(file, yaml.safe_dump_all(documents, sort_keys=False), tmp_path)
    named = {what for what, _ in import_config(file).remarks}
    for document, content in enumerate(documents):
        unused = set()
        for path in settings(content, named):
            deployment = f"model_list[{path[1]}] (" if path[0] == "model_list" and len(path) > 2 else None
            if deployment and any(what.startswith(deployment) for what in named):
                continue  # of a provider, with a remark as a whole
            if result(file, without(documents, (document, *path)), tmp_path) == whole:
                unused.add(".".join(map(str, path)))
        assert unused == (WITHOUT_EFFECT.get(file.name, set()) if document == 0 else set())


def lines(block: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the directives without a block, except where requests go."""
    for found in block:
        if "block" in found:
            yield from lines(found["block"])
        elif found["directive"] != "proxy_pass":
            yield found


def rest_of(block: list[dict[str, Any]], left_out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [found for found in block if not any(found is other for other in left_out)]
    return [
        found | {"block": rest_of(found["block"], left_out)} if "block" in found else found for found in kept
    ]


@each([file for file in EXAMPLES if file.suffix == ".conf"])
def test_no_directive_disappears(file: Path, tmp_path: Path) -> None:
    parsed = crossplane.parse(str(file), single=True, check_ctx=False, check_args=False)
    block = parsed["config"][0]["parsed"]
    whole = result(file, crossplane.build(block), tmp_path)
    found = list(lines(block))
    assert found
    for one in found:  # one remark for all `proxy_set_header`
        same = [each for each in found if each["directive"] == one["directive"]]
        left_out = same if one["directive"].startswith("proxy_") else [one]
        left = result(file, crossplane.build(rest_of(block, left_out)), tmp_path)
        assert left != whole, one


SERVERS = """worker_processes 4;
events { worker_connections 1024; }
http {
    client_max_body_size 64m;
    upstream engines { zone engines 64k; server 10.0.0.1:8000; keepalive 8; }
    upstream others { server 10.0.0.2:8000; }
    server {
        listen [::1]:8443 ssl;
        listen 9000;
        server_name llm.example.com;
        ssl_certificate a.pem;
        ssl_certificate_key a.key;
        location /v1/ { proxy_pass http://engines; proxy_read_timeout 60s; proxy_buffering off; }
        location /old { proxy_pass http://others; proxy_read_timeout 5s; gzip on; return 404; }
    }
}
"""


def test_no_directive_of_several_blocks_disappears(tmp_path: Path) -> None:
    (file := tmp_path / "nginx" / "nginx.conf").parent.mkdir()
    file.write_text(SERVERS)
    draft = import_config(file)
    assert (draft.settings["host"], draft.settings["port"]) == ("::1", 8443)
    remarks = {what for what, _ in draft.remarks}
    assert remarks >= {
        "location /v1/",
        "location /old",
        "upstream others",
        "listen 9000",
        "listen [::1]:8443 ssl",
        "proxy_read_timeout 5s",
        "server_name llm.example.com",
        "worker_processes 4",
        "gzip, return",
    }


MAPS = """events { worker_connections 1024; }
http {
    map $http_upgrade $connection_upgrade { default upgrade; '' close; ~*listen 9000; }
    types { text/html html; }
    upstream engines { server 10.0.0.1:8000; }
    server { listen 8000; location / { proxy_pass http://engines; } }
}
"""


def test_lines_of_a_map_are_no_directives(tmp_path: Path) -> None:
    (file := tmp_path / "nginx" / "nginx.conf").parent.mkdir()
    file.write_text(MAPS)
    remarks = dict(iter(import_config(file).remarks))
    assert set(remarks) == {"worker_connections 1024", "map, types"}
    assert "limits.max_connections" in remarks["worker_connections 1024"]


@pytest.mark.parametrize(
    ("listen", "settings"),
    [
        ("8080", ("0.0.0.0", 8080)),
        ("*:8080", ("0.0.0.0", 8080)),
        ("localhost", ("localhost", 80)),
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("[::]:8080", ("::", 8080)),
        ("unix:/run/llm.sock", ("unix:/run/llm.sock", None)),
    ],
)
def test_addresses_of_nginx(listen: str, settings: tuple[str, int | None], tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(f"upstream a {{ server b:1; }}\nserver {{ listen {listen}; }}\n")
    found = import_config(file).settings
    assert (found["host"], found.get("port")) == settings


def test_a_model_of_production_stack_needs_backends(tmp_path: Path) -> None:
    file = tmp_path / "dynamic.yaml"
    file.write_text("routing_logic: roundrobin\nstatic_models: {m: {static_model_type: chat}}\n")
    with pytest.raises(
        ConfigError, match=r"static_models\.m = .*expected a mapping with a list static_backends"
    ):
        import_config(file)
