"""Requests whose plan has two segments: the prompt is computed by one engine, the answer comes from another.

The first leg is silent: its answer is the router's. The second is the relay's own. What a first leg hands
over is used once and in time; else the second engine computes the prompt itself, which costs time and never
the answer.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import orjson

from lmetric._core import NoInstanceError, Ticket
from lmetric.config import ServerConfig
from lmetric.engines.handover import HandoverError, with_fields
from lmetric.server.fleet import Engine, Pool
from lmetric.server.handed import Handed
from lmetric.server.leg import Leg
from lmetric.server.openai import ApiError, bad
from lmetric.server.upstream import Connection, Fetch, UpstreamError

if TYPE_CHECKING:
    from lmetric.server.asked import Asked
    from lmetric.server.relay import Relay


class EngineRefusal(ApiError):
    """An engine's own error answer, for the client as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, "")
        self._answer = body

    def body(self) -> bytes:
        """What the engine said."""
        return self._answer


class Hearer(Protocol):
    """Who is told how a silent leg ended."""

    def sent(self, now: float) -> None: ...
    def refilled(self, engine: Engine, body: bytes) -> bytes: ...
    def answered(self, silent: "Silent", status: int, body: bytes) -> None: ...
    def failed(self, silent: "Silent", kind: str, reason: str) -> None: ...
    def fail(self) -> None: ...


