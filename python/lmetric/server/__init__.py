"""The OpenAI-compatible server in front of the router."""

from lmetric.server.app import Server, check_config, run_server, serve

__all__ = ["Server", "check_config", "run_server", "serve"]
