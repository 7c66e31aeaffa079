"""A request that may move, run from its start in bounded silent legs: its client gets its tokens leg by leg.

Between two legs it is nowhere, so it may go on anywhere: an answer that is not streamed, too. A leg hands
nothing over, as an engine pins for its lease what nobody fetches; only where the request is to move, the
engine is asked for what it then has in its prefix cache (`moving`). The first leg of each segment has one
token: its client does not wait for more, and the router learns what a prefill costs as from a stream.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmetric.server.execution.chain import Chain, object_of
from lmetric.server.execution.silent import Silent
from lmetric.server.execution.transcript import MergeError, dumps
from lmetric.server.fleet.engine import Engine

if TYPE_CHECKING:
    from lmetric.server.execution.transfer import KvTransfer

# The second leg of a segment, where legs have no fixed length.
FIRST_TOKENS = 8


class Bounded(Chain):
    """What a relay keeps of such a request."""

    _plain_moves = True
    _fresh = True  # the open segment has told no token
    _tokens = 0  # of the leg that runs
    _rate = 0.0  # seconds a token, of the last leg
    _idle_since = 0.0  # the last leg's end
    _fetches = False  # what was there then, with its first leg elsewhere
    _waits_at: Engine | None = None  # between two legs, for a client that does not keep up

    def last(self, engine: Engine, now: float) -> bool:
        """Sends the next leg of the last segment; False: the relay itself has to."""
        joined = self.joined
        # Without a prefix cache, each leg would compute all that came before.
        cached = engine.capabilities.prefix_caching is not False
        self.bounded = cached and not (self._unjoined or self._inside)  # see `_passed`
        if not self.bounded:
            return super().last(engine, now)
        assert self._mover is not None
        self._tokens = 1 if self._fresh else self._next_tokens()
        target, leg = joined.bounded(self._tokens)
        if self._from_token:
            leg |= self._asks(engine, now, goes_on=False)
            self._from_token = 0
        self._mover.running[self.ticket.id] = self
        silent = Silent(self, self._asked, dumps(leg), now, target.encode())
        self._asked_tokens, self._silent = leg["max_tokens"], silent
        silent.go(engine, now)
        return True

    def _next_tokens(self) -> int:
        """Of a leg behind the first. Each leg costs a step's wait or more, and a move waits for half a leg.
        Few requests move, so a leg is as long as its client may wait (`reschedule_max_gap_seconds`), going by
        the last, and at most twice as long as that."""
        assert self._mover is not None
        if self._mover.leg_tokens is not None:
            return self._mover.leg_tokens
        bound = int(self._mover.max_gap_seconds / self._rate) if self._rate > 0 else FIRST_TOKENS
        return max(1, min(bound, 2 * self._tokens if self._tokens > 1 else FIRST_TOKENS))

    # What its legs call.

    def resends(self, silent: Silent) -> bool:
        """Sends a leg again without the KV transfer that its first try may have used."""
        if self.ticket.follows:
            return super().resends(silent)
        if not self._handed.spend():
            return False
        self._silent = None
        self._anew(silent.engine)
        return True

    def answered(self, silent: Silent, status: int, body: bytes) -> None:
        """A leg answered."""
        if self.ticket.follows:
            super().answered(silent, status, body)
            return
        assert self._mover is not None
        engine, self._silent = silent.engine, None
        now = time.monotonic()
        if status != 200:
            if not self.busy(status) and self._handed.broke(status, None):
                self.last(engine, now)
            elif self._fresh or not self.busy(status):
                self.refused(engine, status, body)
            else:
                said = engine.adapter.error(body)
                self._breaks(engine, "status", f"status {status}" + (f": {said}" if said else ""))
            return
        engine.failures = 0
        joined = self.joined
        try:
            answer = object_of(body)
            joined.cached = joined.cached or (answer.get("usage") or {}).get("prompt_tokens_details")
            made = joined.take(answer, self._asked_tokens, whole=True)
        except MergeError as error:
            if error.failed:
                self._breaks(engine, "reset", str(error))
            elif self._asked_anew(engine, error):
                self._anew(engine)
            return
        if made.ids:
            if self._fresh:
                self.ticket.first_token(now)
                if self._fetches and self._handed.used:
                    self._mover.fetched(len(joined.prompt) + len(joined.made), now - self._idle_since)
            elif self._tokens > 1:
                self._rate = (now - silent.started) / self._tokens
            if more := len(made.ids) - self._fresh:
                self.ticket.tokens(more, now)
            self._fresh = False
        if made.finish is not None:
            self._end(made, ended=False)
            return
        self.tell(made)
        self._idle_since = now
        self.goes_on_here(engine)

    def failed(self, silent: Silent, kind: str, reason: str) -> None:
        """A leg failed."""
        self._silent = None
        self._breaks(silent.engine, kind, reason)

    def _breaks(self, engine: Engine, kind: str, reason: str) -> None:
        """The leg is lost, and what was told before is not."""
        if self._fresh:
            self._relay.move(engine, kind, reason)
        else:
            self.breaks(engine, kind, reason)

    # What a move calls.

    def goes_on_here(self, engine: Engine) -> None:
        """The next leg, where the last was; or the move that waits for this moment."""
        if self._relay.stalled:
            self._waits_at = engine
        elif self.move is None or not self.move.between_legs(engine):
            self.last(engine, time.monotonic())

    def goes_on_elsewhere(self, handed: KvTransfer | None = None) -> None:
        """As a stream, between two legs or in the middle of one."""
        self._fresh, self._fetches = True, handed is not None
        super().goes_on_elsewhere(handed)

    # What the relay calls.

    def pause(self, paused: bool) -> None:
        """The client does not keep up, or does again: then the next leg is sent."""
        super().pause(paused)
        engine, self._waits_at = self._waits_at, None
        if paused:
            self._waits_at = engine
        elif engine is not None:
            self.goes_on_here(engine)

    @property
    def attempt_open(self) -> bool:
        """Whether an engine works on the request, or it waits for its client between two legs."""
        return self._waits_at is not None or super().attempt_open

    @property
    def instance(self) -> str:
        """Who answers now, or next."""
        return self.ticket.instance if self.move is not None else super().instance
