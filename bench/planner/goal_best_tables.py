"""The planner against the best of all and against each, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from goal_bound import TWICE
from goal_tables import FIGURES, NINE, change

from lmetric.sim.max_load import Rule
from rerun import bounds, markdown, spread

Row = dict[str, Any]

# What the planner was to reach: changes of each figure against the best of all others at the same load.
GOAL = {name: {"ttft": -0.10, "tpot_p99": -0.30}.get(name, 0.02) for name in NINE}
KINDS = {"ttft": ("TTFT", "s"), "tpot": ("TPOT", "ms"), "e2e": ("E2E", "s")}


def heading(name: str) -> str:
    """A figure by its whole name."""
    kind, _, quantile = name.partition("_")
    return f"{KINDS[kind][0]} {quantile or 'mean'}"


def rendered(told: Row) -> str:
    """A figure's part of the page."""
    if "worlds" in told:
        return against(told["worlds"])
    loads = [
        f"{load['stage']}:\n\n{of_all(load)}\n\n{lost(load)}\n\n{against([load])}" for load in told["loads"]
    ]
    return "\n\n".join([most(told["most"]), *loads] if told["most"] else loads)


def most(told: dict[str, dict[str, float]]) -> str:
    """How many times as fast as recorded each keeps up."""
    labels = list(next(iter(told.values())))
    rows = [[name, *(f"{found[label]:.2f}" for label in labels)] for name, found in told.items()]
    return markdown(["keeps up with so many times the recorded arrivals", *labels], rows)


def one(load: Row, label: str) -> Row:
    """A policy's row."""
    (row,) = (row for row in load["rows"] if row["policy"] == label)
    return row


def of_all(load: Row) -> str:
    """Figure by figure: the best of all others, the planner, whether that is what was wanted, and bounds."""
    planner, twice, alone = (one(load, label) for label in ("planner", TWICE.label, "alone"))
    leaders = [one(load, label) for label in load["leading"]]
    lines = []
    for name in NINE:
        shown = FIGURES[name][1:]
        best = min(leaders, key=lambda row: float(np.mean(row[name])))
        reached = bounds(planner[name], best[name])[0] - 1 <= GOAL[name]
        cells = [spread(row[name], *shown) for row in (best, planner)]
        others = [change(row[name], best[name]) for row in (twice, alone)]
        goal = f"{GOAL[name] * 100:+.0f}%: {'yes' if reached else 'no'}"
        label = f"{heading(name)}, {KINDS[name.partition('_')[0]][1]}"
        lines.append([label, best["policy"], *cells, change(planner[name], best[name]), goal, *others])
    head = ["", "best of all others", "", "planner", "planner over it", "goal", f"{TWICE.label} over it"]
    return markdown([*head, "alone over it"], lines)


def lost(load: Row) -> str:
    """How many others lose."""
    kept, in_all, within = load["kept_up"], load["worse_in_all"], load["within_slack"]
    return (
        f"Of {load['others']} others {kept} keep up. The planner is better than {in_all} of them in all nine "
        f"figures and at most 2% worse in any than {within} more; {kept - in_all - within} are better "
        "in some."
    )


def against(loads: Sequence[Row]) -> str:
    """The planner's figures over those of each family."""
    lines = []
    for load in loads:
        planner = one(load, "planner")
        late = "" if np.mean(planner["kept_up"]) >= Rule().keep_up else "; the planner does not keep up"
        for family, label in load["families"].items():
            what = label if label.startswith(family) else f"{family}: {label}"
            cells = [change(planner[name], one(load, label)[name]) for name in NINE]
            lines.append([what, *cells] if len(loads) == 1 else [load["stage"] + late, what, *cells])
    stage = [] if len(loads) == 1 else [""]
    return markdown([*stage, "planner over", *map(heading, NINE)], lines)
