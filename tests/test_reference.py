"""The generated reference pages: each is what its declarations make, and covers all of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

import lmetric as lm
from lmetric.config import ServerConfig
from lmetric.config.tuning import tuning_fields
from lmetric.config.written import render

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make_reference"))
PAGES = ROOT / "docs" / "reference"
# Other tests declare indicators of their own.
BUILT_IN = [row for row in lm.indicator_table() if row["owner"] != "declared"]
INDICATORS = {f"lmetric_instance_{row['name']}" for row in BUILT_IN}


@pytest.mark.parametrize("name", SCRIPT["MODULES"])
def test_the_page_is_what_the_declarations_make(name: str) -> None:
    for path, content in SCRIPT["made"](name).items():
        assert path.read_text() == content, f"run scripts/make_reference {name}"


def test_the_rust_pages_are_those_of_the_example() -> None:
    """A test of the example compares the stored pages with what it makes."""
    source = (ROOT / "rust" / "sim" / "examples" / "docs.rs").read_text()
    assert re.findall(r'\("(\w+)", \w+\),?\]?', source.partition("PAGES:")[2].partition(";")[0]) == list(
        SCRIPT["RUST"]
    )
    assert not SCRIPT["MODULES"].keys() & set(SCRIPT["RUST"])


def module(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT["MODULES"][name]))


def test_every_function_and_operator_of_the_core_is_on_the_page() -> None:
    source = (ROOT / "rust" / "expr" / "src" / "parse.rs").read_text()
    functions = re.findall(r'^    \("(\w+)", Function::', source, re.MULTILINE)
    made = module("policies")
    assert functions == list(made["FUNCTIONS"])
    symbols = set(re.findall(r'^        \("([^"\w]+)", Token::', source, re.MULTILINE)) - {"(", ")", ","}
    shown = {sign for row in made["OPERATORS"] for sign in re.findall(r"[^\w\s]+", f"{row[0]} {row[1]}")}
    assert shown == symbols
    depth = re.search(r"MAX_DEPTH: usize = (\d+)", source)
    assert depth is not None
    assert f"{depth[1]} levels of brackets" in (PAGES / "policies.md").read_text()


def test_every_metric_in_the_sources_is_on_the_page() -> None:
    page = (PAGES / "metrics.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "python" / "lmetric" / "server").rglob("*.py"))
    names = set(re.findall(r'"(lmetric_[a-z_]+)"', sources))
    assert len(names) > 30
    for name in names:
        assert f"`{name}" in page, name
    for row in re.findall(r"^- `lmetric_.*", page, re.MULTILINE):
        name, found, meaning = row.partition("): ")
        if found:
            assert len(meaning.split()) > 2, name
        else:  # an indicator: the page of the policies has its meaning
            assert name.partition("`")[2].partition("`")[0] in INDICATORS, name


def test_every_policy_and_indicator_is_on_the_page() -> None:
    page = (PAGES / "policies.md").read_text()
    for policy in lm.policy_table():
        assert re.search(rf"^\| `{policy['name']}` \| `.+` \| .+ \|", page, re.MULTILINE), policy["name"]
        for knob in policy["knobs"]:
            assert f"`{knob['name']}`" in page, knob["name"]
    for row in BUILT_IN:
        assert re.search(rf"^\| `{row['name']}` \| {row['unit']} \| .+ \|$", page, re.MULTILINE), row["name"]


def test_every_public_name_is_on_the_page_with_its_docstring() -> None:
    page, functions = (PAGES / "python.md").read_text(), module("policies")["FUNCTIONS"]
    for name in lm.__all__:
        if isinstance(getattr(lm, name), lm.Expr):
            continue
        if name in functions:  # of expressions: their page has the docstrings
            assert f"`{name}`" in page, name
            assert re.search(
                rf"^\| `{name}\(.+\)` \| .+ \|", (PAGES / "policies.md").read_text(), re.MULTILINE
            )
        elif isinstance(getattr(lm, name), str | list):
            assert f"`{name}`" in page, name
        else:
            assert re.search(rf"^(?:- )?`{name}(?:\(.*\))?`: .", page, re.MULTILINE), name
    for owner in (lm.Router, lm.Ticket, lm.Request):
        section = page.partition(f"### `{owner.__name__}`\n")[2].partition("\n#")[0]
        for name, member in vars(owner).items():
            if not name.startswith("_") and member.__doc__:
                assert re.search(rf"^- `{name}(?:\(.*\))?`: .", section, re.MULTILINE), (
                    f"{owner.__name__}.{name}"
                )


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


# Above the 160 of the core: `aliases`, `fallbacks`, `model_in_answers`, `tenants.NAME.models`, the
# windows of `tenants.NAME.budgets`, `state_folder`, the levels of tenants and classes, and their
# aging, the class of budgets,
# `replicas.redis_url`, and the seven settings of `auth.jwt`. The keys of a type that several
# sections share, such as `tls`, count once.
SETTINGS_MAX = 185
TUNING_MAX = 30
FIRST_PAGE_MAX = 40
WORDS_MAX = 9_500


def settings_text() -> str:
    """Returns the pages of settings: the first section's, and the others'."""
    return "".join((PAGES / page).read_text() for page in ("configuration.md", "settings.md"))


def settings_rows() -> dict[str, list[str]]:
    """The rows of both pages of settings by section, as cells."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in settings_text().splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        elif line.startswith("| `") and ". Keys as in `" not in line:  # else a section, shown elsewhere
            found.setdefault(section, []).append(line)
    return found


def test_a_server_has_few_settings() -> None:
    """A change that adds a setting raises the number."""
    sections = settings_rows()
    keys = [row.split("`")[1] for rows in sections.values() for row in rows]
    assert len(keys) == len(set(keys))
    # A key of an engine that overrides the key of the model is the same setting.
    own = [key for key in keys if key.partition("engines[].")[2] not in keys]
    tuning = [key for key in keys if key.startswith("tuning.")]
    assert len(own) <= SETTINGS_MAX
    assert len(tuning) == len(tuning_fields(ServerConfig)) <= TUNING_MAX
    assert list(sections)[-1] == "tuning"
    assert (PAGES / "configuration.md").read_text().count("\n| `") <= FIRST_PAGE_MAX
    assert len(settings_text().split()) <= WORDS_MAX
    changes = (PAGES.parents[1] / "CHANGELOG.md").read_text()
    assert f"`serve` accepts {len(own)} settings" in changes
    served = [row for row in lm.policy_table() if row["maturity"] != "study"]
    assert f"`total_delay` with a hot-spot guard, {len(served) - 1} other policies" in changes


def test_every_setting_is_on_the_page_and_says_when_to_change_it() -> None:
    rows = {row.split("`")[1]: row for rows in settings_rows().values() for row in rows}
    for row in rows.values():
        cells = row.replace("\\|", "").strip("| ").split(" | ")
        assert len(cells[-1].split()) >= 3, row
        assert len(cells[-1].split()) <= 20, row
    text = yaml.safe_load(render(ServerConfig()))
    shown = {key for key, value in text.items() if not isinstance(value, dict) or not value}
    page = settings_text()
    for key in shown:
        assert key in rows or f"\n## {key}" in page, key
