"""docs/reference/options.md: all commands with their options, from the typer application."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import typer

from lmetric.cli.app import build_all
from lmetric.cli.help import BASIC, ordered

HEAD = """\
# Command options

`scripts/make_reference cli` generates this page from the commands. [Commands](cli.md) explains them with examples and lists the exit codes.
`lmetric-router COMMAND --help` prints the same options.
"""


def escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def default_of(parameter: Any, context: Any) -> str:
    """Returns the default in words, as a value, or "required"; "" for none."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.required:
        return "required"
    value = parameter.get_default(context, call=False) if parameter.show_default else None
    if value is None or callable(value):
        return ""
    if getattr(parameter, "is_bool_flag", False):
        on, off = parameter.opts, parameter.secondary_opts
        shown = on if value else off  # a flag without an opposite is off by default
        return shown[0].lstrip("-") if off else ""
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(str(each.value if isinstance(each, Enum) else each) for each in values)


def bounds(parameter: Any) -> str:
    """Returns the bounds of a number, such as ``x>=1``."""
    least, most = parameter.min, parameter.max
    if least is None:
        return "" if most is None else f"x<={most}"
    return f"x>={least}" if most is None else f"{least}<=x<={most}"


def rows(command: Any, context: Any) -> str:
    """Returns a table of arguments and options for each group of a command's help."""
    groups: dict[str, list[str]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or parameter.name == "help":
            continue
        about = re.sub(  # settings
            r"\w+=[^\s;,]+(?:, \w+(?:=[^\s;,]*[^\s;,.])?)+", r"`\g<0>`", parameter.help or ""
        )
        if parameter.envvar and parameter.show_envvar:
            about += f" `env var: {parameter.envvar}`"
        if limits := bounds(parameter):
            about += f" `{limits}`"
        names, default = record[0], default_of(parameter, context)
        panel = "Arguments" if parameter.param_type_name == "argument" else parameter.rich_help_panel or ""
        row = f"| `{escape(names)}` | {escape(default)} | {escape(about)} |\n"
        groups.setdefault(panel or BASIC, []).append(row)
    head = "| option | default | |\n| --- | --- | --- |\n"
    tables = [
        (f"{title}:\n\n" if len(groups) > 1 else "") + head + "".join(groups[title])
        for title in ordered(groups)
    ]
    return "\n".join(tables) or "No options.\n"


def section(command: Any, path: list[str]) -> str:
    """Returns the part of a command, and of its subcommands."""
    context = command.context_class(command, info_name=" ".join(path))
    about = (command.help or "").partition("\f")[0].strip()
    paragraphs = "\n\n".join(escape(part) for part in about.split("\n\n"))
    title = " ".join(path[1:]) or path[0]
    page = f"\n## {title}\n\n{paragraphs}\n\n"
    nested = getattr(command, "commands", None)
    if not nested:
        return page + rows(command, context)
    return page.rstrip("\n") + "\n" + "".join(section(each, [*path, name]) for name, each in nested.items())


def files() -> dict[str, str]:
    """Returns the page."""
    group: Any = typer.main.get_command(build_all())
    parts = [section(command, ["lmetric-router", name]) for name, command in group.commands.items()]
    return {"docs/reference/options.md": HEAD + "".join(parts)}
