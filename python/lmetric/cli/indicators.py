"""``lmetric-router indicators``: the names that a score expression can use."""

from __future__ import annotations

import typer


def command(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the indicators that score expressions can read."""
    from lmetric._core import indicator_table
    from lmetric.cli.show import print_json, print_text

    rows = indicator_table()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print_text(f"{row['name']}: {row['unit']} ({row['scope']}, from {row['owner']})")
        print_text(row["about"], head="    ")
        print_text(f"Freshness: {row['freshness']}. Absent: {row['absent']}.", head="    ")
