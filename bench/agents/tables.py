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
    "ttft_p95": ("TTFT p95, s", 1, 2),
    "end": ("all done, s", 1, 0),
    "copies": ("prompts computed", 1, 1),
    "capacity": ("cache of an instance, 1,000 tokens", 1e-3, 0),
}


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    parts = []
    for stage, here in grouped(told["rows"], "stage").items():
        compared = (
            {} if "jct" not in here[0] else {"jct": "JCT"} | ({"jct_p95": "p95"} if told.get("of") else {})
        )
        bases = {name: base_of(told, here, name) for name in compared}
        lines = []
        for row in here:
            cells = [spread(row[name], *FIGURES[name][1:]) for name in told["columns"]]
            for name, base in bases.items():
                cells.append("" if row is base else change(row[name], base[name], with_bounds=True))
            lines.append([row["policy"], *cells])
        head = ["", *(FIGURES[name][0] for name in told["columns"])]
        head += [f"{word} over {bases[name]['policy']} [95%]" for name, word in compared.items()]
        parts.append(f"{stage}:\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def base_of(told: Row, here: list[Row], figure: str) -> Row:
    """Returns the row that others are compared with: of the base, or of the best rival."""
    if rivals := told.get("of"):
        return min((row for row in here if row["policy"] in rivals), key=lambda row: sum(row[figure]))
    return next((row for row in here if row["policy"] == told["base"]), here[0])
