"""docs/reference/support.md: the support matrix, from support.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "support.yaml"
LEVELS = {
    "real": "running engine",
    "stand_in": "stand-in",
    "not_tested": "not tested",
    "not_supported": "no",
}
HEAD = """\
# Support matrix

`scripts/make_reference support` generates this page from `scripts/reference/support.yaml`. Each row names the tests behind it.

- **running engine**: nightly tests run the feature on real engines of this version.
- **stand-in**: the tests of every change run the feature on an emulated engine that follows the engine's protocol. No running engine of this kind was used.
- **not tested**: the feature may work. No test covers it.
- **no**: the router does not offer the feature for this engine.

No test here used a GPU: vLLM ran on CPU, and SGLang did not run. Run [`lmetric-router doctor`](engines.md#test-your-engines-lmetric-router-doctor)
on your engines: it tests these features with real requests. [Engines](engines.md) describes the flags.

"""


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


def files() -> dict[str, str]:
    """Returns the page."""
    made = matrix()
    engines = made["engines"]
    heads = [f"{each['name']} {each['version']} ({each['build']})" for each in engines.values()]
    page = HEAD + f"| feature | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}\n"
    for feature in made["features"]:
        cells = []
        for engine in engines:
            cell = feature[engine]
            note = f", {cell['note']}" if "note" in cell else ""
            cells.append(f"{LEVELS[cell['level']]}{note}")
        page += f"| {feature['name']} | {' | '.join(cells)} |\n"
    page += "\n## Tests\n\n| feature | engine | tests below `tests/` |\n| --- | --- | --- |\n"
    for feature in made["features"]:
        for engine, each in engines.items():
            if tests := feature[engine].get("tests"):
                page += (
                    f"| {feature['name']} | {each['name']} | {', '.join(f'`{test}`' for test in tests)} |\n"
                )
    return {"docs/reference/support.md": page}
