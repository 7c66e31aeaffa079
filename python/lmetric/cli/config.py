"""``lmetric-router config``: what ``serve`` would run with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmetric.cli.settings import command_with_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmetric.config import ServerConfig


def _run(config: ServerConfig, _: Callable[[], ServerConfig]) -> None:
    from lmetric.config import render

    print(render(config), end="")


command = command_with_settings(
    _run,
    """Print the configuration that serve would run with, as YAML, secrets masked.

    It takes serve's options, so a doubtful command line can be looked at first.
    """,
)
