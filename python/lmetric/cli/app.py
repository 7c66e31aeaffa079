"""The command tree. Each command lives in its own module and imports what it needs when it runs."""

from __future__ import annotations

import os
from collections.abc import Collection

import typer

from lmetric.cli import (
    advise,
    bench,
    calibrate,
    canary,
    config,
    demo,
    doctor,
    engine,
    epp,
    import_config,
    indicators,
    policies,
    profiles,
    records,
    replay,
    report,
    serve,
    simulate,
    study,
    tokenizer,
    top,
    trace,
    whatif,
)
from lmetric.cli.help import Command

MODULES = (
    serve,
    epp,
    top,
    canary,
    doctor,
    tokenizer,
    engine,
    demo,
    replay,
    simulate,
    study,
    trace,
    calibrate,
    whatif,
    report,
    records,
    advise,
    policies,
    indicators,
    profiles,
    config,
    import_config,
    bench,
)


def build(words: Collection[str]) -> typer.Typer:
    """The application. Options with slow imports are added only for the commands in `words`."""
    # Else --show-completion zsh ignores "zsh" and prints the script of the shell that runs it.
    os.environ.setdefault("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    app = typer.Typer(
        help="Routes requests over fleets of LLM engines: new prefill tokens x batch size, no tuning.",
        epilog="Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 port not free, 130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for module in MODULES:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        if hasattr(module, "group"):
            app.add_typer(module.group, name=name)
            continue
        app.command(name, cls=Command)(
            module.build() if name in words and hasattr(module, "build") else module.command
        )
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
