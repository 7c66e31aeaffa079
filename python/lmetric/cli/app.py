"""The command tree. Each command has a module, which is imported only if it is needed."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from lmetric.cli.help import Command

# The commands by group, as `lmetric-router --help` shows them, with the package of each one.
# The laboratory's commands are one of the three doors to it: nothing else here imports it.
_ROUTER, _LAB = "lmetric.cli", "lmetric_lab.cli"
GROUPS = {
    "Run": {"serve": _ROUTER, "epp": _ROUTER, "doctor": _ROUTER, "top": _ROUTER, "config": _ROUTER},
    "Improve": {
        "canary": _ROUTER,
        "whatif": _LAB,
        "advise": _LAB,
        "report": _LAB,
        "records": _ROUTER,
        "calibrate": _LAB,
    },
    "Try": {"demo": _LAB, "engine": _LAB, "replay": _LAB, "simulate": _LAB, "study": _LAB, "trace": _LAB},
    "More": {
        "policies": _ROUTER,
        "indicators": _ROUTER,
        "profiles": _LAB,
        "tokenizer": _ROUTER,
        "import-config": _LAB,
        "bench": _LAB,
    },
}
COMMANDS = {name: package for group in GROUPS.values() for name, package in group.items()}


class Commands(TyperGroup):
    """The command tree, whose help lists the commands in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes one section for each group of commands."""
        for title, names in GROUPS.items():
            shown = [(name, self.commands[name]) for name in names if name in self.commands]
            limit = formatter.width - 6 - max(map(len, self.commands))
            with formatter.section(title):
                formatter.write_dl([(name, each.get_short_help_str(limit)) for name, each in shown])


def build(words: Collection[str]) -> typer.Typer:
    """The application with the commands in `words`, or with all commands if it names none.

    Options with slow imports are added only for the commands in `words`.
    """
    # Else --show-completion zsh ignores "zsh" and prints the script of the shell that runs it.
    os.environ.setdefault("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    app = typer.Typer(
        help="Routes requests over LLM engines: each to the engine where it delays all requests least.",
        epilog="Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 port not free, 130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        cls=Commands,
    )
    app.callback()(_root)
    for name in [name for name in COMMANDS if name in words] or COMMANDS:
        module = import_module(f"{COMMANDS[name]}.{name.replace('-', '_')}")
        if hasattr(module, "group"):
            app.add_typer(module.group, name=name)
            continue
        command = module.build() if name in words and hasattr(module, "build") else module.command
        app.command(name, cls=getattr(module, "CLASS", Command))(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"lmetric-router {version('lmetric-router')}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Defines the options that come before the command."""
