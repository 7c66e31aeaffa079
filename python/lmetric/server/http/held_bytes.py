"""The bytes that a connection keeps: of an incomplete request, or behind a request in flight."""

from lmetric.server.api.request import add_piece
from lmetric.server.http.client_load import Client

# Bytes held of pipelined requests: reading pauses at HOLD_BYTES, and the connection closes at
# HOLD_LIMIT (aiohttp may resume reading).
HOLD_BYTES = 64 * 1024
HOLD_LIMIT = 64 * HOLD_BYTES


class HeldBytes:
    """Bytes in the pieces in which they came, and the client that pays for them."""

    __slots__ = ("_payer", "_tail", "parts", "size")

    def __init__(self) -> None:
        self._payer: Client | None = None
        self._tail = b""  # the last bytes of an incomplete head
        self.parts: list[bytes | bytearray] = []
        self.size = 0

    def begin(self, payer: Client | None, data: bytes) -> bool:
        """Keeps the first bytes, for a client. Returns False beyond a limit on body bytes."""
        self._payer = payer
        self._tail = data[-2:]
        return self.add(data)

    def add(self, data: bytes) -> bool:
        """Keeps bytes. Returns False beyond a limit on body bytes."""
        if self._payer is None or not self._payer.hold(len(data)):
            return False
        add_piece(self.parts, data)
        self.size += len(data)
        return True

    def ends_head(self, data: bytes) -> bool:
        """Returns whether a head may end in ``data``, which was added last.

        Reading an incomplete head again for each of its pieces would take quadratic time.
        """
        data = self._tail + data
        self._tail = data[-2:]
        return b"\n\r\n" in data or b"\n\n" in data

    def take_parts(self) -> list[bytes | bytearray]:
        """Returns the bytes in pieces, and keeps none."""
        parts, self.parts = self.parts, []
        if self._payer is not None:
            self._payer.release(self.size)
        self.size = 0
        return parts

    def take(self) -> bytes:
        """Returns the bytes, and keeps none."""
        return b"".join(self.take_parts())
