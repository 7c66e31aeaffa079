"""Loads the configuration from a YAML file, the environment and flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from lmetric import options
from lmetric._core import LmetricError
from lmetric.config.files import SECRETS, ConfigError, Lines, UniqueKeys, place_of, read_yaml_lines
from lmetric.config.kinds import Strict
from lmetric.config.schema import SHORTHANDS, ServerConfig
from lmetric.config.tuning import KEY as TUNING
from lmetric.config.tuning import unfolded
from lmetric.defaults import DEFAULT_POLICY, TRACE_DIR

ENV_PREFIX = "LMETRIC__"
"""Prefix of environment variables with settings."""

# Kubernetes adds such variables to pods for each Service of their namespace: LMETRIC_PORT for the
# Service `lmetric`. A Service's name ends in a letter or digit, so no setting has such a variable.
_SERVICE_LINK = re.compile(
    r"LMETRIC(\w*[A-Z0-9])?_"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)",
    re.ASCII,
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}", re.ASCII)


def load_config(
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Loads the configuration from a YAML file, the environment and flags.

    Args:
        file: YAML file; None: no file.
        overrides: values of flags by dotted key (``timeouts.connect``); None: flag not given.
        environ: environment variables; None: those of the process. ``LMETRIC__TIMEOUTS__CONNECT``
            sets ``timeouts.connect``. Texts that start with ``[`` or ``{`` are read as YAML if the
            key takes a list or mapping. A secret in any source may be ``${NAME}``: the value of
            the variable ``NAME``.

    Raises:
        ConfigError: a source cannot be read, or a value is invalid.
    """
    merged: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    environ = os.environ if environ is None else environ
    ignored = []

    def take(source: str, values: Mapping[str, Any]) -> None:
        _merge(merged, values, origin, source, str(file))

    lines: Lines = {}
    if file is not None:
        # Its writer may have failed, as on a full disk. A reload would turn off API keys.
        hint = "write {} into it if flags and variables have all settings"
        content, lines = read_yaml_lines(Path(file), if_empty=hint)
        take(str(file), content)
    for name, value in sorted(environ.items()):
        if not name.startswith("LMETRIC") or name == TRACE_DIR or _is_service_link(name, value):
            continue
        if not name.startswith(ENV_PREFIX):
            ignored.append(name)
            continue
        path = name.removeprefix(ENV_PREFIX).lower().split("__")
        take(name, _nested(path, _value(name, path, value)))
    for key, value in (overrides or {}).items():
        if value is not None:
            path = key.split(".")
            take("command line", _nested(path, _value("command line", path, value)))
    merged = _expanded(merged, ServerConfig, (), origin, environ)
    _complete(merged)
    try:
        place = partial(place_of, origin=origin, lines={str(file): lines})
        config = ServerConfig.model_validate(unfolded(merged, ServerConfig, place))
    except ValidationError as error:
        from lmetric.config.problems import explain

        raise ConfigError("\n".join(explain(error, origin, ServerConfig, {str(file): lines}))) from None
    config._ignored = tuple(ignored)
    config._origin = origin
    return config


def _complete(merged: dict[str, Any]) -> None:
    """Adds the policy's default kind to options that have settings and no kind."""
    policy = merged.get("policy", DEFAULT_POLICY)
    models = merged.get("models")
    for model in models if isinstance(models, list) else []:
        if isinstance(model, dict):
            _with_kinds(model, model.get("policy", policy))
    _with_kinds(merged, policy)


def _with_kinds(section: dict[str, Any], policy: Any) -> None:
    name = policy.get("name") if isinstance(policy, Mapping) else policy
    for what, selector in options.SELECTORS.items():
        value = section.get(what)
        if what == "guard" or not isinstance(value, dict) or value.get(selector) not in (None, "auto"):
            continue
        if not value.keys() - {selector}:
            continue
        chosen = options.default_of(what, str(name))
        if chosen is not None:
            value[selector] = True if selector == "enabled" else chosen.core_kind


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE_LINK.fullmatch(name) is None:
        return False
    # LMETRIC_PORT=9000 is meant as a setting: Kubernetes sets an address such as tcp://10.0.0.1:80.
    numbers = ("_SERVICE_PORT", "_TCP_PORT", "_UDP_PORT", "_SCTP_PORT")
    return "://" in value or not name.endswith("_PORT") or name.endswith(numbers)


