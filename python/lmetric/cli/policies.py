"""``lmetric-router policies``: what can stand after ``--policy``."""

from __future__ import annotations

import typer


def command(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the policies: formula, knobs, source."""
    from lmetric._core import policy_table
    from lmetric.cli.show import print_json, print_table

    rows = policy_table()
    if as_json:
        print_json(rows)
        return
    print_table(
        ["policy", "formula", "knobs", "source"],
        [[row["name"], row["formula"], _knobs(row["knobs"]), row["source"]] for row in rows],
    )


def _knobs(knobs: list[dict[str, object]]) -> str:
    return ", ".join(f"{knob['name']}={knob['default']:g}" for knob in knobs)
