"""Flags of sglang-router, smg and vllm-router, which share an origin and most flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.migrate.commands import Flags
from lmetric_lab.migrate.draft import OLD_RULE, Draft

_Convert = Callable[[Draft, str, str], Any]

_PLAIN_POLICIES = ("random", "round_robin", "power_of_two")
_BY_SESSION = ("consistent_hash", "consistent_hashing", "rendezvous_hash", "manual", "sticky_least_loaded")
_KNOBS = {
    "--cache-threshold": "cache_threshold",
    "--balance-abs-threshold": "balance_abs",
    "--balance-rel-threshold": "balance_rel",
}


class _Key(NamedTuple):
    """A flag with an equivalent: the key, how to convert the value, and a note."""

    path: str
    convert: _Convert
    note: str | None = None


def _text(draft: Draft, flag: str, value: str) -> Any:
    return value


def _number(draft: Draft, flag: str, value: str) -> Any:
    return draft.number(flag, value)


def _attempts(draft: Draft, flag: str, value: str) -> Any:
    return max(1, int(draft.number(flag, value)))


def _level(draft: Draft, flag: str, value: str) -> Any:
    known = {"warn": "warning", "critical": "error", "trace": "debug"}
    level = known.get(value.lower(), value.lower())
    if level not in ("debug", "info", "warning", "error"):
        raise draft.error(flag, value, "debug, info, warn or error")
    return level


_KEYS = {
    "--host": _Key("host", _text),
    "--port": _Key("port", _number),
    "--request-timeout-secs": _Key("timeouts.request", _number),
    "--max-payload-size": _Key("limits.max_body_bytes", _number),
    "--retry-max-retries": _Key(
        "retries.attempts", _attempts, "As in the old command, the number counts the first attempt, too."
    ),
    "--cb-failure-threshold": _Key("health.ejection.consecutive_failures", _number),
    "--cb-timeout-duration-secs": _Key("health.ejection.base_seconds", _number),
    "--health-failure-threshold": _Key("health.down_after", _number),
    "--health-check-timeout-secs": _Key("health.timeout", _number),
    "--health-check-interval-secs": _Key("health.interval", _number),
    "--health-check-endpoint": _Key("health.path", _text),
    "--log-level": _Key("log.level", _level),
    "--model-path": _Key("tokenizer", _text),
    "--tokenizer-path": _Key("tokenizer", _text),
    "--chat-template": _Key("chat_template", _text),
    "--tls-cert-path": _Key("tls.certificate_file", _text),
    "--tls-key-path": _Key("tls.key_file", _text),
    "--client-cert-path": _Key("engine_tls.certificate_file", _text),
    "--client-key-path": _Key("engine_tls.key_file", _text),
    "--ca-cert-path": _Key("engine_tls.ca_file", _text),
}

_QUEUE = "requests wait only with `admission` (docs/how-to/overload.md)"
_BACKOFF = "a retry goes to another engine at once"
_METRICS = "metrics are at /metrics on the router's port"
_START = "the router starts at once and uses each engine when it is healthy"
_INDEX = "`index_bytes` limits the index; there is no timer"
_MODELS = "several models: write `models`, or let the engines report theirs"
_TOKENS = "set `tokenizer`; the router caches the tokens of recent prompts"
_HISTORY = "the engines store responses; the router keeps no history"
_REASONS = {
    "--queue-size": _QUEUE,
    "--queue-timeout-secs": _QUEUE,
    "--rate-limit-tokens-per-second": "limits are per tenant: `tenants.NAME.budgets`",
    "--retry-initial-backoff-ms": _BACKOFF,
    "--retry-max-backoff-ms": _BACKOFF,
    "--retry-backoff-multiplier": _BACKOFF,
    "--retry-jitter-factor": _BACKOFF,
    "--health-success-threshold": "one successful check makes an engine healthy again",
    "--cb-success-threshold": "one small request with an answer ends an ejection",
    "--cb-window-duration-secs": "consecutive failures have no window",
    "--disable-health-check": "health checks are always on; raise `health.interval` for fewer",
    "--prometheus-port": _METRICS,
    "--prometheus-host": _METRICS,
    "--log-dir": "logs go to stderr; collect them there",
    "--request-id-headers": "the router reads and sends x-request-id",
    "--api-key": "keys are in a file: `auth.keys_file`; keys for engines: `api_key` of each engine",
    "--api-key-validation-urls": "keys are in a file: `auth.keys_file`",
    "--worker-startup-timeout-secs": _START,
    "--worker-startup-check-interval": _START,
    "--eviction-interval": _INDEX,
    "--eviction-interval-secs": _INDEX,
    "--max-tree-size": _INDEX,
    "--block-size": "the engines report their block size; `block_size` overrides it",
    "--prefix-token-count": "no policy hashes a part of the prompt",
    "--prefix-hash-load-factor": "no policy hashes a part of the prompt",
    "--load-monitor-interval": "requests are counted at once; `load.interval` is for metrics",
    "--dp-aware": "write an entry with `data_parallel_rank` for each rank (docs/reference/engines.md)",
    "--enable-igw": _MODELS,
    "--model-id-from": "set `model_key` of the `kubernetes` source",
    "--backend": "the router finds out whether an engine is vLLM or SGLang",
    "--runtime": "the router finds out whether an engine is vLLM or SGLang",
    "--history-backend": _HISTORY,
    "--mini-lb": "the router has one implementation",
    "--enable-mesh": "routers exchange their load: set `replicas.urls` and `replicas.token`",
    "--router-selector": "routers exchange their load: set `replicas.urls` and `replicas.token`",
    "--vllm-discovery-address": "engines do not register; list `engines`, or use `discovery`",
    "--bootstrap-port-annotation": "the router reads the bootstrap port from the engine",
    "--reasoning-parser": "engines parse reasoning: set the engine's --reasoning-parser",
    "--tool-call-parser": "engines parse tool calls: set the engine's --tool-call-parser",
    "--mcp-config-path": "the router runs no tools",
    "--enable-wasm": "no plugins on the request path except policies (docs/tutorials/your_own_policy.md)",
    "--enable-program-scheduling": "programs are followed by default: `programs` (docs/how-to/agents.md)",
    "--program-scheduling-config-json": "other parameters: `programs` (docs/how-to/agents.md)",
    "--tokenizer-cache-enable-l0": _TOKENS,
    "--tokenizer-cache-enable-l1": _TOKENS,
    "--enable-trace": "traces: `tracing`, with the extra `otel`",
    "--otlp-traces-endpoint": "traces: `tracing.endpoint`, with the extra `otel`",
}


def translate(draft: Draft, flags: Flags, *, launches_engines: bool = False) -> None:
    """Fills the draft from the flags of a command line."""
    flags = dict(flags)
    draft.set("host", "0.0.0.0" if draft.kind == "smg" else "127.0.0.1")
    draft.set("port", 30_000)
    if launches_engines:
        flags = _of_router(draft, flags)
    _policies(draft, flags)
    _engines(draft, flags)
    _discovery(draft, flags)
    _limits(draft, flags)
    for flag, given in flags.items():
        values = given[-1]
        if flag in _KEYS and values:
            key = _KEYS[flag]
            draft.set(key.path, key.convert(draft, flag, values[0]), key.note)
        else:
            why = _REASONS.get(flag, "unknown to the import; check whether you need it")
            draft.remark(flag, why, " ".join(values) or None)


def _of_router(draft: Draft, flags: Flags) -> Flags:
    """The router's flags of a command that also starts the engines: --router-NAME, host, port."""
    kept: Flags = {}
    for flag, given in flags.items():
        if flag.startswith("--router-"):
            kept["--" + flag.removeprefix("--router-")] = given
        elif flag in ("--host", "--port"):
            kept[flag] = given
        else:
            draft.remark(flag, "a flag of the engines; start them yourself", " ".join(given[-1]) or None)
    draft.note("policy", "The old command also started the engines. Start them, and add each to `engines`.")
    return kept


