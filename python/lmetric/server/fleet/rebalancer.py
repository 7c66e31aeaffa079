"""Which running requests move: the router decides (`Router.rebalance`), and what it names is begun here.

STAR, section 5.2: rounds of rescheduling. `execution/planners/migration.py` has the migration itself.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from lmetric._core import Router
from lmetric.config import PoolSettings
from lmetric.options import RebalanceOption
from lmetric.server.fleet.engine import Engine

log = structlog.get_logger("lmetric.mover")

# That a fetch is taken for the next one's measure. A slow one (the first between two engines took 30 s) lets
# no request move, so that no other fetch would ever tell that they are fast again.
REMEMBERED_SECONDS = 60.0


class Movable(Protocol):
    """A running request that may move."""

    @property
    def move(self) -> object | None:
        """Its move that is on its way."""

    @property
    def instance(self) -> str:
        """Name of the engine that runs it."""

    @property
    def known_tokens(self) -> int:
        """Tokens of its answer that are known."""

    def move_to(self, target: Engine, now: float) -> bool:
        """Begins to move it; whether it did."""


class Rebalancer:
    """A pool's requests that may move, and the moves on their way."""

    def __init__(
        self,
        model: str,
        settings: PoolSettings,
        rule: RebalanceOption,
        router: Router,
        engines: Mapping[str, Engine],
        prefill_seconds: Callable[[Engine, int], float],
    ) -> None:
        self._model = model
        self._router = router
        self._engines = engines
        self._prefill_seconds = prefill_seconds
        self.by = settings.migration_by
        self.leg_tokens = settings.migration_leg_tokens
        self.at_once = settings.migration_max_concurrent
        self.max_gap_seconds = settings.migration_max_gap_seconds
        self.period_seconds = rule.period_seconds
        self.due = 0.0  # when the next round is
        self.running: dict[int, Movable] = {}  # by ticket
        self.moves: set[object] = set()
        self._fetch_rate = 0.0  # seconds a token, of the last that was fetched
        self._fetched_at = -math.inf  # seconds on the monotonic clock
        self.outcomes: Counter[str] = Counter()  # of moves that were begun, or named and not begun

    def round(self, now: float) -> None:
        """Has the router look at what runs where, and begins the moves that it names. `now`: seconds on the
        monotonic clock."""
        self.due = now + self.period_seconds
        if not self.running:
            return
        moves, stop = self._router.rebalance(now)
        for move in moves:
            self.begin(move["ticket"], move["target"], now)
        if moves:
            log.debug("rescheduled", model=self._model, moves=moves, stop=stop)

    def begin(self, ticket: int, target: str, now: float) -> bool:
        """Begins to move a running request; whether it did. `ticket`: a `Ticket.id`, `target`: the name of
        an instance."""
        chain, engine = self.running.get(ticket), self._engines.get(target)
        if chain is None or engine is None or chain.move is not None:
            return False
        if len(self.moves) >= self.at_once:
            self.outcomes["too_many"] += 1
            return False
        return chain.move_to(engine, now)

    def fetched(self, tokens: int, seconds: float) -> None:
        """So long it took to fetch so many tokens."""
        self._fetch_rate = seconds / max(tokens, 1)
        self._fetched_at = time.monotonic()

    def fetch_seconds(self, engine: Engine, tokens: int) -> float:
        """Expected seconds to fetch so many tokens: as the last fetch; where none was of late, as long as to
        compute them."""
        if time.monotonic() - self._fetched_at > REMEMBERED_SECONDS:
            return self._prefill_seconds(engine, tokens)
        return self._fetch_rate * tokens
