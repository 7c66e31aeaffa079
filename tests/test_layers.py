"""The server's files import downward only, and never in a circle; imports for types alone count, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.web_protocol import RequestHandler

import lmetric.server
from lmetric.server.http.connection import ClientConnection

PACKAGE = "lmetric.server"
ROOT = Path(lmetric.server.__file__).parent
# From the bottom; folders of one row do not import each other.
LAYERS = [
    {"api"},
    {"upstream"},
    {"fleet"},
    {"execution"},
    {"discovery", "observe"},
    {"background"},
    {"http"},
    {"app"},
]


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


FILES = {module(file): file for file in ROOT.rglob("*.py") if file.name != "__init__.py"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            base = node.module.removeprefix(PACKAGE).removeprefix(".")
            for alias in node.names:
                yield next((name for name in (f"{base}.{alias.name}", base) if name in FILES), base)


@cache
def arrows() -> dict[str, set[str]]:
    """The files that each file imports."""
    return {
        name: {other for other in imported(ast.parse(file.read_text())) if other in FILES}
        for name, file in FILES.items()
    }


def layer(name: str) -> int:
    folder = name.partition(".")[0]
    return next(number for number, folders in enumerate(LAYERS) if folder in folders)


def test_every_import_goes_down() -> None:
    up = [
        f"{name} -> {other}"
        for name, others in arrows().items()
        for other in others
        if name.partition(".")[0] != other.partition(".")[0] and layer(other) >= layer(name)
    ]
    assert up == []


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_aiohttp_has_what_the_short_way_uses() -> None:
    """`ClientConnection` reads attributes that aiohttp does not document."""
    assert issubclass(ClientConnection, RequestHandler)
    assert {"_messages", "_current_request"} <= set(RequestHandler.__slots__)
    assert "_loop" in BaseProtocol.__slots__