def _policies(draft: Draft, flags: Flags) -> None:
    general = _last(flags, "--policy") or "cache_aware"
    first = _last(flags, "--prefill-policy") or general
    splits = bool({"--pd-disaggregation", "--vllm-pd-disaggregation"} & flags.keys())
    decode = _last(flags, "--decode-policy") or general
    for flag in ("--policy", "--prefill-policy", "--decode-policy"):
        flags.pop(flag, None)
    knobs = {
        knob: draft.number(flag, value) for flag, knob in _KNOBS.items() if (value := _last(flags, flag))
    }
    for flag in _KNOBS:
        given = flags.pop(flag, None)
        if given and "cache_aware" not in ((first, decode) if splits else (first,)):
            draft.remark(flag, "a parameter of cache_aware, which the old command does not use")
    _policy(draft, "policy", "knobs", first, knobs)
    if splits:
        _policy(draft, "decode_policy", "decode_knobs", decode, knobs)


def _policy(draft: Draft, key: str, knobs_key: str, name: str, knobs: dict[str, Any]) -> None:
    if name in _PLAIN_POLICIES:
        draft.set(key, name)
    elif name == "cache_aware":
        draft.settings = {"experimental": True, **draft.settings}
        draft.set(key, "cache_aware", f"{OLD_RULE}, and stable.")
        if draft.kind == "smg":
            draft.note(key, "Newer smg versions skip an overloaded match by another rule: `prefix_spill`.")
        if knobs:
            draft.set(knobs_key, dict(knobs))
    elif name in _BY_SESSION:
        draft.set(key, "session_affinity", "Clients name their session in the header x-session-id.")
        if name in ("manual", "sticky_least_loaded"):
            draft.remark(f"policy {name}", "a new session goes to an engine by hash, not by load")
    elif name in ("prefix_hash", "bucket"):
        draft.set(key, DEFAULT_POLICY if key == "policy" else "least_requests")
        draft.remark(f"policy {name}", f"no such rule; `{draft.settings[key]}` replaces it")
    else:
        raise draft.error("--policy", name, f"{', '.join((*_PLAIN_POLICIES, 'cache_aware', *_BY_SESSION))}")


