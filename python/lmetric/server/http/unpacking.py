"""Unpacks compressed request bodies, piece by piece and mostly in a thread."""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor

from lmetric.server.api.errors import bad
from lmetric.server.api.request import LARGE_BODY, BodyParts
from lmetric.server.http.pacing import PacedHandler

# More work than this, in packed or unpacked bytes, is done in the thread.
LOOP_BYTES = 64 * 1024
# Bytes unpacked at once in the thread. Requests take turns, and each piece counts against the
# limits before it is unpacked.
PIECE_BYTES = 1 << 20
_INPUT_BYTES = 64 * 1024  # zlib copies the input that it has not read yet
# Most parts of a gzip body (RFC 1952, 2.2). Each one takes time of the interpreter.
_MAX_MEMBERS = 256


class Unpacker:
    """The unpacked bytes of a body, in pieces."""

    def __init__(self, encoding: str, packed: bytes) -> None:
        self._gzip = encoding == "gzip"
        self._packed = memoryview(packed)
        self._at = 0
        self._members = 1
        # Some clients send deflate without the header of zlib (RFC 9110, 8.4.1.2).
        self._bits = 31 if self._gzip else 15 if packed[0] & 15 == 8 else -15
        self._zlib = zlib.decompressobj(wbits=self._bits)

    def piece(self, size: int) -> bytes:
        """Returns the next bytes, fewer than ``size`` at the end.

        Raises ValueError for a broken body.
        """
        out = bytearray()
        try:
            while len(out) < size:
                if self._zlib.eof and not self._next_member():
                    break
                data: bytes | memoryview = self._zlib.unconsumed_tail
                if not data:
                    data = self._packed[self._at : self._at + _INPUT_BYTES]
                    self._at += len(data)
                got = self._zlib.decompress(data, size - len(out))
                if not (data or got or self._zlib.eof):
                    raise ValueError("it is incomplete")
                out += got
        except zlib.error as error:
            raise ValueError(str(error)) from None
        return bytes(out)

    def _next_member(self) -> bool:
        """Goes on with the next part of the body. Returns False at the end of the body."""
        rest = len(self._zlib.unused_data)
        self._at -= rest
        if self._at == len(self._packed):
            return False
        self._members += 1
        if not self._gzip or self._members > _MAX_MEMBERS:
            raise ValueError("it has bytes after its end")
        self._zlib = zlib.decompressobj(wbits=self._bits)
        return True


class Unpacking:
    """The thread that unpacks bodies."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lmetric-unpack")

    def close(self) -> None:
        """Stops the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def unpack(self, encoding: str, packed: bytes, limit: int, client: PacedHandler) -> bytes | None:
        """Returns the unpacked body, or its first bytes beyond ``limit``; None: no room for them.

        The unpacked bytes count in addition to the packed ones, which the caller counts.

        Raises ApiError (400).
        """
        unpacker = Unpacker(encoding, packed)
        loop = asyncio.get_running_loop()
        out = BodyParts()
        before = client.body_size
        piece = LOOP_BYTES if len(packed) <= LOOP_BYTES else 0
        while True:
            size = min(piece or PIECE_BYTES, limit + 1 - out.size)
            if not client.hold_body(size):
                return None
            try:
                if piece:
                    got = unpacker.piece(size)
                else:
                    got = await loop.run_in_executor(self._thread, unpacker.piece, size)
            except ValueError as error:
                raise bad(f"the body could not be read: it is not {encoding}: {error}") from None
            out.add(got)
            client.keep_body(before + out.size)
            if len(got) < size or out.size > limit:
                if out.size > LARGE_BODY:
                    return await loop.run_in_executor(self._thread, out.joined)
                return out.joined()
            piece = 0
