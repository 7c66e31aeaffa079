"""Explains invalid values of a section: their source, the problem, and the expected value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from lmetric.config.kinds import OptionError

# Secret keys: messages do not show their values.
SECRETS = frozenset({"api_key", "token", "salt_secret"})


def explain(
    error: ValidationError, origin: Mapping[tuple[str, ...], str], root: type[BaseModel]
) -> Iterator[str]:
    """One line per invalid value of `root`: its source, the key, the value, and what is expected.

    `origin` maps key paths to sources.
    """
    seen = set()
    for problem in error.errors(include_url=False):
        # Tags of union members are not keys of the file.
        loc = [
            part for part in problem["loc"] if not (isinstance(part, str) and ("[" in part or part == "str"))
        ]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        names = tuple(str(part) for part in loc if isinstance(part, str))
        source = next((origin[names[:n]] for n in range(len(names), 0, -1) if names[:n] in origin), None)
        place = f"{source}: " if source else ""
        value, message = problem.get("input"), problem["msg"].removeprefix("Value error, ")
        refused = problem.get("ctx", {}).get("error")
        if isinstance(refused, OptionError) and refused.path is not None:
            path = ".".join([path, *refused.path])
            value, message = refused.value, refused.problem
        if problem["type"] == "extra_forbidden":
            known = _known_keys(root, loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
            line = f"{place}{path} = {value!r}: unknown key{hint}"
        elif problem["type"] == "missing":
            line = f"{place}{path}: missing"
        elif not loc:
            line = message
        else:
            shown = "'**********'" if loc[-1] in SECRETS else repr(value)
            line = f"{place}{path} = {shown}: {message}"
        if line not in seen:
            seen.add(line)
            yield line


def _known_keys(section: type[BaseModel], loc: list[Any]) -> list[str]:
    for part in loc:
        if part not in section.model_fields:
            continue  # an index in a list, or a name that the operator chose
        inner = _section(section.model_fields[part].annotation)
        if inner is None:
            return []
        section = inner
    return [field.alias or name for name, field in section.model_fields.items()]


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``list[EngineConfig] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner))), None)
