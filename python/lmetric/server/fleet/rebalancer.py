"""Rebalancing of running requests, in rounds (STAR, section 5.2).

The core router chooses the moves (`Router.rebalance`); this module starts them.
`execution/ways/move.py` has the migration itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import structlog

from lmetric._core import Router, Ticket
from lmetric.config import PoolSettings
from lmetric.options import RebalanceOption
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.transfer import fetches

log = structlog.get_logger("lmetric.mover")


class Movable(Protocol):
    """A running request that may move."""

    @property
    def migration(self) -> object | None:
        """Its move in progress, or None."""

    @property
    def ticket(self) -> Ticket:
        """Its place: the engine that runs it."""

    @property
    def known_tokens(self) -> int:
        """The number of its known answer tokens."""

    def move_to(self, target: Engine, now: float) -> None:
        """Starts a move to another engine, if the request can move."""


class Rebalancer:
    """The requests of a model that may move, and the moves in progress."""

    def __init__(
        self,
        model: str,
        settings: PoolSettings,
        rule: RebalanceOption | None,
        router: Router,
        engines: Mapping[str, Engine],
    ) -> None:
        self._model = model
        self._router = router
        self._engines = engines
        self.by = settings.migration_by
        self.at_once = settings.migration_max_concurrent
        self.max_gap_seconds = settings.migration_max_gap_seconds
        # Without a rule, only engines that leave move their requests.
        self.period_seconds = math.inf if rule is None else rule.period_seconds
        self.due = math.inf if rule is None else 0.0  # time of the next round, monotonic clock
        self.running: dict[int, Movable] = {}  # by ticket
        self.moves: set[object] = set()
        self.outcomes: Counter[str] = Counter()  # of chosen moves, started or not, and of failovers

    @property
    def rebalances(self) -> bool:
        """Whether a rule moves requests; otherwise only engines that leave move theirs."""
        return self.period_seconds < math.inf

    def round(self, now: float) -> None:
        """Asks the core router for moves, and starts them.

        `now`: seconds on the monotonic clock.
        """
        self.due = now + self.period_seconds
        if not self.running:
            return
        moves, stop = self._router.rebalance(now)
        for move in moves:
            ticket, target = move["ticket"], move["target"]
            # Without KV transfer, the target would compute the whole context again. In simulations,
            # that stalls its batch so much that requests are slower than without moves.
            if self.by == "recompute" or self._fetches(ticket, target):
                self.begin(ticket, target, now)
            else:
                self.outcomes["no_transfer"] += 1
        if moves:
            log.debug("rebalanced", model=self._model, moves=moves, stop=stop)

    def _fetches(self, ticket: int, target: str) -> bool:
        request, engine = self.running.get(ticket), self._engines.get(target)
        return (
            request is not None
            and engine is not None
            and fetches(self._engines.get(request.ticket.instance), engine)
        )

    def begin(self, ticket: int, target: str, now: float) -> None:
        """Starts to move a running request, if it can move.

        `ticket`: a `Ticket.id`. `target`: the name of an instance.
        """
        request, engine = self.running.get(ticket), self._engines.get(target)
        if request is None or engine is None or request.migration is not None:
            return
        if len(self.moves) >= self.at_once:
            self.outcomes["too_many"] += 1
        else:
            request.move_to(engine, now)