def _value(name: str, path: Sequence[str], value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    kind: Any = ServerConfig
    for key in path:
        kind = _below(kind, key)
    if not _takes_yaml(kind):
        return value  # a secret, for example, may begin with a bracket
    try:
        return yaml.load(value, UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not readable as YAML: {str(error).splitlines()[0]}") from None


def _below(kind: Any, key: str) -> Any:
    """The type of a key of a section or mapping; None: unknown."""
    if kind is ServerConfig and key == TUNING:
        return kind  # it has the paths of the other sections
    if isinstance(kind, type) and issubclass(kind, Strict):
        fields = kind.model_fields.items()
        return next((field.annotation for name, field in fields if key in (name, field.alias)), None)
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    return next((found for part in get_args(kind) if (found := _below(part, key)) is not None), None)


def _takes_yaml(kind: Any) -> bool:
    """Whether a type has values that are lists or mappings."""
    if isinstance(kind, type) and issubclass(kind, BaseModel | list | dict):
        return True
    return kind is Any or get_origin(kind) in (list, dict) or any(map(_takes_yaml, get_args(kind)))


def _is_secret(kind: Any) -> bool:
    return kind is SecretStr or any(map(_is_secret, get_args(kind)))


def _items_of(kind: Any) -> Any:
    """The type of a list's items; None: no list."""
    if get_origin(kind) is list:
        return get_args(kind)[0]
    return next((found for part in get_args(kind) if (found := _items_of(part)) is not None), None)


def _expanded(
    value: Any,
    kind: Any,
    path: tuple[str | int, ...],
    origin: Mapping[tuple[str, ...], str],
    environ: Mapping[str, str],
) -> Any:
    """A value with the secrets to which `${NAME}` refers. Raises ConfigError.

    ``kind``: the type of the value. Only secrets are expanded: elsewhere, a reference is an error.
    """
    if isinstance(value, Mapping):
        return {
            key: _expanded(each, _below(kind, str(key)), (*path, str(key)), origin, environ)
            for key, each in value.items()
        }
    if isinstance(value, list):
        items = _items_of(kind)
        return [_expanded(each, items, (*path, n), origin, environ) for n, each in enumerate(value)]
    if not isinstance(value, str) or not (found := _VARIABLE.search(value)):
        return value
    secret = _is_secret(kind)
    if secret and found[0] == value and environ.get(found[1]):
        return environ[found[1]]
    names = tuple(part for part in path if isinstance(part, str))
    source = next((origin[names[:n]] for n in range(len(names), 0, -1) if names[:n] in origin), "")
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if secret and found[0] == value:
        problem = f"the variable {found[1]} is not set; set it where the router starts"
    elif secret:
        problem = f"{found[0]} must be the whole value; put all of the secret into the variable"
    else:
        own = (
            ""
            if any(isinstance(part, int) for part in path)
            else f", or set {ENV_PREFIX}{'__'.join(names).upper()}"
        )
        problem = f"{found[0]} is expanded only in secrets; write the value{own}"
    raise ConfigError(f"{source}: {shown}: {problem}")


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _mapping_of(key: str, value: Any, source: str) -> Any:
    """The mapping that a plain value of a section or an option abbreviates. Raises ConfigError."""
    if key not in options.OPTIONS:
        return {SHORTHANDS[key]: value}
    from lmetric.option_values import as_mapping

    try:
        return as_mapping(key, value)
    except LmetricError as error:
        raise ConfigError(f"{source}: {key}: {error}") from None


def _merge(
    into: dict[str, Any],
    new: Mapping[str, Any],
    origin: dict[tuple[str, ...], str],
    source: str,
    file: str,
    path: tuple[str, ...] = (),
) -> None:
    """Adds the values of a source. ``file``: the source that is the configuration file."""
    for key, value in new.items():
        if not isinstance(key, str):
            within = f" in {'.'.join(path)}" if path else ""
            raise ConfigError(f"{source}: key {key!r}{within} is not a name; put it in quotes")
        here = (*path, key)
        if not path and key in SHORTHANDS and not isinstance(value, Mapping):
            # Otherwise a later `admin.token` replaces `admin: true` instead of extending it.
            value = _mapping_of(key, value, source)
        old = into.get(key)
        if not path and key in options.OPTIONS and isinstance(old, dict) and isinstance(value, Mapping):
            kind = value.get("kind")
            if kind is not None and old.get("kind") not in (None, kind):
                old = None  # the settings belong to another kind
        # Policies and their parameters are replaced as a whole; sections merge.
        if isinstance(value, Mapping) and isinstance(old, dict) and key not in ("policy", "decode_policy"):
            _merge(old, value, origin, source, file, here)
        elif isinstance(value, Mapping):
            into[key] = {}
            origin[here] = source
            _merge(into[key], value, origin, source, file, here)
        else:
            name = key.removesuffix("_file")
            other = name if name != key else f"{key}_file"
            if name in SECRETS and origin.get((*path, other)) == file != source:
                # `token` replaces the file's `token_file`, and the reverse.
                del into[other], origin[*path, other]
            into[key] = value
            origin[here] = source
