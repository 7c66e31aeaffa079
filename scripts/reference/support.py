"""The support matrix in docs/reference/engines.md, from support.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "support.yaml"
LEVELS = {"real": "real", "stand_in": "stand-in", "not_tested": "untested", "not_supported": "no"}
ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = "docs/reference/engines.md"
START, END = "<!-- support -->\n", "<!-- end of support -->\n"


def matrix() -> dict[str, Any]:
    """Returns the data file, after a check of its form."""
    made: dict[str, Any] = yaml.safe_load(DATA.read_text())
    for feature in made["features"]:
        assert set(feature) == {"name", *made["engines"]}, feature
        for engine in made["engines"]:
            cell = feature[engine]
            assert cell["level"] in LEVELS, (feature["name"], cell)
            tested = cell["level"] in ("real", "stand_in")
            assert tested == bool(cell.get("tests")), (feature["name"], cell)
            real = any(test.startswith("real/") for test in cell.get("tests", ()))
            assert real == (cell["level"] == "real"), (feature["name"], cell)
    return made


def table() -> str:
    """Returns the matrix as a Markdown table."""
    made = matrix()
    engines = made["engines"]
    heads = [f"{each['name']} {each['version']} ({each['build']})" for each in engines.values()]
    lines = [f"| feature | {' | '.join(heads)} |", f"|{' --- |' * (len(heads) + 1)}"]
    for feature in made["features"]:
        cells = []
        for engine in engines:
            cell = feature[engine]
            note = f", {cell['note']}" if "note" in cell else ""
            cells.append(f"{LEVELS[cell['level']]}{note}")
        lines.append(f"| {feature['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """Returns the page with the current table."""
    before, found, rest = (ROOT / PAGE).read_text().partition(START)
    _, ended, after = rest.partition(END)
    assert found, f"{PAGE}: no {START.strip()}"
    assert ended, f"{PAGE}: no {END.strip()}"
    return {PAGE: f"{before}{START}\n{table()}\n{END}{after}"}
