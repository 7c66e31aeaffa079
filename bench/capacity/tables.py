"""Figures of the capacity study as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rerun import grouped, markdown, spread

Row = dict[str, Any]


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    stages = grouped(told["rows"], "stage")
    return "\n\n".join(f"{stage}:\n\n{table(rows, told['base'])}" for stage, rows in stages.items())


def table(rows: Sequence[Row], base: str) -> str:
    """Returns all policies of a stage; the last column has the cost against the oracle, seed by
    seed."""
    (oracle,) = (row for row in rows if row["policy"] == base)
    lines = []
    for row in rows:
        against = np.asarray(row["cost"]) / np.asarray(oracle["cost"][: len(row["cost"])]) - 1
        over = f"{against.mean():+.1%}"
        if len(against) > 1:
            over += f" ({against.min():+.1%} to {against.max():+.1%})"
        lines.append(
            [
                row["policy"],
                spread(row["within"], 100, 1),
                f"{min(row['within']):.1%}",
                spread(row["worst"], 100, 1),
                spread(row["cost"], 1, 1),
                spread(row["starts"], 1, 0),
                "" if row is oracle else over,
            ]
        )
    head = [
        "policy", "within the SLO, %", "worst seed", "worst quarter of an hour, %", "engine hours",
        "engines started", f"cost over {base}",
    ]  # fmt: skip
    return markdown(head, lines)
