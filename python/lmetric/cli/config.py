"""``lmetric-router config``: checks and prints the configuration of ``serve``."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli.help import BASIC, Brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmetric.config import ServerConfig

CLASS = Brief


def command() -> None:
    """Check the configuration and print it as YAML.

    The output includes defaults and masks secrets. The command has the options of serve and
    checks settings, policies, parameters and files like serve. It contacts no engine. Exit code
    2: serve would not start with this configuration.
    """


def build() -> Callable[..., None]:
    """The command with its options. Their defaults come from the configuration (slow import)."""
    from lmetric.cli.settings import command_with_settings
    from lmetric.cli.show import print_json
    from lmetric.config import json_schema

    changed = typer.Option(
        "--changed",
        rich_help_panel=BASIC,
        help="Print only settings that differ from the defaults, each with its source.",
    )
    schema = typer.Option(
        "--schema",
        rich_help_panel=BASIC,
        help="Print the JSON schema of configuration files, for editors.",
    )
    extra = {"changed": Annotated[bool, changed], "schema": Annotated[bool, schema]}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in extra.items()
    ]
    check = command_with_settings(_run, command.__doc__, parameters)

    @wraps(check)
    def check_or_print_schema(**given: Any) -> None:
        if given["schema"]:
            print_json(json_schema())
        else:
            check(**given)

    return check_or_print_schema


def _run(config: ServerConfig, _: Callable[[], ServerConfig], *, changed: bool, schema: bool) -> None:
    from lmetric.config import render, render_changed
    from lmetric.server import check_config

    check_config(config)
    print(render_changed(config) if changed else render(config), end="")
