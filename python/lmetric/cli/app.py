"""The command tree. Each command lives in its own module and imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import typer

from lmetric.cli import bench, config, demo, engine, indicators, policies, replay, serve

app = typer.Typer(
    help="Routes requests over fleets of LLM engines: new prefill tokens x batch size, no tuning.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 port not to be had, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"lmetric-router {version('lmetric-router')}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Options before the command."""


def _add(module: ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    command = module.command
    # Options made from a model take long to import: only the command that is asked for pays for its own.
    if hasattr(module, "build") and name in [*sys.argv, *os.environ.get("COMP_WORDS", "").split()]:
        command = module.build()
    app.command(name)(command)


for module in (serve, engine, demo, replay, policies, indicators, config, bench):
    _add(module)
