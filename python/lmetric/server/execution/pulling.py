"""The front of a prompt, fetched before its request begins from the engine that holds it (prefix pull).

The holder is asked for one token behind whole blocks of the prompt. It finds them in its own prefix cache, so
that costs a step, and hands them over as the first leg of a request that is cut inside its prompt would; the
request then goes on as the second leg of such a one (`chain`). Whatever goes wrong costs the time until then:
the request is sent as it came, and its engine computes.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import structlog

from lmetric.server.execution.silent import Silent
from lmetric.server.execution.transcript import dumps
from lmetric.server.execution.transfer import KvTransfer, blocks_differ

if TYPE_CHECKING:
    from lmetric.server.execution.chain import Chain
    from lmetric.server.fleet.engine import Engine
    from lmetric.server.fleet.pool import Pool

log = structlog.get_logger("lmetric.pulling")

LEAST_SECONDS = 0.02  # that a holder is waited for, however fast computing is


class Pull:
    """One pull for one request, until the holder has answered, or is waited for no more."""

    def __init__(self, pool: Pool, chain: Chain, target: Engine) -> None:
        pull = chain.ticket.pull
        assert pull is not None  # else nothing is to be pulled
        name, self._from_token, to_token = pull
        self._pool = pool
        self._chain = chain
        self._target = target
        self._holder = pool.engines.get(name)
        self._tokens = to_token - to_token % pool.block_size  # what a holder has, it has in whole blocks
        self._handed = KvTransfer(pool)
        self._silent: Silent | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0

    def begin(self, now: float) -> bool:
        """Asks the holder; False: it cannot be asked, and the pull is over."""
        self._began = now
        holder = self._holder
        connector = self._target.connector
        if holder is None or not holder.healthy:
            return self._over("holder_gone")
        if connector is None or connector.at_once or holder.connector is not connector:
            return self._over("no_connector")
        if blocks_differ(holder, self._target):
            return self._over("other_blocks")
        if self._tokens <= self._from_token:
            return self._over("no_block")
        self._handed.begin(holder)
        fields: Any = connector.asks(None, goes_on=True, whole=True)
        body = dumps(self._chain.joined.ahead(self._tokens) | fields)
        self._silent = self._chain.silent(self, body, now)
        self._timer = asyncio.get_running_loop().call_later(self._patience(), self._late)
        self._silent.go(holder, now)
        return True

    def _patience(self) -> float:
        """Seconds that the holder is waited for."""
        given = self._pool.settings.pull_seconds
        if given is not None:
            return given
        tokens = self._tokens - self._from_token
        return max(self._pool.prefill_seconds(self._target, tokens), LEAST_SECONDS)

    def _late(self) -> None:
        self._go_on("late")

    def drop(self) -> None:
        """The request is over."""
        self._end()
        self._pool.pull_outcomes["ended"] += 1

    # What its leg calls.

    def sent(self, now: float) -> None:
        """It is on its way."""

    def refilled(self, engine: Engine, body: bytes) -> bytes:
        """The leg's body."""
        return body

    def resends(self, silent: Silent) -> bool:
        """Returns False: what the holder is asked has no KV transfer that could be used twice."""
        return False

    def answered(self, silent: Silent, status: int, body: bytes) -> None:
        """The holder answered."""
        engine = silent.engine
        if status != 200:
            if status >= 500 and status != 503:
                engine.failed("status", f"status {status}")
            self._go_on("refused")
            return
        engine.failures = 0
        self._handed.accept(engine, body, self._tokens)
        self._go_on("pulled" if self._handed.there else "missing")

    def failed(self, silent: Silent, kind: str, reason: str) -> None:
        """The holder failed."""
        silent.engine.failed(kind, reason)
        self._go_on("holder_failed")

    def fail(self) -> None:
        """Nobody foresaw this."""
        self._chain.fail()

    # How it ends.

    def _go_on(self, outcome: str) -> None:
        """It is over, and the request goes to its engine now."""
        try:
            self._over(outcome)
            self._chain.begins(self._target)
        except Exception:
            self._chain.fail()

    def _over(self, outcome: str) -> bool:
        """Tells router and chain what came; False, as the last leg is to be sent now."""
        self._end()
        now = time.monotonic()
        came = self._tokens - self._from_token if outcome == "pulled" else 0
        # No engine tells how long it fetches: that much is as the configuration says, the rest was seen.
        seconds = now - self._began + came * self._pool.transfer_seconds_per_token
        self._chain.ticket.pulled(came, seconds, now)
        self._chain.pulled(self._handed if came else None, self._tokens if came else 0)
        self._pool.pull_outcomes[outcome] += 1
        if not came:
            holder = self._holder.name if self._holder else None
            log.debug("nothing is pulled", model=self._pool.name, holder=holder, why=outcome)
        return False

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        silent, self._silent = self._silent, None
        if silent is not None:
            silent.drop()
