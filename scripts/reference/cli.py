"""docs/reference/options.md: all commands with their options, from the typer application."""

from __future__ import annotations

import re
from typing import Any

import typer

from lmetric.cli.app import MODULES, build
from lmetric.cli.help import BASIC, ordered

HEAD = """\
# Command options

`scripts/make_reference cli` generates this page from the commands. [Commands](cli.md) explains them with examples and lists the exit codes.
`lmetric-router COMMAND --help` prints the same options.
"""


def escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def rows(command: Any, context: Any) -> str:
    """Returns a table of arguments and options for each group of a command's help."""
    groups: dict[str, list[str]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or parameter.name == "help":
            continue
        names, text = record
        default = parameter.show_default if isinstance(parameter.show_default, str) else ""
        text = text.replace(f"default: ({default})", "") if default else text
        # Help reads "TEXT [default: A].  [default: B; x>=1]"; both parts in brackets are optional.
        about, _, notes = text.rpartition("  [") if "  [" in text else (text, "", "")
        given = re.search(r" \[default: ([^\]]*)\]", about)
        about = re.sub(r" \[default: [^\]]*\]", "", about)
        about = re.sub(r"\w+=[^\s;,]+(?:, \w+(?:=[^\s;,]*[^\s;,.])?)+", r"`\g<0>`", about)  # settings
        default = default or (given[1] if given else "")
        for note in filter(None, notes.rstrip("]").split("; ")):
            if note.startswith("default: "):
                default = note.removeprefix("default: ").strip("()")
            elif note == "required":
                default = note
            else:
                about += f" `{note}`"
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
    group: Any = typer.main.get_command(build([module.__name__.rpartition(".")[2] for module in MODULES]))
    parts = [section(command, ["lmetric-router", name]) for name, command in group.commands.items()]
    return {"docs/reference/options.md": HEAD + "".join(parts)}
