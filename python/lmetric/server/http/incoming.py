"""The bytes that come in on a client's connection: where they go, and those that it keeps."""

from enum import IntEnum

from aiohttp import StreamReader
from aiohttp.http_exceptions import HttpProcessingError

from lmetric._core import ChunkedBody
from lmetric.server.api.request import add_piece
from lmetric.server.http.client_load import Client

# Bytes held of pipelined requests: reading pauses at HOLD_BYTES, and the connection closes at
# HOLD_LIMIT (aiohttp may resume reading).
HOLD_BYTES = 64 * 1024
HOLD_LIMIT = 64 * HOLD_BYTES


class State(IntEnum):
    """The state of a connection: the destination of its next bytes."""

    FREE = 0  # a new request
    COLLECTING = 1  # an incomplete request
    ASKED = 2  # the queue behind a request in flight
    SKIPPING = 3  # the rest of the body of a request that aiohttp has answered
    DISCARDING = 4  # none: the connection closes after its answer
    AWAITING = 5  # an incomplete request: reading is paused until its key is known


class HeldBytes:
    """Bytes of an incomplete request, or behind a request in flight.

    It has them in the pieces in which they came, and the client that pays for them.
    """

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


class NoRoomError(HttpProcessingError):
    """A body has reached a limit on body bytes."""


class BodyFeed:
    """The rest of an incomplete body. ``length``: its bytes; None: it comes in chunks."""

    __slots__ = ("_chunks", "_left", "reader")

    def __init__(self, length: int | None) -> None:
        self._chunks = ChunkedBody() if length is None else None
        self._left = length or 0
        self.reader: StreamReader | None = None  # of aiohttp

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come."""
        return self._left <= 0 if self._chunks is None else self._chunks.done

    def frame(self, data: bytes) -> tuple[bytes, int, bytes]:
        """Returns the next bytes for aiohttp, their body bytes, and the bytes behind the body.

        Raises WireError.
        """
        if self._chunks is None:
            body, rest = data[: self._left], data[self._left :]
            self._left -= len(body)
            return body, len(body), rest
        body, used = self._chunks.read(data)
        framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        if self._chunks.done:
            framed += b"0\r\n\r\n"
        return framed, len(body), data[used:]
