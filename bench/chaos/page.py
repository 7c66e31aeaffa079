"""The tables of docs/reference/reliability.md that are made from faults.csv and soak_*.csv.

python bench/chaos/page.py [--check]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from faults import FAULTS

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
RESULTS = HERE / "faults.csv"
SOAKS = {"core": "`lm.Router` in one process", "sockets": "router process, over sockets"}
WARM_SHARE = 0.3  # as in soak.py
PAGE = ROOT / "docs" / "reference" / "reliability.md"
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


def soaks() -> str:
    """Returns the table of endurance runs."""
    lines = [
        "| run | prompts | time | memory after 30% | highest after that | requests in flight at the end |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, what in SOAKS.items():
        with (HERE / f"soak_{name}.csv").open() as file:
            rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
        last = rows[-1]
        warm = [row for row in rows if row["prompts"] <= WARM_SHARE * last["prompts"]]
        later = rows[len(warm) :]
        cells = [
            what,
            f"{last['prompts']:,.0f}",
            f"{last['seconds']:,.0f} s",
            f"{max(row['rss_mib'] for row in warm):.1f} MiB",
            f"{max(row['rss_mib'] for row in later):.1f} MiB",
            f"{last['in_flight']:g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Returns the page with the present tables."""
    text = PAGE.read_text()
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    for name, table in {"faults": rendered(rows), "soaks": soaks()}.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{PAGE}: no {begin.strip()} with an end"
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif page() != PAGE.read_text():
        sys.exit("docs/reference/reliability.md is stale: run `python bench/chaos/page.py`")
