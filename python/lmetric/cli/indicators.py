"""``lmetric-router indicators``: the names that a score expression can use."""

from __future__ import annotations

import typer


def command(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the indicators that score expressions can read: unit, owner, meaning."""
    from lmetric._core import indicator_table
    from lmetric.cli.show import print_json, print_table

    rows = indicator_table()
    if as_json:
        print_json(rows)
        return
    columns = list(rows[0])
    print_table(columns, [[row[column] for column in columns] for row in rows])
