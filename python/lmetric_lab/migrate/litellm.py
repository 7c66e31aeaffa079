"""The configuration of a LiteLLM proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.migrate import litellm_fallbacks
from lmetric_lab.migrate.draft import OLD_RULE, Draft

# Providers whose api_base is an engine with the OpenAI API.
_OWN = {
    "hosted_vllm",
    "openai",
    "vllm",
    "text-completion-openai",
    "custom_openai",
    "openai_like",
    "xinference",
}
_STRATEGIES = {"simple-shuffle": "random", "least-busy": "least_requests"}
_OTHER_STRATEGIES = (
    "latency-based-routing",
    "usage-based-routing",
    "usage-based-routing-v2",
    "cost-based-routing",
)
_WEIGHTS = ("rpm", "tpm", "weight")
_NEW_KEYS = (
    "default_key_generate_params",
    "upperbound_key_generate_params",
    "default_internal_user_params",
    "default_team_params",
)
_REDIS = (
    "routers of the same engines exchange their load: `replicas.urls` and `replicas.token`; only budgets "
    "can use Redis: `replicas.redis_url`"
)
_REASONS = {
    "content_policy_fallbacks": "the router does not judge contents",
    "redis_host": _REDIS,
    "redis_port": _REDIS,
    "redis_password": _REDIS,
    "redis_url": _REDIS,
    "master_key": "keys are in a file: `auth.keys_file`",
    "background_health_checks": "health checks are always on: `health.interval`",
    "health_check_interval": "health checks are always on: `health.interval`",
    "drop_params": "requests reach the engine unchanged",
    "cache": "no cache of answers; the engines cache prefixes",
    "cache_params": "no cache of answers; the engines cache prefixes",
    "success_callback": "use /metrics, `records` and `tracing`",
    "failure_callback": "use /metrics, `records` and `tracing`",
    "callbacks": "use /metrics, `records` and `tracing`",
    "alerting": "alert on the metrics (docs/how-to/monitoring.md)",
    "retry_policy": "every failure that another engine may not have is retried",
    "retry_after": "a retry goes to another engine at once",
    "enable_pre_call_checks": "the engine refuses prompts that are too long",
}


def translate(draft: Draft, config: dict[str, Any], _: list[Any]) -> None:
    """Fills the draft from a proxy's config.yaml."""
    router = _section(draft, config, "router_settings")
    general = _section(draft, config, "general_settings")
    module = _section(draft, config, "litellm_settings")
    draft.set("host", "0.0.0.0")
    draft.set("port", 4000, "The address of the old router, so that clients stay as they are.")
    _policy(draft, router)
    pools: dict[str, list[dict[str, Any]]] = {}
    names = _Names()
    entries = config.get("model_list")
    if not isinstance(entries, list):
        raise draft.error("model_list", entries, "a list of deployments")
    for index, entry in enumerate(entries):
        _deployment(draft, f"model_list[{index}]", entry, pools, names)
    if len(pools) == 1:
        [(name, engines)] = pools.items()
        draft.set("model", name)
        draft.set("engines", engines)
    elif pools:
        draft.set("models", [{"name": name, "engines": engines} for name, engines in pools.items()])
    else:
        draft.remark("model_list", "no deployment is an engine of yours; keep LiteLLM in front of providers")
    aliases = _aliases(draft, router, pools, names)
    litellm_fallbacks.translate(draft, litellm_fallbacks.take(draft, router, module), pools, aliases)
    _reliability(draft, router, module)
    _limits(draft, module)
    for name, section in (
        ("router_settings", router),
        ("litellm_settings", module),
        ("general_settings", general),
    ):
        for key, value in section.items():
            draft.remark(f"{name}.{key}", _REASONS.get(key, "no equivalent known"), value)
    if config.get("environment_variables"):
        draft.remark(
            "environment_variables", "the router reads LMETRIC__... (docs/reference/configuration.md)"
        )
    known = {"model_list", "router_settings", "general_settings", "litellm_settings", "environment_variables"}
    for key in config.keys() - known:
        draft.remark(key, "no equivalent known")


