"""Figures of the study of fleet changes as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rerun import change, grouped, markdown, spread

Row = dict[str, Any]

# For each figure of the outcome: heading, scale and digits.
FIGURES = {
    "ttft_p50": ("TTFT p50, s", 1, 3),
    "ttft": ("mean", 1, 3),
    "ttft_p99": ("p99", 1, 2),
    "first_p99": ("p99 of the first minute", 1, 2),
    "found": ("cached or fetched, %", 100, 1),
    "tokens": ("fetched for the change, 1,000 tokens", 1, 0),
    "seconds": ("longest change, s", 1, 1),
    "moves": ("requests moved", 1, 1),
}


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    stages = grouped(told["rows"], "stage")
    return "\n\n".join(f"{stage}:\n\n{table(rows, told['base'])}" for stage, rows in stages.items())


def table(rows: Sequence[Row], base: str) -> str:
    """Returns all rivals of a scenario; the last column has the P99 of TTFT against the fleet that
    never changes, seed by seed."""
    (steady,) = (row for row in rows if row["policy"] == base)
    lines = []
    for row in rows:
        cells = [spread(row[name], *FIGURES[name][1:]) for name in FIGURES]
        against = "" if row is steady else change(row["ttft_p99"], steady["ttft_p99"], with_bounds=True)
        lines.append([row["policy"], *cells, against])
    head = ["fleet", *(FIGURES[name][0] for name in FIGURES), f"TTFT p99 over {base} [95%]"]
    return markdown(head, lines)
