"""Figures of the study of the planner as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from goal_world import FIXED
from tables import LATENCIES

from rerun import change, grouped, markdown, spread

Row = dict[str, Any]

# For each figure of the outcome: heading, scale and digits.
FIGURES = {
    **LATENCIES,
    "e2e": ("E2E mean, s", 1, 2),
    "e2e_p50": ("p50", 1, 2),
    "e2e_p99": ("p99", 1, 1),
    "apart": ("apart, %", 100, 0),
}
FIXED_ROLES = {rival.label for rival in FIXED}
NINE = [name for name in FIGURES if name != "apart"]


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    stages = grouped(told["rows"], "stage")
    parts = [f"{stage}:\n\n{table(rows, told)}" for stage, rows in stages.items()]
    return "\n\n".join(parts)


def best_fixed(rows: Sequence[Row]) -> Row | None:
    """Returns the fixed roles with the least mean E2E latency in a scenario."""
    fixed = [row for row in rows if row["policy"] in FIXED_ROLES]
    return min(fixed, key=lambda row: float(np.mean(row["e2e"]))) if fixed else None


def table(rows: Sequence[Row], told: Row) -> str:
    """Returns all rivals of a scenario; of the fixed roles, those with the least mean E2E latency
    in hindsight. The last column has the mean E2E latency against the base's, seed by seed."""
    best = best_fixed(rows)
    (against,) = (row for row in rows if row["policy"] == told["base"])
    lines = []
    for row in rows:
        if row["policy"] in FIXED_ROLES and row is not best:
            continue
        label = f"best of fixed roles: {row['policy']}" if row is best else row["policy"]
        cells = [spread(row[name], *shown[1:]) for name, shown in FIGURES.items()]
        lines.append([label, *cells, "" if row is against else change(row["e2e"], against["e2e"])])
    return markdown(["", *(shown[0] for shown in FIGURES.values()), f"E2E over {told['base']}"], lines)
