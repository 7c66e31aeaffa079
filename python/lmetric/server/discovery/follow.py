"""Runs the discovery sources, one task each. A failed source is restarted after a growing pause."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.config import CONFIGURED, ServerConfig
from lmetric.server.discovery.members import Found, Members
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.problem import unix_of

if TYPE_CHECKING:
    from lmetric.server.discovery.followed import Followed

log = structlog.get_logger("lmetric.discovery")

FIRST_SECONDS = 5.0  # longest wait at start for the first report of each source


class Discovery:
    """The members of the fleet, and the sources that report them.

    Args:
        check: checks engines. It is called with each batch of new engines.

    Raises ConfigError if a source needs a package that is not installed.
    """

    def __init__(
        self, config: ServerConfig, fleet: Fleet, check: Callable[[list[Engine]], Awaitable[None]]
    ) -> None:
        self.members = Members(config, fleet, self._came)
        self._check = check
        self._sources: list[Followed] = []  # a reload adds none
        if config.discovery:
            from lmetric.server.discovery.followed import Followed, make_source

            self._sources = [
                Followed(section, make_source(section, fleet.objectives), self.members)
                for section in config.discovery
            ]
        self._tasks: list[asyncio.Task[None]] = []
        self._checks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts the sources, and waits for their first reports and the checks of their engines.

        Each wait takes at most `FIRST_SECONDS`.
        """
        for source in self._sources:
            self._tasks.append(asyncio.create_task(source.forever(), name=f"discovery {source.name}"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                for source in self._sources:
                    await source.reported.wait()
        if self._checks:
            await asyncio.wait(self._checks, timeout=FIRST_SECONDS)

    async def stop(self) -> None:
        """Stops all sources. The fleet keeps its engines."""
        tasks = [*self._tasks, *self._checks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in self._sources:
            await source.stop()
        await self.members.stop()

    async def reload(self, config: ServerConfig, sections_of: ServerConfig) -> list[str]:
        """Applies the engines of a configuration, and the API keys in the sections of another.

        Returns the engines whose key changed. A key and TLS change while an engine serves; an
        engine with other changes is replaced.
        """
        keys = await self.members.change(
            CONFIGURED,
            lambda _: [
                *(Found(engine, model.name) for model in config.models for engine in model.engines),
                *(Found(engine, config.model) for engine in config.engines),
            ],
        )
        sections = {section.label: section for section in sections_of.discovery}
        for source in self._sources:
            section = sections.get(source.name)
            if section is not None and section.api_key != source.key:
                keys += await source.set_key(section.api_key)
        return keys

    def _came(self, engines: list[Engine]) -> None:
        task = asyncio.create_task(self._checked(engines), name="check of new engines")
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _checked(self, engines: list[Engine]) -> None:
        try:
            await self._check(engines)
        except Exception:
            log.exception("cannot check new engines")

    def state(self) -> list[dict[str, Any]]:
        """Returns the content of /debug/discovery: one row per source."""
        now = time.monotonic()
        return [
            {
                "source": source.name,
                "engines": len(self.members.of(source.name)),
                "problem": source.wrong,
                "problem_since": unix_of(source.wrong_since),
                "updates": source.updates,
                "failures": source.failures,
                "last_update_age_seconds": None
                if source.updated_at is None
                else round(now - source.updated_at, 3),
            }
            for source in self._sources
        ]

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of discovery."""
        engines = GaugeMetricFamily(
            "lmetric_discovery_engines", "Engines in the last report of a source", labels=("source",)
        )
        working = GaugeMetricFamily(
            "lmetric_discovery_up",
            "1 if the last read of a source had no problem, else 0",
            labels=("source",),
        )
        updates = CounterMetricFamily(
            "lmetric_discovery_updates", "Reports of engines from a source", labels=("source",)
        )
        failures = CounterMetricFamily(
            "lmetric_discovery_failures", "Failed reads of a source", labels=("source",)
        )
        for source in self._sources:
            label = (source.name,)
            engines.add_metric(label, len(self.members.of(source.name)))
            working.add_metric(label, float(source.updated_at is not None and source.wrong is None))
            updates.add_metric(label, source.updates)
            failures.add_metric(label, source.failures)
        yield from (engines, working, updates, failures)
        for name, text, value in (
            ("lmetric_engines_added", "Engines added while the router ran", self.members.added),
            ("lmetric_engines_removed", "Engines removed while the router ran", self.members.removed),
        ):
            yield CounterMetricFamily(name, text, value=value)
