"""Messages about values that pydantic refuses, without its classes and its parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXPECTED = {
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "dataclass_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "finite_number": "expected a finite number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "int_from_float": "expected an integer",
    "int_parsing": "expected an integer",
    "int_type": "expected an integer",
    "list_type": "expected a list",
    "missing": "missing",
    "model_attributes_type": "expected a mapping",
    "model_type": "expected a mapping",
    "path_type": "expected a path",
    "set_type": "expected a list",
    "string_type": "expected a text",
    "tuple_type": "expected a list",
}

# Kinds with a bound: its name in the problem's context, and the words before it.
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}
_LENGTHS = {"too_short": "min_length", "string_too_short": "min_length"}
_LENGTHS |= {"too_long": "max_length", "string_too_long": "max_length"}


def expected(problem: Mapping[str, Any]) -> str:
    """Returns the expected value in words, for one of `ValidationError.errors()`."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"expected {words} {context[name]:.12g}"
    if kind in _LENGTHS:
        bound = _LENGTHS[kind]
        words = "at least" if bound == "min_length" else "at most"
        what = "character" if kind.startswith("string") else "item"
        return f"expected {words} {context[bound]} {what}{'s' * (context[bound] != 1)}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"expected a text of the form {context['pattern']}"
    return _EXPECTED.get(kind) or str(problem["msg"]).removeprefix("Value error, ")
