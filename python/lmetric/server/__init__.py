"""The OpenAI-compatible server in front of the router."""

from lmetric.server.app import Server, run_server, serve

__all__ = ["Server", "run_server", "serve"]
