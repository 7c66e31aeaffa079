"""Passes chunks of a stream through the reader of engines' answers, for `instructions.py` to count.

python bench/http/chunks.py COUNT
"""

from __future__ import annotations

import sys
from collections import deque

import mock  # noqa: UP026 - the mock engines beside this file

from lmetric._core import Request, ResponseReader, Router

EVENT = mock.CHUNK % 12
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


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
    reader.begin(Sink(), ticket, True, True)
    reader.data_received(mock.STREAM_HEAD + CHUNK)
    written: deque[bytes] = deque(maxlen=1)
    reader.commit(b"", False, written.append)
    for _ in range(int(sys.argv[1])):
        reader.data_received(CHUNK)
    if written != deque([CHUNK]):
        sys.exit(f"chunks.py: the last chunk did not pass: {written}")


if __name__ == "__main__":
    main()
