"""A leg whose answer is the router's: nobody streams it, and the client never sees it."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from lmetric._core import MAX_TOKENS
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.leg import Leg
from lmetric.server.fleet.engine import Engine
from lmetric.server.upstream.connection import Connection, UpstreamError
from lmetric.server.upstream.fetch import Fetch

if TYPE_CHECKING:
    from lmetric.server.execution.exchange import ClientRequest


class EngineRefusal(ApiError):
    """An engine's own error answer, for the client as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, "")
        self._answer = body

    def body(self, show_engines: bool = True) -> bytes:
        """What the engine said."""
        return self._answer


class Hearer(Protocol):
    """Who is told how a silent leg ended."""

    def sent(self, now: float) -> None: ...
    def refilled(self, engine: Engine, body: bytes) -> bytes: ...
    def resends(self, silent: "Silent") -> bool: ...
    def answered(self, silent: "Silent", status: int, body: bytes) -> None: ...
    def failed(self, silent: "Silent", kind: str, reason: str) -> None: ...
    def fail(self) -> None: ...


class Silent(Leg):
    """A leg whose answer the client does not see; ``legs`` is told how it ended. ``target``: where it goes,
    if not where the client's request went."""

    def __init__(
        self, legs: Hearer, asked: "ClientRequest", body: bytes, now: float, target: bytes | None = None
    ) -> None:
        self._legs = legs
        self._asked = asked
        self._body = body
        self._target = target
        self.started = now
        self._fetch: Fetch | None = None

    @property
    def engine(self) -> Engine:
        """Where it is."""
        return self._engine

    def _ask(self, connection: Connection, now: float) -> None:
        self._connection = connection
        if connection.transport.is_closing():
            self.settle("reset", "connection closed as soon as it was made")
            return
        self._fetch = Fetch(connection)
        self._fetch.done.add_done_callback(self._answered)
        self._write(connection, self._legs.refilled(self._engine, self._body), False)
        self._legs.sent(now)

    def _answered(self, done: asyncio.Future[tuple[int, bytes]]) -> None:
        connection = self._connection
        if self.ended or connection is None or self._fetch is None or done is not self._fetch.done:
            return
        try:
            error = done.exception()
            if isinstance(error, UpstreamError):
                if self._fresh or connection.pieces:
                    self.settle(error.kind, str(error))
                else:
                    self._resend()
                return
            status, body = done.result()
            self.ended = True
            self._connection = None
            if (load := connection.load) is not None:
                self._engine.report(self._engine.adapter.load_of_header(load), "header")
            connection.release()
            self._legs.answered(self, status, body)
        except Exception:
            self.fail()

    def _resend(self) -> None:
        """Sends the leg again. An engine may close a kept connection just when the next request is on its
        way: no failure. But it may have fetched what the leg carries, which is not sent twice."""
        self._drop()
        self.ended = True
        if not self._legs.resends(self):
            self.ended = False
            self._connect()

    def settle(self, kind: str, reason: str) -> None:
        """It failed."""
        self.drop()
        try:
            self._legs.failed(self, kind, reason)
        except Exception:
            self.fail()

    def drop(self) -> None:
        """Gives up, without a word."""
        self.ended = True
        self._drop()

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""
        self._legs.fail()


def usage_of(answer: bytes) -> tuple[int | None, int | None]:
    """Prompt tokens and cached tokens of an answer; None where absent or where they cannot be true."""
    try:
        usage = orjson.loads(answer)["usage"]
        prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None, None
    prompt = prompt if _plausible(prompt, MAX_TOKENS) else None
    return prompt, cached if _plausible(cached, MAX_TOKENS if prompt is None else prompt) else None


def _plausible(count: Any, most: int) -> bool:
    return type(count) is int and 0 <= count <= most
