"""The answer that one client gets: passed on from an engine, or written by the router, and ended once."""

from __future__ import annotations

import re
from typing import Literal

from lmetric._core import ResponseReader
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest

_CORS_FIELDS = re.compile(rb"\r\naccess-control-[^\r\n]*", re.IGNORECASE)


# Who writes the answer: nobody yet; an engine, whose bytes pass; the router; or it has ended.
AnswerState = Literal["nothing", "passed", "written", "ended"]


class ClientAnswer:
    """The answer to one client. `show_engines`: whether its head names them."""

    __slots__ = ("_asked", "_chunked", "_reader", "_show_engines", "close", "state")

    def __init__(self, asked: ClientRequest, show_engines: bool) -> None:
        self._asked = asked
        self._show_engines = show_engines
        self._reader: ResponseReader | None = None  # whose bytes pass
        self._chunked = False  # what the router writes goes out in chunks
        self.close = False  # only closing the connection ends it
        self.state: AnswerState = "nothing"

    def pass_on(self, reader: ResponseReader, label: str, engine: str, prefill: str | None) -> None:
        """Begins with what an engine has said so far; from now on its bytes pass."""
        asked = self._asked
        self.state = "passed"
        self._reader = reader
        write = asked.transport.write
        head = reader.commit(self._lines(label, engine, prefill), not asked.keep_alive, write)
        write(_with_cors(head, asked.cors) if asked.cors else head)

    def begin(self, kind: bytes, length: int | None, label: str, engine: str, prefill: str | None) -> None:
        """Begins an answer of the router's own; `length`: of its body, None: it is streamed."""
        asked = self._asked
        self.state = "written"
        lines = [
            b"HTTP/1.1 200 OK\r\ncontent-type: ",
            kind,
            b"\r\n",
            self._lines(label, engine, prefill),
            asked.cors,
        ]
        self._chunked = length is None and asked.http11
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self.close = True
        if self.close or not asked.keep_alive:
            lines.append(b"connection: close\r\n")
        asked.transport.write(b"".join(lines) + b"\r\n")

    def write(self, data: bytes, *, last: bool = False) -> None:
        """More of it, written by the router; where a stream passed so far, behind its last event."""
        if self.state == "passed":
            assert self._reader is not None
            self.state = "written"
            self._chunked = not self._reader.closes_client
            self.close = self._reader.closes_client
        if self._chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"0\r\n\r\n" if last else b"")
        if data:
            self._asked.transport.write(data)
        if last:
            self.state = "ended"

    def break_off(self, error: ApiError) -> None:
        """Ends what the client has some of, with an error as the last event; where that cannot be told, by
        closing its connection."""
        body = error.body(self._show_engines)
        if self.state == "written":
            self.write(b"data: %b\n\ndata: [DONE]\n\n" % body, last=True)
        elif self.state == "passed":
            assert self._reader is not None
            tail = self._reader.end_with(body)
            if tail:
                self._asked.transport.write(tail)
            else:
                self.close = True
            self.close |= self._reader.closes_client
        self.state = "ended"

    def passed(self) -> None:
        """An engine's answer has passed to its end."""
        if self.state == "passed":
            assert self._reader is not None
            self.close |= self._reader.closes_client
            self.state = "ended"

    def _lines(self, label: str, engine: str, prefill: str | None) -> bytes:
        """Lines of the head that are the router's."""
        request_id = self._asked.head.request_id
        lines = f"x-lmetric-decision: {label}\r\nx-request-id: {request_id}\r\n".encode("latin-1")
        if not self._show_engines:
            return lines
        first = b"x-lmetric-prefill: %b\r\n" % prefill.encode() if prefill else b""
        return b"x-lmetric-instance: %b\r\n%b%b" % (engine.encode(), lines, first)


def _with_cors(answer: bytes, lines: bytes) -> bytes:
    """The beginning of an engine's answer with these lines instead of the engine's own CORS fields."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    return b"%b\r\n%b\r\n%b" % (_CORS_FIELDS.sub(b"", head), lines, rest)
