"""Plugins of llm-d's endpoint picker (EndpointPickerConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.migrate.draft import Draft

KIND = "EndpointPickerConfig"

# Types of plugins, with their older names, and the parameters of `llmd_scorers`.
_SCORERS = {
    "prefix-cache-scorer": "prefix",
    "prefix-cache": "prefix",
    "precise-prefix-cache-scorer": "prefix",
    "kvcache-aware-scorer": "prefix",
    "queue-scorer": "queue",
    "queue": "queue",
    "kv-cache-utilization-scorer": "usage",
    "kv-cache-scorer": "usage",
    "kv-cache": "usage",
}
# Plugins of `llmd_affinity`: its parameter for each of theirs, and how many of their units make one
# of its own.
_AFFINITY: dict[str, dict[str, tuple[str, float]]] = {
    "prefix-cache-affinity-filter": {
        "affinityThreshold": ("affinity", 1),
        "maxTTFTPenaltyMs": ("max_ttft_seconds", 1000),
        "peakPrefillThroughput": ("peak_prefill_tokens_per_second", 1),
    },
    "token-load-scorer": {"queueThresholdTokens": ("full_load_tokens", 1)},
}
_NO_LIMIT_SECONDS = 1e6  # the largest `max_ttft_seconds`
_NEAR = {"load-aware-scorer": "queue"}  # another formula on the same signal
_STRUCTURE = {
    "max-score-picker",
    "max-score",
    "single-profile-handler",
    "single-profile",
    "pd-profile-handler",
    "disagg-profile-handler",
    "metrics-data-source",
    "core-metrics-extractor",
    "endpoint-notification-source",
    "prefill-header-handler",
    "disagg-headers-handler",
    "openai-parser",
    "vllmgrpc-parser",
}
_ROLE_FILTERS = {"prefill-filter", "decode-filter"}
_PREFIX_SOURCES = {
    "approx-prefix-cache-producer",
    "precise-prefix-cache-producer",
    "token-producer",
    "tokenizer",
}
_WIRING = "part of the picker's wiring; the router has its own"
_KEYS = {
    "apiVersion",
    "kind",
    "metadata",
    "plugins",
    "schedulingProfiles",
    "saturationDetector",
    "flowControl",
}
_KEYS |= {"featureGates", "dataLayer", "data", "parser", "requestHandler"}
_ROLE_LABEL = "llm-d.ai/role"
_REASONS = {
    "session-affinity-scorer": "no score beside others; `session_affinity` is a policy of its own",
    "running-requests-size-scorer": "write an expression over r_bs (docs/reference/policies.md)",
    "active-request-scorer": "write an expression over bs (docs/reference/policies.md)",
    "lora-affinity-scorer": "no score by loaded adapters; cached prefixes are separate for each adapter",
    "no-hit-lru-scorer": "no equivalent: a prompt without a hit goes where the score is best",
    "weighted-random-picker": "the best score wins, ties are drawn at random",
    "random-picker": "the best score wins, ties are drawn at random",
    "prefix-based-pd-decider": "every request with separate roles runs its prompt on a prefill engine",
    "always-disagg-pd-decider": "every request with separate roles runs its prompt on a prefill engine",
    "by-label-selector": "set the labels in the selector of the `kubernetes` source",
    "by-label": "set the labels in the selector of the `kubernetes` source",
    "models-responder": "the router answers /v1/models itself",
    "utilization-detector": "requests wait only with `admission` (docs/how-to/overload.md)",
}


# Kinds of documents in a file that are read, or have no settings of a router.
_READ = {KIND, "InferencePool", "InferenceModelRewrite", "ConfigMap"}
_DOCUMENTS = {
    "InferenceModel": "write its targets in `aliases`; classes have levels (docs/how-to/priorities.md)",
    "InferenceObjective": "classes and tenants have levels (docs/how-to/priorities.md)",
}


def translate(draft: Draft, config: dict[str, Any], documents: list[Any]) -> None:
    """Fills the draft from an EndpointPickerConfig and the InferencePools in `documents`."""
    plugins: dict[str, Mapping[str, Any]] = {}
    for each in config.get("plugins") or []:
        if not isinstance(each, Mapping) or not isinstance(each.get("type"), str):
            raise draft.error("plugins", each, "a mapping with `type`")
        plugins[str(each.get("name") or each["type"])] = each
    profiles = {str(each.get("name")): each for each in config.get("schedulingProfiles") or []}
    if not profiles:
        profiles = {"default": {"plugins": [{"pluginRef": name} for name in plugins]}}
    types = {name: str(plugin["type"]) for name, plugin in plugins.items()}
    splits = "prefill" in profiles and "decode" in profiles
    first = profiles["prefill"] if splits else next(iter(profiles.values()))
    _policy(draft, "policy", first, plugins, types)
    if splits:
        _policy(draft, "decode_policy", profiles["decode"], plugins, types)
    for name, kind in types.items():
        parameters = plugins[name].get("parameters") or {}
        _plugin(draft, name, kind, parameters)
    others = profiles.keys() - ({"prefill", "decode"} if splits else {next(iter(profiles))})
    for name in sorted(others):
        draft.remark(f"profile {name}", "the router has one policy, and one for decode engines")
    for key in ("saturationDetector", "flowControl"):
        if config.get(key):
            draft.remark(key, "requests wait only with `admission` (docs/how-to/overload.md)")
    for key in ("featureGates", "dataLayer", "data", "parser", "requestHandler"):
        if config.get(key):
            draft.remark(key, _WIRING)
    for key in sorted(config.keys() - _KEYS):
        draft.remark(key, "no equivalent known", config[key])
    _aliases(draft, documents)
    _other_documents(draft, documents)
    _pools(draft, documents, separate=splits or bool(_ROLE_FILTERS & set(types.values())))


def _weights(draft: Draft, profile: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, float]:
    """The weight of each scorer of a profile, by type; the default is 1."""
    weights: dict[str, float] = {}
    for each in profile.get("plugins") or []:
        name = str(each.get("pluginRef"))
        if name not in types:
            raise draft.error("pluginRef", name, f"a plugin in `plugins`: {', '.join(types)}")
        given = each.get("weight")
        kind = types[name]
        if given is not None or kind in _SCORERS or kind.endswith("-scorer"):
            weights[kind] = float(draft.number(f"weight of {name}", 1 if given is None else given))
        else:
            weights.setdefault(kind, 0.0)
    return weights


def _policy(
    draft: Draft,
    key: str,
    profile: Mapping[str, Any],
    plugins: Mapping[str, Mapping[str, Any]],
    types: Mapping[str, str],
) -> None:
    weights = _weights(draft, profile, types)
    own_default = DEFAULT_POLICY if key == "policy" else "least_requests"
    knobs_key = "knobs" if key == "policy" else "decode_knobs"
    if _AFFINITY.keys() & weights.keys():
        _experimental(draft)
        draft.set(key, "llmd_affinity")
        names = [str(each.get("pluginRef")) for each in profile.get("plugins") or []]
        if found := _affinity(draft, {name: plugins[name] for name in names}):
            draft.set(knobs_key, found)
        for kind, weight in weights.items():
            if kind in _SCORERS or kind in _NEAR:
                draft.remark(f"weight of {kind}", f"`llmd_affinity` has no further scores ({key})", weight)
        return
    knobs = dict.fromkeys(("queue", "usage", "prefix"), 0.0)
    known = False
    for kind, weight in weights.items():
        if (knob := _SCORERS.get(kind) or _NEAR.get(kind)) is not None:
            knobs[knob] += weight
            known = True
        if kind in _NEAR:
            draft.remark(
                kind, f"counted as the queue score of `llmd_scorers`, by another formula ({key})", weight
            )
    if known:
        _experimental(draft)
        draft.set(
            key,
            "llmd_scorers",
            f"The old scorers. `{DEFAULT_POLICY}` is this router's default, without weights.",
        )
        draft.set(knobs_key, {name: int(w) if w == int(w) else w for name, w in knobs.items()})
    elif "session-affinity-scorer" in weights:
        draft.set(key, "session_affinity", "Clients name their session in the header x-session-id.")
    else:
        picks_at_random = "random-picker" in weights
        draft.set(key, "random" if picks_at_random else own_default)
        if not picks_at_random:
            draft.remark(f"profile for {key}", f"no scorer with an equivalent; `{own_default}` decides")


def _affinity(draft: Draft, plugins: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The parameters of `llmd_affinity` from a profile's plugins; the others become remarks."""
    found: dict[str, float] = {}
    for name, plugin in plugins.items():
        known = _AFFINITY.get(str(plugin["type"]), {})
        for key, value in (plugin.get("parameters") or {}).items() if known else ():
            if key not in known:
                draft.remark(f"{name}.{key}", "`llmd_affinity` has no such parameter", value)
                continue
            knob, units = known[key]
            number = draft.number(f"{name}.{key}", value)
            number = number / units if units != 1 else number
            if knob == "max_ttft_seconds" and number == 0:
                number = _NO_LIMIT_SECONDS
            if found.setdefault(knob, number) != number:
                draft.remark(f"{name}.{key}", f"an earlier plugin of the profile sets `{knob}`", value)
    return found


