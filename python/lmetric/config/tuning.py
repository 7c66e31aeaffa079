"""The section `tuning`: settings that only experts change. Any version may change or remove them.

A field with the mark `{"tuning": True}` is declared in the section that uses it. Configurations
have its key under `tuning`, by the same path: ``tuning: {admission: {room_seconds: 1}}``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmetric.config.files import ConfigError
from lmetric.config.kinds import Strict

KEY = "tuning"

Path = tuple[str, ...]


def is_tuning(field: FieldInfo) -> bool:
    """Whether a field is a tuning setting."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get(KEY))


@cache
def tuning_fields(root: type[BaseModel]) -> Mapping[Path, FieldInfo]:
    """The tuning settings of a configuration, by their path."""
    return MappingProxyType(dict(_fields(root, ())))


def _fields(section: type[BaseModel], above: Path) -> Iterator[tuple[Path, FieldInfo]]:
    for name, field in section.model_fields.items():
        if is_tuning(field):
            yield (*above, name), field
        # Items of lists and mappings, such as `models`, have the values of the top level.
        if get_origin(field.annotation) in (list, dict):
            continue
        kinds = [each for each in get_args(field.annotation) or [field.annotation] if each is not NoneType]
        if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Strict):
            yield from _fields(kinds[0], (*above, name))


def in_configuration(root: type[BaseModel], loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """The path of a key in configurations: below `tuning` for a tuning setting."""
    own = tuple(loc[2:] if loc[:1] == ("models",) else loc)
    return (KEY, *own) if own in tuning_fields(root) else tuple(loc)


def unfolded(
    values: Mapping[str, Any], root: type[BaseModel], place: Callable[[Sequence[str | int]], str]
) -> dict[str, Any]:
    """Returns the values of a configuration with the tuning settings in their sections.

    Args:
        place: the source of a key, as the prefix of an error message.

    Raises:
        ConfigError: a key of `tuning` is not a tuning setting, or a tuning setting is elsewhere.
    """
    known = tuning_fields(root)
    sections = [((), values), *((("models", n), each) for n, each in models_in(values))]
    for above, section in sections:
        for path in known:
            if has(section, path):
                loc = (*above, *path)
                shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
                moved = ".".join((KEY, *path))
                raise ConfigError(
                    f"{place(loc)}{shown.lstrip('.')}: it is a tuning setting; set {moved} instead"
                )
    if KEY not in values:
        return dict(values)
    unfolded: dict[str, Any] = copied(values)
    given = unfolded.pop(KEY)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place((KEY,))}{KEY} = {given!r}: expected a mapping")
    for path, value in _leaves(given, (), known, place):
        into = [model for _, model in models_in(unfolded) if len(path) > 1 and model.get(path[0]) is not None]
        optional = root.model_fields[path[0]].get_default(call_default_factory=True) is None
        if len(path) == 1 or unfolded.get(path[0]) is not None or not optional:
            into.append(unfolded)
        if not into:
            off = f"it has no effect without `{path[0]}`"
            raise ConfigError(f"{place((KEY, *path))}{'.'.join((KEY, *path))} = {value!r}: {off}")
        for section in into:
            put(section, path, value)
    return unfolded


def _leaves(
    given: Mapping[str, Any],
    above: Path,
    known: Mapping[Path, Any],
    place: Callable[[Sequence[str | int]], str],
) -> Iterator[tuple[Path, Any]]:
    for key, value in given.items():
        path = (*above, key)
        near = sorted({each[len(above)] for each in known if each[: len(above)] == above})
        if path in known:
            yield path, value
        elif key in near and isinstance(value, Mapping):
            yield from _leaves(value, path, known, place)
        else:
            where = f"{place((KEY, *path))}{'.'.join((KEY, *path))} = {value!r}"
            if key in near:
                raise ConfigError(f"{where}: expected a mapping")
            close = difflib.get_close_matches(key, near, 1, 0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(near)}"
            raise ConfigError(f"{where}: unknown key; {hint}")


def models_in(values: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    models = values.get("models")
    for number, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict):
            yield number, model


def copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


def has(values: Any, path: Path) -> bool:
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True


def put(values: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[path[-1]] = value
