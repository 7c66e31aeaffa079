"""Figures of the STAR study as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rerun import bounds, grouped, markdown, spread

Row = dict[str, Any]


def rendered(told: dict[str, Any]) -> str:
    """A figure's part of the page."""
    stages = grouped(told["rows"], "stage")
    if "column" in told:
        return by_column(stages, told["column"])
    return "\n\n".join(stage_table(stage, here, told["base"]) for stage, here in stages.items())


def stage_table(stage: str, rows: Sequence[Row], base: str) -> str:
    """All rivals on a stage; the last column holds P99 TPOT against that of `base`, seed by seed."""
    (against,) = (row for row in rows if row["policy"] == base)
    lines = []
    for row in rows:
        ratio, low, high = bounds(row["p99"], against["p99"])
        cells = [spread(row[name], digits=3) for name in ("throughput", "goodput")]
        cells += [spread(row[name], digits=1) for name in ("p50", "p99")]
        cells += [spread(row["variance"]), spread(row["oom"], digits=0), spread(row["moves"])]
        cells += [
            spread(row["gap"], digits=1),
            "1" if row is against else f"{ratio:.3f} [{low:.3f}, {high:.3f}]",
        ]
        lines.append([row["policy"], *cells])
    head = ["", "throughput, 1/s", "goodput, 1/s", "TPOT P50, ms", "P99", "variance, ms²", "out of memory"]
    head += ["moves a request", "longest gap P99, s", f"P99 over {base} [95%]"]
    return f"{stage} ({int(np.mean(rows[0]['ended'])):,} requests counted):\n\n{markdown(head, lines)}"


def by_column(stages: dict[str, list[Row]], column: str) -> str:
    """One figure of all rivals: a line for each stage."""
    rivals = [row["policy"] for row in next(iter(stages.values()))]
    lines = [[stage, *(spread(row[column]) for row in here)] for stage, here in stages.items()]
    return markdown([f"{TITLES[column]}", *rivals], lines)


TITLES = {"variance": "variance of step times, ms²", "oom": "times out of memory", "p99": "P99 TPOT, ms"}