def _experimental(draft: Draft) -> None:
    if "experimental" not in draft.settings:
        draft.settings = {"experimental": True, **draft.settings}


def _plugin(draft: Draft, name: str, kind: str, parameters: Mapping[str, Any]) -> None:
    if kind == "token-producer" and "/" in str(model := parameters.get("modelName", "")):
        if not str(model).startswith("hf-repo/"):  # the placeholder of the examples
            draft.set("tokenizer", str(model))
            return
        draft.remark(
            f"{name}.modelName", "a placeholder; set `tokenizer`, or let the engines report it", model
        )
    if kind in _SCORERS or kind in _PREFIX_SOURCES:
        if parameters:
            draft.remark(
                f"{name}: {', '.join(parameters)}",
                "the engines report block size, cache size and KV events; `block_size`, `cache_blocks` and "
                "`kv_events` override them",
            )
    elif kind == "session-affinity-scorer" and draft.settings.get("policy") == "session_affinity":
        if parameters:
            draft.remark(
                f"{name}: {', '.join(parameters)}", "sessions come in the header x-session-id, not a cookie"
            )
    elif kind not in _STRUCTURE | _ROLE_FILTERS | _AFFINITY.keys() | _NEAR.keys():
        draft.remark(f"{name} ({kind})" if name != kind else name, _REASONS.get(kind, "no equivalent known"))
    elif parameters and kind in _STRUCTURE | _ROLE_FILTERS:
        draft.remark(f"{name}: {', '.join(parameters)}", _WIRING)
    elif parameters and kind in _NEAR:
        draft.remark(f"{name}: {', '.join(parameters)}", "`llmd_scorers` has no such parameter")


