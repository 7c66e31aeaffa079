"""Tables and JSON on stdout; notes and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table


def stdout() -> Console:
    """A console for data. Piped, it does not wrap: a reader of lines gets whole rows."""
    return Console(width=None if sys.stdout.isatty() else 4096, highlight=False)


def stderr() -> Console:
    """A console for progress and notes."""
    return Console(stderr=True, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A plain table; columns whose cells all begin with a digit, sign or dash stand to the right."""
    rows = [list(row) for row in rows]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows if row[index]]
        number = bool(cells) and all(cell[0].isdigit() or cell[0] in "+-–" for cell in cells)
        shown.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table on stdout, under its title."""
    if title is not None:
        print(title)
    stdout().print(table(columns, rows))


def print_json(value: Any) -> None:
    """Print `value` (dataclasses and numpy included) as indented JSON on stdout."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    print(orjson.dumps(value, option=options).decode())


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr)