class Silent(Leg):
    """A leg whose answer the client does not see; ``legs`` is told how it ended. ``target``: where it goes,
    if not where the client's request went."""

    def __init__(
        self, legs: Hearer, asked: "Asked", body: bytes, now: float, target: bytes | None = None
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
            status, body = done.result()
        except UpstreamError as error:
            if not self._fresh and not connection.pieces:
                # An engine may close a kept connection just when the next request is on its way: no failure.
                self._drop()
                self._connect()
            else:
                self.settle(error.kind, str(error))
            return
        try:
            self.ended = True
            self._connection = None
            if (load := connection.load) is not None:
                self._engine.report(self._engine.adapter.load_of_header(load), "header")
            connection.release()
            self._legs.answered(self, status, body)
        except Exception:
            self.fail()

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


class Legs:
    """What a relay keeps of a plan with two segments."""

    def __init__(
        self, relay: "Relay", config: ServerConfig, asked: "Asked", pool: Pool, ticket: Ticket
    ) -> None:
        self._relay = relay
        self._config = config
        self._asked = asked
        self._pool = pool
        self._ticket = ticket
        self._silent: Silent | None = None
        self._first: Engine | None = None  # that computed the prompt, or does
        self._joined: bytes | None = None  # the body of both legs that run at once
        self._handed = Handed(pool)

    # What the relay calls.

    def begin(self, engine: Engine, body: bytes, now: float) -> None:
        """Sends the first of two legs, and the second with it where both run at once."""
        self._first, self._joined = engine, None
        self._handed.begin(engine)
        connector, told = engine.connector, engine.handover
        try:
            if connector is None or told is None:
                raise HandoverError(f"{engine.name} hands nothing over")
            leg = connector.first(self._asked.path, body, orjson.loads(body), engine.host, told)
        except HandoverError as error:
            if connector is not None and connector.at_once:
                self._relay.end_with(
                    bad(f"{self._pool.name} is served by prefill and decode engines: {error}")
                )
                return
            self._handed.recompute("not_cut", str(error))
            self._go_on(None, None)
            return
        if connector.at_once:
            self._joined = leg
        if self._prefill(engine, leg, now) and connector.at_once:
            following = self._pool.engines.get(self._ticket.next_instance or "")
            if following is None:
                self._go_on(None, None)
            else:
                self._relay.go(following, now)

    def second(self, engine: Engine, now: float) -> None:
        """The second segment's turn is now, at this engine; it may be at work where both run at once."""
        if self._joined is None:
            self._relay.go(engine, now)
        elif not self._relay.at_work(engine):
            # Another engine: it needs the prompt to be computed again.
            self._relay.drop()
            first, body = self._first, self._relay.body
            told = first.handover if first else None
            if first is None or first.connector is None or told is None:
                self._relay.end_with(ApiError(502, "no engine could answer", code="reset"))
                return
            self._joined = first.connector.first(self._asked.path, body, orjson.loads(body), first.host, told)
            if self._prefill(first, self._joined, now):
                self._relay.go(engine, now)

    def body(self, engine: Engine, body: bytes, now: float) -> bytes:
        """The second leg's body for this engine."""
        if self._joined is not None:
            return self._joined
        fields = self._handed.fields(engine, now)
        return body if fields is None else with_fields(body, fields)

    def broke(self, status: int, error_code: int | None) -> bool:
        """Whether an answer of the second engine means that it could not fetch what was handed over; then the
        request is to be sent there once more."""
        return self._handed.broke(status, error_code)

    def settle(self, engine: Engine) -> str | None:
        """An attempt at `engine` failed, and the ticket is about to be told. Where the request goes on, if it
        need not be. Raises NoInstanceError."""
        self.drop()
        if self._joined is None or engine is self._first or not self._ticket.follows:
            return None
        # Both ran at once, and it is the second segment that failed: let it be the open one.
        following = self._ticket.finished()
        return following if following != engine.name else None

    def drop(self) -> None:
        """Gives the silent leg up."""
        silent, self._silent = self._silent, None
        if silent is not None:
            silent.drop()

    def check(self, now: float) -> None:
        """Ends a first leg that takes too long."""
        silent, limit = self._silent, self._config.timeouts.first_byte
        if silent is not None and not silent.ended and now - silent.started > limit:
            silent.settle("timeout", f"no answer within {limit:g} s")

    @property
    def header(self) -> bytes:
        """A line of the answer's head: who computed the prompt."""
        return b"x-lmetric-prefill: %s\r\n" % self._first.name.encode() if self._first else b""

    # What the silent leg calls.

    def sent(self, now: float) -> None:
        """It is on its way."""
        if self._ticket.follows:
            self._ticket.sent(now)

    def refilled(self, engine: Engine, body: bytes) -> bytes:
        """Its body, as the engine's index wants it."""
        return self._relay.refilled(engine, body)

    def answered(self, silent: Silent, status: int, body: bytes) -> None:
        """It answered."""
        engine, self._silent = silent.engine, None
        if self._relay.committed:
            return  # both ran at once, and the answer is on its way
        if status != 200:
            self._refused(engine, status, body)
            return
        engine.failures = 0
        if not self._ticket.follows:
            return  # the second leg's first token was here before
        prompt, cached = usage_of(body)
        if self._joined is None:
            self._handed.accept(engine, body)
        self._go_on(prompt, cached)

    def _refused(self, engine: Engine, status: int, body: bytes) -> None:
        if status in self._config.retries.statuses:
            said = engine.adapter.error(body)
            self._relay.move(engine, "status", f"status {status}" + (f": {said}" if said else ""))
            return
        if status >= 500:
            engine.failed("status", f"status {status}")
        self._relay.end_with(EngineRefusal(status, body))

    def failed(self, silent: Silent, kind: str, reason: str) -> None:
        """It failed."""
        self._silent = None
        if not self._relay.committed:
            self._relay.move(silent.engine, kind, reason)

    def fail(self) -> None:
        """Nobody foresaw this."""
        self._relay.fail()

    # Both.

    def _prefill(self, engine: Engine, body: bytes, now: float) -> bool:
        """Sends a first leg; whether it is on its way and has not failed at once, and moved on."""
        silent = self._silent = Silent(self, self._asked, body, now)
        silent.go(engine, now)
        return self._silent is silent

    def _go_on(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """The first segment is over: on to the next, unless both run at once and it is at work already."""
        try:
            following = self._ticket.finished(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        except NoInstanceError as error:
            self._relay.end_with(
                ApiError(503, f"{self._pool.name}: {error}", code="no_engine", headers={"retry-after": "2"})
            )
            return
        assert following is not None  # another segment follows
        self._relay.segment(following, time.monotonic())


def usage_of(answer: bytes) -> tuple[int | None, int | None]:
    """Prompt tokens and cached ones, as far as an answer tells."""
    try:
        usage = orjson.loads(answer)["usage"]
        prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None, None
    return (
        prompt if isinstance(prompt, int) else None,
        cached if isinstance(cached, int) else None,
    )
