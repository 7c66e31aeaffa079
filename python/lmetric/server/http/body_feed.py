"""The body of a request in aiohttp, as its bytes come."""

from aiohttp import StreamReader
from aiohttp.http_exceptions import HttpProcessingError

from lmetric._core import ChunkedBody


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
