"""The gRPC server of the endpoint picker, and what its streams share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import structlog
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lmetric._core import Peer
from lmetric.config import ConfigError, ServerConfig
from lmetric.server.api.errors import ApiError
from lmetric.server.api.paths import stored_response
from lmetric.server.epp.addresses import address_of
from lmetric.server.epp.ext_proc_pb2 import (
    HeaderMap,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from lmetric.server.epp.request_fields import RequestFields
from lmetric.server.epp.stream import GatewayStream
from lmetric.server.epp.subset import Subset
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.runner import RequestRunner
from lmetric.server.fleet.engine import Engine
from lmetric.server.http.connection import ClientConnection
from lmetric.server.http.frontend import DRAINING, Frontend
from lmetric.server.http.protocol import origin_form
from lmetric.server.observe.histograms import SHORT_SECONDS, Histogram

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH = "grpc.health.v1.Health"
_MODELS = "/v1/models"
_STOP_SECONDS = 1.0
_READY = frozenset({"", "readiness", SERVICE})

log = structlog.get_logger("lmetric.epp")


class PickerFrontend(Frontend):
    """A frontend whose requests come from a gateway. Its HTTP port has only the router's pages."""

    def takes(self, head: Any) -> bool:
        """Returns False: no request goes to an engine from here."""
        return False

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers pages, and refuses requests for engines."""
        path = origin_form(request.raw_path).partition("?")[0]
        if isinstance(request.protocol, ClientConnection) and (path in self.paths or stored_response(path)):
            text = "this router picks engines for a gateway; send the request to the gateway"
            return self._refuse(request, ApiError(404, text, code="endpoint_picker"), None)
        return await super().handle(request)


class Picker:
    """The gRPC server, and what its streams share.

    ``counts``: requests, and their outcomes: picked or refused. ``fallbacks``: requests that
    another engine of the list answered.
    """

    def __init__(self, config: ServerConfig, front: Frontend) -> None:
        self._config = config
        self.front = front
        self.counts: Counter[str] = Counter()
        self.decision_seconds = Histogram(SHORT_SECONDS)
        self.port = 0
        self._streams = 0
        self._peers: dict[str, Peer] = {}
        self._server: grpc.aio.Server | None = None

    # -- the server --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens. Raises ConfigError if the address or the certificate is not usable."""
        config = self._config
        epp, limit = config.epp, config.limits.max_body_bytes
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit + (1 << 20)),
                ("grpc.max_send_message_length", limit + (1 << 20)),
                ("grpc.so_reuseport", 0),
                # Gateways keep their connection open with pings.
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        health = {"request_deserializer": HealthCheckRequest.FromString}
        health["response_serializer"] = HealthCheckResponse.SerializeToString
        check = grpc.unary_unary_rpc_method_handler(self._check, **health)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            )
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{epp.port}"
        try:
            if epp.tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, _credentials(epp.tls))
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot listen for gateways at {address} (epp.port): {error}") from None
        await server.start()
        self._server = server
        log.info("listening for gateways", address=f"{host}:{self.port}", tls=epp.tls is not None)

    async def stop(self) -> None:
        """Ends all streams."""
        if self._server is not None:
            await self._server.stop(_STOP_SECONDS)

    async def _process(self, _: object, context: Any) -> None:
        self._streams += 1
        try:
            await GatewayStream(self, context).serve()
        finally:
            self._streams -= 1

    async def _check(self, request: HealthCheckRequest, _: object) -> HealthCheckResponse:
        status = HealthCheckResponse.SERVICE_UNKNOWN
        if request.service == "liveness":
            status = HealthCheckResponse.SERVING
        elif request.service in _READY:
            ready = self.front.phase < DRAINING and self.front.fleet.ready()
            status = HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)

    # -- for streams -------------------------------------------------------------------------------

    def peer(self, name: str) -> Peer:
        """Returns a gateway. ``name``: its address, as gRPC writes it."""
        kind, _, rest = name.partition(":")
        host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
        host = host if kind in ("ipv4", "ipv6") else ""
        peer = self._peers.get(host)
        if peer is None:
            peer = Peer(host, False, True)
            if len(self._peers) < 1024:
                self._peers[host] = peer
        return peer

    def read_fields(self, headers: HeaderMap) -> RequestFields:
        """Returns the fields of a request's head."""
        return RequestFields(headers, self.front.fleet.objectives, self._is_class)

    def _is_class(self, name: str) -> bool:
        return any(name in pool.held.classes for pool in self.front.fleet.pools)

    def path_error(self, method: str, path: str) -> ApiError | None:
        """Returns the error of a request that is for no engine; None: it is for one."""
        stored = stored_response(path)
        methods = ("POST",) if path in self.front.paths else stored.methods if stored else ()
        if path == _MODELS:
            methods = ("GET",)
        if not methods:
            hint = "; add it to paths in the configuration" if method == "POST" else ""
            return ApiError(404, f"unknown path {path}{hint}", code="unknown_path")
        if method not in methods:
            allowed = {"allow": ", ".join(methods)}
            return ApiError(405, f"{method} is not allowed on {path}; use {methods[0]}", headers=allowed)
        return None

    def route(self, request: ClientRequest, body: bytes, fields: RequestFields) -> None:
        """Routes or refuses a whole request."""
        request.sheddable = fields.priority < 0
        stored = stored_response(fields.path)
        if fields.path in self.front.paths:
            self.front.serve(request, body)
        elif stored is not None:
            self.front.serve_stored(request, stored, fields.method)
        else:
            models = self.front.fleet.models()
            request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + models)

    def address(self, engine: Engine) -> str:
        """Returns IP:PORT of an engine."""
        return address_of(engine)

    def endpoints(self, engine: Engine, relay: InFlightRequest | None, subset: Subset | None) -> list[str]:
        """Returns IP:PORT of the chosen engine, and of the next ones that may replace it."""
        found = [address_of(engine)]
        more = self.front.config.epp.fallbacks
        if not more or not isinstance(relay, RequestRunner):
            return found
        execution = relay.execution
        if execution.client_request.pinned_to is not None or execution.pool.disaggregates:
            return found
        engines = execution.pool.engines
        for name in execution.decision.ranking():
            other = engines.get(name)
            if len(found) > more:
                break
            if other is None or other is engine or other.unusable is not None:
                continue
            if subset is None or other in subset:
                found.append(address_of(other))
        return found

    # -- metrics -----------------------------------------------------------------------------------

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of the picker."""
        yield GaugeMetricFamily("lmetric_epp_streams", "Requests of gateways in flight", self._streams)
        counter = CounterMetricFamily(
            "lmetric_epp_requests",
            "Requests of gateways by outcome: picked, refused (answered by the router), or fallbacks "
            "(also picked; the gateway's second engine answered)",
            labels=("outcome",),
        )
        for outcome in ("picked", "refused", "fallbacks"):
            counter.add_metric((outcome,), self.counts[outcome])
        yield counter
        seconds = self.decision_seconds
        histogram = HistogramMetricFamily(
            "lmetric_epp_decision_seconds", "Time from the end of a gateway's request to its pick or refusal"
        )
        histogram.add_metric((), seconds.buckets(), seconds.sum)
        yield histogram


def _credentials(tls: Any) -> grpc.ServerCredentials:
    """Returns the credentials of the gRPC server. Raises OSError."""
    pair = (tls.key_file.read_bytes(), tls.certificate_file.read_bytes())
    ca = None if tls.client_ca_file is None else tls.client_ca_file.read_bytes()
    return grpc.ssl_server_credentials([pair], ca, ca is not None)
