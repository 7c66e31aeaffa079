"""Figures of the UniBoost study as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rerun import bounds, grouped, markdown, spread

Row = dict[str, Any]

# By name: heading, factor, digits.
COLUMNS = {
    "e2e": ("E2E, s:", 1.0, 1),
    "ttft": ("TTFT, s:", 1.0, 2),
    "tpot": ("TPOT, ms:", 1e3, 1),
    "gap": ("gap, ms:", 1e3, 0),
    "pause": ("pause, s:", 1.0, 1),
}


DIGITS = {"tokens a second": 0, "slope, s a request": 5}


def rendered(told: dict[str, Any]) -> str:
    """Returns a figure's part of the page."""
    return KINDS[told["kind"]](told)


def heading(name: str) -> tuple[str, float, int]:
    """Returns the words, factor and digits of a column such as ``short e2e p99``."""
    *of, what, statistic = ["", *name.split()]
    if what not in COLUMNS:
        return name, 1.0, DIGITS.get(name, 2)
    words, factor, digits = COLUMNS[what]
    at = statistic.upper() if statistic.startswith("p") else statistic
    return " ".join(filter(None, [*of, words, at])), factor, digits


def absolute(told: dict[str, Any]) -> str:
    """Returns all orders of each scenario; the last columns have ratios to `base`, seed by seed."""
    parts = []
    for stage, rows in grouped(told["rows"], "stage").items():
        base = next(row for row in rows if row["order"] == told["base"])
        head = [""] + [heading(name)[0] for name in told["columns"]]
        head += [f"{bare(name)} over {base['order']} [95%]" for name in told["over"]]
        lines = []
        for row in rows:
            cells = [row["order"]]
            for name in told["columns"]:
                _, factor, digits = heading(name)
                cells.append(spread(row[name], factor, digits))
            cells += ["1" if row is base else ratio(row[name], base[name]) for name in told["over"]]
            lines.append(cells)
        parts.append(f"{stage}:\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def bare(name: str) -> str:
    """Returns the heading without its unit."""
    return re.sub(", m?s:", "", heading(name)[0])


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Returns the ratio with its 95% bounds."""
    if min(*ours, *theirs) <= 0:
        return "–"
    middle, low, high = bounds(ours, theirs)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]" if len(ours) > 1 else f"{middle:.2f}"


def relative(told: dict[str, Any]) -> str:
    """Returns a row per scenario and order: the figures `of`, ratios to `base` in this scenario,
    seed by seed."""
    of: list[str] = told.get("of", [])
    lines = []
    for stage, rows in grouped(told["rows"], "stage").items():
        base = next(row for row in rows if row["order"] == told["base"])
        for row in rows if of else [row for row in rows if row is not base]:
            cells = [spread(row[name], *heading(name)[1:]) for name in of]
            cells += ["1" if row is base else ratio(row[name], base[name]) for name in told["columns"]]
            lines.append([stage, row["order"], *cells])
    head = ["", "", *(heading(name)[0] for name in of)]
    return markdown([*head, *(f"{bare(name)} over {told['base']}" for name in told["columns"])], lines)


def improvement(told: dict[str, Any]) -> str:
    """Returns percent better than `base` as in the paper's Table 2 (latency down, throughput up),
    mean over seeds."""
    parts = []
    for stage, rows in grouped(told["rows"], "stage").items():
        base = next(row for row in rows if row["order"] == told["base"])
        lines = []
        for row in rows:
            cells = [row["order"]]
            for name in told["columns"]:
                sign = 1 if name == "tokens a second" else -1
                each = [sign * (a / b - 1) for a, b in zip(row[name], base[name], strict=True)]
                cells.append(spread(each, 100, 0) if row is not base else "0")
            lines.append(cells)
        head = [
            f"% better than {told['base']}",
            *(bare(name) for name in told["columns"]),
        ]
        parts.append(f"{stage}:\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def plain(told: dict[str, Any]) -> str:
    """Returns a table of text without changes."""
    head = list(told["table"][0])
    return markdown(head, (list(row.values()) for row in told["table"]))


KINDS = {"absolute": absolute, "relative": relative, "improvement": improvement, "plain": plain}
