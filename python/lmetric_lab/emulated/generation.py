"""Requests in progress: what the engine's tokens become, collected or streamed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from lmetric_lab.emulated.protocol import Shape


class StopText:
    """The text of an answer that stop strings or stop tokens may end, cut and held back as vLLM
    does."""

    def __init__(self, strings: Sequence[str], *, shown: bool, min_tokens: int) -> None:
        self.text = ""
        self._strings = strings
        self._shown = shown  # what ends the answer is part of it
        self._min_tokens = min_tokens  # stop strings count only after this many tokens
        # The longest beginning of a stop string, which a stream holds back until it is known to be
        # none.
        self._held = 0 if shown else max((len(string) - 1 for string in strings), default=0)
        self._sent = 0

    def more(self, text: str, tokens: int, *, stopped: bool) -> str | None:
        """Takes the text of the next token, the `tokens`-th. `stopped`: it is a stop token. Returns
        the stop string that ends the answer, if one does."""
        begin = len(self.text)
        if not stopped or self._shown:
            self.text += text
        if tokens <= self._min_tokens:
            return None
        for string in self._strings:
            at = self.text.find(string, max(0, begin + 1 - len(string)))
            if at >= 0:
                self.text = self.text[: at + len(string) if self._shown else at]
                return string
        return None

    def due(self, over: bool) -> str:
        """The text that a stream can send now. `over`: the answer is complete."""
        end = len(self.text) - (0 if over else self._held)
        if end <= self._sent:
            return ""
        begin, self._sent = self._sent, end
        return self.text[begin:end]


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
        stop_text: StopText | None = None,  # where token ids or strings may end it
    ) -> None:
        self.shape = shape
        self._stops = stops
        self.stop_text = stop_text
        self.stop_reason: int | str | None = None
        self.max_tokens = max_tokens
        self.break_after = break_after
        self.key = -1  # the engine's name for it, once submitted
        self.arrived = 0.0
        self.scheduled = 0.0
        self.first_token = 0.0
        self.interrupted = 0.0  # by a preemption; 0: not, or over
        self.cached_tokens = 0
        self.fetched_tokens = 0  # of the prompt, from another engine
        self.garbage: array[int] | None = None  # words of an answer with wrong KV
        self.kv_transfer_params: dict[str, Any] | None = None  # for the engine that takes over
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def broken(self) -> bool:
        """Whether it has reached the token at which it must fail."""
        return self.break_after is not None and len(self.tokens) >= self.break_after

    def push(self, token: int, last: bool) -> None:
        """Takes the next token."""
        token = self._said(token)
        self.tokens.append(token)
        self._judge(token, last)

    def _judge(self, token: int, last: bool) -> None:
        stopped = token in self._stops
        if stopped:
            self.finish_reason, self.stop_reason = "stop", token
        elif last:
            self.finish_reason = "length"
        if self.stop_text is not None:
            found = self.stop_text.more(self.shape.text_of(token), len(self.tokens), stopped=stopped)
            if found is not None:
                self.finish_reason, self.stop_reason = "stop", found

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
    """A streamed generation. Tokens that are due together are sent in one write."""

    def __init__(
        self,
        shape: Shape,
        max_tokens: int,
        *,
        break_after: int | None = None,
        stops: Collection[int] = (),
        stop_text: StopText | None = None,
        transport: asyncio.WriteTransport,
        chunked: bool,
        cached_tokens_reported: bool,
    ) -> None:
        super().__init__(shape, max_tokens, break_after=break_after, stops=stops, stop_text=stop_text)
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
        text = None if self.stop_text is None else self.stop_text.due(self.finish_reason is not None)
        self._due.append(
            self.shape.token(token, len(self.tokens), self.finish_reason, self.stop_reason, text)
        )

    def flush(self) -> None:
        """Writes what is due. Straight to the transport: a coroutine for each token would cost more
        than the token."""
        if self.finish_reason and not self.broken and not self.over.done():
            cached = self.cached_tokens if self._cached_tokens_reported else None
            self._due.append(self.shape.closing(len(self.tokens), cached))
        self.write(b"".join(self._due))
        self._due.clear()
        super().flush()

    def abort(self) -> None:
        """Ends the stream as vLLM does when it is stopped: a last chunk that says so, and the end
        mark."""
        self._due.append(self.shape.aborted())
        super().abort()

    def write(self, data: bytes) -> None:
        """Writes bytes of the body, framed."""
        if data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
