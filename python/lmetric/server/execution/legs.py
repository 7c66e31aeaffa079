"""Requests whose plan has two segments: the prompt is computed by one engine, the answer comes from another.

The first leg is silent: its answer is the router's. The second is the relay's own, unless its engine would
tell in a plain answer where it holds what it has: that is no client's business. What a first leg hands over
is used once and in time; else the second engine computes the prompt itself, which costs time and never the
answer.
"""

import contextlib
import time
from typing import TYPE_CHECKING, cast

import orjson

from lmetric._core import NoInstanceError, Ticket
from lmetric.engines.handover import HandoverError, with_fields
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.execution.rest import Passed, Rest
from lmetric.server.execution.segments import Segments
from lmetric.server.execution.silent import Silent, usage_of
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool
from lmetric.server.upstream.connection import Connection

if TYPE_CHECKING:
    from lmetric.server.execution.chain import Chain
    from lmetric.server.execution.exchange import ClientRequest, Rules
    from lmetric.server.execution.relay import Relay


class Legs(Segments):
    """What a relay keeps of a plan with two segments."""

    def __init__(
        self, relay: "Relay", rules: "Rules", asked: "ClientRequest", pool: Pool, ticket: Ticket
    ) -> None:
        super().__init__(relay, rules, asked, pool, ticket)
        self._first: Engine | None = None  # that computed the prompt, or does
        self._joined: bytes | None = None  # the body of both legs that run at once
        self._prompt_tokens: int | None = None

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
            following = self._pool.engines.get(self.ticket.next_instance or "")
            if following is None:
                self._go_on(None, None)
            else:
                self._relay.go(following, now)

    def second(self, engine: Engine, now: float) -> None:
        """The second segment's turn is now, at this engine; it may be at work where both run at once."""
        if self._joined is None and self._tells(engine):
            fields = self._handed.fields(engine, now) or {}
            body = with_fields(self._relay.body, fields) if fields else self._relay.body
            self._passes = True
            target = self._asked.path.encode()
            # Of an answer that is neither streamed nor checked, it calls what all segments have, and `again`.
            self._rest = Passed(cast("Chain", self), self._asked, body, False, target, now)
            self._rest.go(engine, now)
        elif self._joined is None:
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

    def _tells(self, engine: Engine) -> bool:
        """Whether an engine that fetches now says in its answer where it holds what it then has."""
        told = engine.handover
        tells = told is not None and bool(told.bidirectional)
        return tells and self._handed.there and not self._relay.streams

    def again(self, rest: Rest) -> None:
        """The second leg could not fetch what was handed over: once more, without."""
        self._rest, self._passes = None, False
        self.second(rest.engine, time.monotonic())

    @property
    def prompt_tokens(self) -> int | None:
        """Of the prompt, as far as the second leg's answer tells."""
        return self._prompt_tokens

    def passed(self, connection: Connection, answer: bytes | None) -> None:
        """The second leg ended well."""
        self._prompt_tokens = connection.prompt_tokens
        super().passed(connection, answer)

    def body(self, engine: Engine, body: bytes, now: float) -> bytes:
        """The second leg's body for this engine."""
        if self._joined is not None:
            return self._joined
        fields = self._handed.fields(engine, now)
        return body if fields is None else with_fields(body, fields)

    def settle(self, engine: Engine) -> str | None:
        """An attempt at `engine` failed, and the ticket is about to be told. Where the request goes on, if it
        need not be. Raises NoInstanceError."""
        self.drop()
        if self._joined is None or engine is self._first or not self.ticket.follows:
            return None
        # Both ran at once, and it is the second segment that failed: let it be the open one.
        following = self.ticket.finished()
        return following if following != engine.name else None

    def second_ended(self) -> bool:
        """The second leg's answer ended well; whether the ticket is still open.

        Where both legs run at once, this may come before the first's answer. Then the first segment is over,
        too; if all engines were removed meanwhile, that closes the ticket.
        """
        if self._joined is not None and self.ticket.follows:
            with contextlib.suppress(NoInstanceError):
                self.ticket.finished()
        return self.ticket.open

    def drop(self) -> None:
        """Gives up what is on its way and is not the relay's own."""
        self._drop_silent()
        self._drop_rest()

    def check(self, now: float) -> None:
        """Ends a leg that takes too long."""
        silent, limit = self._silent, self._rules.timeouts.first_byte
        if silent is not None and not silent.ended and now - silent.started > limit:
            silent.settle("timeout", f"no answer within {limit:g} s")
        elif self._rest is not None:
            self._rest.check(now, self._rules.timeouts)

    @property
    def header(self) -> bytes:
        """A line of the answer's head: who computed the prompt."""
        return b"x-lmetric-prefill: %s\r\n" % self._first.name.encode() if self._first else b""

    # What the silent leg calls.

    def sent(self, now: float) -> None:
        """It is on its way."""
        if self.ticket.follows or self._rest is not None:
            self.ticket.sent(now)

    def answered(self, silent: Silent, status: int, body: bytes) -> None:
        """It answered."""
        engine, self._silent = silent.engine, None
        if self._relay.committed:
            return  # both ran at once, and the answer is on its way
        if status != 200:
            self.refused(engine, status, body)
            return
        engine.failures = 0
        if not self.ticket.follows:
            return  # the second leg's first token was here before
        prompt, cached = usage_of(body)
        if self._joined is None:
            self._handed.accept(engine, body)
        self._go_on(prompt, cached)

    def failed(self, silent: Silent, kind: str, reason: str) -> None:
        """It failed."""
        self._silent = None
        if not self._relay.committed:
            self._relay.move(silent.engine, kind, reason)

    # Both.

    def _prefill(self, engine: Engine, body: bytes, now: float) -> bool:
        """Sends a first leg; whether it is on its way and has not failed at once, and moved on."""
        silent = self._silent = Silent(self, self._asked, body, now)
        silent.go(engine, now)
        return self._silent is silent
