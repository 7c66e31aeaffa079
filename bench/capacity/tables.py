"""Figures of the capacity study as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from world import TARGET

from rerun import grouped, markdown, spread

Row = dict[str, Any]


def chosen(rows: Sequence[Row], name: str) -> str:
    """The policy with the best parameters: the cheapest that meets the SLO, else the one with the
    highest attainment."""
    own = [row for row in rows if row["policy"].startswith(f"{name} (")]
    meets = [row for row in own if row["attainment"][0] >= TARGET]
    best = (
        min(meets, key=lambda row: row["cost"][0])
        if meets
        else max(own, key=lambda row: row["attainment"][0])
    )
    return str(best["policy"])


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    if "load" in told["rows"][0]:
        return variations(told["rows"])
    stages = grouped(told["rows"], "stage")
    return "\n\n".join(f"{stage}:\n\n{table(rows, told.get('base'))}" for stage, rows in stages.items())


def variations(rows: Sequence[Row]) -> str:
    """Returns a table of how much arrivals vary."""
    names = [name for name in rows[0] if name.startswith("sd_")]
    head = ["arrivals", *(f"in {name.removeprefix('sd_')} s, %" for name in names), "busiest minute"]
    lines = [
        [row["load"], *(spread(row[name], 100, 1) for name in names), spread(row["busiest_minute"], 1, 2)]
        for row in rows
    ]
    return markdown(head, lines)


def table(rows: Sequence[Row], base: str | None) -> str:
    """Returns all policies of a stage. With a base, the last column has the cost against it, seed
    by seed."""
    against = next((row for row in rows if row["policy"] == base), None)
    several = len(rows[0]["attainment"]) > 1
    lines = []
    for row in rows:
        line = [row["policy"], spread(row["attainment"], 100, 1)]
        line += [f"{min(row['attainment']):.1%}"] if several else []
        line += [spread(row[name], 100, 1) for name in ("joint", "worst")]
        line += [spread(row["cost"], 1, 1), spread(row["starts"], 1, 0)]
        if against is not None:
            line.append("" if row is against else _over(row["cost"], against["cost"]))
        lines.append(line)
    head = ["policy", "SLO attainment, %", *(["worst seed"] if several else [])]
    head += ["within both bounds, %", "worst quarter of an hour, %", "engine hours", "engines started"]
    if against is not None:
        head.append(f"cost over {base}")
    return markdown(head, lines)


def _over(cost: Sequence[float], base: Sequence[float]) -> str:
    found = np.asarray(cost) / np.asarray(base[: len(cost)]) - 1
    text = f"{found.mean():+.1%}"
    return text if len(found) == 1 else f"{text} ({found.min():+.1%} to {found.max():+.1%})"
