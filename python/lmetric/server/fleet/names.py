"""Names in requests: the base names and adapters of a model, and the engines that list each.

An engine's list of models (`/v1/models`) has its base names, of which all mean the same weights,
and its LoRA adapters. The list changes while the engine runs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from lmetric.engines.adapter import ModelCard

SEARCH_SECONDS = 1.0  # least time between two searches for unknown names
# In large fleets a search costs more: about 0.2 ms of the event loop per engine.
SEARCH_SECONDS_PER_ENGINE = 0.005
# Requests that may wait for a search. A client can send any number of unknown names.
MOST_SEARCHES = 256


class ModelNames:
    """The names of one model.

    ``main``: the name of the model. ``adapters``: adapters in the configuration. An engine that
    reports no models may serve these names, but no others. ``configured``: the configuration names
    the model, so that no other model gets these names.
    """

    def __init__(self, main: str, adapters: Iterable[str] = (), *, configured: bool = False) -> None:
        self.main = main
        self.adapters = dict.fromkeys(adapters)
        self.configured = configured
        self.listed: dict[str, dict[str, ModelCard]] = {}  # by name: the engines that list it
        self.engines: dict[str, tuple[ModelCard, ...]] = {}  # by engine: its list
        self.silent: set[str] = set()  # engines that report no models
        self.uniform = True  # whether each known name is served by all engines
        # Names whose last engine was removed, with the time on the monotonic clock, and whether it
        # was an adapter's.
        self._gone: dict[str, tuple[float, bool]] = {}

    @property
    def known(self) -> list[str]:
        """All names that may be requested."""
        return list(dict.fromkeys([self.main, *self.adapters, *self.listed, *self._gone]))

    def update(self, engine: str, models: Sequence[ModelCard]) -> list[str]:
        """Replaces the list of an engine. Returns the names that appeared or vanished."""
        return self._replace(engine, models, gone=False)

    def remove(self, engine: str) -> list[str]:
        """Removes an engine. Names that no other engine lists stay known for a while."""
        return self._replace(engine, None, gone=True)

    def _replace(self, engine: str, models: Sequence[ModelCard] | None, *, gone: bool) -> list[str]:
        old = dict.fromkeys(model.name for model in self.engines.pop(engine, ()))
        new = {model.name: model for model in models or ()}
        changed = []
        for name in [name for name in old if name not in new]:
            engines = self.listed[name]
            model = engines.pop(engine)
            if not engines:
                del self.listed[name]
                if gone:
                    self._gone[name] = time.monotonic(), model.parent is not None
                changed.append(name)
        for name, model in new.items():
            if name not in self.listed:
                self.listed[name] = {}
                self._gone.pop(name, None)
                changed.append(name)
            self.listed[name][engine] = model
        self.silent.discard(engine)
        if models is not None:
            self.engines[engine] = tuple(models)
            if not models:
                self.silent.add(engine)
        self._see_uniform()
        return changed

    def _see_uniform(self) -> None:
        self.uniform = all(self._serve_all(name) for name in self.known)

    def _serve_all(self, name: str) -> bool:
        """Whether all engines serve a known name."""
        return len(self.listed.get(name, ())) + len(self._silent_for(name)) == len(self.engines)

    def forget(self, before: float) -> set[str]:
        """Forgets names whose last engine was removed before this time. Returns them."""
        old = {name for name, (since, _) in self._gone.items() if since <= before}
        for name in old:
            del self._gone[name]
        if old:
            self._see_uniform()
        return old

    def claim(self, name: str) -> int | None:
        """Returns how strong the model's claim to a name is, 0 the strongest; None: it has none."""
        own = name == self.main
        if self.configured and (own or name in self.adapters):
            return 0
        if name in self.listed:
            return 1 if own else 2 + self.is_adapter(name)
        if own:
            return 4 if self.engines else 5
        return 6 if name in self.adapters or name in self._gone else None

    def is_adapter(self, name: str) -> bool:
        """Whether a known name is an adapter's. The engines know best."""
        engines = self.listed.get(name)
        if engines:
            return next(iter(engines.values())).parent is not None
        return name in self.adapters or self._gone.get(name, (0.0, False))[1]

    def engines_of(self, name: str | None) -> Collection[str] | None:
        """Returns the only engines that serve a name; None: all engines do."""
        if name is None or self._serve_all(name):
            return None
        return [*self.listed.get(name, ()), *self._silent_for(name)]

    def serves(self, engine: str, name: str | None) -> bool:
        """Whether an engine serves a name."""
        if name is None or self._serve_all(name):
            return True
        return engine in self.listed.get(name, ()) or engine in self._silent_for(name)

    def _silent_for(self, name: str) -> Collection[str]:
        """Returns the engines that may serve a name, although they report no models."""
        return self.silent if name == self.main or name in self.adapters else ()

    def name_for(self, engine: str) -> str:
        """Returns the base name for the router's own requests to an engine."""
        bases = [model.name for model in self.engines.get(engine, ()) if model.parent is None]
        return self.main if not bases or self.main in bases else bases[0]

    def shown(self, name: str) -> bool:
        """Whether a known name is in the router's list of models.

        Adapters vanish when no engine lists them any more, base names when they are forgotten.
        """
        served = self.engines_of(name)
        return served is None or len(served) > 0 or not self.is_adapter(name)

    def card(self, name: str, created: int) -> dict[str, Any]:
        """Returns the card of a name, with the values of the engines that list it.

        ``created``: the time for a name without a reported one, Unix time, s.
        """
        models = list(self.listed.get(name, {}).values())
        adapter = self.is_adapter(name)
        first = models[0] if models else ModelCard(name, parent=self.main if adapter else None)
        lengths = [model.max_model_len for model in models if model.max_model_len is not None]
        card = {
            "id": name,
            "object": "model",
            "created": first.created or created,
            "owned_by": "lmetric-router",
            "root": first.root or (first.parent if adapter else name),
            "parent": first.parent,
        }
        return card | ({"max_model_len": min(lengths)} if lengths else {})


