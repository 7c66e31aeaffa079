"""Tables and JSON on stdout; notes and progress on stderr."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress

    from lmetric.sim.max_load import MaxLoad
    from lmetric.sim.setups import Result

_JSON = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY


def stdout(piped_width: int = 4096) -> Console:
    """A console for data, as wide as the terminal or as COLUMNS says.

    Args:
        piped_width: columns if neither is known. The default does not wrap: programs read whole
            rows.
    """
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else piped_width, highlight=False)


def stderr() -> Console:
    """A console for progress and notes."""
    return Console(stderr=True, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A plain table. Columns whose cells all begin with a digit, sign or dash are right-aligned."""
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
    """Print a table with its title on stdout."""
    if title is not None:
        print(title)
    stdout().print(table(columns, rows))


def print_json(value: Any) -> None:
    """Print `value` (dataclasses and numpy included) as indented JSON on stdout."""
    print(orjson.dumps(value, option=_JSON).decode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` (dataclasses and numpy included) as indented JSON into a file."""
    path.write_bytes(orjson.dumps(value, option=_JSON) + b"\n")


def write_report(
    results: Sequence[Result],
    title: str,
    page: Path | None,
    figures: Path | None,
    *,
    max_loads: Sequence[MaxLoad] = (),
) -> None:
    """Write a report of simulated runs: the HTML file `page`, and PNG figures into `figures`."""
    import shlex

    from lmetric.sim.figures import save_pngs
    from lmetric.sim.report import build

    command = shlex.join(["lmetric-router", *sys.argv[1:]])
    made = build(results, title=title, command=command, max_loads=max_loads)
    if page is not None:
        page.write_text(made.html, encoding="utf-8")
    if figures is not None:
        save_pngs(made.drawings, figures)


def progress(what: str) -> Progress:
    """A progress bar on stderr with counts and the remaining time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=stderr())


def note(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr)


def warn_unscored(results: Iterable[Result]) -> None:
    """Print a warning for each policy that scored no instance in some decisions."""
    counts: Counter[str] = Counter()
    for result in results:
        policies = (result.setup.policy, result.setup.decode_policy)
        label = " and ".join(each.label for each in policies if each is not None)
        counts[label] += result.unscored
    for label, count in (+counts).items():
        note(f"warning: {label} scored no instance in {count} decisions; least_requests decided")
