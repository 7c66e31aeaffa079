"""Results of the studies as CSV tables.

A `results` folder holds:

- `figures.csv`: one line per figure with its title, the commit of the code that ran, the seeds, and
  what the page shows. Lists such as `columns` are joined by `"; "`.
- `FIGURE.csv`: the rows of a figure. The columns left of `seed` are text and name the row. The
  columns right of `seed` are numbers; a row takes one line per seed, counted from the figure's
  first. An empty cell is a missing value.
- `FIGURE.TABLE.csv`: further tables of a figure in the same form. Without `seed`, all cells are
  text.

In memory a figure is a dictionary: `rows` and the other tables are lists of dictionaries, in which
the values of the seeds are a list of floats. Floats are written in full, so a read returns the
written values.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
INDEX = "figures.csv"
SEED = "seed"
LISTS = ("columns", "over", "of")  # cells of the index with several values
SEPARATOR = "; "


def path_of(folder: Path, figure: str, table: str = "rows") -> Path:
    """Returns the file of a figure's table."""
    return folder / (f"{figure}.csv" if table == "rows" else f"{figure}.{table}.csv")


def paths_of(folder: Path, figure: str) -> list[Path]:
    """Returns all files of a figure, its rows first."""
    rows = path_of(folder, figure)
    return [*([rows] if rows.exists() else []), *sorted(folder.glob(f"{figure}.*.csv"))]


def read_index(folder: Path) -> dict[str, Row]:
    """Returns the entries of `figures.csv` by figure name.

    Raises `FileNotFoundError` if the folder has no `figures.csv`.
    """
    return {row["figure"]: _typed(row) for row in read_table(folder / INDEX)}


def read_figure(folder: Path, figure: str) -> Row:
    """Returns a figure with all its tables.

    Raises `KeyError` if the folder has no such figure, `FileNotFoundError` if it has no
    `figures.csv`.
    """
    index = read_index(folder)
    if figure not in index:
        raise KeyError(f"{folder / INDEX} has no figure {figure!r}; it has {', '.join(index)}")
    tables = {path.name[len(figure) + 1 : -len(".csv")] or "rows": path for path in paths_of(folder, figure)}
    return {**index[figure], "rows": [], **{name: read_table(path) for name, path in tables.items()}}


def write_figure(told: Mapping[str, Any], folder: Path) -> None:
    """Writes a figure's tables and its line of `figures.csv`, in place of earlier ones."""
    figure = told["figure"]
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths_of(folder, figure):
        path.unlink()
    about: Row = {}
    for name, value in told.items():
        if name in LISTS:
            about[name] = SEPARATOR.join(value)
        elif not isinstance(value, list):
            about[name] = str(value)
        elif value:
            write_table(path_of(folder, figure, name), value)
    index = {row["figure"]: row for row in read_table(folder / INDEX)} if (folder / INDEX).exists() else {}
    write_table(folder / INDEX, (index | {figure: about}).values())


def read_table(path: Path) -> list[Row]:
    """Returns the rows of a file.

    Raises `ValueError` if the seeds of a row do not count up from 0, or if an earlier seed has no
    value.
    """
    with path.open(newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    if SEED not in head:
        return [dict(zip(head, line, strict=True)) for line in lines]
    at = head.index(SEED)
    names, numbers = head[:at], head[at + 1 :]
    rows: list[Row] = []
    before: tuple[list[str], int] = ([], 0)
    for number, line in enumerate(lines, 2):
        key, seed, cells = line[:at], int(line[at]), line[at + 1 :]
        if seed == 0:
            rows.append(dict(zip(names, key, strict=True)) | {name: [] for name in numbers})
        elif (key, seed) != before:
            raise ValueError(f"{path}:{number}: seed {seed}; expected 0 or the seed after the line before")
        for name, cell in zip(numbers, cells, strict=True):
            if cell and len(rows[-1][name]) < seed:
                raise ValueError(
                    f"{path}:{number}: {name} has a value for seed {seed}, but none for an earlier seed"
                )
            if cell:
                rows[-1][name].append(float(cell))
        before = (key, seed + 1)
    return [{name: cell for name, cell in row.items() if cell != []} for row in rows]


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows of text and of lists of numbers.

    Raises `TypeError` if a cell is neither.
    """
    rows = list(rows)
    head = list(dict.fromkeys(name for row in rows for name in row))
    numbers = [name for name in head if any(isinstance(row.get(name), list) for row in rows)]
    names = [name for name in head if name not in numbers]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, *([SEED, *numbers] if numbers else [])])
        for row in rows:
            key = [_text(path, name, row.get(name, "")) for name in names]
            if not numbers:
                writer.writerow(key)
                continue
            for seed in range(max(len(row.get(name, ())) for name in numbers)):
                writer.writerow([*key, seed, *(_cell(row.get(name, ()), seed) for name in numbers)])


def _text(path: Path, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{path}: {name} is {value!r}, expected text or a list with a number per seed")
    return value


def _cell(values: Sequence[float], seed: int) -> str:
    return repr(float(values[seed])).removesuffix(".0") if seed < len(values) else ""


def _typed(row: Row) -> Row:
    told: Row = {name: cell for name, cell in row.items() if cell}
    told |= {name: cell.split(SEPARATOR) for name, cell in told.items() if name in LISTS}
    numbers = {name: int(row[name]) for name in ("seeds", "first_seed")}
    return told | numbers | {"quick": row["quick"] == "True"}
