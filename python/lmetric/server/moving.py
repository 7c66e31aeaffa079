"""Requests that move while they run (STAR, section 5.4): a stream is closed at the token it is at, and goes
on at another engine.

vLLM hands nothing over of a stream, so the target computes prompt and answer again. It does so ahead: it is
asked for one token behind what there is, while the source runs on. When it has said it, its prefix cache
holds all but the last tokens, and only then the stream changes over. What fails before that costs nothing:
the source still runs. An engine without a prefix cache computes all of it in the gap.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import orjson
import structlog

from lmetric._core import NoInstanceError, TicketError
from lmetric.server.joined import NotJoinable
from lmetric.server.openai import nobody_takes
from lmetric.server.silent import Silent, usage_of

if TYPE_CHECKING:
    from lmetric.server.chain import Chain
    from lmetric.server.fleet import Engine, Pool
    from lmetric.server.mover import Mover

log = structlog.get_logger("lmetric.moving")


class Move:
    """One move of one request, until another engine goes on with it, or it stays."""

    def __init__(self, mover: Mover, pool: Pool, chain: Chain, target: Engine) -> None:
        self._mover = mover
        self._pool = pool
        self._chain = chain
        self._target = target
        self._silent: Silent | None = None
        self._sent_tokens = 0  # that the target is asked to compute ahead

    def begin(self, now: float) -> bool:
        """Books the target, and has it compute what there is; whether the move is on its way, or done."""
        chain, target, joined = self._chain, self._target, self._chain.joined
        ahead = target.capabilities.prefix_caching is not False
        tokens = len(joined.prompt) + len(joined.made)
        if joined.over:
            return self._count("ended")
        if not ahead and self._mover.prefill_seconds(target, tokens) > self._mover.max_gap_seconds:
            return self._count("long_gap")
        try:
            joined.catch_up()
            # What is computed ahead is there when the segment begins, as if it had been sent.
            chain.ticket.begin_move(target.name, recompute=not ahead)
        except NotJoinable as error:
            self._pool.not_joinable(chain.path, str(error))
            return self._count("not_joinable")
        except TicketError as error:
            log.debug("cannot move", model=self._pool.name, reason=str(error))
            return self._count("not_movable")
        chain.move = self
        self._mover.moves.add(self)
        if not ahead:
            return self._change_over()
        self._sent_tokens = tokens
        self._silent = chain.silent(self, orjson.dumps(joined.ahead()), now)
        self._silent.go(target, now)
        return True

    def check(self, now: float, limit: float) -> None:
        """Gives up a target that takes too long."""
        silent = self._silent
        if silent is not None and not silent.ended and now - silent.started > limit:
            silent.settle("timeout", f"no answer within {limit:g} s")

    def at_once(self) -> bool:
        """The source has failed: the target goes on now, however far it is. Whether it could be done."""
        chain = self._chain
        self._end()
        try:
            chain.ticket.cancel_move()
            chain.ticket.begin_move(self._target.name, recompute=True)
        except TicketError:
            return self._count("not_movable")
        return self._change_over("source_failed")

    def drop(self) -> None:
        """The request is over, or goes another way."""
        self._stays("ended")

    # What the target's leg calls.

    def sent(self, now: float) -> None:
        """It is on its way."""

    def refilled(self, engine: Engine, body: bytes) -> bytes:
        """The leg's body."""
        return body

    def answered(self, silent: Silent, status: int, body: bytes) -> None:
        """The target has computed what there was."""
        target = self._target
        if status != 200:
            if status >= 500 and status != 503:
                target.failed("status", f"status {status}")
            self._stays("target_refused")
            return
        target.failures = 0
        now = time.monotonic()
        _, cached = usage_of(body)
        joined, block = self._chain.joined, self._pool.block_size
        computed = max(self._sent_tokens - (cached or 0), block)
        left = len(joined.prompt) + len(joined.made) - self._sent_tokens // block * block
        if left / computed * (now - silent.started) > self._mover.max_gap_seconds:
            self._stays("long_gap")
        else:
            self._change_over()

    def failed(self, silent: Silent, kind: str, reason: str) -> None:
        """The target failed: nothing has happened."""
        if kind != "status":
            self._target.failed(kind, reason)
        self._stays("target_failed")

    def fail(self) -> None:
        """Nobody foresaw this."""
        self._chain.fail()

    # How it ends.

    def _change_over(self, outcome: str = "moved") -> bool:
        chain, target = self._chain, self._target
        if chain.joined.over:
            return self._stays("ended")
        if target.pool is not self._pool or not target.healthy or target.held:
            return self._stays("target_gone")
        try:
            self._end()
            chain.goes_on_elsewhere()
        except NotJoinable as error:
            self._pool.not_joinable(chain.path, str(error))
            return self._stays("not_joinable")
        except NoInstanceError as error:
            self._count("no_instance")
            chain.lost(nobody_takes(self._pool.name, error))
            return True
        self._count(outcome)
        return True

    def _stays(self, outcome: str) -> bool:
        """The source runs on."""
        self._end()
        if self._chain.ticket.open:
            self._chain.ticket.cancel_move()
        return self._count(outcome)

    def _end(self) -> None:
        self._chain.move = None
        self._mover.moves.discard(self)
        silent, self._silent = self._silent, None
        if silent is not None:
            silent.drop()

    def _count(self, outcome: str) -> bool:
        """Counts what came of it; False, as most of that is that nothing moves."""
        self._mover.outcomes[outcome] += 1
        return False