def _engines(draft: Draft, flags: Flags) -> None:
    ranks = 1
    if (given := _last(flags, "--intra-node-data-parallel-size")) is not None:
        ranks = int(draft.number("--intra-node-data-parallel-size", given))
        del flags["--intra-node-data-parallel-size"]
        if ranks > 1:
            draft.note("engines", f"One entry for each of the {ranks} data-parallel ranks.")
    for flag, role in (("--worker-urls", None), ("--prefill", "prefill"), ("--decode", "decode")):
        for values in flags.pop(flag, []):
            urls = values[:1] if role == "prefill" else values
            for url in urls:
                for rank in range(ranks):
                    own = {} if ranks == 1 else {"data_parallel_rank": rank}
                    draft.add_engine(url, flag, **own, **({"role": role} if role else {}))
            for port in values[1:2] if role == "prefill" else ():
                if port != "none":
                    draft.remark(
                        f"bootstrap port {port}", "the router reads the bootstrap port from the engine"
                    )
    for flag in ("--pd-disaggregation", "--vllm-pd-disaggregation"):
        flags.pop(flag, None)
    connector = _last(flags, "--kv-connector")
    flags.pop("--kv-connector", None)
    if connector not in (None, "nixl"):
        draft.remark("--kv-connector", "KV transfers: NIXL (vLLM) and bootstrap (SGLang) only", connector)


def _discovery(draft: Draft, flags: Flags) -> None:
    wanted = flags.pop("--service-discovery", None) is not None
    port = _last(flags, "--service-discovery-port") or "80"
    namespace = _last(flags, "--service-discovery-namespace")
    selectors = {
        name: [label for given in flags.pop(name, []) for label in given]
        for name in ("--selector", "--prefill-selector", "--decode-selector")
    }
    flags.pop("--service-discovery-port", None)
    flags.pop("--service-discovery-namespace", None)
    if not wanted:
        return
    common: dict[str, Any] = {"port": int(draft.number("--service-discovery-port", port))}
    if namespace is not None:
        common["namespace"] = namespace
    else:
        draft.remark(
            "all namespaces", "a `kubernetes` source watches one namespace: the router's, or `namespace`"
        )
    sources = []
    prefill, decode = selectors["--prefill-selector"], selectors["--decode-selector"]
    if prefill or decode:
        key = role_key(prefill, decode)
        if key is not None:
            rest = [label for label in prefill if label in decode]
            selector = ",".join([*rest, f"{key} in (prefill,decode)"])
            sources.append({"selector": selector, **common, "role_key": key})
        else:
            sources += [{"selector": ",".join(labels), **common} for labels in (prefill, decode) if labels]
            draft.remark(
                "--prefill-selector, --decode-selector",
                "no role by selector: give the pods a label with prefill or decode, and set `role_key`",
            )
    if labels := selectors["--selector"]:
        sources.append({"selector": ",".join(labels), **common})
    if not sources:
        raise draft.error(
            "--service-discovery", "", "a --selector, or --prefill-selector and --decode-selector"
        )
    draft.set("discovery", [{"kubernetes": source} for source in sources])


def role_key(prefill: list[str], decode: list[str]) -> str | None:
    """The label that has the role as value, if the selectors differ only there."""
    only = [set(prefill) - set(decode), set(decode) - set(prefill)]
    if [len(each) for each in only] != [1, 1]:
        return None
    (first,), (second,) = only
    key, _, role = first.partition("=")
    return key if role == "prefill" and second == f"{key}=decode" else None


def _limits(draft: Draft, flags: Flags) -> None:
    if (given := _last(flags, "--max-concurrent-requests")) is not None:
        limit = int(draft.number("--max-concurrent-requests", given))
        del flags["--max-concurrent-requests"]
        if limit > 0:
            draft.set(
                "limits.max_concurrent_requests", limit, "Requests above max_concurrent_requests get a 503."
            )
        else:
            draft.remark("--max-concurrent-requests", "`limits.max_concurrent_requests` has a default", given)
    if origins := [each for given in flags.pop("--cors-allowed-origins", []) for each in given]:
        draft.set("cors.origins", origins)
    if flags.pop("--disable-retries", None) is not None:
        flags.pop("--retry-max-retries", None)
        draft.set("retries.attempts", 1)
    if flags.pop("--disable-circuit-breaker", None) is not None:
        draft.set("health.ejection.enabled", False)


def _last(flags: Flags, flag: str) -> str | None:
    given = flags.get(flag)
    return given[-1][0] if given and given[-1] else None
