"""Merges the reports of all sources into one fleet: owners of engines, arrivals and departures.

Two sources that list the same name, or the same URL for the same model, mean one engine. Its owner
is the first source in the order configuration, administrator, `discovery`. When no source lists an
engine any more, the router sends it no new requests. It is removed once it is idle, or after the
drain time. Requests that still run then continue: removal never aborts a request.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from lmetric._core import LmetricError
from lmetric.config import ADMIN, CONFIGURED, EngineConfig, ServerConfig
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.turns import in_turns

log = structlog.get_logger("lmetric.discovery")


@dataclass(frozen=True, slots=True)
class Found:
    """An engine that a source reports.

    ``model``: its model; None: the router asks the engine. ``ready``: whether it may get requests.
    An engine without an API key of its own gets the key of its section (`followed.py`).
    """

    config: EngineConfig
    model: str | None = None
    ready: bool = True

    def is_also(self, other: "Found") -> bool:
        """Returns whether both may be one engine, by URL, data-parallel rank and model.

        A server of two models is two engines. An entry without a rank is all ranks.
        """
        models = (self.model, other.model)
        ranks = (self.config.data_parallel_rank, other.config.data_parallel_rank)
        same = all(None in pair or pair[0] == pair[1] for pair in (models, ranks))
        return self.config.url == other.config.url and same


# The reports of all sources, in the order of precedence. The engines to keep with their owners, by
# name.
Lists = dict[str, Sequence[Found]]
Wanted = dict[str, tuple[str, Found]]

# A full garbage collection looks at all objects of 10,000 new engines in one turn of the event
# loop: 150 ms. So the objects that exist after this many new engines are exempt, as at the start of
# the router. Engines and requests have no cycles of references: the exempt ones are freed, too.
_EXEMPT_ENGINES = 500

_LOOK_SECONDS = 0.05  # time between two checks whether a leaving engine is idle


@dataclass(slots=True)
class _Leave:
    deadline: float  # on the monotonic clock
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Members:
    """Keeps the fleet equal to the reports of its sources.

    Args:
        on_new: called with each batch of new engines.
    """

    def __init__(self, config: ServerConfig, fleet: Fleet, on_new: Callable[[list[Engine]], None]) -> None:
        self.fleet = fleet
        self.added = 0
        self.removed = 0
        self._on_new = on_new
        self._lists: Lists = {
            CONFIGURED: [Found(engine.config, engine.configured_model) for engine in fleet.engines()],
            ADMIN: [],
            **{source.label: [] for source in config.discovery},
        }
        self._turn = asyncio.Lock()  # held by the one change that is applied
        self._changes: set[asyncio.Task[list[str]]] = set()
        self._refused: set[str] = set()
        self._leaving: dict[Engine, _Leave] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def of(self, source: str) -> Sequence[Found]:
        """Returns the engines in the last report of a source."""
        return self._lists[source]

    async def update(self, source: str, found: Sequence[Found]) -> list[str]:
        """Replaces all engines of a source. Returns the engines whose API key changed."""
        return await self.change(source, lambda _: found)

    async def change(
        self,
        source: str,
        change: Callable[[Sequence[Found]], Sequence[Found]],
        drain_seconds: float | None = None,
    ) -> list[str]:
        """Changes the engines of a source. Returns the engines whose API key changed.

        Changes are applied one after another. Large ones take several turns of the event loop, and
        end even if the caller is canceled.

        Args:
            change: returns the new list, from the present one. It runs in a thread. If it raises,
                nothing has changed.
            drain_seconds: drain time of engines that are no longer listed; None:
                `timeouts.engine_drain`.
        """
        task = asyncio.create_task(self._change(source, change, drain_seconds), name="change of engines")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change(
        self,
        source: str,
        change: Callable[[Sequence[Found]], Sequence[Found]],
        drain_seconds: float | None,
    ) -> list[str]:
        async with self._turn:
            lists = self._lists

            def plan() -> tuple[Lists, Wanted, set[str]]:
                changed = lists | {source: change(lists[source])}
                return (changed, *_wanted(changed))

            self._lists, wanted, refused = await asyncio.to_thread(plan)
            seconds = self.fleet.config.timeouts.engine_drain if drain_seconds is None else drain_seconds
            await in_turns(self._leave_all(wanted, seconds))
            new: list[Engine] = []
            keys: list[str] = []
            await in_turns(self._take_all(wanted, new, keys, refused=refused))
            for reason in sorted(refused - self._refused):
                log.warning("engine ignored", reason=reason)
            self._refused = refused
            if new:
                log.info("engines added", source=source, engines=_some(engine.name for engine in new))
                self._on_new(new)
            return keys

    def _leave_all(self, wanted: Wanted, seconds: float) -> Iterator[None]:
        for name in [engine.name for engine in self.fleet.engines() if engine.name not in wanted]:
            engine = self.fleet.engine(name)
            if engine is not None:
                self._leave(engine, seconds)
            yield

    def _take_all(
        self, wanted: Wanted, new: list[Engine], keys: list[str], refused: set[str]
    ) -> Iterator[None]:
        """Adds and changes engines, one by one.

        Adds to ``new`` the new engines, to ``keys`` the engines whose API key changed, and to
        ``refused`` the problems.
        """
        for name, (owner, each) in wanted.items():
            known = len(new)
            self._take(name, owner, each, new=new, keys=keys, refused=refused)
            if len(new) > known and len(new) % _EXEMPT_ENGINES == 0:
                gc.freeze()
            yield

    def _take(
        self, name: str, owner: str, each: Found, new: list[Engine], keys: list[str], refused: set[str]
    ) -> None:
        old = self.fleet.engine(name)
        new_key = old is not None and old.config.api_key != each.config.api_key
        if old is not None and new_key:
            old.set_key(each.config.api_key)
        if old is not None and old.config.tls != each.config.tls:
            try:
                old.set_tls(each.config.tls, self.fleet.config)
            except LmetricError as error:
                refused.add(f"cannot change TLS of engine {name} of {owner}: {error}")
                return
        if old is not None and (old.config, old.configured_model) != (each.config, each.model or self._model):
            # Another engine has the same name. Requests of the old engine continue.
            self._forget(old)
            old = None
        if old is not None:
            self._stay(old, owner, each.ready)
        else:
            try:
                engine = self.fleet.add(each.config, owner, each.model)
            except LmetricError as error:
                refused.add(f"cannot add engine {name} of {owner}: {error}")
                return
            engine.ready = each.ready
            engine.hold(one_of_many=True)
            new.append(engine)
            self.added += 1
        if new_key:
            keys.append(name)

    @property
    def _model(self) -> str | None:
        return self.fleet.config.model

    def _stay(self, engine: Engine, source: str, ready: bool) -> None:
        leave = self._leaving.pop(engine, None)
        if leave is not None:
            leave.over.set()
            log.info("engine is listed again", source=source, engine=engine.name)
        held = engine.held
        engine.source, engine.ready, engine.leaving = source, ready, False
        if engine.held != held:
            engine.hold(one_of_many=True)

    def _leave(self, engine: Engine, seconds: float) -> None:
        if engine in self._leaving:
            return
        engine.leaving = True
        engine.hold(one_of_many=True)
        if seconds <= 0 or not (engine.running or engine.sends_prefixes):
            self._forget(engine)
            return
        log.info("engine drains", source=engine.source, engine=engine.name, running=engine.running)
        self._leaving[engine] = _Leave(time.monotonic() + seconds)
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep(), name="leaving engines")

    async def _sweep(self) -> None:
        while self._leaving:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for engine, leave in list(self._leaving.items()):
                if now >= leave.deadline or not (engine.running or engine.sends_prefixes):
                    self._forget(engine)

    def _forget(self, engine: Engine) -> None:
        self.fleet.remove(engine)
        self.removed += 1
        leave = self._leaving.pop(engine, None)
        if leave is not None:
            leave.over.set()
        log.info("engine removed", source=engine.source, engine=engine.name, running=engine.running)

    async def settled(self, engine: Engine) -> None:
        """Waits until a leaving engine is removed or listed again."""
        leave = self._leaving.get(engine)
        if leave is not None:
            await leave.over.wait()

    async def stop(self) -> None:
        """Stops the changes and the checks of leaving engines."""
        for change in list(self._changes):
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper


def _wanted(lists: Lists) -> tuple[Wanted, set[str]]:
    """Returns the engines to keep, and the problems of others."""
    wanted: Wanted = {}
    at: dict[str, list[tuple[str, Found]]] = {}
    refused: set[str] = set()
    for source, found in lists.items():
        for each in found:
            name, url = each.config.label, each.config.url
            if name in wanted:
                owner, first = wanted[name]
                rank = first.config.data_parallel_rank
                if (first.config.url, rank) != (url, each.config.data_parallel_rank):
                    refused.add(f"{source} and {owner} both list an engine {name}; {owner}'s is used")
            elif not any(owner != source and each.is_also(first) for owner, first in at.get(url, ())):
                wanted[name] = (source, each)
                at.setdefault(url, []).append((source, each))
    return wanted, refused


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
