"""Figures of the Libra study as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rerun import grouped, markdown, spread

Row = dict[str, Any]
# Name, heading, scale, digits. The order is the order of the columns.
GOODPUT = ("goodput", "goodput, tokens/s", 1.0, 0)
P50, P99 = ("p50", "P50 TBT, ms", 1e3, 0), ("p99", "P99 TBT, ms", 1e3, 0)
SLOW = ("slow", "slow tokens, %", 100.0, 2)
TTFT = ("ttft", "TTFT, s", 1.0, 2)
CUT, CUT_AT = ("cut", "cut, %", 100.0, 0), ("cut_at", "at token", 1.0, 0)
CAPACITY = ("rate", "capacity, requests/s", 1.0, 2)
BY_GPU = [
    ("rate", "capacity a GPU, requests/s", 1.0, 3), ("goodput", "goodput a GPU, tokens/s", 1.0, 0), P99,
    TTFT,
]  # fmt: skip
COLUMNS: dict[str, list[tuple[str, str, float, int]]] = {
    "5": [("requests", "served, requests/s", 1.0, 2), P50, TTFT, CUT_AT],
    "predictor": [("requests", "served, requests/s", 1.0, 2), GOODPUT, P99, TTFT, CUT, CUT_AT],
    "table_1": [("saturated", "saturated, requests/s", 1.0, 2), P50, P99, SLOW, GOODPUT, TTFT, CUT, CUT_AT],
    "9": [CAPACITY, GOODPUT, P99, TTFT, CUT, CUT_AT],
    "larger": [GOODPUT, P99, SLOW, TTFT],
    "10": [
        P50, ("p90", "P90, ms", 1e3, 0), P99, ("within", "within 100 ms, %", 100.0, 2),
        ("worst", "longest, s", 1.0, 1), TTFT,
    ],
    "transfer": [("wait", "wait at the seam, ms", 1e3, 1), ("wait_p99", "its P99, ms", 1e3, 1), SLOW],
    "table_5": [GOODPUT, P99, SLOW, CUT_AT],
    "table_2": [TTFT, ("ttft_p99", "its P99, s", 1.0, 2), P99],
    "parallel": BY_GPU,
    "table_6": BY_GPU,
    "table_7": [CAPACITY, GOODPUT, P50, P99, SLOW, TTFT, CUT, CUT_AT],
    "table_8": [CAPACITY, GOODPUT, P99, TTFT],
}  # fmt: skip
OVER_RATES = {"8"}  # Figures whose page shows the goodput over the rate; the rest is in their CSV.
BEST = {"goodput", "rate", "saturated"}  # More is better; other figures are not compared.


def cell(values: Sequence[float], scale: float, digits: int) -> str:
    """Returns the mean and half the range over seeds; a dash if there is no value."""
    known = [value for value in values if not np.isnan(value)]
    return spread(known, scale, digits) if known else "–"


def rendered(told: dict[str, Any]) -> str:
    """Returns a figure's part of the page: a table for each group, or for each workload if the
    figure is over rates."""
    if told["figure"] in OVER_RATES:
        split = ("workload", "at")
        rows = [row | dict(zip(split, row["group"].rsplit(", ", 1), strict=True)) for row in told["rows"]]
        workloads = grouped(rows, "workload").items()
        parts = (f"{workload}:\n\n{over_rates(here, *GOODPUT)}" for workload, here in workloads)
        return "\n\n".join(parts)
    groups = grouped(told["rows"], "group").items()
    return "\n\n".join(f"{group}:\n\n{table(told['figure'], rows)}" for group, rows in groups)


def over_rates(rows: Sequence[Row], name: str, heading: str, scale: float, digits: int) -> str:
    """Returns one figure of all systems of a workload, a column per rate. Bold as in `table`."""
    by_rate = grouped(rows, "at")
    best = {rate: max(np.mean(row[name]) for row in here) for rate, here in by_rate.items()}
    lines = []
    for system, here in grouped(rows, "system").items():
        line = [system]
        for rate, row in zip(best, here, strict=True):
            text = cell(row[name], scale, digits)
            line.append(f"**{text}**" if np.mean(row[name]) >= 0.99 * best[rate] else text)
        lines.append(line)
    return markdown([heading, *by_rate], lines)


def table(figure: str, rows: Sequence[Row]) -> str:
    """Returns all systems of a group. The best, and all values within 1% of it, are bold."""
    columns = COLUMNS[figure]
    lines = []
    for each in rows:
        line = [each["system"]]
        for name, _, scale, digits in columns:
            text = cell(each[name], scale, digits)
            if name in BEST and np.mean(each[name]) >= 0.99 * max(np.mean(other[name]) for other in rows):
                text = f"**{text}**"
            line.append(text)
        lines.append(line)
    return markdown(["system", *(heading for _, heading, _, _ in columns)], lines)
