"""The gRPC server of the endpoint picker."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import structlog
from aiohttp import web
from google.protobuf.message import DecodeError

from lmetric.config import ServerConfig
from lmetric.server.api.errors import ApiError
from lmetric.server.api.paths import stored_response
from lmetric.server.epp.addresses import check_address
from lmetric.server.epp.ext_proc_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingResponse,
)
from lmetric.server.epp.shared import Shared
from lmetric.server.epp.stream import GatewayStream
from lmetric.server.fleet.subset import index_addresses
from lmetric.server.http.connection import ClientConnection
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.port import port_error
from lmetric.server.http.protocol import origin_form
from lmetric.server.http.running import DRAINING

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH = "grpc.health.v1.Health"
_STOP_SECONDS = 1.0
_MORE_STREAMS = 256  # beside those of requests in flight: health checks, and requests that begin or end
_READY = frozenset({"", "readiness", SERVICE})

log = structlog.get_logger("lmetric.epp")


class PickerFrontend(Frontend):
    """A frontend whose requests come from a gateway. Its HTTP port has only the router's pages."""

    pages_only = True

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers pages, and refuses requests for engines."""
        path = origin_form(request.raw_path).partition("?")[0]
        if isinstance(request.protocol, ClientConnection) and (
            path in self.arrivals.paths or stored_response(path)
        ):
            text = "this router picks engines for a gateway; send the request to the gateway"
            return self._refuse(request, ApiError(404, text, code="endpoint_picker"), None)
        return await super().handle(request)


class Picker:
    """The gRPC server: one stream for each request of a gateway, and health checks.

    ``shared_port``: its port, at which other workers listen, too; None: `epp.port`, alone.
    """

    def __init__(self, config: ServerConfig, front: Frontend, shared_port: int | None = None) -> None:
        self._config = config
        front.fleet.check_url = check_address
        front.fleet.on_model_made.append(index_addresses)
        for model in front.fleet.models:
            index_addresses(model)
        self.shared = Shared(front)
        self._shared_port = shared_port
        self.port = 0
        self._server: grpc.aio.Server | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens. Raises PortError for the address, and ConfigError for the certificate."""
        config = self._config
        epp, limit = config.epp, config.limits.max_body_bytes
        server = grpc.aio.server(
            maximum_concurrent_rpcs=config.limits.max_concurrent_requests + _MORE_STREAMS,
            options=[
                ("grpc.max_receive_message_length", limit + (1 << 20)),
                ("grpc.max_send_message_length", limit + (1 << 20)),
                ("grpc.so_reuseport", int(self._shared_port is not None)),
                # Gateways keep their connection open with pings.
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        # Without deserializers: gRPC would log each malformed message with its bytes.
        process = grpc.stream_stream_rpc_method_handler(
            self._process, response_serializer=ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, response_serializer=HealthCheckResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            )
        )
        host = config.host or "::"  # gRPC serves IPv4 at :: too
        host = f"[{host}]" if ":" in host else host
        port = epp.port if self._shared_port is None else self._shared_port
        address = f"{host}:{port}"
        try:
            if epp.tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, _credentials(epp.tls))
        except (RuntimeError, OSError) as error:
            why = _bind_error("" if config.host == "::" else config.host, port) or error
            raise port_error(config.host, port, why, setting="epp.port") from None
        await server.start()
        self._server = server
        log.info("listening for gateways", address=f"{host}:{self.port}", tls=epp.tls is not None)

    async def leave(self, seconds: float, hurry: asyncio.Event) -> None:
        """Stops accepting, and sends GOAWAY to the gateways, which then open other connections.

        Returns when the running streams have ended, after this time, or when ``hurry`` is set.
        """
        if self._server is None:
            return
        # `stop` ends what is left after the wait.
        self._leaving = asyncio.create_task(self._server.stop(seconds + _STOP_SECONDS), name="picker")
        hurried = asyncio.create_task(hurry.wait(), name="hurry")
        await asyncio.wait((self._leaving, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()

    async def stop(self) -> None:
        """Ends all streams."""
        if self._server is not None:
            await self._server.stop(_STOP_SECONDS)
        if self._leaving is not None:
            await self._leaving

    async def _process(self, _: object, context: Any) -> None:
        self.shared.streams += 1
        try:
            await GatewayStream(self.shared, context).serve()
        finally:
            self.shared.streams -= 1

    async def _check(self, data: bytes, context: Any) -> HealthCheckResponse:
        try:
            request = HealthCheckRequest.FromString(data)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a HealthCheckRequest")
        status = HealthCheckResponse.SERVICE_UNKNOWN
        if request.service == "liveness":
            status = HealthCheckResponse.SERVING
        elif request.service in _READY:
            front = self.shared.front
            ready = front.running.phase < DRAINING and front.fleet.ready()
            status = HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)


def _credentials(tls: Any) -> grpc.ServerCredentials:
    """Returns the credentials of the gRPC server. Raises OSError."""
    pair = (tls.key_file.read_bytes(), tls.certificate_file.read_bytes())
    ca = None if tls.client_ca_file is None else tls.client_ca_file.read_bytes()
    return grpc.ssl_server_credentials([pair], ca, ca is not None)


def _bind_error(host: str, port: int) -> OSError | None:
    """Returns the error of a bind to an address, for listeners that hide it; None: it succeeds."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error
    return None
