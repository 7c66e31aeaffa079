"""``lmetric-router serve``: the router as a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmetric.cli.settings import command_with_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmetric.config import ServerConfig


def _run(config: ServerConfig, reread: Callable[[], ServerConfig]) -> None:
    from lmetric.server import run_server

    if code := run_server(config, reread):
        raise SystemExit(code)


command = command_with_settings(
    _run,
    """Route requests to engines over OpenAI's API.

    Flags win over the environment (LMETRIC_...), the environment over --config, the file over the defaults.
    SIGTERM and Ctrl-C drain: /ready turns red, streams finish up to a deadline. SIGHUP reloads API keys,
    tenants and the engines' API keys; SIGUSR1 and SIGUSR2 are ignored.
    """,
)
