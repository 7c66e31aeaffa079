"""The part of a figure that its page shows: the tables, rows and columns that decide the verdict.

The marker of a figure may hold a mapping in YAML, such as
`<!-- figure 10 {tables: [small], rows: [no moves], columns: [P99], spread: false} -->`:

- `tables`: texts that the line above a table contains, or the head of a table without such a line.
- `rows`: texts that the first two cells of a row contain.
- `columns`: beginnings of column names. The first column, and a second one without a name, stay.
- `=text` is a whole cell, column name, or line above.
- `spread`: `false` leaves the spread of the seeds to the results.

Tables with the same head become one table, with the line above as the first column.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SPREAD = re.compile(r" ±[-\d.,]+| \[[-+\d.]+, [-+\d.]+\]")
CELLS = re.compile(r"(?<!\\)\|")
KEYS = {"tables", "rows", "columns", "spread"}


@dataclass
class Table:
    """A table in Markdown with the line above it."""

    above: str
    head: list[str]
    rows: list[list[str]]


def parsed(text: str) -> list[Table]:
    """Returns the tables of a text in Markdown, without those in `<details>`."""
    text = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    found: list[Table] = []
    above, table = "", None
    for line in text.splitlines():
        if not line.startswith("|"):
            table = None
            above = line.strip().rstrip(":") or above
            continue
        cells = [cell.strip() for cell in CELLS.split(line)[1:-1]]
        if table is None:
            found.append(table := Table(above, cells, []))
            above = ""
        elif set(line) - set("|-: "):
            table.rows.append(cells)
    return found


def _fits(want: str, text: str, what: str) -> bool:
    """Returns whether a choice fits a column, or the first cells of a row, or a line above."""
    if want.startswith("="):
        return want[1:] in ([text] if what == "columns" else text.split(" | "))
    return text.startswith(want) if what == "columns" else want in text


def _chosen(wanted: Sequence[str] | None, texts: Sequence[str], what: str, where: str) -> list[int]:
    """Returns the places of the texts that any of `wanted` chooses. Exits if one chooses none."""
    if wanted is None:
        return list(range(len(texts)))
    if unused := [want for want in wanted if not any(_fits(want, text, what) for text in texts)]:
        sys.exit(f"run.py: {where}: no {what} {unused}; there are {list(texts)}")
    return [at for at, text in enumerate(texts) if any(_fits(want, text, what) for want in wanted)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def select(text: str, chosen: dict[str, Any], where: str) -> str:
    """Returns the chosen part of a figure. Exits if a choice fits nothing."""
    if unknown := chosen.keys() - KEYS:
        sys.exit(f"run.py: {where}: unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(KEYS))}")
    tables = parsed(text)
    names = [table.above or " | ".join(table.head) for table in tables]
    tables = [tables[at] for at in _chosen(chosen.get("tables"), names, "tables", where)]
    every = [" | ".join(row[:2]) for table in tables for row in table.rows]
    kept = {every[at] for at in _chosen(chosen.get("rows"), every, "rows", where)}
    groups: dict[tuple[str, ...], list[tuple[str, list[list[str]]]]] = {}
    for table in tables:
        fixed = 2 if len(table.head) > 1 and not table.head[1] else 1
        columns = [*range(fixed), *_columns(chosen.get("columns"), table.head[fixed:], fixed)]
        rows = [[row[at] for at in columns] for row in table.rows if " | ".join(row[:2]) in kept]
        if rows:
            groups.setdefault(tuple(table.head[at] for at in columns), []).append((table.above, rows))
    _chosen(chosen.get("columns"), [name for head in groups for name in head], "columns", where)
    parts = [part for head, some in groups.items() for part in _one(head, some)]
    made = "\n".join(parts).strip()
    return made if chosen.get("spread", True) else SPREAD.sub("", made)


def _columns(wanted: Sequence[str] | None, names: Sequence[str], first: int) -> list[int]:
    fits = [wanted is None or any(_fits(want, name, "columns") for want in wanted) for name in names]
    return [at for at, fit in enumerate(fits, first) if fit]


def _one(head: tuple[str, ...], some: list[tuple[str, list[list[str]]]]) -> list[str]:
    """Returns the lines of one table, with the line above it in front or as a column."""
    merged = len(some) > 1
    lines = [] if merged or not some[0][0] else [f"{some[0][0]}:", ""]
    lines += [_row(["", *head] if merged else head), f"|{'---|' * (len(head) + merged)}"]
    for above, rows in some:
        lines += [_row([above, *row] if merged else row) for row in rows]
    return [*lines, ""]
