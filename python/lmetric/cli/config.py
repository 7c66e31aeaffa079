"""``lmetric-router config``: checks and prints the configuration of ``serve``."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmetric.cli.help import BASIC, Brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmetric.config import ServerConfig

CLASS = Brief
# The settings that most fleets need, in 25 lines. A test loads it, also without the comments.
START = """\
# lmetric-router serve --config router.yaml
# Settings (docs/reference/configuration.md, settings.md). Test: lmetric-router config --config FILE
host: 127.0.0.1  # "::": all addresses; then set auth
port: 8080
# Your engines, as your load balancer lists them. Test their features: lmetric-router doctor URL
engines:
  - http://10.0.0.1:8000
  - http://10.0.0.2:8000
# model: chat  # only if the engines serve several models
# tokenizer: OWNER/NAME  # of the Hugging Face Hub, or a folder; needed for exact cache knowledge
policy: total_delay  # or a name of `lmetric-router policies`, or a score such as p_token * (bs + 1)
# auth:
#   keys_file: keys.yaml  # API keys of your clients: "sk-...: tenant"
# admin:
#   token: ${ADMIN_TOKEN}  # from the environment; for /debug, /admin and /ui
# admission:  # refuse requests whose first token would come too late
#   ttft_seconds: 10
timeouts:
  connect: 2  # seconds; then another engine gets the request
  drain: 30  # seconds to finish running requests at the end
# records:  # for whatif and report
#   path: records
log:
  level: info
  json: false  # true: JSON lines
"""


def command() -> None:
    """Check the configuration and print it, or write a first one.

    The output includes defaults and masks secrets. The command has the options of serve and
    checks settings, policies, parameters and files like serve. It contacts no engine. Exit code
    2: serve would not start with this configuration. `config init` prints a short file with
    comments.
    """


def build() -> Callable[..., None]:
    """The command with its options. Their defaults come from the configuration (slow import)."""
    from lmetric.cli.settings import command_with_settings
    from lmetric.cli.show import print_json
    from lmetric.config.written import json_schema

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
    action = typer.Argument(metavar="[init]", help="init: print a short configuration with comments.")
    parameters.append(
        inspect.Parameter(
            "action",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Literal["init"] | None, action],
        )
    )
    check = command_with_settings(_run, command.__doc__, parameters)

    @wraps(check)
    def check_or_print_schema(**given: Any) -> None:
        if given["action"] == "init":
            print(START, end="")
        elif given["schema"]:
            print_json(json_schema())
        else:
            check(**given)

    return check_or_print_schema


def _run(
    config: ServerConfig, _: Callable[[], ServerConfig], *, changed: bool, schema: bool, action: str | None
) -> None:
    from lmetric.config.written import render, render_changed
    from lmetric.lean_imports import own_process

    with own_process():
        from lmetric.server import check_config

    check_config(config)
    print(render_changed(config) if changed else render(config), end="")
