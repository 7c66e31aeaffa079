"""The request states in docs/explanation/architecture.md, from `lmetric.server.execution.plan`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from lmetric.server.execution.plan import DEADLINES, EVENTS, MEANINGS, TRANSITIONS, State

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = "docs/explanation/architecture.md"
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


def files() -> dict[str, str]:
    """Returns the page with the current table."""
    before, _, rest = (ROOT / PAGE).read_text().partition(START)
    _, _, after = rest.partition(END)
    return {PAGE: f"{before}{START}{transition_table()}{END}{after}"}
