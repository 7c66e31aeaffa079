"""Explains invalid values of a section: their source, the problem, and the expected value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from lmetric.config.files import SECRETS, Lines, place_of
from lmetric.config.kinds import OptionError, Strict
from lmetric.config.tuning import KEY, in_configuration, is_tuning, tuning_fields
from lmetric.validation import expected

MASK = "**********"
# Names of unknown keys that may hold a secret.
_LIKE_SECRET = re.compile(
    r"key|token(?!iz|s\b)|secret|salt|passw|pwd|credential|auth|bearer|cookie|dsn", re.IGNORECASE
)
_USER = re.compile(r"//\S*@")  # of a URL, whose password may have a slash


def explain(
    error: ValidationError,
    origin: Mapping[tuple[str, ...], str],
    root: type[BaseModel],
    lines: Mapping[str, Lines] = MappingProxyType({}),
) -> Iterator[str]:
    """One line per invalid value of `root`: its source, the key, the value, and what is expected.

    `origin` maps key paths to sources, `lines` the sources that are files to the lines of their
    keys.
    """
    found = error.errors(include_url=False)
    mistyped = set(_mistyped(found))
    lines_of: dict[str, list[str]] = {}  # the expected values of each line, in order
    for problem in found:
        if problem["type"] == "missing" and problem["loc"] in mistyped:
            continue
        # Tags of union members are not keys of the file.
        loc = [
            part for part in problem["loc"] if not (isinstance(part, str) and ("[" in part or part == "str"))
        ]
        loc = list(in_configuration(root, loc))
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        place = place_of(loc, origin, lines)
        value, message = problem.get("input"), expected(problem)
        refused = problem.get("ctx", {}).get("error")
        if isinstance(refused, OptionError) and refused.path is not None:
            path = ".".join([path, *refused.path])
            value, message = refused.value, refused.problem
        if problem["type"] == "extra_forbidden":
            known = _known_keys(root, loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
            shown = repr(_masked(value, loc[-1], unknown=True))
            head, message = f"{place}{path} = {shown}: ", f"unknown key{hint}"
        elif problem["type"] == "missing":
            head, message = f"{place}{path}: ", "missing; add this key"
        elif not loc:
            head = ""
        else:
            shown = "null" if value is None else repr(_masked(value, loc[-1]))
            head = f"{place}{path} = {shown}: "
        if message not in lines_of.setdefault(head, []):
            lines_of[head].append(message)
    for head, messages in lines_of.items():
        if head and all(message.startswith("expected ") for message in messages):  # of a union's members
            messages[1:] = [message.removeprefix("expected ") for message in messages[1:]]
            yield head + " or ".join(messages)
        else:
            yield from (head + message for message in messages)


def _masked(value: Any, key: Any = None, *, unknown: bool = False) -> Any:
    """The value, with its secrets masked.

    `unknown`: the router has no such key, so keys that look like secrets count, too.
    """
    if value is not None and (key in SECRETS or (unknown and _looks_secret(str(key)))):
        return MASK
    if isinstance(value, Mapping):
        return {name: _masked(each, name, unknown=unknown) for name, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, unknown=unknown) for each in value]
    return _USER.sub("//***@", value) if isinstance(value, str) else value


def _looks_secret(key: str) -> bool:
    return bool(_LIKE_SECRET.search(key) or difflib.get_close_matches(key, SECRETS, n=1, cutoff=0.75))


def _mistyped(problems: Sequence[Any]) -> Iterator[tuple[str | int, ...]]:
    """Yields the missing keys for which an unknown key of the same section stands."""
    unknown = [each["loc"] for each in problems if each["type"] == "extra_forbidden"]
    for each in problems:
        loc = each["loc"]
        names = [str(other[-1]) for other in unknown if other[:-1] == loc[:-1]]
        if each["type"] == "missing" and difflib.get_close_matches(str(loc[-1]), names, n=1, cutoff=0.5):
            yield loc


def _known_keys(section: type[BaseModel], loc: list[Any]) -> list[str]:
    tuning = [KEY] if not loc and tuning_fields(section) else []
    for part in loc:
        if part not in section.model_fields:
            continue  # an index in a list, or a name that the operator chose
        inner = _section(section.model_fields[part].annotation)
        if inner is None:
            return []
        section = inner
    names = [field.alias or name for name, field in section.model_fields.items() if not is_tuning(field)]
    return names + tuning


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``list[EngineConfig] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner))), None)
