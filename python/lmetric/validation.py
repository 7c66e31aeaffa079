"""Messages about values that pydantic refuses, without its classes and its parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXPECTED = {
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "dataclass_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "int_from_float": "expected an integer",
    "int_parsing": "expected an integer",
    "int_type": "expected an integer",
    "list_type": "expected a list",
    "model_attributes_type": "expected a mapping",
    "model_type": "expected a mapping",
    "string_type": "expected a text",
}


def expected(problem: Mapping[str, Any]) -> str:
    """Returns the expected value in words, for one of `ValidationError.errors()`."""
    return _EXPECTED.get(problem["type"]) or str(problem["msg"]).removeprefix("Value error, ")
