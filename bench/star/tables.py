"""Figures of the STAR study as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rerun import bounds, grouped, markdown, spread

Row = dict[str, Any]


def rendered(told: dict[str, Any]) -> str:
    """Returns a figure's part of the page."""
    stages = grouped(told["rows"], "stage")
    if "columns" in told:
        over = (told["compare"], told["base"]) if "compare" in told else None
        return "\n\n".join(by_column(stages, column, over) for column in told["columns"])
    return "\n\n".join(stage_table(stage, here, told["base"]) for stage, here in stages.items())


def stage_table(stage: str, rows: Sequence[Row], base: str) -> str:
    """Returns all rivals of a scenario; the last column has P99 TPOT against `base`'s, seed by
    seed."""
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


# For each column: its heading and digits.
COLUMNS = {
    "variance": ("variance of step times, ms²", 2),
    "oom": ("times out of memory", 0),
    "p99": ("P99 TPOT, ms", 1),
    "goodput": ("goodput, 1/s", 3),
    "moves": ("moves a request", 2),
    "gap": ("longest gap P99, s", 2),
}


def by_column(stages: dict[str, list[Row]], column: str, over: tuple[str, str] | None) -> str:
    """Returns one figure of all rivals, a line per scenario; the last column has the ratio of the
    two in `over`."""
    title, digits = COLUMNS[column]
    head = [title, *(row["policy"] for row in next(iter(stages.values())))]
    if over is not None:
        head.append(f"{over[0]} over {over[1]} [95%]")
    lines = []
    for stage, here in stages.items():
        line = [stage, *(spread(row[column], digits=digits) for row in here)]
        if over is not None:
            ours, theirs = ({row["policy"]: row[column] for row in here}[name] for name in over)
            known = min(*ours, *theirs) > 0
            ratio, low, high = bounds(ours, theirs) if known else (np.nan,) * 3
            line.append(f"{ratio:.3f} [{low:.3f}, {high:.3f}]" if known else "–")
        lines.append(line)
    return markdown(head, lines)
