"""Settings that a reload (SIGHUP, POST /admin/reload) applies while the router serves.

All other settings need a restart. The reference shows this table, too.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from lmetric.config.schema import POLICY_KNOBS, ModelConfig, ServerConfig

POLICIES = (
    *(name for pair in POLICY_KNOBS.items() for name in pair),
    *("policies", "policy_time_limit_seconds", "indicators"),
)
"""Settings of policies and of their indicators."""

_OF_MODELS = frozenset({*POLICIES, "engines", "engine_tls", "admission", "hedging", "shadow", "canary"})

RELOADED = frozenset(
    {
        *_OF_MODELS,
        *(f"models.{name}" for name in _OF_MODELS),
        *(
            "admin",
            "aliases",
            "auth",
            "cors",
            "discovery.api_key",
            "errors",
            "fallbacks",
            "forwarded",
            "health",
        ),
        *("limits", "load", "log", "model_in_answers", "paths", "retries", "tenants", "timeouts", "tls"),
    }
)
"""The settings that a reload applies. A section stands for all of its keys."""


def reloads(key: str) -> bool:
    """Whether a reload applies a key in the notation of the reference, such as `engines[].url`."""
    parts = key.replace("[]", "").replace(".NAME", "").split(".")
    return any(".".join(parts[:length]) in RELOADED for length in range(1, len(parts) + 1))


def needs_restart(old: ServerConfig, new: ServerConfig) -> list[str]:
    """The top-level keys with changes that need a restart."""
    before, after = _fixed(old, ""), _fixed(new, "")
    changed = [name for name in before if before[name] != after[name]]
    if (old.tls is None) != (new.tls is None):
        changed.append("tls")
    return changed


def _fixed(section: BaseModel, path: str) -> dict[str, Any]:
    """The values of a section that need a restart."""
    values = {}
    for name in type(section).model_fields:
        key, value = f"{path}{name}", getattr(section, name)
        if reloads(key):
            continue
        if isinstance(value, list):
            value = [_fixed(each, f"{key}.") if isinstance(each, BaseModel) else each for each in value]
        values[name] = value
    return values


def effective(running: ServerConfig, new: ServerConfig) -> ServerConfig:
    """The configuration of a running router after a reload. Raises ValueError.

    Models that only one of the two configurations has stay as they are.
    """
    update = {name: getattr(new, name) for name in RELOADED if name in ServerConfig.model_fields}
    if running.tls is None or new.tls is None:
        update["tls"] = running.tls
    named = {model.name: model for model in new.models}
    update["models"] = [_model(model, named.get(model.name)) for model in running.models]
    config = running.model_copy(update=update)
    config.check()
    return config


def _model(running: ModelConfig, new: ModelConfig | None) -> ModelConfig:
    if new is None:
        return running
    values = {
        name: getattr(new if name in _OF_MODELS else running, name) for name in ModelConfig.model_fields
    }
    given = new.model_fields_set & _OF_MODELS | running.model_fields_set - _OF_MODELS
    return ModelConfig.model_construct(given, **values)
