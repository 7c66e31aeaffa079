"""The configuration from its sources: a YAML file, the environment and flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lmetric.config.files import ConfigError, read_yaml_mapping
from lmetric.config.problems import explain
from lmetric.config.schema import SHORTHANDS, ServerConfig

ENV_PREFIX = "LMETRIC_"


def load_config(
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServerConfig:
    """The configuration from a YAML file, the environment and flags.

    ``overrides`` maps dotted keys (``timeouts.connect``) to values given by flags; None means not given. In
    ``environ`` (default: the process's) ``LMETRIC_TIMEOUTS__CONNECT`` sets ``timeouts.connect``; a text that
    starts with ``[`` or ``{`` is read as YAML. Raises ConfigError.
    """
    merged: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    if file is not None:
        _merge(merged, _read_yaml(Path(file)), origin, str(file))
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            _merge(merged, _nested(path, _value(name, value)), origin, name)
    for key, value in (overrides or {}).items():
        if value is not None:
            path = key.split(".")
            source = "command line"
            _merge(merged, _nested(path, _value(source, value)), origin, source)
    try:
        return ServerConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, origin, ServerConfig))) from None


def render(config: ServerConfig) -> str:
    """The whole configuration as YAML, defaults included, secrets masked."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def _read_yaml(file: Path) -> dict[str, Any]:
    content = read_yaml_mapping(file)
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(f"{file}: key {key!r} is not a name")
    return content


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not readable as YAML: {str(error).splitlines()[0]}") from None


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _merge(
    into: dict[str, Any],
    new: Mapping[str, Any],
    origin: dict[tuple[str, ...], str],
    source: str,
    path: tuple[str, ...] = (),
) -> None:
    for key, value in new.items():
        here = (*path, key)
        if not path and key in SHORTHANDS and not isinstance(value, Mapping):
            # Else a later `admin.token` would replace `admin: true`, and not be added to it.
            value = {SHORTHANDS[key]: value}
        old = into.get(key)
        # Knobs and policies belong together: they replace, sections merge.
        if isinstance(value, Mapping) and isinstance(old, dict) and key not in ("policy", "decode_policy"):
            _merge(old, value, origin, source, here)
        elif isinstance(value, Mapping):
            into[key] = {}
            origin[here] = source
            _merge(into[key], value, origin, source, here)
        else:
            into[key] = value
            origin[here] = source
