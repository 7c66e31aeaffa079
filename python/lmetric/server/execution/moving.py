"""Requests that move while they run (STAR, section 5.4): a stream is closed at the token it is at, and goes
on at another engine.

vLLM hands nothing over of a stream, so the target computes prompt and answer again (`recompute`). It does so
ahead: it is asked for one token behind what there is, while the source runs on. When it has said it, its
prefix cache holds all but the last tokens, and only then the stream changes over. What fails before that
costs nothing: the source still runs. An engine without a prefix cache computes all of it in the gap.

Nor need the stream be what hands over (`pull`): the source is asked for one token behind what there is, too,
as a leg that is to be fetched from. It finds all of it in its own prefix cache, so that costs a step, and the
target fetches instead of computing.

A request that runs in legs (`bounded`) moves between two of them: nothing runs then, so what the source hands
over is all there is, and the target's first leg fetches it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import structlog

from lmetric._core import NoInstanceError, TicketError, UnknownNameError
from lmetric.server.execution.silent import Silent, usage_of
from lmetric.server.execution.transcript import MergeError, dumps
from lmetric.server.execution.transfer import KvTransfer

if TYPE_CHECKING:
    from lmetric.server.execution.chain import Chain
    from lmetric.server.fleet.engine import Engine
    from lmetric.server.fleet.pool import Pool
    from lmetric.server.fleet.rebalancer import Rebalancer

log = structlog.get_logger("lmetric.moving")


class Move:
    """One move of one request, until another engine goes on with it, or it stays."""

    def __init__(self, mover: Rebalancer, pool: Pool, chain: Chain, target: Engine) -> None:
        self._mover = mover
        self._pool = pool
        self._chain = chain
        self._source = pool.engines.get(chain.ticket.instance)
        self._target = target
        self._handed = KvTransfer(pool)
        self._silent: Silent | None = None
        self._asks_source = False  # that leg is the source's
        self._sent_tokens = 0  # that it is of

    def begin(self, now: float) -> bool:
        """Books the target, and has it compute or fetch what there is; whether the move is on its way, or
        done."""
        chain, target, joined = self._chain, self._target, self._chain.joined
        ahead = target.capabilities.prefix_caching is not False and not chain.bounded
        if joined.over:
            return self._count("ended")
        if not ahead and self._gap_seconds() > self._mover.max_gap_seconds:
            return self._count("long_gap")
        try:
            joined.catch_up()
            # What is computed ahead, or fetched, is there when the segment begins, as if it had been sent.
            sent = ahead or (chain.bounded and self._fetches)
            chain.ticket.begin_move(target.name, recompute=not sent)
        except MergeError as error:
            self._pool.not_joinable(chain.path, str(error))
            return self._count("not_joinable")
        except TicketError as error:
            log.debug("cannot move", model=self._pool.name, reason=str(error))
            return self._count("not_movable")
        chain.move = self
        self._mover.moves.add(self)
        if chain.bounded:
            return True  # when the leg that runs is over
        if not ahead:
            return self._change_over()
        if self._fetches:
            self._ask_source(now)
        else:
            self._ask_target(now)
        return True

    @property
    def _fetches(self) -> bool:
        """Whether the target can fetch from the source."""
        source, connector = self._source, self._target.connector
        if self._mover.by == "recompute" or source is None or connector is None or connector.at_once:
            return False
        return source.connector is connector and source.capabilities.prefix_caching is not False

    def _gap_seconds(self) -> float:
        """That the client is expected to wait where nothing is done ahead."""
        joined = self._chain.joined
        tokens = len(joined.prompt) + len(joined.made)
        fetches = self._chain.bounded and self._fetches
        return (self._mover.fetch_seconds if fetches else self._pool.prefill_seconds)(self._target, tokens)

    def _ask_source(self, now: float) -> None:
        """Has the source hold for the target what there is so far."""
        source = self._source
        assert source is not None
        assert source.connector is not None
        self._handed.begin(source)
        self._ask(source, source.connector.asks(None, goes_on=True, whole=True), now)

    def _ask_target(self, now: float) -> None:
        """Has the target fetch that, or compute it."""
        connector = self._target.connector
        fields = self._handed.fields(self._target, now) if connector is not None else None
        if fields is None or connector is None:
            self._ask(self._target, {}, now)
        else:
            self._ask(self._target, connector.asks(fields, goes_on=False, whole=True), now)

    def _ask(self, engine: Engine, fields: Any, now: float) -> None:
        joined = self._chain.joined
        self._asks_source = engine is self._source
        # What the source holds is all that may be fetched: one token more, and the target dies.
        if not fields or self._asks_source:
            self._sent_tokens = len(joined.prompt) + len(joined.made)
        self._silent = self._chain.silent(self, dumps(joined.ahead(self._sent_tokens) | fields), now)
        self._silent.go(engine, now)

    @property
    def attempt_open(self) -> bool:
        """Whether an engine is at work for the move."""
        return self._silent is not None and not self._silent.ended

    def check(self, now: float, limit: float) -> None:
        """Gives up a target that takes too long."""
        silent = self._silent
        if silent is not None and not silent.ended and now - silent.started > limit:
            silent.settle("timeout", f"no answer within {limit:g} s")

    def at_once(self) -> bool:
        """The source has failed: the target goes on now, however far it is. Whether it could be done."""
        chain = self._chain
        self._end()
        self._handed.forget("source_failed", "the engine that computed the tokens has failed")
        try:
            chain.ticket.cancel_move()
            chain.ticket.begin_move(self._target.name, recompute=True)
        except TicketError:
            return self._count("not_movable")
        except UnknownNameError:  # removed since the move began
            return self._count("target_gone")
        return self._change_over("source_failed")

    def drop(self) -> None:
        """The request is over, or goes another way."""
        self._stays("ended")

    def between_legs(self, source: Engine) -> bool:
        """A leg is over, at this engine, and no other is sent: whether the move sees to what comes next."""
        if self._fetches and source is self._source:
            self._ask_source(time.monotonic())
            return True
        return self._change_over()

    # What its legs call.

    def sent(self, now: float) -> None:
        """It is on its way."""

    def refilled(self, engine: Engine, body: bytes) -> bytes:
        """The leg's body."""
        return body

    def resends(self, silent: Silent) -> bool:
        """Asks the target again without the KV transfer that the first try may have used."""
        if self._asks_source or not self._handed.spend():
            return False
        self._ask_target(time.monotonic())
        return True

    def answered(self, silent: Silent, status: int, body: bytes) -> None:
        """An engine did what it was asked for, or refused."""
        engine, now = silent.engine, time.monotonic()
        if status == 200:
            engine.failures = 0
        elif status >= 500 and status != 503:
            engine.failed("status", f"status {status}")
        if self._asks_source:
            if status == 200:
                self._handed.accept(engine, body, self._sent_tokens)
            else:
                self._handed.recompute("missing", f"status {status}")
            self._held()
        elif status != 200 and not self._chain.busy(status) and self._handed.broke(status, None):
            self._ask_target(now)
        elif status != 200:
            self._stays("target_refused")
        elif self._left_seconds(body, now - silent.started) > self._mover.max_gap_seconds:
            self._stays("long_gap")
        else:
            self._change_over()

    def _held(self) -> None:
        """The source holds what there is for the target, or does not."""
        chain, source = self._chain, self._source
        assert source is not None
        if not chain.bounded:
            self._ask_target(time.monotonic())
        elif self._handed.there or self._pool.prefill_seconds(self._target, self._sent_tokens) <= (
            self._mover.max_gap_seconds
        ):
            if not self._change_over():
                chain.goes_on_here(source)
        else:
            self._stays("long_gap")
            chain.goes_on_here(source)

    def _left_seconds(self, body: bytes, seconds: float) -> float:
        """That the target will take for what was said since, going by what it took for the rest. More than it
        computed then is not as slow as that, for its queue was in those seconds, too."""
        _, cached = usage_of(body)
        joined, block = self._chain.joined, self._pool.block_size
        left = len(joined.prompt) + len(joined.made) - self._sent_tokens // block * block
        if self._handed.used:
            self._mover.fetched(self._sent_tokens, seconds)
            return self._pool.prefill_seconds(self._target, left)
        computed = max(self._sent_tokens - (cached or 0), block)
        more = self._pool.prefill_seconds(self._target, max(left - computed, 0))
        return min(left / computed, 1.0) * seconds + more

    def failed(self, silent: Silent, kind: str, reason: str) -> None:
        """An engine failed: nothing has happened, where a stream runs on."""
        if self._asks_source and self._chain.bounded:
            self._chain.breaks(silent.engine, kind, reason)
            return
        if kind != "status":
            silent.engine.failed(kind, reason)
        if self._asks_source:
            self._handed.recompute("missing", reason)
            self._ask_target(time.monotonic())
        else:
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
            chain.goes_on_elsewhere(self._handed if self._handed.there else None)
        except MergeError as error:
            self._pool.not_joinable(chain.path, str(error))
            return self._stays("not_joinable")
        except NoInstanceError as error:
            self._count("no_instance")
            chain.lost(self._pool.no_engine_error(error))
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