def _aliases(draft: Draft, documents: list[Any]) -> None:
    """Sets `aliases` from the InferenceModelRewrites. Of two rules for a name, the first counts."""
    found: dict[str, dict[str, float]] = {}
    for each in documents:
        if not isinstance(each, Mapping) or each.get("kind") != "InferenceModelRewrite":
            continue
        for rule in (each.get("spec") or {}).get("rules") or []:
            targets: dict[str, float] = {}
            for target in rule.get("targets") or []:
                given = target.get("weight")
                weight = float(draft.number("weight", 1 if given is None else given))
                if weight > 0:
                    model = draft.text("modelRewrite", target.get("modelRewrite"))
                    targets[model] = targets.get(model, 0.0) + weight
            matches = rule.get("matches") or []
            if not matches:
                draft.remark(f"rewrite of all models to {', '.join(targets)}", "`aliases` names each model")
            for match in matches if targets else []:
                found.setdefault(draft.text("value", (match.get("model") or {}).get("value")), targets)
    models = {model for targets in found.values() for model in targets}
    for name in [name for name in found if name in models]:
        draft.remark(f"rewrite of {name}", "a model has this name, so it stays; give clients another name")
        del found[name]
    draft.set_aliases(found)


def _other_documents(draft: Draft, documents: list[Any]) -> None:
    for each in documents:
        kind = each.get("kind", KIND) if isinstance(each, Mapping) else KIND
        if kind not in _READ:
            name = (each.get("metadata") or {}).get("name", "")
            keys = ", ".join(each.get("spec") or {})
            draft.remark(f"{kind} {name}: {keys}", _DOCUMENTS.get(kind, "no part of the router's settings"))


def _pools(draft: Draft, documents: list[Any], *, separate: bool) -> None:
    sources = []
    for each in documents:
        if not isinstance(each, Mapping) or each.get("kind") != "InferencePool":
            continue
        spec = each.get("spec") or {}
        labels = (spec.get("selector") or {}).get("matchLabels") or spec.get("selector") or {}
        ports = [port.get("number") for port in spec.get("targetPorts") or []] or [
            spec.get("targetPortNumber")
        ]
        source: dict[str, Any] = {
            "selector": ",".join(f"{k}={v}" for k, v in labels.items()),
            "port": ports[0],
        }
        if namespace := (each.get("metadata") or {}).get("namespace"):
            source["namespace"] = namespace
        if separate:
            source["role_key"] = _ROLE_LABEL
        sources.append({"kubernetes": source})
        for key in sorted(spec.keys() - {"selector", "targetPorts", "targetPortNumber"}):
            draft.remark(f"InferencePool {key}", "clients connect to the router; `epp` serves a gateway")
        for port in ports[1:]:
            draft.remark(
                f"InferencePool port {port}", "one port per source; write another `kubernetes` source"
            )
    if sources:
        draft.set("discovery", sources)
        return
    role = f" and role_key: {_ROLE_LABEL}" if separate else ""
    draft.remark(
        "the engines",
        "an InferencePool names them; import both in one file, or add a `kubernetes` source with its "
        f"selector{role}",
    )
