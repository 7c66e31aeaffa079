"""Figures of the SIBYL study as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rerun import bounds, grouped, markdown, spread

Row = dict[str, Any]
# Figures whose page has one line per scenario, as the paper shows; the rest is in their CSV.
BY_STAGE = {"6": ("p99",), "12": ("p99",), "9": ("p99", "least_loaded"), "15": ("p99",)}
HEADINGS = {"p99": ("P99 TPOT, ms", 1.0), "least_loaded": ("assigned to a least loaded instance, %", 100.0)}
LEAST = "least requests, bound ones too (REQLEVEL)"


def rendered(told: dict[str, Any]) -> str:
    """Returns a figure's part of the page."""
    if "surfaces" in told:
        return survival_errors(told["rows"], told["surfaces"])
    if "compare" in told:
        return compared(told["rows"], told["compare"])
    stages = grouped(told["rows"], "stage")
    if told["figure"] in BY_STAGE:
        return "\n\n".join(by_stage(stages, name) for name in BY_STAGE[told["figure"]])
    return "\n\n".join(stage_table(stage, here) for stage, here in stages.items())


def by_stage(stages: dict[str, list[Row]], name: str) -> str:
    """Returns one figure of all policies, a line per scenario; the lowest P99 is bold."""
    heading, scale = HEADINGS[name]
    lines = []
    for stage, here in stages.items():
        lowest = min(float(np.mean(row[name])) for row in here) if name == "p99" else 0.0
        cells = [spread(row[name], scale, 1) for row in here]
        bold = [np.mean(row[name]) <= lowest * 1.001 for row in here]
        lines.append(
            [stage, *(f"**{text}**" if best else text for text, best in zip(cells, bold, strict=True))]
        )
    return markdown([heading, *(row["policy"] for row in next(iter(stages.values())))], lines)


def stage_table(stage: str, rows: Sequence[Row]) -> str:
    """Returns all policies in a scenario."""
    tails = [np.mean(each["p99"]) for each in rows]
    best = min(tails) if max(tails) > min(tails) * 1.001 else 0.0  # none if all are equal
    head = ["decode policy", "TPOT mean, ms", "p50", "p99", "p99.9", "least loaded, %", "batch"]
    stuck = any(max(each["without_end"]) > 0 for each in rows)
    lines = []
    for each in rows:
        cells = [spread(each[name], digits=1) for name in ("mean", "p50", "p99", "p999")]
        if np.mean(each["p99"]) <= best * 1.001:
            cells[2] = f"**{cells[2]}**"
        cells += [spread(each["least_loaded"], 100, 1), spread(each["batch"], digits=1)]
        lines.append([each["policy"], *cells, *([spread(each["without_end"], 100, 1)] if stuck else [])])
    requests = int(np.mean(rows[0]["requests"]))
    table = markdown(head + (["without end, %"] if stuck else []), lines)
    return f"{stage} ({requests:,} requests counted):\n\n{table}"


def compared(rows: Sequence[Row], chosen: str) -> str:
    """Returns the P99 TPOT of one policy over each other, scenario by scenario."""
    stages = grouped(rows, "stage")
    if not stages:
        return "No stage."
    first = next(iter(stages.values()))
    others = [each["policy"] for each in first if each["policy"] not in (chosen, LEAST)]
    lines = []
    for stage, here in stages.items():
        p99 = {each["policy"]: each["p99"] for each in here}
        ratio, low, high = bounds(p99[chosen], p99[LEAST])
        text = f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
        cells = [stage, spread(p99[LEAST], digits=1), f"**{text}**" if high > 1.01 else text]
        cells += [f"{bounds(p99[chosen], p99[other])[0]:.3f}" for other in others]
        lines.append(cells)
    head = ["stage", "P99 TPOT of least requests, ms", f"{chosen} over it [95%]"]
    return markdown(head + [f"over {other}" for other in others], lines)


def survival_errors(errors: Sequence[Row], surfaces: Sequence[Row]) -> str:
    """Returns mean, P95 and largest error of the learned chance to continue, by the answers
    seen."""
    seen = grouped(errors, "seen")
    curves = {"eq4": "Eq. 4", "product_limit": "product limit"}
    lines = []
    for lengths, here in grouped(errors, "lengths").items():
        for number, both in grouped(here, "seen").items():
            by_curve = {row["curve"]: row for row in both}
            cells = [spread(by_curve[c][name], 100, 1) for c in curves for name in ("mean", "p95", "largest")]
            lines.append([lengths, f"{int(number):,}", *cells])
    head = ["lengths", "answers seen"]
    head += [f"{curve}: {figure}" for curve in curves.values() for figure in ("mean", "p95", "largest")]
    parts = ["Error of S(g + m) / S(g), percentage points, over a grid of g and m:", markdown(head, lines)]
    shown = [row for row in surfaces if (row["seen"], row["curve"]) == (list(seen)[-1], "product_limit")]
    for lengths, here in grouped(shown, "lengths").items():
        lines = []
        for row in here:
            means = [float(np.mean(row[f"m {m}"])) * 100 for m in range(1, len(here) + 1)]
            cells = ["" if np.isnan(mean) else f"{mean:.1f}" for mean in means]
            lines.append([f"{row['g']} of {len(here)}", *cells])
        head = ["g in part", *(f"m in part {m + 1}" for m in range(len(here)))]
        parts += [
            f"The product limit's surface, {lengths}, both axes up to the longest answer:",
            markdown(head, lines),
        ]
    return "\n\n".join(parts)
