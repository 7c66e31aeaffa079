"""Limits on the connections, requests, request bytes and unread answers of clients.

All but the last are limited in total and per client address. Bytes of an incomplete head count from
the first one, and a body counts until an engine answers, so slow or stalled clients cannot use more
memory than `limits` allows. Answers count while their client reads too slowly. Beyond
`UNREAD_BYTES`, the clients that have been slow for longest lose their connections.
"""

import resource
from collections import Counter
from collections.abc import Iterator

import structlog
from aiohttp.web_protocol import RequestHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.config import Limits

# Descriptors that are not connections: listener, log, event feeds, watched files, probes of
# engines.
OTHER_DESCRIPTORS = 32

# The limits, by their names in metrics.
BOUNDS = (
    *("connections", "connections_per_client", "requests_per_client", "requests_per_tenant"),
    *("body_bytes_total", "body_bytes_per_client", "head_size", "head_time", "chunks"),
    "unread_bytes",
)
# Unread bytes at which a connection stops its engine: the mark of its write buffer. TLS has a
# buffer of its own before the socket's, whose default mark is eight times as high.
WRITE_MARK_BYTES = 64 * 1024
# Memory of a slow client beyond the bytes in its write buffer: what its engine's connection holds,
# and with TLS the packed bytes in the socket's buffer.
SLOW_CLIENT_BYTES = 192 * 1024
SLOW_TLS_CLIENT_BYTES = 512 * 1024
# Most memory of all slow clients.
UNREAD_BYTES = 256 << 20

log = structlog.get_logger("lmetric.server")


class Client:
    """The connections and body bytes of one client address.

    ``is_gateway``: several clients share it, so that only the limits on all clients hold.
    """

    __slots__ = ("_load", "address", "body_bytes", "connections", "is_gateway", "requests", "running")

    def __init__(self, load: "ClientLoad", address: str, is_gateway: bool) -> None:
        self._load = load
        self.address = address
        self.is_gateway = is_gateway
        self.connections = 0
        self.requests = 0  # in flight over a trusted proxy
        self.running = 0  # whole requests that have no answer yet
        self.body_bytes = 0

    def hold(self, size: int) -> bool:
        """Counts `size` more bytes of a body. Returns False, and counts nothing, beyond a limit."""
        load = self._load
        if load.body_bytes + size > load.limits.max_body_bytes_total:
            load.refused["body_bytes_total"] += 1
            return False
        if self.body_bytes + size > load.limits.max_body_bytes_per_client and not self.is_gateway:
            load.refused["body_bytes_per_client"] += 1
            return False
        load.body_bytes += size
        self.body_bytes += size
        return True

    def release(self, size: int) -> None:
        """Releases `size` bytes."""
        self._load.body_bytes -= size
        self.body_bytes -= size


class ClientLoad:
    """The connections and body bytes of all clients, and the number of refusals."""

    def __init__(self, limits: Limits) -> None:
        self.configure(limits)
        self.connections = 0
        self.body_bytes = 0
        self.refused: Counter[str] = Counter()
        self.unread_bytes = 0
        self._slow: dict[RequestHandler, int] = {}  # bytes by connection, the slowest client first
        self._clients: dict[str, Client] = {}

    def configure(self, limits: Limits) -> None:
        """Sets the limits. Connections beyond a lower one stay."""
        self.limits = limits
        self.max_connections = _within_descriptors(limits)

    def open(self, address: str, is_gateway: bool) -> Client | None:
        """Counts a new connection. Returns None, and counts nothing, if there are too many.

        ``is_gateway``: a trusted proxy, or a unix socket.
        """
        if self.connections >= self.max_connections:
            self.refused["connections"] += 1
            return None
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = Client(self, address, is_gateway)
        elif client.connections >= self.limits.max_connections_per_client and not is_gateway:
            self.refused["connections_per_client"] += 1
            return None
        client.connections += 1
        self.connections += 1
        return client

    def close(self, client: Client) -> None:
        """Removes a closed connection of `client` from the counts."""
        client.connections -= 1
        self.connections -= 1
        self._forget(client)

    def begin(self, address: str) -> Client:
        """Returns the client that a trusted proxy names as the sender of a request."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = Client(self, address, False)
        client.requests += 1
        return client

    def end(self, client: Client) -> None:
        """Ends a request of `begin`."""
        client.requests -= 1
        self._forget(client)

    def slow(self, connection: RequestHandler) -> None:
        """Counts the unread bytes of a connection. Closes the slowest beyond `UNREAD_BYTES`."""
        self.caught_up(connection)
        transport = connection.transport
        if transport is None:
            return
        tls = transport.get_extra_info("ssl_object") is not None
        size = transport.get_write_buffer_size() + (SLOW_TLS_CLIENT_BYTES if tls else SLOW_CLIENT_BYTES)
        self._slow[connection] = size
        self.unread_bytes += size
        while self.unread_bytes > UNREAD_BYTES:
            slowest = next(iter(self._slow))
            self.caught_up(slowest)
            self.refused["unread_bytes"] += 1
            if slowest.transport is not None:
                slowest.transport.abort()

    def caught_up(self, connection: RequestHandler) -> None:
        """Takes a connection off the count of unread bytes."""
        self.unread_bytes -= self._slow.pop(connection, 0)

    def _forget(self, client: Client) -> None:
        if not client.connections and not client.requests:
            del self._clients[client.address]

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of clients."""
        yield GaugeMetricFamily("lmetric_client_connections", "Open connections of clients", self.connections)
        yield GaugeMetricFamily(
            "lmetric_client_connections_limit",
            "Limit on client connections: limits.max_connections, less if the process may open fewer files",
            self.max_connections,
        )
        yield GaugeMetricFamily(
            "lmetric_client_body_bytes",
            "Bytes of requests being received, and of request bodies not yet answered by an engine",
            self.body_bytes,
        )
        yield GaugeMetricFamily(
            "lmetric_client_unread_bytes", "Bytes of answers that wait for slow clients", self.unread_bytes
        )
        refused = CounterMetricFamily(
            "lmetric_client_refusals",
            "Connections and requests refused or closed because of a limit on clients, by limit",
            labels=("bound",),
        )
        for bound in BOUNDS:
            refused.add_metric((bound,), self.refused[bound])
        yield refused


def _within_descriptors(limits: Limits) -> int:
    """Returns the limit on connections.

    It is lower than configured if the process cannot open two files for each: the client's and an
    engine's.
    """
    configured = limits.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * configured + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return configured
    possible = max((soft - OTHER_DESCRIPTORS) // 2, 1)
    tell = log.warning if "max_connections" in limits.model_fields_set or possible < 1024 else log.debug
    tell(
        "limits.max_connections reduced to fit the open-file limit",
        max_connections=possible,
        configured=configured,
        open_files=soft,
        fix=f"ulimit -n {wanted} (systemd: LimitNOFILE), or lower limits.max_connections",
    )
    return possible
