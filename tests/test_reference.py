"""The generated reference pages: each is what its declarations make, and covers all of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import lmetric as lm

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make_reference"))
PAGES = ROOT / "docs" / "reference"


@pytest.mark.parametrize("name", SCRIPT["MODULES"])
def test_the_page_is_what_the_declarations_make(name: str) -> None:
    for path, content in SCRIPT["made"](name).items():
        assert path.read_text() == content, f"run scripts/make_reference {name}"


def test_the_rust_pages_are_those_of_the_example() -> None:
    """A test of the example compares the stored pages with what it makes."""
    source = (ROOT / "rust" / "sim" / "examples" / "docs.rs").read_text()
    assert re.findall(r'^    \("(\w+)", \w+\),$', source, re.MULTILINE) == list(SCRIPT["RUST"])
    assert not SCRIPT["MODULES"].keys() & set(SCRIPT["RUST"])


def module(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT["MODULES"][name]))


def test_every_function_and_operator_of_the_core_is_on_the_page() -> None:
    source = (ROOT / "rust" / "core" / "src" / "expr" / "parse.rs").read_text()
    functions = re.findall(r'^    \("(\w+)", Function::', source, re.MULTILINE)
    made = module("expressions")
    assert functions == list(made["FUNCTIONS"])
    symbols = set(re.findall(r'^        \("([^"\w]+)", Token::', source, re.MULTILINE)) - {"(", ")", ","}
    shown = {sign for row in made["OPERATORS"] for sign in re.findall(r"[^\w\s]+", f"{row[0]} {row[1]}")}
    assert shown == symbols
    depth = re.search(r"MAX_DEPTH: usize = (\d+)", source)
    assert depth is not None
    assert f"{depth[1]} levels of brackets" in (PAGES / "expressions.md").read_text()


def test_every_metric_in_the_sources_is_on_the_page() -> None:
    page = (PAGES / "metrics.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "python" / "lmetric" / "server").rglob("*.py"))
    names = set(re.findall(r'"(lmetric_[a-z_]+)"', sources))
    assert len(names) > 30
    for name in names:
        assert f"`{name}" in page, name
    for row in re.findall(r"^\| `lmetric_.*", page, re.MULTILINE):
        name, _type, _unit, _labels, meaning = row.strip("| ").split(" | ")
        assert len(meaning.split()) > 2, name


def test_every_public_name_is_on_the_page_with_its_docstring() -> None:
    page = (PAGES / "api.md").read_text()
    for name in lm.__all__:
        if isinstance(getattr(lm, name), lm.Expr):
            continue
        assert re.search(rf"^(?:### `{name}`\n|- `{name}`: .)", page, re.MULTILINE), name
    for owner in (lm.Router, lm.Ticket, lm.Request):
        for name, member in vars(owner).items():
            if not name.startswith("_") and member.__doc__:
                assert f"#### `{owner.__name__}.{name}`\n" in page, f"{owner.__name__}.{name}"


def test_every_test_of_the_support_matrix_exists() -> None:
    made = module("support")["matrix"]()
    versions = (ROOT / "tests" / "real" / "install_vllm").read_text()
    assert f"VLLM_CPU:-{made['engines']['vllm']['version']}" in versions
    assert (ROOT / "tests" / "samples" / f"sglang-{made['engines']['sglang']['version']}.json").exists()
    for feature in made["features"]:
        for engine in made["engines"]:
            for test in feature[engine].get("tests", ()):
                file, _, name = test.partition("::")
                source = (ROOT / "tests" / file).read_text()
                found = re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE)
                assert found, test
                if engine == "sglang":
                    assert "sglang" in source or "bootstrap" in source, test
