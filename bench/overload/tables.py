"""Figures of the overload study as Markdown."""

from __future__ import annotations

from typing import Any

from rerun import change, grouped, markdown, spread

Row = dict[str, Any]

# For each figure of the outcome: heading, scale and digits.
FIGURES = {
    "offered": ("offered, req/s", 1, 1),
    "goodput": ("goodput, req/s", 1, 1),
    "refused": ("refused, %", 100, 1),
    "late": ("late, %", 100, 1),
    "ttft_p50": ("TTFT p50, s", 1, 2),
    "ttft_p99": ("TTFT p99, s", 1, 2),
    "wait_p99": ("wait in the router p99, s", 1, 2),
}


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    name, peak = told["compared"], told["base"] == "peak"
    parts = []
    for policy, rows in grouped(told["rows"], "policy").items():
        base = max(rows, key=lambda row: sum(row[name])) if peak else rows[0]
        lines = []
        for row in rows:
            cells = [spread(row[each], *FIGURES[each][1:]) for each in told["columns"]]
            none = min(row[name]) == 0.0  # a ratio has no logarithm
            cells.append(
                "" if row is base else "-100%" if none else change(row[name], base[name], with_bounds=True)
            )
            lines.append([row["stage"], *cells])
        over = "the peak" if peak else base["stage"]
        head = ["", *(FIGURES[each][0] for each in told["columns"]), f"{FIGURES[name][0]} over {over} [95%]"]
        parts.append(f"{policy}:\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)
