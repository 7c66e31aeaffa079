"""The table of faults in docs/reference/reliability.md, made from faults.csv.

python bench/chaos/page.py [--check]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "faults.csv"
PAGE = ROOT / "docs" / "reference" / "reliability.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"
NAMES = {
    "lmetric": "lmetric-router",
    "nginx": "nginx",
    "envoy": "Envoy",
    "sglang-ca": "sglang-router",
    "smg-ca": "smg",
    "vllm-ca": "vllm-router",
}


def rendered(rows: list[dict[str, str]]) -> str:
    """Returns the table."""
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    found = {(row["subject"], row["fault"]): row for row in rows}
    lines = [
        "| fault | " + " | ".join(NAMES[subject] for subject in subjects) + " |",
        "| --- |" + " --- |" * len(subjects),
    ]
    for name, fault in FAULTS.items():
        cells = [_cell(found.get((subject, name))) for subject in subjects]
        if any(cells):
            lines.append(f"| {name}: {fault.what} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    if row["lost"] == "0":
        return f"0 of {row['requests']}"
    kinds = [f"{row[kind]} {kind}" for kind in ("wrong", "error", "broken", "late") if row[kind] != "0"]
    until = float(row["recovery_seconds"])
    return f"{row['lost']} of {row['requests']} ({', '.join(kinds)}), until {until:.1f} s"


def page() -> str:
    """Returns the page with the present table."""
    text = PAGE.read_text()
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rendered(rows)}\n{END}{after}"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif page() != PAGE.read_text():
        sys.exit("docs/reference/reliability.md is stale: run `python bench/chaos/page.py`")
