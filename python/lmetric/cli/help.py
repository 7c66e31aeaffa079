"""The layout of ``--help``: options in groups, the basics first, each option with its default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from collections.abc import Iterable

BASIC, DISAGGREGATION, EXPERIMENTAL = "Basic", "Disaggregation", "Experimental"
POLICY, TRACE, ENGINES, RESULTS = "Policy", "Trace", "Engines", "Results"
HELP_ALL = "lmetric.help_all"
"""Key of the context's `meta`: the help lists all options."""

# The options that the help of `Brief` commands shows: those that a first start needs.
MAIN = (
    "config",
    "host",
    "port",
    "engine",
    "embedded",
    "policy",
    "api_keys",
    "records",
    "set_",
    "changed",
    "schema",
    "help_all",
    "help",
)
_FIRST = ("Arguments", BASIC, POLICY)
_LAST = (DISAGGREGATION, EXPERIMENTAL)


class Command(TyperCommand):
    """A command whose help lists its options by `rich_help_panel`, as plain text."""

    def shown(self, ctx: Any) -> list[Any]:
        """The parameters that the help lists."""
        return list(self.get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, then one section for each group of options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.shown(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(param, "rich_help_panel", None)
            if param.param_type_name == "argument":
                panel = "Arguments"
            sections.setdefault(panel or "", []).append(_plain(record, param))
        general = sections.pop("", [])
        first = BASIC if BASIC in sections else "Options"
        sections[first] = sections.get(first, []) + general  # --help ends the first group
        for title in ordered(sections):
            with formatter.section(title):
                formatter.write_dl(sections[title])


class Brief(Command):
    """A command with a help of one screen: the options of `MAIN`. ``--help-all`` lists all."""

    def shown(self, ctx: Any) -> list[Any]:
        """All parameters after ``--help-all``, else those of `MAIN`."""
        params = super().shown(ctx)
        return params if ctx.meta.get(HELP_ALL) else [each for each in params if each.name in MAIN]


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """The callback of ``--help-all``."""
    if wanted:
        ctx.meta[HELP_ALL] = True
        print(ctx.get_help())
        ctx.exit()


def ordered(titles: Iterable[str]) -> list[str]:
    """Arguments, basics and policy first, disaggregation and experimental options last."""

    def place(title: str) -> int:
        if title in _LAST:
            return len(_FIRST) + 1 + _LAST.index(title)
        return _FIRST.index(title) if title in _FIRST else len(_FIRST)

    return sorted(titles, key=place)


def _plain(record: tuple[str, str], param: Any) -> tuple[str, str]:
    """The record without typer's brackets around a default in words and without "range"."""
    names, text = record
    if isinstance(param.show_default, str):
        text = text.replace(f"({param.show_default})", param.show_default)
    return names.replace(" range>", ">"), text
