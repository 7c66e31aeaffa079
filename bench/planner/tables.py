"""Figures of the study of prefix fetch as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rerun import bounds, grouped, markdown, spread

Row = dict[str, Any]

# For each figure of the outcome: heading, scale and digits.
LATENCIES = {
    "ttft": ("TTFT mean, s", 1, 3),
    "ttft_p50": ("p50", 1, 3),
    "ttft_p99": ("p99", 1, 2),
    "tpot": ("TPOT mean, ms", 1, 1),
    "tpot_p50": ("p50", 1, 1),
    "tpot_p99": ("p99", 1, 0),
}
FIGURES = {
    **LATENCIES,
    "others": ("others' TPOT mean, ms", 1, 1),
    "found": ("found, %", 100, 1),
    "pulled": ("pulled, %", 100, 1),
    "pulls": ("requests that pull, %", 100, 1),
    "wait": ("a pull, s", 1, 3),
    "instances": ("instances", 1, 1),
    "filters": ("filters", 1, 1),
}


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    stages = grouped(told["rows"], "stage")
    if "changes" in told:
        return changes(stages, told["base"], told["changes"])
    return "\n\n".join(
        f"{stage}:\n\n{table(here, told['base'], told['columns'])}" for stage, here in stages.items()
    )


def table(rows: Sequence[Row], base: str, columns: Sequence[str]) -> str:
    """Returns all rivals of a scenario; the last two columns have mean TTFT and TPOT against
    `base`'s, seed by seed."""
    (against,) = (row for row in rows if row["policy"] == base)
    lines = []
    for row in rows:
        cells = [spread(row[name], *FIGURES[name][1:]) for name in columns]
        cells += ["" if row is against else ratio(row[name], against[name]) for name in ("ttft", "tpot")]
        lines.append([row["policy"], *cells])
    head = ["", *(FIGURES[name][0] for name in columns), f"TTFT over {base} [95%]", "TPOT"]
    return markdown(head, lines)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Returns the relative change with its bounds."""
    change, low, high = ((each - 1) * 100 for each in bounds(ours, theirs))
    return f"{change:+.1f}% [{low:+.1f}, {high:+.1f}]"


def changes(stages: dict[str, list[Row]], base: str, claimed: Sequence[Row]) -> str:
    """Returns each rival's change of `base`'s figures, a row per scenario and rival, beside the
    claim over all scenarios."""
    names = ("ttft", "ttft_p50", "tpot")
    lines = []
    for stage, rows in stages.items():
        (against,) = (row for row in rows if row["policy"] == base)
        for row in rows:
            if row is not against:
                said = next((each for each in claimed if each["policy"] == row["policy"]), {})
                cells = (ratio(row[name], against[name]) for name in names)
                beside = [
                    f"{cell} ({said[name]})" if name in said else cell
                    for name, cell in zip(names, cells, strict=True)
                ]
                lines.append([stage, row["policy"], *beside, spread(row["pulled"], 100, 1)])
    return markdown(["", "", "TTFT mean", "TTFT p50", "TPOT mean", "pulled, %"], lines)
