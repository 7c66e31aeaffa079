"""Requests in progress: what the engine's tokens become, collected or streamed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection
from typing import Any

from lmetric.engines.emulated.protocol import Shape


class Generation:
    """One request in the engine, its answer collected to be sent whole. Times are the engine's, in
    seconds."""

    def __init__(
        self,
        shape: Shape,
        max_tokens: int,
        *,
        break_after: int | None = None,
        stops: Collection[int] = (),  # token ids that end it
    ) -> None:
        self.shape = shape
        self._stops = stops
        self.max_tokens = max_tokens
        self.break_after = break_after
        self.key = -1  # the engine's name for it, once submitted
        self.arrived = 0.0
        self.scheduled = 0.0
        self.first_token = 0.0
        self.interrupted = 0.0  # by a preemption; 0: not, or over
        self.cached_tokens = 0
        self.pulled_tokens = 0  # of the prompt, from another engine
        self.garbage: array[int] | None = None  # words of an answer whose pulled tokens were another prompt's
        self.kv_transfer_params: dict[str, Any] | None = None  # for the engine that takes over
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def broken(self) -> bool:
        """Whether it has reached the token after which it was told to fail."""
        return self.break_after is not None and len(self.tokens) >= self.break_after

    def push(self, token: int, last: bool) -> None:
        """Takes the next token."""
        token = self._said(token)
        self.tokens.append(token)
        self._judge(token, last)

    def _judge(self, token: int, last: bool) -> None:
        if token in self._stops:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "length"

    def _said(self, token: int) -> int:
        return token if self.garbage is None else self.garbage[(7 * token + 1) % len(self.garbage)]

    def die(self) -> None:
        """The engine dies."""
        self.break_after = 0
        self.flush()

    def flush(self) -> None:
        """Sends what has come since the last time; tells who waits that it is over."""
        if (self.finish_reason or self.broken) and not self.over.done():
            self.over.set_result(None)

    def abort(self) -> None:
        """The engine ends it before its last token."""
        self.finish_reason = "abort"
        self.flush()


class Stream(Generation):
    """A generation whose tokens go to the client as they come: whatever is due together leaves in one
    write."""

    def __init__(
        self,
        shape: Shape,
        max_tokens: int,
        *,
        break_after: int | None = None,
        stops: Collection[int] = (),
        transport: asyncio.WriteTransport,
        chunked: bool,
        cached_tokens_reported: bool,
    ) -> None:
        super().__init__(shape, max_tokens, break_after=break_after, stops=stops)
        self._transport = transport
        self._chunked = chunked
        self._cached_tokens_reported = cached_tokens_reported
        self._due: list[bytes] = []

    def push(self, token: int, last: bool) -> None:
        """Takes the next token."""
        if self.broken:
            return
        if not self.tokens:
            self._due.append(self.shape.opening())
        token = self._said(token)
        self.tokens.append(token)
        self._judge(token, last)
        self._due.append(self.shape.token(token, len(self.tokens), self.finish_reason))

    def flush(self) -> None:
        """Writes what is due. Straight to the transport: a coroutine for each token would cost more than the
        token."""
        if self.finish_reason and not self.broken and not self.over.done():
            cached = self.cached_tokens if self._cached_tokens_reported else None
            self._due.append(self.shape.closing(len(self.tokens), cached))
        self.write(b"".join(self._due))
        self._due.clear()
        super().flush()

    def abort(self) -> None:
        """Ends the stream as vLLM does when it is stopped: a last chunk that says so, and the end mark."""
        self._due.append(self.shape.aborted())
        super().abort()

    def write(self, data: bytes) -> None:
        """Writes bytes of the body, framed."""
        if data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
