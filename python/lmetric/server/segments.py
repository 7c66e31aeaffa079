"""What all plans of several segments have in common: a silent leg, what it hands over, and on to the next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmetric._core import NoInstanceError, Ticket
from lmetric.config import ServerConfig
from lmetric.server.fleet import Engine, Pool
from lmetric.server.handed import Handed
from lmetric.server.openai import nobody_takes
from lmetric.server.silent import EngineRefusal, Silent

if TYPE_CHECKING:
    from lmetric.server.asked import Asked
    from lmetric.server.relay import Relay


class Segments:
    """What a relay keeps of a request whose plan has several segments."""

    def __init__(self, relay: Relay, config: ServerConfig, asked: Asked, pool: Pool, ticket: Ticket) -> None:
        self._relay = relay
        self._config = config
        self._asked = asked
        self._pool = pool
        self.ticket = ticket
        self._silent: Silent | None = None
        self._handed = Handed(pool)

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

    def refused(self, engine: Engine, status: int, body: bytes) -> None:
        """An engine refused a leg."""
        if status in self._config.retries.statuses or self._relay.committed:
            said = engine.adapter.error(body)
            self._relay.move(engine, "status", f"status {status}" + (f": {said}" if said else ""))
            return
        if status >= 500:
            engine.failed("status", f"status {status}")
        self._relay.end_with(EngineRefusal(status, body))

    def _drop_silent(self) -> None:
        silent, self._silent = self._silent, None
        if silent is not None:
            silent.drop()

    def _go_on(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """The open segment is over: on to the next."""
        try:
            following = self.ticket.finished(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        except NoInstanceError as error:
            self._relay.end_with(nobody_takes(self._pool.name, error))
            return
        assert following is not None  # another segment follows
        self._relay.segment(following, time.monotonic())
