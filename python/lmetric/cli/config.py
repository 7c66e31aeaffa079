"""``lmetric-router config``: checks and prints the configuration of ``serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmetric.cli.settings import command_with_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmetric.config import ServerConfig


def _run(config: ServerConfig, _: Callable[[], ServerConfig]) -> None:
    from lmetric.config import render
    from lmetric.server import check_config

    check_config(config)
    print(render(config), end="")


command = command_with_settings(
    _run,
    """Check the configuration and print it as YAML, defaults included, secrets masked.

    It has the options of serve and checks settings, policies, parameters and files like serve. It contacts
    no engine. Exit code 2: serve would not start with this configuration.
    """,
)
