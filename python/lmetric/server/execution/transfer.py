"""What one engine hands over to the next: used once and in time, or the tokens are computed again.

vLLM holds what a segment computed for its lease. What is fetched later, or twice, is the cache of some other
prompt: the answer is wrong, with status 200.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import structlog

from lmetric.engines.handover import HandoverError
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool

log = structlog.get_logger("lmetric.handed")

WHOLE_PROMPT = sys.maxsize  # tokens of a prompt that is handed over whole, however long it is


class KvTransfer:
    """The fields for one request's next step, and what came of them (`Pool.handovers` counts it)."""

    __slots__ = ("_deadline", "_fields", "_lent", "_pool", "_sent", "source", "tokens")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.source: Engine | None = None  # that computed what is held
        self.tokens = 0  # up to here the next step need not compute: that is, or was, handed over
        self._fields: Any = None  # until they were sent
        self._deadline = math.inf
        self._lent = False  # the step that was planned last carries them
        self._sent = False  # what was sent last carried them

    @property
    def available(self) -> bool:
        """Whether something is held, and not fetched yet."""
        return self._fields is not None

    @property
    def used(self) -> bool:
        """Whether the step that was planned last carries the fields."""
        return self._lent

    @property
    def until(self) -> float:
        """When what carries the fields must be sent at the latest, seconds on the monotonic clock."""
        return self._deadline if self._lent else math.inf

    def begin(self, engine: Engine) -> None:
        """An engine has computed, or computes, what is to be handed over."""
        self.source, self._fields = engine, None
        self._lent = self._sent = False

    def accept(self, engine: Engine, answer: bytes, tokens: int | None, now: float) -> None:
        """Takes what an answer hands over; `tokens`: of how many tokens it must be the cache."""
        connector, handover = engine.connector, engine.handover
        try:
            if connector is None or handover is None:
                raise HandoverError(f"{engine.name} is another engine by now")
            fields = connector.fields(answer)
            if tokens is not None:
                connector.check_count(fields, tokens)
        except HandoverError as error:
            self.recompute("missing", str(error))
            return
        self._fields = fields
        self._deadline = now + (self._pool.settings.handover_seconds or connector.deadline_seconds(handover))

    def take(self, engine: Engine, now: float, *, goes_on: bool, total: int) -> Any:
        """What a step's body says of handing over: what it fetches, and that another fetches from it
        (`goes_on`). `total`: tokens of its prompt. Not twice."""
        connector, handover = engine.connector, engine.handover
        # What was handed over is all of this step's prompt, or the front of it.
        whole = self.tokens >= total
        if (goes_on or not whole) and not (handover is not None and handover.bidirectional):
            self.forget("not_cut", f"{engine.name} is not known to be in bidirectional mode")
        fields = self._take(engine, now)
        if connector is None:
            if not goes_on and self.tokens:
                self.recompute("no_connector", f"{engine.name} hands nothing over")
            return {}
        try:
            return connector.asks(fields, goes_on=goes_on, whole=whole)
        except HandoverError as error:
            self.recompute("not_cut", str(error))
            return {}

    def _take(self, engine: Engine, now: float) -> Any:
        again = self._sent
        self._lent = self._sent = False
        fields = self._fields
        if fields is None:
            if again:
                self.recompute("spent", "what was handed over was sent to an engine that failed")
            return None
        source = self.source
        if engine is source:
            self.recompute("same_engine", "it has the tokens in its own cache")
        elif source is None or engine.connector is not source.connector:
            why = f"{engine.name} cannot take over from {source and source.name}"
            self.recompute("other_connector", why)
        elif differ := blocks_differ(source, engine):
            self.recompute("other_blocks", differ)
        elif now > self._deadline:
            self.recompute("late", "the engine that computed the tokens may have let go of them")
        else:
            self._lent = True
            return fields
        self._fields = None
        return None

    def sent(self) -> None:
        """The step that carries the fields was sent. Once: what was fetched is gone, and whoever fetches it
        again decodes something else."""
        self._fields, self._sent = None, True
        self._pool.handovers["handed_over"] += 1

    def forget(self, outcome: str, reason: str) -> None:
        """What was handed over cannot be used."""
        if self._fields is not None:
            self._fields = None
            self.recompute(outcome, reason)

    def broke(self, status: int, error_code: int | None) -> bool:
        """Whether an answer means that its engine could not fetch what was handed over; then the step is to
        be sent there once more."""
        broke = self._sent and (status >= 500 or (error_code or 0) >= 500)
        if broke:
            self.useless("broken", f"status {status}, error {error_code}")
        return broke

    def stale(self, *, late: bool) -> None:
        """The step must be sent again without the fields: the connection was ready after their deadline
        (`late`), or it closed when the engine may have fetched already."""
        if late:
            self._fields = None
            self.useless("late", "the connection came after the time of what is held")
        else:
            self.useless("spent", "the engine may have fetched before its connection closed")

    def useless(self, outcome: str, reason: str) -> None:
        """What was sent with it cannot be used; it is to be sent once more, without."""
        self._lent = self._sent = False
        self.recompute(outcome, reason)

    def recompute(self, outcome: str, reason: str) -> None:
        """Counts that tokens are computed again."""
        self._pool.handovers[outcome] += 1
        log.debug("tokens are computed again", model=self._pool.name, why=outcome, reason=reason)


def blocks_differ(source: Engine, engine: Engine) -> str | None:
    """Why whole blocks of one are none of the other's, where both tell and it is so."""
    theirs, own = source.capabilities.block_size, engine.capabilities.block_size
    if theirs is None or own is None or theirs == own:
        return None
    return f"blocks of {source.name} have {theirs} tokens, those of {engine.name} {own}"
