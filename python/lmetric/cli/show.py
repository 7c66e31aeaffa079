"""Tables and JSON on stdout; notes and progress on stderr."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from lmetric.file_errors import write_file
from lmetric.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress

_PIPED_WIDTH = 80  # columns if neither a terminal nor COLUMNS gives the width
_TEXT_WIDTH = 24  # columns; texts in tables wrap at or above this width
GAP, EDGES = 2, 2  # columns between two cells, and at the borders of a table
_JSON = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY


class _Console(Console):
    """A console that escapes control characters, and gives no text a meaning as markup.

    Names and messages of engines and files reach the tables of many commands.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yields the segments of a renderable, with escapes for control characters."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, "\n\t"), style, control)


def stdout() -> Console:
    """A console for data, as wide as the terminal or as COLUMNS says, else 80 columns."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return _Console(width=None if known else _PIPED_WIDTH)


def stderr() -> Console:
    """A console for progress and notes."""
    return _Console(stderr=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A plain table. Columns of numbers are right-aligned and never wrapped."""
    rows = [list(row) for row in rows]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_header=any(columns))
    for column, number in zip(columns, _numeric(columns, rows), strict=True):
        shown.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        shown.add_row(*row)
    return shown


def tables(
    columns: Sequence[str], rows: Iterable[Sequence[str]], width: int, *, keys: int = 1
) -> list[Table]:
    """The tables of these columns that fit `width`. Each begins with the first `keys` columns.

    Columns of text wrap; columns of numbers do not.
    """
    rows = [list(row) for row in rows]
    needed = []
    for index, number in enumerate(_numeric(columns, rows)):
        natural = max([len(columns[index]), *(len(row[index]) for row in rows)])
        needed.append(GAP + (natural if number else min(natural, _TEXT_WIDTH)))
    parts: list[list[int]] = [[]]
    left = free = width - EDGES - sum(needed[:keys])
    for index in range(keys, len(columns)):
        if parts[-1] and needed[index] > left:
            parts.append([])
            left = free
        parts[-1].append(index)
        left -= needed[index]
    chosen = [[*range(keys), *part] for part in parts]
    return [
        table([columns[index] for index in part], [[row[index] for index in part] for row in rows])
        for part in chosen
    ]


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Whether all cells of each column begin with a digit, sign or dash, in a table with a head."""
    cells = [[row[index] for row in rows if row[index]] for index in range(len(columns))]
    return [
        any(columns) and bool(own) and all(cell[0].isdigit() or cell[0] in "+-–" for cell in own)
        for own in cells
    ]


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    keys: int = 1,
    spare: Collection[str] = (),
) -> None:
    """Print a table with its title on stdout.

    A table that is wider than the console loses the `spare` columns, one by one from the last, and
    a line below names them. If it still does not fit, it becomes several tables.
    """
    console = stdout()
    if title is not None:
        print_text(title, console)
    rows = [list(row) for row in rows]
    fitting = tables(columns, rows, console.width, keys=keys)
    left_out: list[str] = []
    for name in reversed([column for column in columns if column in spare]):
        if len(fitting) == 1:
            break
        left_out.insert(0, name)
        kept = [index for index, column in enumerate(columns) if column not in left_out]
        shown = [[row[index] for index in kept] for row in rows]
        fitting = tables([columns[index] for index in kept], shown, console.width, keys=keys)
    for each in fitting:
        console.print(each)
    if left_out:
        print_text(f"Left out for lack of columns: {', '.join(left_out)}.", console)


def print_text(text: str, console: Console | None = None, *, head: str = "") -> None:
    """Print `text` on stdout in lines of the console's width.

    Args:
        head: text before it. Further lines are indented to the start of the text.
    """
    width = max((console or stdout()).width, len(head) + 20)
    print(printable(wrapped(text, width, head=head), "\n"))


def wrapped(text: str, width: int, *, head: str = "") -> str:
    """`text` after `head` in lines of at most `width` columns. Long words are not broken."""
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def print_json(value: Any) -> None:
    """Print `value` (dataclasses and numpy included) as indented JSON on stdout."""
    print(orjson.dumps(value, option=_JSON).decode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` (dataclasses and numpy included) as indented JSON into a file."""
    write_file(path, orjson.dumps(value, option=_JSON) + b"\n")


def progress(what: str) -> Progress:
    """A progress bar on stderr with counts and the remaining time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=stderr())


def note(text: str) -> None:
    """Print a text on stderr."""
    print(printable(text, "\n\t"), file=sys.stderr)
