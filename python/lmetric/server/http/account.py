"""The clients that pay for a connection, for its requests and for their bytes."""

from lmetric._core import Peer
from lmetric.server.api.errors import ApiError, whole_answer
from lmetric.server.http.client_load import Client, ClientLoad

TOO_MANY_CONNECTIONS = whole_answer(
    ApiError(503, "too many connections", code="too_many_connections", headers={"retry-after": "1"}), None
)


class ConnectionAccount:
    """Counts a connection and its request in flight against the limits of their clients."""

    __slots__ = ("_clients", "body_size", "client", "payer", "sender")

    def __init__(self, clients: ClientLoad) -> None:
        self._clients = clients
        self.client: Client | None = None  # None: not connected, or over the limit
        # The client that pays for the request in flight; None: it has disconnected.
        self.payer: Client | None = None
        # The client that a trusted proxy names as the sender of the request in flight.
        self.sender: Client | None = None
        self.body_size = 0  # counted bytes of the request outside `HeldBytes`

    def open(self, peer: Peer) -> bool:
        """Counts the connection. Returns False beyond a limit.

        A TLS listener calls this before the handshake.
        """
        self.client = self._clients.open(peer.address, peer.trusted or not peer.address)
        self.payer = self.client
        return self.client is not None

    def close(self) -> None:
        """Takes the connection and its request off the counts."""
        self.keep_body(0)
        self.end_sender()
        client, self.client = self.client, None
        self.payer = None
        if client is not None:
            self._clients.close(client)

    def name_sender(self, address: str) -> None:
        """Charges the request to the client that its trusted proxy names."""
        if self.sender is not None:
            self._clients.end(self.sender)
        self.sender = self.payer = self._clients.begin(address)

    def end_sender(self) -> None:
        """Ends the request of the named client."""
        sender, self.sender = self.sender, None
        self.payer = self.client
        if sender is not None:
            self._clients.end(sender)

    def hold_body(self, size: int) -> bool:
        """Counts bytes of a request outside `HeldBytes`. Returns False beyond a limit."""
        payer = self.payer
        if payer is None or not payer.hold(size):
            return False
        self.body_size += size
        return True

    def keep_body(self, size: int) -> None:
        """Counts only ``size`` of the counted bytes."""
        payer = self.payer
        if payer is not None:
            payer.release(self.body_size - size)
        self.body_size = size
