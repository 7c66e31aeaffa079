"""The router of vLLM production-stack: Helm values, its dynamic configuration, and its flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.migrate.commands import Flags, flags_of
from lmetric_lab.migrate.draft import Draft

_POLICIES = {"roundrobin": "round_robin", "session": "session_affinity", "priority": "least_requests"}
_BY_PREFIX = ("prefixaware", "kvaware", "ttft")
_SPLITTING = ("disaggregated_prefill", "disaggregated_prefill_orchestrated")

# Keys of routerSpec and their flags, as the chart sets them.
_FLAGS = {
    "containerPort": "--port",
    "serviceDiscovery": "--service-discovery",
    "staticBackends": "--static-backends",
    "staticModels": "--static-models",
    "routingLogic": "--routing-logic",
    "sessionKey": "--session-key",
    "engineScrapeInterval": "--engine-stats-interval",
    "requestStatsWindow": "--request-stats-window",
    "lmcacheControllerPort": "--lmcache-controller-port",
}
_LABELS = {"environment": "test", "release": "test"}  # of the engines' pods, if the values have none
_STATS = "the router counts its own requests; no statistics by window"
_REASONS = {
    "--request-stats-window": _STATS,
    "--log-stats": _STATS,
    "--log-stats-interval": _STATS,
    "--static-model-types": "the router checks engines at `health.path`, for every type of model",
    "--static-backend-health-checks": "health checks are always on: `health`",
    "--lmcache-controller-port": "no LMCache: engines publish KV events (docs/reference/engines.md)",
    "--callbacks": "no callbacks on the request path",
    "--dynamic-config-yaml": "import that file, too; `discovery: [{file: ...}]` follows a file of engines",
    "--dynamic-config-json": "import that file, too; `discovery: [{file: ...}]` follows a file of engines",
    "--sentry-dsn": "errors are in the log and in /metrics",
    "--k8s-service-discovery-type": "the router finds pods, not services",
    "--otel-endpoint": "traces: `tracing.endpoint`, with the extra `otel`",
    "--lmcache-health-check-interval": "no LMCache controller",
}


def translate_values(draft: Draft, values: dict[str, Any], _: list[Any]) -> None:
    """Fills the draft from values of the Helm chart."""
    router = dict(values.get("routerSpec") or {})
    engines = dict(values.get("servingEngineSpec") or {})
    words = []
    for key, flag in _FLAGS.items():
        if (value := router.pop(key, None)) not in (None, ""):
            words.append(f"{flag}={draft.text(f'routerSpec.{key}', value)}")
    words += [str(word) for word in router.pop("extraArgs", None) or []]
    flags = {"--host": [["0.0.0.0"]], "--port": [["8000"]], "--routing-logic": [["roundrobin"]]}
    flags |= flags_of(words)
    if "--static-backends" not in flags:
        labels = engines.pop("labels", None) or _LABELS
        port = engines.pop("containerPort", 8000)
        flags.setdefault("--k8s-label-selector", [[",".join(f"{k}={v}" for k, v in labels.items())]])
        flags.setdefault("--k8s-port", [[str(port)]])
        flags.setdefault("--service-discovery", [["k8s"]])
    translate_flags(draft, flags)
    if (copies := router.pop("replicaCount", 1)) not in (1, None):
        draft.remark(
            "routerSpec.replicaCount",
            "routers of the same engines exchange their load: `replicas.urls` and `replicas.token`",
            copies,
        )
    router.pop("enableRouter", None)
    if router:
        draft.remark(
            f"routerSpec: {', '.join(sorted(router))}",
            "settings of the router's deployment; see deploy/kubernetes.yaml",
        )
    if engines.pop("vllmApiKey", None):
        draft.remark(
            "servingEngineSpec.vllmApiKey",
            "not copied; set `api_key` of the engines or of their `discovery` source",
        )
    models = [each.get("name") for each in engines.get("modelSpec") or [] if isinstance(each, Mapping)]
    if engines:
        named = ", ".join([*map(str, models), *sorted(engines.keys() - {"modelSpec"})])
        draft.remark(
            f"servingEngineSpec ({named})", "keep the chart for the engines; they report their models"
        )
    for key in sorted(values.keys() - {"routerSpec", "servingEngineSpec"}):
        if values[key]:
            draft.remark(key, "not a part of the router")


def translate_dynamic(draft: Draft, values: dict[str, Any], _: list[Any]) -> None:
    """Fills the draft from a dynamic configuration file (--dynamic-config-yaml)."""
    words = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        if key == "static_models" and isinstance(value, Mapping):
            backends: list[tuple[str, str]] = []
            for model, each in value.items():
                urls = each.get("static_backends") if isinstance(each, Mapping) else None
                if not isinstance(urls, list):
                    raise draft.error(f"static_models.{model}", each, "a mapping with a list static_backends")
                backends += [(str(url), str(model)) for url in urls]
                for other in sorted(each.keys() - {"static_backends"}):
                    why = _REASONS.get(f"--{other.replace('_', '-')}s", "no equivalent known")
                    draft.remark(f"static_models.{model}.{other}", why, each[other])
            words.append("--static-backends=" + ",".join(url for url, _ in backends))
            words.append("--static-models=" + ",".join(model for _, model in backends))
        elif isinstance(value, Mapping):
            words.append(f"{flag}=" + ",".join(f"{k}:{v}" for k, v in value.items()))
        else:
            words.append(f"{flag}={value}")
    translate_flags(draft, flags_of(words))


def translate_flags(draft: Draft, flags: Flags) -> None:
    """Fills the draft from the flags of a command line."""
    draft.set("host", "0.0.0.0")
    draft.set("port", 8001)
    left = {flag: given[-1][0] if given[-1] else "" for flag, given in flags.items()}
    for flag, path in (("--host", "host"), ("--port", "port")):
        if value := left.pop(flag, None):
            draft.set(path, draft.number(flag, value) if flag == "--port" else value)
    _policy(draft, left)
    roles = [left.pop(f"--{role}-model-labels", "") for role in ("prefill", "decode")]
    if "--static-backends" in left:
        _static(draft, left, roles)
    elif "--k8s-label-selector" in left or left.get("--service-discovery", "").startswith("k8s"):
        _pods(draft, left, roles)
    if pairs := left.pop("--static-aliases", None):
        _aliases(draft, pairs)
    left.pop("--service-discovery", None)
    if interval := left.pop("--engine-stats-interval", None):
        draft.remark("--engine-stats-interval", "`load.interval` is 1 second by default", interval)
    if level := left.pop("--log-level", None):
        draft.set("log.level", {"critical": "error", "trace": "debug"}.get(level, level))
    for flag, value in left.items():
        why = _REASONS.get(flag, "unknown to the import; check whether you need it")
        draft.remark(flag, why, value or None)


def _policy(draft: Draft, left: dict[str, str]) -> None:
    logic = left.pop("--routing-logic", "roundrobin")
    key = left.pop("--session-key", None)
    if logic in _POLICIES:
        draft.set("policy", _POLICIES[logic])
    elif logic in _BY_PREFIX:
        draft.set(
            "policy",
            DEFAULT_POLICY,
            f"The old rule has no equivalent. `{DEFAULT_POLICY}` reads prefix hits, too.",
        )
        draft.remark(
            f"routing logic {logic}", f"no such rule; `{DEFAULT_POLICY}` replaces it, without LMCache"
        )
    elif logic in _SPLITTING:
        draft.set(
            "policy",
            DEFAULT_POLICY,
            f"The prefill engine by `{DEFAULT_POLICY}`, the decode engine by `decode_policy`.",
        )
    else:
        known = ", ".join([*_POLICIES, *_BY_PREFIX[:2], *_SPLITTING])
        raise draft.error("--routing-logic", logic, known)
    if logic == "priority":
        draft.remark("routing logic priority", "`least_requests` is the nearest rule")
    if key is not None and key.lower() != "x-session-id":
        draft.remark("--session-key", "clients name their session in the header x-session-id", key)


def _static(draft: Draft, left: dict[str, str], roles: list[str]) -> None:
    urls = [url for url in left.pop("--static-backends").split(",") if url]
    models = [model for model in left.pop("--static-models", "").split(",") if model]
    labels = left.pop("--static-model-labels", "").split(",")
    if models and len(models) != len(urls):
        raise draft.error(
            "--static-models", ",".join(models), f"one model for each of the {len(urls)} backends"
        )
    named = dict.fromkeys(models)
    pools: dict[str | None, list[dict[str, Any]]] = {}
    for index, url in enumerate(urls):
        label = labels[index] if index < len(labels) else ""
        role = next(
            (r for r, own in zip(("prefill", "decode"), roles, strict=True) if own and own == label), None
        )
        engine = draft.engine(url, "--static-backends", **({"role": role} if role else {}))
        if engine is not None:
            pools.setdefault(models[index] if len(named) > 1 else None, []).append(engine)
    if len(named) > 1:
        draft.set("models", [{"name": model, "engines": pools[model]} for model in named if model in pools])
    elif pools:
        draft.set("engines", pools[None])
        if named:
            draft.set("model", next(iter(named)))


def _aliases(draft: Draft, given: str) -> None:
    pairs = [pair.partition(":") for pair in given.split(",") if pair]
    for alias, _, model in pairs:
        if not alias or not model:
            raise draft.error("--static-aliases", given, "ALIAS:MODEL, separated by commas")
    draft.set("aliases", {alias: model for alias, _, model in pairs})


def _pods(draft: Draft, left: dict[str, str], roles: list[str]) -> None:
    source: dict[str, Any] = {
        "selector": left.pop("--k8s-label-selector", ""),
        "port": int(draft.number("--k8s-port", left.pop("--k8s-port", "8000"))),
    }
    if not source["selector"]:
        source["selector"] = ",".join(f"{k}={v}" for k, v in _LABELS.items())
        draft.remark("no --k8s-label-selector", "the source needs a selector; this is the chart's default")
    if namespace := left.pop("--k8s-namespace", None):
        source["namespace"] = namespace
    if roles == ["prefill", "decode"]:
        source["role_key"] = "model"
    elif any(roles):
        draft.remark(
            f"--prefill-model-labels {roles[0]}, --decode-model-labels {roles[1]}",
            "give the pods a label with prefill or decode, and set `role_key`",
        )
    draft.set("discovery", [{"kubernetes": source}])
