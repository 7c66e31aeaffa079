"""``lmetric-router policies``: the values of ``--policy``."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="Show this policy with its parameters.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the policies, or show one.

    The list has maturity and formula. One policy also has parameters, indicators and source.
    `serve` accepts stable policies, and experimental policies with `--experimental`. The others are
    for studies.
    """
    from lmetric._core import policy_table
    from lmetric.cli.show import print_json, print_text

    rows = {row["name"]: row for row in policy_table()}
    if name is not None and name not in rows:
        raise typer.BadParameter(f"{name!r} is not a policy{_hint(name, rows)}", param_hint="NAME")
    if as_json:
        print_json(rows[name] if name is not None else list(rows.values()))
    elif name is not None:
        _show(rows[name])
    else:
        width = max(map(len, rows)) + 2
        for row in rows.values():
            print_text(row["formula"], head=f"{row['name']:<{width}}{row['maturity']:<14}")


def _hint(name: str, known: dict[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; `lmetric-router policies` lists them"


def _show(row: dict[str, Any]) -> None:
    from lmetric.cli.show import print_text

    print_text(row["name"], head="policy      ")
    print_text(row["formula"], head="formula     ")
    print_text(", ".join(row["reads"]) or "no indicator", head="reads       ")
    print_text(row["maturity"], head="maturity    ")
    print_text(row["source"], head="source      ")
    for parameter in row["knobs"]:
        default = f"{parameter['default']:.12g}"
        bounds = f"{parameter['min']:.12g} to {parameter['max']:.12g}"
        text = f"{parameter['name']} = {default} ({bounds}): {parameter['about']}"
        print_text(text, head="parameter   ")
