"""The planner against the best of all others and against each family, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from goal_bound import TWICE
from goal_tables import FIGURES, NINE, best_fixed, change

from lmetric_lab.sim.max_load import Rule
from rerun import bounds, grouped, markdown, spread

Row = dict[str, Any]

# Goals of the planner: change of each figure against the best of all others at the same load.
GOAL = {name: {"ttft": -0.10, "tpot_p99": -0.30}.get(name, 0.02) for name in NINE}
KINDS = {"ttft": ("TTFT", "s"), "tpot": ("TPOT", "ms"), "e2e": ("E2E", "s")}


def heading(name: str) -> str:
    """Returns a figure's full name."""
    kind, _, quantile = name.partition("_")
    return f"{KINDS[kind][0]} {quantile or 'mean'}"


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    parts = ("rows", "families", "counts", "leading")
    tables = {name: grouped(told.get(name, []), "stage") for name in parts}
    stages = [
        {"stage": stage, **{name: groups[stage] for name, groups in tables.items() if stage in groups}}
        for stage in tables["rows"]
    ]
    if not tables["counts"]:
        return against(stages)
    loads = [f"{load['stage']}:\n\n{of_all(load)}\n\n{lost(load)}\n\n{against([load])}" for load in stages]
    return "\n\n".join([most(told["most"]), *loads] if told.get("most") else loads)


def over_rivals(told: Row) -> str:
    """Returns the planner's figures over the base's and the best fixed roles', scenario by
    scenario."""
    stages = []
    for stage, rows in grouped(told["rows"], "stage").items():
        families = [{"family": told["base"], "policy": told["base"]}]
        if best := best_fixed(rows):
            families.append({"family": "best of fixed roles", "policy": best["policy"]})
        stages.append({"stage": stage, "rows": rows, "families": families})
    return against(stages)


def most(told: Sequence[Row]) -> str:
    """Returns the sustained speed of each policy, times the recorded arrivals."""
    _, *labels = told[0]
    rows = (list(row.values()) for row in told)
    return markdown(["sustained arrivals, times the recorded arrivals", *labels], rows)


def one(load: Row, label: str) -> Row:
    """Returns a policy's row."""
    (row,) = (row for row in load["rows"] if row["policy"] == label)
    return row


def of_all(load: Row) -> str:
    """Returns, figure by figure, the best of all others, the planner, whether the goal is met, and
    bounds."""
    planner, twice, alone = (one(load, label) for label in ("planner", TWICE.label, "alone"))
    leaders = [one(load, label) for label in (row["policy"] for row in load["leading"])]
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
    """Returns how many others lose."""
    (counts,) = load["counts"]
    kept, in_all, within = (int(counts[name]) for name in ("kept_up", "worse_in_all", "within_slack"))
    return (
        f"Of {counts['others']} others {kept} keep up. The planner is better than {in_all} of them in all "
        f"nine figures and at most 2% worse in any than {within} more; {kept - in_all - within} are better "
        "in some."
    )


def against(loads: Sequence[Row]) -> str:
    """Returns the planner's figures over each family's."""
    lines = []
    for load in loads:
        planner = one(load, "planner")
        late = "" if np.mean(planner["kept_up"]) >= Rule().keep_up else "; the planner does not keep up"
        for family, label in ((row["family"], row["policy"]) for row in load["families"]):
            what = label if label.startswith(family) else f"{family}: {label}"
            cells = [change(planner[name], one(load, label)[name]) for name in NINE]
            lines.append([what, *cells] if len(loads) == 1 else [load["stage"] + late, what, *cells])
    stage = [] if len(loads) == 1 else [""]
    return markdown([*stage, "planner over", *map(heading, NINE)], lines)
