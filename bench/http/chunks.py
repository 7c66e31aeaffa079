"""Passes chunks of a stream through the reader of engines' answers, for `instructions.py` to count.

python bench/http/chunks.py COUNT [recorded]

`recorded`: the engine sends token ids, which the reader records and hides (`stream_failover`).
"""

from __future__ import annotations

import sys
from collections import deque

import mock  # noqa: UP026 - the mock engines beside this file

from lmetric._core import Request, ResponseReader, Router

RECORDED = sys.argv[2:] == ["recorded"]
EVENT = (mock.CHUNK_WITH_ID if RECORDED else mock.CHUNK) % 12
SHOWN = EVENT.replace(b"[1465]", b"null")


def framed(event: bytes) -> bytes:
    """Returns an event in a chunk of its own."""
    return b"%x\r\n%b\r\n" % (len(event), event)


CHUNK = framed(EVENT)


class Sink:
    """Receives bytes that the reader does not write to the client itself."""

    def received(self, flags: int, data: bytes) -> None:
        """Handles the first event, at which the answer is committed."""

    def failed(self, error: Exception) -> None:
        """Raises the error: no answer fails here."""
        raise error


def main() -> None:
    """Reads `COUNT` chunks and checks that the last chunk was written."""
    router = Router()
    router.add_instance("engine")
    _, ticket = router.route(Request(prompt_tokens=10))
    ticket.sent()
    reader = ResponseReader()
    reader.begin(Sink(), ticket, True, True, RECORDED, RECORDED)
    reader.data_received(mock.STREAM_HEAD + CHUNK)
    written: deque[bytes] = deque(maxlen=1)
    reader.commit(b"", False, written.append)
    for _ in range(int(sys.argv[1])):
        reader.data_received(CHUNK)
    if written != deque([framed(SHOWN)]) or (RECORDED and reader.observed_tokens != int(sys.argv[1]) + 1):
        sys.exit(f"chunks.py: the last chunk did not pass: {written}")


if __name__ == "__main__":
    main()
