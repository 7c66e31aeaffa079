"""Tables of states: requests in docs/explanation/architecture.md, engines in failures.md there.

From `lmetric.server.execution.plan` and `lmetric.server.fleet.outliers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from lmetric.server.execution.plan import DEADLINES, EVENTS, MEANINGS, TRANSITIONS, State
from lmetric.server.fleet import outliers

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = "docs/explanation/architecture.md"
ENGINES_PAGE = "docs/explanation/failures.md"
START, END = "<!-- transition table -->\n", "<!-- end of transition table -->\n"


def transition_table() -> str:
    """Returns the states and their transitions as Markdown tables."""
    lines = ["| state | meaning | deadline |", "| --- | --- | --- |"]
    lines += [f"| {state} | {MEANINGS[state]} | {DEADLINES[state]} |" for state in get_args(State)]
    lines += ["", "| event | what happened | in | then |", "| --- | --- | --- | --- |"]
    for event in EVENTS:
        by_targets: dict[tuple[State, ...], list[str]] = {}
        for (state, of), targets in TRANSITIONS.items():
            if of == event:
                by_targets.setdefault(tuple(sorted(set(targets), key=list(MEANINGS).index)), []).append(state)
        for targets, states in by_targets.items():
            names = ", ".join(targets)
            where = "all but DONE" if len(states) == len(MEANINGS) - 1 else ", ".join(states)
            lines.append(f"| {event} | {EVENTS[event]} | {where} | {names} |")
    return "\n".join(lines) + "\n"


def engine_table() -> str:
    """Returns the states of engines and their transitions as Markdown tables."""
    lines = ["| state | an engine in it |", "| --- | --- |"]
    lines += [f"| {state} | {meaning} |" for state, meaning in outliers.MEANINGS.items()]
    lines += ["", "| event | what happened | in | then |", "| --- | --- | --- | --- |"]
    for (state, event), targets in sorted(
        outliers.TRANSITIONS.items(), key=lambda each: list(outliers.EVENTS).index(each[0][1])
    ):
        lines.append(f"| {event} | {outliers.EVENTS[event]} | {state} | {', '.join(targets)} |")
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """Returns the pages with the current tables."""
    pages = {}
    for page, table in ((PAGE, transition_table()), (ENGINES_PAGE, engine_table())):
        before, _, rest = (ROOT / page).read_text().partition(START)
        _, _, after = rest.partition(END)
        pages[page] = f"{before}{START}{table}{END}{after}"
    return pages
