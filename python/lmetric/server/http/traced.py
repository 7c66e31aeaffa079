"""The dispatcher of a router that records traces. Only such a router imports this module."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from lmetric.config import ServerConfig
from lmetric.server.api.auth import Keys
from lmetric.server.api.errors import ApiError
from lmetric.server.api.paths import StoredResponsePath
from lmetric.server.api.request import BodyParts
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.waiting import WaitingRequest
from lmetric.server.observe.metrics import Metrics
from lmetric.server.observe.request_log import in_request
from lmetric.server.observe.tracing.export import Tracing


class TracedFrontend(Frontend):
    """A dispatcher whose requests write their ids into each of their log lines."""

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        keys: Keys,
        metrics: Metrics,
        pages: Callable[[Frontend, web.BaseRequest, str, str], Awaitable[web.StreamResponse]],
    ) -> None:
        """Raises ConfigError if the settings `tracing` are not usable."""
        super().__init__(config, fleet, keys, metrics, pages)
        assert config.tracing is not None
        self.tracing: Tracing = Tracing(config.tracing, metrics.spans)

    def admits(self, client_request: ClientRequest) -> bool:
        self._join_trace(client_request)
        return in_request(client_request, super().admits, client_request)

    def _serve(self, client_request: ClientRequest, body: bytes | BodyParts) -> None:
        in_request(client_request, super()._serve, client_request, body)

    def serve_stored(self, client_request: ClientRequest, target: StoredResponsePath, method: str) -> None:
        in_request(client_request, super().serve_stored, client_request, target, method)

    def _go_on(
        self,
        client_request: ClientRequest,
        waiting: WaitingRequest,
        then: Callable[[float], None],
        now: float,
    ) -> None:
        in_request(client_request, super()._go_on, client_request, waiting, then, now)

    def _ended(
        self, client_request: ClientRequest, relay: InFlightRequest | None, error: ApiError | None
    ) -> None:
        self._join_trace(client_request)
        in_request(client_request, super()._ended, client_request, relay, error)

    def _join_trace(self, client_request: ClientRequest) -> None:
        self.tracing.context(client_request)
