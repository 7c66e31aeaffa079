"""Figures of the agents study as Markdown."""

from __future__ import annotations

from typing import Any

from rerun import change, grouped, markdown, spread

Row = dict[str, Any]

# For each figure of the outcome: heading, scale and digits.
FIGURES = {
    "jct": ("JCT mean, s", 1, 0),
    "jct_p50": ("p50", 1, 0),
    "jct_p95": ("p95", 1, 0),
    "turns": ("turns/min", 1, 0),
    "recomputed": ("recomputed, %", 100, 1),
    "stretch": ("max stretch", 1, 1),
    "hold": ("longest hold, s", 1, 0),
    "ttft": ("TTFT mean, s", 1, 2),
    "capacity": ("cache of an instance, 1,000 tokens", 1e-3, 0),
}


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    parts = []
    for stage, here in grouped(told["rows"], "stage").items():
        base = next((row for row in here if row["policy"] == told["base"]), here[0])
        lines = []
        for row in here:
            cells = [spread(row[name], *FIGURES[name][1:]) for name in told["columns"]]
            over = "" if row is base else change(row["jct"], base["jct"], with_bounds=True)
            lines.append([row["policy"], *cells, over])
        head = ["", *(FIGURES[name][0] for name in told["columns"]), f"JCT over {base['policy']} [95%]"]
        parts.append(f"{stage}:\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)
