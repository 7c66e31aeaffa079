"""The KV events of a model's engines. The first engine with events loads what they need."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from lmetric._core import Router
from lmetric.options import KvSource
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.kv_mode import ENCODES, UNASKED, Mode, ModelFacts, without_events

if TYPE_CHECKING:
    from lmetric.server.fleet.kv_events import KvEvents

log = structlog.get_logger("lmetric.kv")


class KvFeed:
    """The modes of one model's engines, and their KV events."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._events: KvEvents | None = None  # of the engines that report events or push their load

    def _with_events(self) -> KvEvents:
        """Returns what follows events. It is made once."""
        if self._events is None:
            from lmetric.server.fleet.kv_events import KvEvents

            self._events = KvEvents(self._router, self._turn)
        return self._events

    async def look_up(self, engine: Engine) -> None:
        """Resolves and checks the hosts of an engine's endpoints, if its addresses have rules."""
        allowed = engine.upstream.allowed
        if allowed is not None:
            await self._with_events().look_up(engine, allowed)
        elif _mode_without_events(engine) is None:
            self._with_events()  # before it counts as identified: a failed import is repeated

    def wire(self, engine: Engine, pooled: ModelFacts) -> None:
        """Chooses the engine's mode by its capabilities, and makes the needed subscriptions."""
        mode = _mode_without_events(engine)
        if mode is None or self._events is not None:
            self._with_events().wire(engine, pooled)
        else:
            engine.lost_blocks = False
            self._turn(engine, ENCODES if engine.encodes else mode)

    def begin_empty(self, engines: Sequence[Engine]) -> None:
        """Forgets what engines have cached: their caches or their weights are new.

        Events that the engines made before now do not count, even if they arrive later.
        """
        names = [engine.name for engine in engines]
        for engine in engines:
            engine.refill = None
        if self._events is None or not self._events.begin_empty(names):
            for name in names:
                self._router.blocks_cleared(name)

    def unwire(self, name: str) -> None:
        """Ends all subscriptions to an engine, and forgets its addresses."""
        if self._events is not None:
            self._events.unwire(name)

    def status(self, name: str) -> dict[str, Any] | None:
        """Returns the feed's status of an engine's ranks and pushed load; None without a feed."""
        return None if self._events is None else self._events.status(name)

    def counts(self, name: str) -> Counter[str]:
        """Returns the feed's counts of an engine, summed over its ranks."""
        return Counter() if self._events is None else self._events.counts(name)

    def close(self) -> None:
        """Ends the feed's thread."""
        if self._events is not None:
            self._events.close()

    def watch(self, engines: Iterable[Engine]) -> list[Engine]:
        """Checks that events arrive, and updates the engines' modes.

        Call it about once a second. Returns the engines to check now: their event connections have
        broken, so their processes may be gone.
        """
        return [] if self._events is None else self._events.watch(engines)

    def _turn(self, engine: Engine, mode: Mode) -> None:
        if mode == engine.mode:
            return
        before, engine.mode = engine.mode, mode
        if mode.name != before.name or before is UNASKED:
            engine.mode_since = time.monotonic()
        engine.was_exact |= mode.name == "exact"
        if mode.name != before.name:
            # An engine without a cache (load_only) counts as exact: no events, so no blocks.
            feed: KvSource = "approximate" if mode.name == "approximate" else "exact"
            self._router.update_instance(engine.name, kv_source=feed)
        if mode.name != "exact":
            engine.refill = None
        if before is not UNASKED:  # else the mode is logged with the identification
            level = logging.WARNING if engine.inexact else logging.INFO
            log.log(
                level,
                "KV index mode changed",
                engine=engine.name,
                mode=mode.name,
                reason=mode.reason,
                fix=mode.fix,
            )


def _mode_without_events(engine: Engine) -> Mode | None:
    """Returns the mode of an engine that reports no events and pushes no load; None for others."""
    if engine.capabilities.load_feeds:
        return None
    return without_events(engine.capabilities, engine.kv_events, engine.adapter.flags)
