"""Descriptions of settings: the texts below the fields in the code. Only documents need them.

pydantic can read these texts, too, but would do so in every process.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def descriptions(cls: type[BaseModel]) -> dict[str, str]:
    """The descriptions of a model's fields by name. Fields without one are absent."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(BaseModel)]):
        found |= _texts(base.__module__).get(base.__name__, {})
    return {name: text for name, text in found.items() if name in cls.model_fields}


@cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    """The texts below the fields of a module's classes, by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: dict(_below(each)) for each in tree.body if isinstance(each, ast.ClassDef)}


def _below(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                yield name, " ".join(about.split())


class DescribedSchema(GenerateJsonSchema):
    """Generates JSON schemas with the descriptions of fields."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """The schema of a model."""
        made: dict[str, Any] = super().model_schema(schema)
        cls = schema["cls"]
        for name, text in descriptions(cls).items():
            key = cls.model_fields[name].alias or name
            made["properties"][key] = {"description": text, **made["properties"][key]}
        return made
