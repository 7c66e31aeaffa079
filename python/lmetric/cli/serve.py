"""``lmetric-router serve``: the router as a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmetric.cli.help import Brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmetric.config import ServerConfig

CLASS = Brief


def command() -> None:
    """Route OpenAI API requests to engines.

    Precedence of settings: flags, environment (LMETRIC__...), file (--config), defaults. SIGTERM
    and Ctrl-C drain: /ready fails, and streams finish up to a deadline. SIGHUP reloads settings:
    the reference of the configuration marks them. SIGUSR2 replaces several workers one by one; with
    one process it is ignored, as SIGUSR1 is.
    """


def build() -> Callable[..., None]:
    """The command with its options. Their defaults come from the configuration (slow import)."""
    from lmetric.cli.settings import command_with_settings

    return command_with_settings(_run, command.__doc__)


def _run(config: ServerConfig, reread: Callable[[], ServerConfig]) -> None:
    from lmetric.lean_imports import own_process

    with own_process():
        from lmetric.server import run_server

    if code := run_server(config, reread):
        raise SystemExit(code)
