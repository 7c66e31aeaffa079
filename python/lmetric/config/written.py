"""A configuration as text, and the JSON schema of its files. Only commands need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from lmetric import options
from lmetric.config.schema import SHORTHANDS, ServerConfig
from lmetric.config.tuning import KEY, Path, copied, has, models_in, put, tuning_fields
from lmetric.descriptions import DescribedSchema


def render(config: ServerConfig) -> str:
    """The whole configuration as YAML, defaults included, secrets masked.

    Settings that models inherit from the top level are there alone.
    """
    values = config.model_dump(mode="json")
    for model, shown in zip(config.models, values["models"], strict=True):
        for name in model.inherited:
            del shown[name]
    return yaml.safe_dump(folded(values, ServerConfig), sort_keys=False, allow_unicode=True)


def render_changed(config: ServerConfig) -> str:
    """The settings that differ from the defaults as YAML, each with its source, secrets masked."""
    changed = config.model_dump(mode="json", exclude_defaults=True)
    return "".join(_changed(folded(changed, ServerConfig), config._origin, ())) or "{}\n"


def json_schema() -> dict[str, Any]:
    """The JSON schema of configuration files."""
    schema = ServerConfig.model_json_schema(schema_generator=DescribedSchema)
    fold_schema(schema)
    for key, field in SHORTHANDS.items():
        if key not in options.OPTIONS:
            section = schema["properties"][key]
            name = section["$ref"].rpartition("/")[2]
            value = schema["$defs"][name]["properties"][field]
            plain = {word: value[word] for word in ("type", "anyOf") if word in value}
            about = {word: section.pop(word) for word in ("description", "default") if word in section}
            schema["properties"][key] = {"anyOf": [section, plain], **about}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _changed(
    values: Mapping[str, Any], origin: Mapping[tuple[str, ...], str], path: tuple[str, ...]
) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, key)
        below = [other for other in origin if other[: len(here)] == here]
        if not below:
            continue  # a default of an option that has other settings
        if isinstance(value, dict) and any(len(other) > len(here) for other in below):
            yield f"{indent}{key}:\n"
            yield from _changed(value, origin, here)
            continue
        # One line for each scalar: a comment cannot stand inside a folded one.
        text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=float("inf"))
        first, *rest = text.splitlines()
        yield f"{indent}{first}  # {', '.join(dict.fromkeys(origin[other] for other in below))}\n"
        yield from (f"{indent}{line}\n" for line in rest)


def folded(values: Mapping[str, Any], root: type[BaseModel]) -> dict[str, Any]:
    """Returns values of `root` as in configurations: tuning settings are under `tuning`."""
    folded: dict[str, Any] = copied(values)
    found: dict[str, Any] = {}
    for path in tuning_fields(root):
        for section in (folded, *(model for _, model in models_in(folded))):
            if has(section, path):
                value = _take(section, path)
                if not has(found, path):
                    put(found, path, value)
    return folded | ({KEY: found} if found else {})


def fold_schema(schema: dict[str, Any]) -> None:
    """Moves the tuning settings in the JSON schema of a configuration below `tuning`."""
    definitions = schema["$defs"]
    marked = {
        (name, key): fields.pop(key)
        for name, each in [("", schema), *definitions.items()]
        for fields in [each.get("properties", {})]
        for key in [key for key, field in fields.items() if field.get(KEY)]
    }

    def tuning_of(name: str) -> dict[str, Any]:
        found = {key: field for (owner, key), field in marked.items() if owner == name}
        for key, field in (definitions[name] if name else schema).get("properties", {}).items():
            options = field.get("anyOf", [field])
            below = [each["$ref"].rpartition("/")[2] for each in options if "$ref" in each]
            if len(below) == 1 and (inner := tuning_of(below[0])):
                found[key] = {"type": "object", "additionalProperties": False, "properties": inner}
        return found

    about = {"description": "unstable settings for experts", "type": "object", "additionalProperties": False}
    schema["properties"][KEY] = {**about, "properties": tuning_of("")}


def _take(values: dict[str, Any], path: Path) -> Any:
    """Removes a value and returns it, with the sections that are empty then."""
    if len(path) == 1:
        return values.pop(path[0])
    value = _take(values[path[0]], path[1:])
    if not values[path[0]]:
        del values[path[0]]
    return value
