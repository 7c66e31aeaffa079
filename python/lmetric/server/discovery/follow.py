"""Runs the discovery sources, one task each. A failed source is restarted after a growing pause."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import SecretStr

from lmetric.config import CONFIGURED, ConfigError, DiscoverySource, ServerConfig
from lmetric.server.discovery.members import Members
from lmetric.server.discovery.source import Found, Source, SourceError
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.problem import unix_of

log = structlog.get_logger("lmetric.discovery")

FIRST_SECONDS = 5.0  # longest wait at start for the first report of each source
_PAUSES = (1.0, 30.0)  # pauses before a source is restarted: first, longest


def make_source(config: DiscoverySource, objectives: dict[str, int] | None = None) -> Source:
    """Returns the source that a section describes. Raises ConfigError if a package is missing.

    ``objectives``: gets the priorities of InferenceObjectives.
    """
    # Imported here because most routers need only one source, and Kubernetes' client is optional.
    if config.dns is not None:
        from lmetric.server.discovery.dns import DnsNames

        return DnsNames(config.dns, config)
    if config.kubernetes is not None:
        if config.kubernetes.inference_pool is not None:
            from lmetric.server.discovery.inference_pool import PoolEngines

            return PoolEngines(config.kubernetes, config, {} if objectives is None else objectives)
        from lmetric.server.discovery.kubernetes import Pods

        return Pods(config.kubernetes, config)
    from lmetric.server.discovery.file import WatchedFile

    assert config.file is not None
    return WatchedFile(config.file, config)


class _Followed:
    """A source with its state. It is the sink that receives the source's reports.

    ``section``: of the configuration. Engines without an API key get the section's key when their
    report is applied, because sources keep reports, and a reload changes the key.
    """

    def __init__(self, section: DiscoverySource, source: Source, members: Members) -> None:
        self.name = section.label
        self.source = source
        self.key = section.api_key
        self.updates = 0
        self.failures = 0
        self.updated_at: float | None = None
        self.wrong: str | None = None
        self.wrong_since: float | None = None  # monotonic
        self.reported = asyncio.Event()  # set at the first report, of engines or of a problem
        self._members = members
        self._problem: str | None = None  # of the last read
        self._waiting: Sequence[Found] | None = None  # the last report, if it is not applied yet
        self._engines: Sequence[Found] = ()  # the report that was applied last, without the key
        self._applying: asyncio.Task[None] | None = None

    def found(self, engines: Sequence[Found], problem: str | None = None) -> None:
        """Replaces all engines of the source.

        ``problem``: the fault of entries left out, or None. Of reports that come while one is
        applied, only the last one is applied. Leaves out engines whose URL the router cannot use.
        """
        self.updates += 1
        self.updated_at = time.monotonic()
        usable, wrong = self._usable(engines)
        self._waiting, self._problem = usable, problem or wrong
        if self._applying is None:
            self._applying = asyncio.create_task(self._apply(), name=f"engines of {self.name}")

    def _usable(self, engines: Sequence[Found]) -> tuple[Sequence[Found], str | None]:
        """Returns the engines with a usable URL, and the first fault of another one."""
        check = self._members.fleet.check_url
        if check is None:
            return engines, None
        usable, wrong = [], None
        for each in engines:
            try:
                check(each.config.url)
            except ConfigError as error:
                wrong = wrong or str(error)
            else:
                usable.append(each)
        return usable, wrong

    async def _apply(self) -> None:
        try:
            while self._waiting is not None:
                engines, self._waiting = self._waiting, None
                try:
                    await self._members.change(self.name, partial(self._with_key, engines))
                except Exception as error:
                    log.exception("cannot apply the engines of a source", source=self.name)
                    if self._waiting is None:  # else a later report has replaced the problem
                        self._problem = f"cannot apply its engines: {type(error).__name__}; see the log"
                self._say()
        finally:
            self._applying = None

    def _with_key(self, engines: Sequence[Found] | None, _: Sequence[Found]) -> Sequence[Found]:
        """Returns the engines of a report, with the present key. None: of the last report."""
        key = self.key
        if engines is not None:
            self._engines = engines
        if key is None:
            return self._engines
        return [
            each
            if each.config.api_key is not None
            else replace(each, config=each.config.model_copy(update={"api_key": key}))
            for each in self._engines
        ]

    async def set_key(self, key: SecretStr | None) -> list[str]:
        """Sets the API key of the section. Returns the engines whose key changed."""
        self.key = key
        return await self._members.change(self.name, partial(self._with_key, None))

    async def stop(self) -> None:
        """Ends the application of reports."""
        if self._applying is not None:
            self._applying.cancel()
            await asyncio.gather(self._applying, return_exceptions=True)

    def problem(self, reason: str) -> None:
        """Records that the source cannot be read now. Its last engines stay."""
        self.failures += 1
        self._problem = reason
        if self._applying is None:
            self._say()

    def _say(self) -> None:
        wrong = self._problem
        engines = len(self._members.of(self.name))
        if wrong is not None and wrong != self.wrong:
            log.warning("discovery failed", source=self.name, reason=wrong, engines_kept=engines)
        elif wrong is None and self.wrong is not None:
            log.info("discovery works again", source=self.name, engines=engines)
        if (wrong is None) is not (self.wrong is None):
            self.wrong_since = None if wrong is None else time.monotonic()
        self.wrong = wrong
        self.reported.set()

    async def forever(self) -> None:
        """Follows the source, and restarts it after failures."""
        pause, longest = _PAUSES
        while True:
            updates = self.updates
            try:
                await self.source.follow(self)
            except SourceError as error:
                self.problem(str(error))
            except Exception as error:
                log.exception("a source failed unexpectedly", source=self.name)
                self.problem(f"{type(error).__name__}; see the log")
            if self.updates > updates:
                pause = _PAUSES[0]
            # The pause varies, so that the routers of a fleet do not all retry at once.
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, longest)


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
        self._sources = [
            _Followed(section, make_source(section, fleet.objectives), self.members)
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
