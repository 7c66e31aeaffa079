"""Admission of requests before their bodies are read: keys, tenants, CORS, and room."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from lmetric.config import ServerConfig
from lmetric.server.api.caller import Caller, UnknownKeyError, by_header
from lmetric.server.api.errors import ApiError
from lmetric.server.api.identity import Identity
from lmetric.server.execution import request_log
from lmetric.server.execution.exchange import STOPPING, ClientRequest
from lmetric.server.execution.observers import guarded
from lmetric.server.http.client_load import ClientLoad
from lmetric.server.http.forwarding import UNIX
from lmetric.server.http.running import REFUSING, RunningRequests

if TYPE_CHECKING:
    from lmetric.server.http.cors import Cors


class Admission:
    """Admits or refuses requests for engines."""

    def __init__(
        self, config: ServerConfig, identity: Identity, running: RunningRequests, clients: ClientLoad
    ) -> None:
        self.running = running
        self._clients = clients
        self.configure(config, identity)

    def configure(self, config: ServerConfig, identity: Identity) -> None:
        """Applies settings to new requests."""
        self.identity = identity
        self.tenants = by_header(config.tenants)
        self.cors: Cors | None = None
        if config.cors.origins:
            from lmetric.server.http.cors import Cors

            self.cors = Cors(config.cors.origins)
        self._needs_address = config.log.access
        # Whether the access log, CORS, keys or tenants need values of a head.
        self._reads_head = bool(config.log.access or self.cors or identity.on or self.tenants)
        self._request_limit = config.limits.max_concurrent_requests
        self._share_limit = ceil(self._request_limit * config.limits.max_client_share)

    def admits(self, client_request: ClientRequest) -> bool:
        """Returns whether the request may be served.

        Otherwise it is answered with an error, or it waits: then `unknown_key` is set, and
        `admits_late` comes later.
        """
        running = self.running
        if running.tracing is not None and request_log.current.request is not client_request:
            guarded(running.tracing.context, client_request)
            return request_log.in_request(client_request, self.admits, client_request)
        if self._reads_head and not self._read_head(client_request):
            return False
        # As `has_room`, inline because each request runs it.
        if len(running.relays) < self._share_limit and running.phase is not REFUSING:
            return True
        return self.has_room(client_request)

    def _read_head(self, client_request: ClientRequest) -> bool:
        """Reads the sender of a request in its head.

        Returns False if it was answered with an error, or if its key is unknown yet.
        """
        if self._needs_address:
            client_request.address = _address(client_request)
        if self.cors is not None:
            client_request.cors = self.cors.lines(client_request.head)
        try:
            if self.identity.on:
                head = client_request.head
                given = map(_text, (head.authorization, head.x_api_key, head.api_key))
                caller = client_request.caller = self.identity.identify(*given, client=client_request.client)
                client_request.tenant = caller.tenant
            elif self.tenants and (named := self.tenants.get(client_request.head.tenant or "")):
                client_request.tenant = named  # without keys, the header is trusted
                client_request.caller = Caller(named)
        except UnknownKeyError as error:
            client_request.unknown_key = error
            return False
        except ApiError as error:
            self.running.ended(client_request, None, error)
            return False
        return True

    def admits_late(self, client_request: ClientRequest) -> bool:
        """Returns whether a request whose key was unknown may be served, as `admits`.

        The issuer's keys have been read since.
        """
        unknown, client_request.unknown_key = client_request.unknown_key, None
        assert unknown is not None  # as the caller made sure
        try:
            caller = client_request.caller = unknown.finish()
            client_request.tenant = caller.tenant
        except ApiError as error:
            self.running.ended(client_request, None, error)
            return False
        return self.has_room(client_request)

    def has_room(self, client_request: ClientRequest) -> bool:
        """Returns whether a request of a known tenant may start; otherwise answers an error."""
        try:
            if len(self.running.relays) >= self._share_limit or self.running.phase is REFUSING:
                self._check_room(client_request)
        except ApiError as error:
            self.running.ended(client_request, None, error)
            return False
        return True

    def _check_room(self, client_request: ClientRequest) -> None:
        """Raises ApiError (503) if the request may not start."""
        if self.running.phase is REFUSING:
            raise ApiError(503, STOPPING, code="shutting_down", headers={"retry-after": "5"})
        if len(self.running.relays) >= self._request_limit:
            raise _too_many("")
        payer = client_request.client.payer
        if payer is not None and payer.running >= self._share_limit and not payer.is_gateway:
            self._clients.refused["requests_per_client"] += 1
            raise _too_many(" of this client address")
        tenant = client_request.tenant
        if tenant and self.running.tenants[tenant] >= self._share_limit:
            self._clients.refused["requests_per_tenant"] += 1
            raise _too_many(" of this tenant")


def _text(field: bytes | None) -> str | None:
    return None if field is None else field.decode("utf-8", "surrogateescape")


def _too_many(whose: str) -> ApiError:
    return ApiError(
        503, f"too many concurrent requests{whose}", code="too_many", headers={"retry-after": "1"}
    )


def _address(client_request: ClientRequest) -> str | None:
    """Returns HOST:PORT of a client, the HOST that a trusted proxy names, or `unix`.

    None: the client has disconnected.
    """
    client = client_request.client
    if client.sender != client.peer.address:
        return client.sender
    peer = client_request.transport.get_extra_info("peername")
    if not peer:
        return None if client.peer.address else UNIX
    # A socket of both families has IPv4 addresses in the form of IPv6.
    host, port = client.peer.address or peer[0], peer[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
