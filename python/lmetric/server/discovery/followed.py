"""The sources that the router follows. Routers with `discovery` load this module."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import structlog
from pydantic import SecretStr

from lmetric.config import ConfigError, DiscoverySource
from lmetric.server.discovery.members import Found, Members
from lmetric.server.discovery.source import Source, SourceError

log = structlog.get_logger("lmetric.discovery")

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


class Followed:
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
        self._unusable: str | None = None  # fault of a URL in the report that was applied last
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
        self._waiting, self._problem = engines, problem
        if self._applying is None:
            self._applying = asyncio.create_task(self._apply(), name=f"engines of {self.name}")

    def _usable(self, engines: Sequence[Found]) -> tuple[Sequence[Found], str | None]:
        """Returns the engines with a usable URL, and the first fault of another one.

        A check takes some 10 µs of CPU time: call it in a thread.
        """
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
            self._engines, self._unusable = self._usable(engines)
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
        wrong = self._problem or self._unusable
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
