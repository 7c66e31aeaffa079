"""`import-config`: published examples of other routers, and files that are no configuration."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import ConfigError, ServerConfig, load_config
from lmetric.server import check_config
from lmetric_lab.migrate import KINDS, import_config

FOLDER = Path(__file__).parent / "data" / "other_routers"
EXAMPLES = sorted(file for file in FOLDER.iterdir() if file.suffix != ".md")


def pods(selector: str, port: int = 8000, **more: str) -> list[dict[str, Any]]:
    return [{"kubernetes": {"selector": selector, "port": port, **more}}]


# For each example: the kind, some of the settings, and words of the remarks.
EXPECTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "sglang_workers.sh": (
        "sglang-router",
        {
            "experimental": True,
            "policy": "cache_aware",
            "engines": [{"url": "http://worker1:8000"}, {"url": "http://worker2:8001"}],
            "host": "0.0.0.0",
            "port": 30000,
        },
        [],
    ),
    "sglang_pd.sh": (
        "sglang-router",
        {
            "policy": "cache_aware",
            "decode_policy": "power_of_two",
            "engines": [
                {"url": "http://prefill1:30001", "role": "prefill"},
                {"url": "http://decode1:30011", "role": "decode"},
            ],
        },
        ["bootstrap port 9001"],
    ),
    "sglang_grpc.sh": (
        "sglang-router",
        {"tokenizer": "meta-llama/Llama-3.1-8B-Instruct", "port": 8080},
        ["--worker-urls grpc://127.0.0.1:20000", "--reasoning-parser deepseek-r1", "--tool-call-parser json"],
    ),
    "sglang_launch_server.sh": (
        "sglang-router",
        {"policy": "round_robin", "port": 8080, "log": {"level": "debug"}},
        ["--dp-size 8", "--tp-size 1", "--grpc-mode", "--prometheus-port 10001"],
    ),
    "sglang_discovery.sh": (
        "sglang-router",
        {
            "discovery": pods(
                "app=sglang-worker,component in (prefill,decode)",
                80,
                namespace="production",
                role_key="component",
            )
        },
        [],
    ),
    "smg_thresholds.sh": (
        "smg",
        {"knobs": {"cache_threshold": 0.3, "balance_abs": 64, "balance_rel": 1.5}, "host": "0.0.0.0"},
        [],
    ),
    "vllm_router_ranks.sh": (
        "vllm-router",
        {
            "policy": "session_affinity",
            "engines": [
                {"url": f"http://worker{n}:8000", "data_parallel_rank": rank}
                for n in (1, 2)
                for rank in range(8)
            ],
        },
        [],
    ),
    "vllm_router_pd.sh": ("vllm-router", {"decode_policy": "power_of_two"}, ["bootstrap port 9000"]),
    "vllm_router_mooncake.sh": ("vllm-router", {"port": 8090}, ["--kv-connector mooncake"]),
    "vllm_router_retries.sh": (
        "vllm-router",
        {
            "retries": {"attempts": 3},
            "health": {"ejection": {"consecutive_failures": 5, "base_seconds": 30}},
        },
        ["--retry-jitter-factor 0.1", "--cb-window-duration-secs 60"],
    ),
    "vllm_router_manifest.yaml": (
        "vllm-router",
        {"discovery": pods("app=vllm-worker,role=inference", 80, namespace="default"), "port": 8080},
        [],
    ),
    "production_stack_session.yaml": (
        "production-stack",
        {
            "policy": "session_affinity",
            "discovery": pods("environment=test,release=test"),
            "log": {"level": "info"},
        },
        ["--session-key x-user-id", "--lmcache-controller-port 9000", "opt125m"],
    ),
    "production_stack_prefix.yaml": ("production-stack", {"policy": "total_delay"}, ["prefixaware"]),
    "production_stack_disaggregated.yaml": (
        "production-stack",
        {"policy": "total_delay"},
        ["--prefill-model-labels llama-prefill", "nixlProxyPort"],
    ),
    "production_stack_static.sh": (
        "production-stack",
        {
            "policy": "round_robin",
            "models": [
                {
                    "name": "facebook/opt-125m",
                    "engines": [{"url": "http://localhost:9001"}, {"url": "http://localhost:9003"}],
                },
                {
                    "name": "meta-llama/Llama-3.1-8B-Instruct",
                    "engines": [{"url": "http://localhost:9002"}],
                },
            ],
            "aliases": {"gpt4": "meta-llama/Llama-3.1-8B-Instruct"},
        },
        ["--engine-stats-interval 10", "--log-stats"],
    ),
    "production_stack_dynamic.yaml": (
        "production-stack",
        {
            "policy": "round_robin",
            "aliases": {
                "my-alias": "facebook/opt-125m",
                "my-other-alias": "meta-llama/Llama-3.1-8B-Instruct",
            },
        },
        ["--callbacks"],
    ),
    "production_stack_pods.yaml": (
        "production-stack",
        {"discovery": pods("app in (prefill,decode)", namespace="default", role_key="model")},
        ["--log-stats-interval 30"],
    ),
    "llmd_prefix.yaml": (
        "llm-d",
        {"policy": "llmd_scorers", "knobs": {"queue": 0, "usage": 0, "prefix": 2}},
        ["models-responder", "InferencePool"],
    ),
    "llmd_precise.yaml": (
        "llm-d",
        {"knobs": {"queue": 1, "usage": 1, "prefix": 2}},
        ["dataLayer", "tokenProcessorConfig"],
    ),
    "llmd_pd.yaml": (
        "llm-d",
        {
            "decode_policy": "llmd_scorers",
            "decode_knobs": {"queue": 1, "usage": 0, "prefix": 2},
            "discovery": pods("app=qwen3", namespace="llm", role_key="llm-d.ai/role"),
        },
        ["prefix-based-pd-decider", "lruCapacityPerServer"],
    ),
    "llmd_affinity.yaml": (
        "llm-d",
        {
            "policy": "llmd_affinity",
            "knobs": {
                "affinity": 0.75,
                "max_ttft_seconds": 5.0,
                "peak_prefill_tokens_per_second": 33821,
                "full_load_tokens": 1000000,
            },
        },
        [
            "prefix-affinity.explorationProbability 0.01",
            "prefix-affinity.ttftSource prefillThroughput",
            "weight of queue-scorer 5",
            "weight of load-aware-scorer 3",
            "load-aware-scorer: threshold",
            "InferenceObjective batch: priority, poolRef",
            "InferenceModel chat: modelName, criticality, targetModels",
        ],
    ),
    "llmd_session.yaml": (
        "llm-d",
        {"knobs": {"queue": 0, "usage": 0, "prefix": 50}},
        ["session-affinity-scorer"],
    ),
    "llmd_old_names.yaml": (
        "llm-d",
        {"knobs": {"queue": 1, "usage": 0, "prefix": 2}},
        ["load-aware-scorer 1.0"],
    ),
    "litellm_load_balancing.yaml": (
        "litellm",
        {"policy": "random", "retries": {"attempts": 3}, "timeouts": {"request": 30}, "port": 4000},
        ["fallbacks", "redis_host", "model_group_alias.gpt-4", "zephyr-7b-beta"],
    ),
    "litellm_vllm.yaml": (
        "litellm",
        {
            "model": "facebook/opt-125m",
            "engines": [{"url": "http://0.0.0.0:4000"}],
            "aliases": {"vllm-models": "facebook/opt-125m"},
        },
        ["azure/gpt-4o-eu", "rpm 1440", "alerting", "master_key ***"],
    ),
    "nginx_vllm.conf": (
        "nginx",
        {
            "policy": "least_requests",
            "engines": [{"url": "http://vllm0:8000"}, {"url": "http://vllm1:8000"}],
            "port": 80,
        },
        ["proxy_set_header"],
    ),
    "nginx_weights.conf": ("nginx", {"policy": "round_robin"}, ["weight=5", "192.0.0.1 backup"]),
    "kubernetes_service.yaml": (
        "kubernetes",
        {"policy": "round_robin", "discovery": pods("app=mistral-7b", namespace="default")},
        [],
    ),
    "nginx_ip_hash.conf": ("nginx", {"policy": "session_affinity"}, ["ip_hash"]),
}


def test_every_example_is_expected_and_every_kind_has_one() -> None:
    assert {file.name for file in EXAMPLES} == EXPECTED.keys()
    assert {kind for kind, _, _ in EXPECTED.values()} == set(KINDS)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_a_published_example(file: Path, tmp_path: Path) -> None:
    kind, settings, remarks = EXPECTED[file.name]
    draft = import_config(file)
    assert draft.kind == kind
    printed = draft.render()
    loaded = yaml.safe_load(printed)
    assert {key: loaded.get(key) for key in settings} == settings
    comments = " ".join(line.strip("# ") for line in printed.splitlines() if line.startswith("#"))
    missing = [each for each in remarks if each not in comments and each not in str(draft.remarks)]
    assert not missing, printed
    (tmp_path / "router.yaml").write_text(printed)
    check_config(load_config(tmp_path / "router.yaml", environ={}))
    assert import_config(file, kind).render() == printed


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model_list: [{model_name: m, litellm_params: {model: hosted_vllm/m, api_base: 'http://e:1/v1', "
        "api_key: sk-one}}]\ngeneral_settings: {master_key: sk-two, database_url: 'postgres://u:sk-three@h'}\n"
        "router_settings: {redis_password: sk-four}\nenvironment_variables: {KEY: sk-five}\n"
    )
    printed = import_config(file).render()
    assert "sk-" not in printed
    assert "api_key" in printed
    assert "database_url ***" in printed
    script = tmp_path / "run.sh"
    script.write_text("smg --worker-urls http://a:1 --api-key sk-six")
    assert "sk-" not in import_config(script).render()


def test_the_engines_key_of_production_stack_has_a_remark(tmp_path: Path) -> None:
    (file := tmp_path / "values.yaml").write_text(
        "servingEngineSpec: {vllmApiKey: sk-one, runtimeClassName: nvidia, modelSpec: [{name: m}]}\n"
        "routerSpec: {routingLogic: roundrobin}\n"
    )
    printed = import_config(file).render()
    assert "servingEngineSpec.vllmApiKey: not copied; set `api_key` of the engines" in printed
    assert "servingEngineSpec (m, runtimeClassName)" in printed
    assert "sk-" not in printed


def test_litellms_limits_of_new_keys_are_budgets_to_write_for_each_tenant(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model_list: [{model_name: m, litellm_params: {model: hosted_vllm/m, api_base: 'http://e:1/v1'}}]\n"
        "litellm_settings:\n"
        "  default_key_generate_params: {rpm_limit: 60, tpm_limit: 20000}\n"
        "  default_team_params: {tpm_limit: 5, max_budget: 100}\n"
    )
    remarks = dict(import_config(file).remarks.keys())
    text = remarks["litellm_settings.default_key_generate_params"]
    found = yaml.safe_load(text.partition("`")[2].partition("`")[0])
    windows = ServerConfig.model_validate({"tenants": {"a": found}}).tenants["a"].budgets
    assert [(each.counts, each.limit, each.per) for each in windows] == [
        ("requests", 60, "minute"),
        ("total_tokens", 20_000, "minute"),
    ]
    file.write_text(file.read_text().replace("rpm_limit: 60", "rpm_limit: many"))
    with pytest.raises(ConfigError, match=r"default_key_generate_params\.rpm_limit"):
        import_config(file)


def test_arguments_without_a_program_need_their_kind(tmp_path: Path) -> None:
    file = tmp_path / "args.txt"
    file.write_text("--worker-urls http://a:1\n--policy random\n")
    with pytest.raises(ConfigError, match="--from"):
        import_config(file)
    draft = import_config(file, "smg")
    assert draft.settings["engines"] == [{"url": "http://a:1"}]
    assert draft.settings["policy"] == "random"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello", "no router's configuration; expected one of"),
        ("a: [1", "no router's configuration; expected one of"),
        ("", "no router's configuration; expected one of"),
        ("smg --worker-urls http://a:1 && smg --worker-urls http://b:1", "2 router commands"),
        ("smg --worker-urls http://a:1 --policy best", "--policy = 'best': expected random"),
        ("smg --worker-urls http://a:1 --port x", "--port = 'x': expected a number"),
        ("smg --worker-urls http://a:1 --port 99999", "port = 99999: expected at most"),
        ("vllm-router --service-discovery", "expected a --selector"),
        ("vllm-router --routing-logic best", "--routing-logic = 'best': expected roundrobin"),
        ("model_list: 3", "model_list = 3: expected a list"),
        ("model_list: [{model_name: x}]", "expected a mapping with model_name and litellm_params"),
        ("kind: EndpointPickerConfig\nplugins: [3]", "plugins = 3: expected a mapping"),
        (
            "kind: EndpointPickerConfig\nplugins: []\n"
            "schedulingProfiles: [{name: d, plugins: [{pluginRef: q}]}]",
            "pluginRef = 'q': expected a plugin",
        ),
        (
            "kind: Service\nmetadata: {name: a}\nspec: {}",
            "Service a: spec.selector = None: expected the labels",
        ),
        ("kind: Service\nspec: {selector: {a: b}}", "spec.ports = None: expected the port of the engines"),
        ("kind: Service\n---\nkind: Service", "2 Services; expected one"),
        ("upstream a {\n server b;\n", ':2: unexpected end of file, expecting "}"'),
        ("upstream a {\n server b fail_timeout=soon;\n}", "fail_timeout = 'soon': expected a time"),
    ],
)
def test_errors_name_the_file_and_what_was_expected(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        import_config(file)
    assert str(file) in str(raised.value)
    assert problem in str(raised.value)


def test_nginx_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "crossplane":
            raise ImportError(name)
        return actual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'crossplane>="):
        import_config(FOLDER / "nginx_vllm.conf")


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    app = build(["import-config"])
    done = run(app, ["import-config", str(FOLDER / "sglang_pd.sh")])
    assert done.exit_code == 0
    assert yaml.safe_load(done.stdout)["decode_policy"] == "power_of_two"
    done = run(app, ["import-config", str(FOLDER / "sglang_pd.sh"), "--from", "haproxy"])
    assert isinstance(done.exception, ConfigError)
    assert "expected one of sglang-router" in str(done.exception)
    done = run(app, ["import-config", str(tmp_path / "none")])
    assert "cannot be read" in str(done.exception)


def test_litellms_names_and_weights_become_aliases(tmp_path: Path) -> None:
    given = tmp_path / "config.yaml"
    engine = "api_base: 'http://10.0.0.%d:8000', weight: %d"
    deployment = "  - {model_name: %s, litellm_params: {model: hosted_vllm/%s, " + engine + "}}\n"
    lines = [
        ("fast", "small", 1, 9),
        ("fast", "large", 2, 1),
        ("small", "large", 3, 1),
        ("one", "small", 4, 2),
    ]
    given.write_text(
        "model_list:\n"
        + "".join(deployment % line for line in lines)
        + "router_settings:\n  model_group_alias: {gpt: fast, hidden: {model: one}, lost: gone}\n"
    )
    printed = import_config(given).render()
    aliases = yaml.safe_load(printed)["aliases"]
    assert aliases == {
        "fast": {"small": 9, "large": 1},
        "one": "small",
        "gpt": {"small": 9, "large": 1},
        "hidden": "small",
    }
    assert ServerConfig(**yaml.safe_load(printed)).aliases["gpt"] == {"small": 9, "large": 1}
    assert "model_group_alias.lost: no engine of yours serves gone" in printed
    assert "alias small: engines serve a model of this name, so it stays small" in printed
    assert "model_list[3].weight 2: no weights: load decides" in printed
    assert "model_list[0].weight" not in printed


@pytest.mark.parametrize(("old", "attempts"), [(5, 5), (1, 1), (0, 1)])
def test_the_old_number_of_retries_counts_the_first_attempt(old: int, attempts: int, tmp_path: Path) -> None:
    (script := tmp_path / "run.sh").write_text(f"smg --worker-urls http://a:1 --retry-max-retries {old}")
    assert import_config(script).settings["retries"] == {"attempts": attempts}


REDIRECT = """
upstream vllm { server 10.0.0.1:8000; }
server { listen 80; return 301 https://$host$request_uri; }
server {
    listen 443 ssl; ssl_certificate a.pem; ssl_certificate_key a.key; proxy_connect_timeout 7s;
    location /static { proxy_read_timeout 2s; root /srv; }
    location / { proxy_connect_timeout 3s; proxy_pass http://vllm; }
}
"""


def test_nginx_settings_come_from_the_blocks_around_the_proxy_pass(tmp_path: Path) -> None:
    (file := tmp_path / "nginx.conf").write_text(REDIRECT)
    draft = import_config(file)
    assert draft.settings["port"] == 443
    assert draft.settings["tls"] == {"certificate_file": "a.pem", "key_file": "a.key"}
    assert draft.settings["timeouts"] == {"connect": 3.0}
    remarks = dict(iter(draft.remarks))
    for line in ("listen 80", "proxy_read_timeout 2s"):
        assert remarks[line] == "its block passes no requests to this upstream"
    assert (
        remarks["proxy_connect_timeout 7s"] == "another line has this setting, too, and counts in its place"
    )


@pytest.mark.parametrize(
    ("location", "passed", "engine"),
    [
        ("/", "http://vllm", "http://10.0.0.1:8000"),
        ("/", "http://vllm/", "http://10.0.0.1:8000"),
        ("/", "http://vllm:8000$request_uri", "http://10.0.0.1:8000"),
        ("/", "http://vllm/llm/api/", "http://10.0.0.1:8000/llm/api"),
        ("/v1/", "http://vllm/llm/v1/", "http://10.0.0.1:8000/llm"),
        ("^~ /v1/", "http://vllm/llm/v1/", "http://10.0.0.1:8000/llm"),
        ("/llm/", "http://vllm/", None),
        ("/", "http://vllm/llm", None),
        ("/", "http://vllm/$host$uri", None),
    ],
)
def test_the_path_of_nginxs_proxy_pass_is_a_part_of_the_engines_urls(
    tmp_path: Path, location: str, passed: str, engine: str | None
) -> None:
    """nginx replaces the location's path by that of proxy_pass. None: a remark names it."""
    (file := tmp_path / "nginx.conf").write_text(
        "upstream vllm { server 10.0.0.1:8000; }\n"
        f"server {{ listen 80; location {location} {{ if ($a) {{ proxy_pass {passed}; }} }} }}\n"
    )
    draft = import_config(file)
    assert draft.settings["engines"] == [{"url": engine or "http://10.0.0.1:8000"}]
    named = [what for what, _ in draft.remarks if what.startswith("proxy_pass")]
    assert named == ([] if engine else [f"proxy_pass {passed}"])


def test_losses_come_first_and_an_nginx_file_needs_an_upstream(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text("upstream a { server h:1; }\nupstream b { server h:2; }\n")
    text = import_config(file).render()
    assert text.index("# - upstream b: one fleet per import") < text.index("engines:")
    file.write_text("server {\n    location / { proxy_pass http://10.0.0.1:80; }\n}\n")
    with pytest.raises(
        ConfigError, match=r"an nginx configuration without upstream; expected `upstream NAME"
    ):
        import_config(file)


def test_litellms_fallbacks_name_models_of_engines(tmp_path: Path) -> None:
    given = tmp_path / "config.yaml"
    deployment = "  - {model_name: %s, litellm_params: {model: hosted_vllm/%s, api_base: 'http://e:%d'}}\n"
    lines = [("small", "small", 1), ("fast", "small", 1), ("big", "large", 2), ("any", "small", 1)]
    lines += [("any", "large", 2)]
    given.write_text(
        "model_list:\n"
        + "".join(deployment % line for line in lines)
        + """
router_settings:
  fallbacks: [{small: [big, gpt-4o]}, {lost: [fast]}]
litellm_settings:
  fallbacks: [{small: [ignored]}]
  context_window_fallbacks: [{small: [big]}, {any: [big, {model: big, messages: []}]}]
  default_fallbacks: [big]
"""
    )
    printed = import_config(given).render()
    loaded = yaml.safe_load(printed)
    assert loaded["aliases"] == {"fast": "small", "big": "large", "any": {"small": 1, "large": 1}}
    assert loaded["fallbacks"] == {
        "small": ["large"],
        "lost": ["small"],
        "any": ["large"],
        "fast": ["large"],
    }
    assert ServerConfig(**loaded).fallbacks["small"] == ["large"]
    assert "fallbacks.small: gpt-4o: no engine of yours serves it" in printed
    assert "context_window_fallbacks.any: a fallback is a model; the request stays as it is" in printed


@pytest.mark.parametrize(
    ("fallbacks", "said"),
    [
        ("{a: [b]}", "fallbacks = a mapping: expected a list"),
        ("[a]", "fallbacks = 'a': expected a mapping of a model to a list of models"),
        ("[{a: b}]", "fallbacks.a = 'b': expected a list of models"),
    ],
)
def test_fallbacks_of_another_shape_are_refused(tmp_path: Path, fallbacks: str, said: str) -> None:
    given = tmp_path / "config.yaml"
    given.write_text(f"model_list: []\nrouter_settings: {{fallbacks: {fallbacks}}}\n")
    with pytest.raises(ConfigError, match=said):
        import_config(given)


def test_a_profile_of_llm_d_has_the_parameters_of_its_own_plugins(tmp_path: Path) -> None:
    """The decode profile has no affinity filter, and a penalty of 0 ms is no limit."""
    given = tmp_path / "epp.yaml"
    given.write_text(
        """
kind: EndpointPickerConfig
plugins:
  - {type: prefix-cache-affinity-filter, parameters: {maxTTFTPenaltyMs: 0}}
  - {type: token-load-scorer}
schedulingProfiles:
  - {name: prefill, plugins: [{pluginRef: prefix-cache-affinity-filter}, {pluginRef: token-load-scorer}]}
  - {name: decode, plugins: [{pluginRef: token-load-scorer}]}
"""
    )
    settings = import_config(given).settings
    assert settings["knobs"] == {"max_ttft_seconds": 1e6}
    assert settings["decode_policy"] == "llmd_affinity"
    assert "decode_knobs" not in settings


def test_a_second_affinity_filter_of_a_profile_is_a_remark(tmp_path: Path) -> None:
    """The names in the profile decide which one is first."""
    filters = [("b", "affinityThreshold: 0.9"), ("a", "affinityThreshold: 0.75, maxTTFTPenaltyMs: 2300")]
    given = tmp_path / "epp.yaml"
    given.write_text(
        "kind: EndpointPickerConfig\nplugins:\n"
        + "".join(
            f"  - {{type: prefix-cache-affinity-filter, name: {name}, parameters: {{{parameters}}}}}\n"
            for name, parameters in filters
        )
        + """
  - {type: token-load-scorer}
schedulingProfiles:
  - {name: default, plugins: [{pluginRef: a}, {pluginRef: b}, {pluginRef: token-load-scorer}]}
"""
    )
    draft = import_config(given)
    assert draft.settings["knobs"] == {"affinity": 0.75, "max_ttft_seconds": 2.3}
    assert [what for what, _ in draft.remarks] == ["b.affinityThreshold 0.9", "the engines"]


def test_rewrites_of_llm_d_become_aliases(tmp_path: Path) -> None:
    rule = """
    - matches: [{model: {type: Exact, value: %s}}]
      targets: [%s]"""
    rules = [
        (
            "chat",
            "{modelRewrite: v1, weight: 9}, {modelRewrite: v2, weight: 1}, {modelRewrite: v3, weight: 0}",
        ),
        ("chat", "{modelRewrite: v9}"),
        ("code", "{modelRewrite: v1}"),
        ("v2", "{modelRewrite: v1, weight: 1}"),
    ]
    given = tmp_path / "epp.yaml"
    given.write_text(
        (FOLDER / "llmd_prefix.yaml").read_text()
        + "---\nkind: InferenceModelRewrite\nspec:\n  rules:"
        + "".join(rule % each for each in rules)
        + "\n    - {matches: [], targets: [{modelRewrite: v1}]}\n"
    )
    printed = import_config(given).render()
    assert yaml.safe_load(printed)["aliases"] == {"chat": {"v1": 9, "v2": 1}, "code": "v1"}
    assert "rewrite of all models to v1: `aliases` names each model" in printed
    assert "rewrite of v2: a model has this name, so it stays" in printed
