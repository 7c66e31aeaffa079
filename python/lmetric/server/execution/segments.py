"""What all plans of several segments have in common: a silent leg, what it hands over, and on to the next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmetric._core import NoInstanceError, Ticket
from lmetric.server.execution.rest import Rest
from lmetric.server.execution.silent import EngineRefusal, Silent
from lmetric.server.execution.transfer import KvTransfer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool
from lmetric.server.upstream.connection import Connection

if TYPE_CHECKING:
    from lmetric.server.execution.exchange import ClientRequest, Rules
    from lmetric.server.execution.relay import Relay


class Segments:
    """What a relay keeps of a request whose plan has several segments."""

    def __init__(self, relay: Relay, rules: Rules, asked: ClientRequest, pool: Pool, ticket: Ticket) -> None:
        self._relay = relay
        self._rules = rules
        self._asked = asked
        self._pool = pool
        self.ticket = ticket
        self._silent: Silent | None = None
        self._handed = KvTransfer(pool)
        self._rest: Rest | None = None  # the last leg, where its answer is looked at
        self._passes = False  # that is a whole request, whose answer is passed on
        self._passed_tokens = 0
        self._passed_cached: int | None = None
        self.first_token_at: float | None = None

    def refilled(self, engine: Engine, body: bytes) -> bytes:
        """A leg's body, as the engine's index wants it."""
        return self._relay.refilled(engine, body)

    def fail(self) -> None:
        """Nobody foresaw this."""
        self._relay.fail()

    def broke(self, status: int, error_code: int | None) -> bool:
        """Whether a leg's answer means that its engine could not fetch what was handed over; then it is to
        be sent there once more."""
        return self._handed.broke(status, error_code)

    def spends(self) -> bool:
        """Whether the leg sent last carried a KV transfer, which must not be sent again."""
        return self._handed.spend()

    def refused(self, engine: Engine, status: int, body: bytes) -> None:
        """An engine refused a leg."""
        if status in self._rules.statuses or self._relay.committed:
            said = engine.adapter.error(body)
            self._relay.move(engine, "status", f"status {status}" + (f": {said}" if said else ""))
            return
        if status >= 500:
            engine.failed("status", f"status {status}")
        self._relay.end_with(EngineRefusal(status, body))

    @property
    def attempt_open(self) -> bool:
        """Whether an engine works on a segment that the relay itself does not look after."""
        return any(leg is not None and not leg.ended for leg in (self._silent, self._rest))

    def resends(self, silent: Silent) -> bool:
        """Returns False: a first leg carries no KV transfer that could be used twice."""
        return False

    @property
    def speaks(self) -> bool:
        """Whether the client's answer is written here, not passed on by the relay."""
        return self._passes

    @property
    def output_tokens(self) -> int:
        """Of the answer, as far as the client has it."""
        return self._passed_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, as the engine that answered counted them."""
        return self._passed_cached

    @property
    def instance(self) -> str:
        """Who answers now, or next."""
        if self._rest is not None:
            return self._rest.engine.name
        return self.ticket.next_instance or self.ticket.instance

    # What the last leg calls, where its answer is looked at.

    def busy(self, status: int | None) -> bool:
        """Whether another engine is to be asked where one answers so."""
        return status in self._rules.statuses

    def moved(self, rest: Rest, kind: str, reason: str) -> None:
        """It failed before anything came of it."""
        self._rest = None
        self._passes = False
        self._relay.move(rest.engine, kind, reason)

    def passed(self, connection: Connection, answer: bytes | None) -> None:
        """It ended well, and all of it was passed on; `answer`: where it was not streamed."""
        self._passed_tokens = connection.output_tokens
        self._passed_cached = connection.cached_tokens
        self.first_token_at = connection.first_token_at
        if answer is not None:
            self._relay.commit_joined(b"application/json", len(answer))
        self._relay.say(b"data: [DONE]\n\n" if answer is None else answer, last=True)
        connection.finished()
        self._rest = None
        self._relay.joined_end()

    # Both.

    def pause(self, paused: bool) -> None:
        """The client does not keep up, or does again."""
        if self._rest is not None:
            self._rest.pause(paused)

    def _drop_rest(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.drop()

    def _drop_silent(self) -> None:
        silent, self._silent = self._silent, None
        if silent is not None:
            silent.drop()

    def _go_on(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """The open segment is over: on to the next."""
        try:
            following = self.ticket.finished(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        except NoInstanceError as error:
            self._relay.end_with(self._pool.no_engine_error(error))
            return
        assert following is not None  # another segment follows
        self._relay.segment(following, time.monotonic())
