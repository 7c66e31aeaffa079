"""``lmetric-router epp``: the router as an endpoint picker behind a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmetric.cli.help import Brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmetric.config import ServerConfig

CLASS = Brief


def command() -> None:
    """Pick engines for a gateway, such as Envoy.

    It is an endpoint picker of the Gateway API Inference Extension (ext_proc). The gateway sends
    requests and answers; this process decides. Same settings and signals as `serve`. --port has
    metrics and pages, `epp.port` (9002) is for the gateway. Needs the extra `epp`.
    """


def build() -> Callable[..., None]:
    """The command with its options. Their defaults come from the configuration (slow import)."""
    from lmetric.cli.settings import command_with_settings

    return command_with_settings(_run, command.__doc__)


def _run(config: ServerConfig, reread: Callable[[], ServerConfig]) -> None:
    from lmetric.lean_imports import own_process

    with own_process():
        from lmetric.server import run_server
        from lmetric.server.epp.settings import for_gateway

    if code := run_server(for_gateway(config), lambda: for_gateway(reread()), picks=True):
        raise SystemExit(code)
