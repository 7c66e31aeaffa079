"""``lmetric-router policies``: the values of ``--policy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def command(
    name: Annotated[str | None, typer.Argument(help="Show this policy with its parameters.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the policies with their maturity and formulas, or show one with its parameters and
    source.

    `serve` accepts stable policies, and experimental policies with `--experimental`. The others are
    for studies.
    """
    from lmetric._core import policy_table
    from lmetric.cli.show import print_json, stdout

    rows = {row["name"]: row for row in policy_table()}
    if name is not None and name not in rows:
        raise typer.BadParameter(f"{name!r} is not a policy{_hint(name, rows)}", param_hint="NAME")
    if as_json:
        print_json(rows[name] if name is not None else list(rows.values()))
    elif name is not None:
        _show(stdout(), rows[name])
    else:
        width = max(map(len, rows)) + 2
        for row in rows.values():
            _print(stdout(), f"{row['name']:<{width}}{row['maturity']:<14}", row["formula"])


def _hint(name: str, known: dict[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; `lmetric-router policies` lists them"


def _show(console: Console, row: dict[str, Any]) -> None:
    _print(console, "policy      ", row["name"])
    _print(console, "formula     ", row["formula"])
    _print(console, "reads       ", ", ".join(row["reads"]) or "no indicator")
    _print(console, "maturity    ", row["maturity"])
    _print(console, "source      ", row["source"])
    for parameter in row["knobs"]:
        default = f"{parameter['default']:.12g}"
        bounds = f"{parameter['min']:.12g} to {parameter['max']:.12g}"
        studies = " (for studies)" if parameter["study"] else ""
        text = f"{parameter['name']}{studies} = {default} ({bounds}): {parameter['about']}"
        _print(console, "parameter   ", text)


def _print(console: Console, head: str, text: str) -> None:
    """Prints `text` after `head`. Further lines are indented to the start of the text."""
    import textwrap

    width = max(console.width, len(head) + 20)
    for line in textwrap.wrap(text, width - len(head), break_on_hyphens=False):
        print(head + line)
        head = " " * len(head)
