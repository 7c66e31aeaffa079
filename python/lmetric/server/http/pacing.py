"""The parts of a client's connection that concern others: its share of the limits and of the time.

Its requests and their bytes count for its client. A connection that reads much leaves time to the
others.
"""

from typing import Any

import aiohttp
from aiohttp.web_protocol import RequestHandler

from lmetric._core import Peer
from lmetric.server.api.errors import ApiError, whole_answer
from lmetric.server.http.client_load import Client, ClientLoad
from lmetric.server.upstream.reading import read_on_later

if not hasattr(RequestHandler, "_pause_transport_reading"):
    raise ImportError(
        f"aiohttp {aiohttp.__version__} lacks what the server builds on: install 3.14.4 or a later 3.14"
    )

TOO_MANY_CONNECTIONS = whole_answer(
    ApiError(503, "too many connections", code="too_many_connections", headers={"retry-after": "1"}), None
)


class PacedHandler(RequestHandler):
    """An aiohttp connection that counts against the limits of its clients.

    Its large reads take turns with those of other connections.
    """

    __slots__ = ("_clients", "_late", "_resting", "_sender", "body_size", "client", "payer")

    def __init__(self, clients: ClientLoad, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clients = clients
        self.client: Client | None = None  # None: not connected, or over the limit
        # The client that pays for the request in flight; None: it has disconnected.
        self.payer: Client | None = None
        # The client that a trusted proxy names as the sender of the request in flight.
        self._sender: Client | None = None
        self.body_size = 0  # counted bytes of the request outside `HeldBytes`
        self._late: list[bytes] = []  # reads that a later turn processes
        self._resting = False  # reading is paused until the next turn of the loop

    # The limits of clients.

    def open_account(self, peer: Peer) -> bool:
        """Counts the connection. Returns False beyond a limit.

        A TLS listener calls this before the handshake.
        """
        self.client = self.payer = self._clients.open(peer.address, peer.trusted or not peer.address)
        return self.client is not None

    def close_account(self) -> None:
        """Takes the connection and its request off the counts."""
        self.keep_body(0)
        self._end_sender()
        client, self.client = self.client, None
        self.payer = None
        if client is not None:
            self._clients.close(client)

    def _name_sender(self, address: str) -> None:
        """Charges the request to the client that its trusted proxy names."""
        if self._sender is not None:
            self._clients.end(self._sender)
        self._sender = self.payer = self._clients.begin(address)

    def _end_sender(self) -> None:
        """Ends the request of the named client."""
        sender, self._sender = self._sender, None
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

    def release_body(self) -> None:
        """Releases the counted bytes of the request's body."""
        self.keep_body(0)

    # Reading in turns.

    def _received(self, data: bytes) -> None:
        """Processes a read."""
        raise NotImplementedError

    def _is_full(self) -> bool:
        """Returns whether reading stays paused."""
        raise NotImplementedError

    def _rest_reading(self) -> None:
        """Leaves the rest of the loop's turn to other connections."""
        if not self._resting:
            self._resting = True
            self._pause_transport_reading()
            read_on_later(self._loop, self._read_on)

    def _keep_late(self, data: bytes) -> None:
        """Keeps a read for a later turn."""
        client = self.client
        if client is None or not client.hold(len(data)):
            self.force_close()
        else:
            self._late.append(data)

    def _resume_transport_reading(self) -> None:
        if not self._resting:  # else `_read_on` resumes
            super()._resume_transport_reading()

    def _read_on(self) -> None:
        if self._late:
            read_on_later(self._loop, self._read_on)
            data = self._late.pop(0)
            if self.client is not None:
                self.client.release(len(data))
            if self.transport is not None and not self.transport.is_closing():
                self._received(data)
            return
        self._resting = False
        if not self._is_full() and not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _drop_late(self) -> None:
        """Drops the reads that wait for a turn."""
        if self.client is not None:
            self.client.release(sum(map(len, self._late)))
        self._late.clear()