def fits(names: ModelNames, engine: str, models: Iterable[ModelCard]) -> bool:
    """Whether an engine with this list of models serves a model of the fleet.

    It lists the model's name, or it shares a base name with another engine that lists it.
    """
    bases = {model.name for model in models if model.parent is None}
    if not bases or names.main in bases:
        return True
    anchors = [each for each in names.listed.get(names.main, ()) if each != engine]
    return any(name in bases for each in anchors for name in _bases(names.engines[each]))


def _bases(models: Iterable[ModelCard]) -> Iterator[str]:
    return (model.name for model in models if model.parent is None)


class NameSearch:
    """Searches for unknown names, which read the lists of models of all engines.

    The begins of two searches are at least `SEARCH_SECONDS` apart. ``read``: begins to read all
    lists. ``engines``: returns the number of engines.
    """

    def __init__(self, read: Callable[[], Iterable[asyncio.Task[None]]], engines: Callable[[], int]) -> None:
        self._read = read
        self._engines = engines
        self._began = -math.inf  # the last search, on the monotonic clock
        self._next: asyncio.Task[None] | None = None  # the search that has not begun
        self._tasks: set[asyncio.Task[None]] = set()
        # Requests that wait, with the name of each. `_joined`: for the search that has not begun.
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._joined: list[asyncio.Future[None]] = []

    def find(self, name: str, seconds: float) -> asyncio.Future[None] | None:
        """Returns a future that ends when the name is known, or at the end of a search.

        The search takes at most ``seconds``. None: too many requests wait.
        """
        if len(self._waiting) >= MOST_SEARCHES:
            return None
        if self._next is None:
            self._next = asyncio.create_task(self._search(seconds), name="search for a model")
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[found] = name
        self._joined.append(found)
        found.add_done_callback(self._waiting.pop)
        return found

    async def _search(self, seconds: float) -> None:
        pause = max(SEARCH_SECONDS, SEARCH_SECONDS_PER_ENGINE * self._engines())
        await asyncio.sleep(max(0.0, self._began + pause - time.monotonic()))
        self._began = time.monotonic()
        joined, self._joined, self._next = self._joined, [], None
        try:
            if reads := list(self._read()):
                await asyncio.wait(reads, timeout=seconds)
        finally:
            _end(joined)

    def known(self, known: Callable[[str], bool]) -> None:
        """Ends the searches for names that are known now."""
        if self._waiting:
            _end([found for found, name in self._waiting.items() if known(name)])

    def close(self) -> None:
        """Cancels the searches."""
        for task in self._tasks:
            task.cancel()


def _end(waiting: Iterable[asyncio.Future[None]]) -> None:
    for found in waiting:
        if not found.done():
            found.set_result(None)