def _section(draft: Draft, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise draft.error(name, value, "a mapping")
    return dict(value)


def _policy(draft: Draft, router: dict[str, Any]) -> None:
    strategy = str(router.pop("routing_strategy", "simple-shuffle"))
    args = router.pop("routing_strategy_args", None)
    if strategy in _STRATEGIES:
        draft.set("policy", _STRATEGIES[strategy], f"{OLD_RULE}.")
    elif strategy in _OTHER_STRATEGIES:
        draft.set("policy", DEFAULT_POLICY)
        draft.remark(f"routing_strategy {strategy}", f"no such rule; `{DEFAULT_POLICY}` replaces it")
    else:
        raise draft.error(
            "router_settings.routing_strategy", strategy, ", ".join([*_STRATEGIES, *_OTHER_STRATEGIES])
        )
    if args:
        draft.remark("router_settings.routing_strategy_args", "parameters of the old rule")


@dataclass
class _Names:
    """The public names of deployments."""

    # Weights by the engines' name, by public name.
    targets: dict[str, dict[str, float]] = field(default_factory=dict)
    weights: list[tuple[str, str, object]] = field(default_factory=list)  # public name, key, value


def _aliases(
    draft: Draft, router: dict[str, Any], pools: Mapping[str, object], names: _Names
) -> dict[str, dict[str, float]]:
    """Sets `aliases`: public names that differ from the engines', and `model_group_alias`.

    Returns them, as weights by model.
    """
    groups = router.pop("model_group_alias", None) or {}
    if not isinstance(groups, Mapping):
        raise draft.error("router_settings.model_group_alias", groups, "a mapping")
    found = {name: targets for name, targets in names.targets.items() if targets.keys() != {name}}
    for alias, value in groups.items():
        group = str(value.get("model") if isinstance(value, Mapping) else value)
        if targets := names.targets.get(group):
            found[str(alias)] = dict(targets)
        else:
            draft.remark(f"router_settings.model_group_alias.{alias}", f"no engine of yours serves {group}")
    for name in [name for name in found if name in pools]:
        draft.remark(f"alias {name}", f"engines serve a model of this name, so it stays {name}")
        del found[name]
    for name, key, value in names.weights:
        if len(found.get(name, ())) < 2:
            draft.remark(key, "no weights: load decides; limits are per tenant", value)
    draft.set_aliases(found)
    return found


def _deployment(
    draft: Draft,
    where: str,
    entry: Any,
    pools: dict[str, list[dict[str, Any]]],
    names: _Names,
) -> None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("litellm_params"), Mapping):
        raise draft.error(where, entry, "a mapping with model_name and litellm_params")
    params = dict(entry["litellm_params"])
    public, model = str(entry.get("model_name")), str(params.pop("model", ""))
    provider, slash, served = model.partition("/")
    base = params.pop("api_base", None)
    if base is None or provider not in _OWN or not slash:
        draft.remark(f"{where} ({public})", f"{model}: a provider's model; LiteLLM stays in front of it")
        return
    base = str(base)
    if base.startswith("os.environ/"):
        draft.remark(
            f"{where} ({public})", f"its address is in a variable; add it to `engines` of {served}", base
        )
        return
    engine = draft.engine(base, f"{where}.api_base")
    if engine is None:
        return
    if params.pop("api_key", "none") not in ("none", "", "EMPTY", "fake", None):
        draft.remark(f"{where}.api_key", "not copied; set `api_key` of the engine")
    given = next((source[key] for key in _WEIGHTS[::-1] for source in (params, entry) if key in source), 1)
    weight = float(draft.number(f"{where} weight", given))
    targets = names.targets.setdefault(public, {})
    targets[served] = targets.get(served, 0.0) + weight
    for key in _WEIGHTS:
        for source in (params, entry):
            if key in source:
                names.weights.append((public, f"{where}.{key}", source[key]))
        params.pop(key, None)
    for key, value in params.items():
        draft.remark(f"{where}.{key}", "clients send request parameters themselves", value)
    for key in sorted(entry.keys() - {"model_name", "litellm_params", *_WEIGHTS}):
        draft.remark(f"{where}.{key}", "the router asks the engines for their models")
    engines = pools.setdefault(served, [])
    if draft.is_new(engine, model=served):
        engines.append(engine)


def _limits(draft: Draft, module: dict[str, Any]) -> None:
    """Limits of new keys, users and teams: as budgets to write for each tenant.

    LiteLLM's database has the keys and teams, so their names are not in the file.
    """
    for section in _NEW_KEYS:
        given = module.get(section)
        if not isinstance(given, Mapping):
            continue
        params = dict(given)
        budgets = []
        for key, counts in (("rpm_limit", "requests"), ("tpm_limit", "total_tokens")):
            if (value := params.pop(key, None)) is not None:
                limit = int(draft.number(f"litellm_settings.{section}.{key}", value))
                budgets.append(f"{{counts: {counts}, limit: {limit}, per: minute}}")
        if budgets:
            text = f"write for each tenant: `budgets: [{', '.join(budgets)}]` (docs/how-to/budgets.md)"
            draft.remark(f"litellm_settings.{section}", text)
            if params:
                module[section] = params
            else:
                del module[section]


def _reliability(draft: Draft, router: dict[str, Any], module: dict[str, Any]) -> None:
    """Retries, time limits and cooldowns. The router's settings come before the module's."""

    def take(*names: str) -> float | int | None:
        values = [section.pop(name, None) for section in (router, module) for name in names]
        value = next((each for each in values if each is not None), None)
        return None if value is None else draft.number(names[0], value)

    if (retries := take("num_retries")) is not None:
        draft.set("retries.attempts", int(retries) + 1, "retries.attempts counts the first attempt, too.")
    if (limit := take("timeout", "request_timeout")) is not None:
        draft.set("timeouts.request", limit)
    if (first := take("stream_timeout")) is not None:
        draft.set("timeouts.first_byte", first)
    if (fails := take("allowed_fails")) is not None:
        draft.set("health.ejection.consecutive_failures", int(fails) + 1)
        draft.note("health", "LiteLLM counts failures per minute; the router counts consecutive failures.")
    if (pause := take("cooldown_time")) is not None:
        draft.set("health.ejection.base_seconds", pause)
