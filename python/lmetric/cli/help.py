"""The layout of ``--help``: options in groups, the basics first, each option with its default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from collections.abc import Iterable

BASIC, DISAGGREGATION, EXPERIMENTAL = "Basic", "Disaggregation", "Experimental"
POLICY, TRACE, ENGINES, RESULTS = "Policy", "Trace", "Engines", "Results"
_FIRST = ("Arguments", BASIC, POLICY)
_LAST = (DISAGGREGATION, EXPERIMENTAL)


class Command(TyperCommand):
    """A command whose help lists its options by `rich_help_panel`, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, then one section for each group of options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
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
