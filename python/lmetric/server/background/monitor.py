"""Periodic tasks: engine checks, engine load, time limits, the hot-spot guard, rebalancing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from lmetric.config import ServerConfig, Timeouts
from lmetric.engines.adapter import read_page
from lmetric.server.api.errors import Unusable
from lmetric.server.background.polls import Polls
from lmetric.server.execution.exchange import SATURATED
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.indicators import METRICS_PAGE
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.periodic import periodic
from lmetric.server.fleet.turns import in_turns
from lmetric.server.observe.metrics import Metrics
from lmetric.server.upstream.connection import UpstreamError

if TYPE_CHECKING:
    from lmetric.server.background.downloads import Downloads
    from lmetric.server.tls.contexts import TlsContext

MODELS_SECONDS = 10.0  # time between two reads of an engine's list of models
LAG_PERIOD_SECONDS = 0.1
NO_LOAD_SECONDS = 1.0  # time between two looks whether a reload has turned on reads of the load
REMINDER_SECONDS = 30.0  # time between two warnings about a model without a usable engine
GROWTH_LOG_SECONDS = 60.0
FILE_WATCH_SECONDS = 1.0
ENGINES_PER_TURN = 500  # engines whose time limits one turn of the event loop checks, 2 µs each
ADMISSION_SECONDS = 0.5  # time between two rounds of admission if no request waits

log = structlog.get_logger("lmetric.health")

# Priorities follow the wall clock, so that all routers compute the same ones.
CLOCK_SECONDS = 10.0


class Monitor:
    """The periodic tasks of a router."""

    def __init__(
        self,
        fleet: Fleet,
        overdue: Callable[[float], None],
        metrics: Metrics,
        certificates: Callable[[], Iterable[TlsContext]],
    ) -> None:
        self.fleet = fleet
        self._overdue = overdue  # ends requests past their limits; argument: the monotonic clock, s
        self.metrics = metrics
        self._certificates = certificates
        self._tasks: list[asyncio.Task[None]] = []
        self._checks = Polls("check", self._check)
        self._reads = Polls("load", self._load_of)
        self._probes = Polls("probe", self._probe_silent)
        self._downloads: Downloads | None = None  # from the first tokenizer to download on
        fleet.check = self._checks.begin
        self._warn_again_at = 0.0
        # By model without a usable engine: the time of its last warning.
        self._reminded: dict[str | None, float] = {}

    @property
    def config(self) -> ServerConfig:
        """The configuration, which a reload replaces."""
        return self.fleet.config

    async def check_all(self) -> None:
        """Checks all engines at once and waits for the results."""
        await self.check(list(self.fleet.engines()))

    def start_reminders(self, now: float) -> None:
        """Marks unusable engines as logged: the log of the start has named them."""
        self._reminded = {model: now for model, reason in self._unusable().items() if reason is not None}

    def _unusable(self) -> dict[str | None, Unusable | None]:
        """Returns by model why it has no usable engine. None, without a known model: any engine."""
        reasons: dict[str | None, Unusable | None] = {
            model.name: model.unusable for model in self.fleet.models
        }
        return reasons or {None: self.fleet.unusable}

    def _remind(self, now: float) -> None:
        """Logs why models have no usable engine: at once, then every `REMINDER_SECONDS`.

        A model that neither the configuration nor an engine names any more is logged once, as long
        as the fleet has engines.
        """
        reasons = self._unusable()
        gone = {each.name for each in self.fleet.models if not (each.engines or each.names.configured)}
        for model, reason in reasons.items():
            last = self._reminded.get(model)
            repeats = model not in gone or not self.fleet.size
            if reason is None:
                self._reminded.pop(model, None)
            elif last is None or (repeats and now - last >= REMINDER_SECONDS):
                self._reminded[model] = now
                log.warning("no usable engine", model=model, reason=reason.details)
        for model in self._reminded.keys() - reasons.keys():
            del self._reminded[model]

    async def check(self, engines: Sequence[Engine]) -> None:
        """Checks these engines at once and waits for the results."""
        await self._checks.begin_all(engines)
        checks = [task for engine in engines if (task := self._checks.running.get(engine)) is not None]
        if checks:
            await asyncio.wait(checks)

    def start(self) -> None:
        """Starts the periodic tasks."""
        self._tasks += [
            periodic("checks", lambda: self.config.health.interval, self._begin_checks),
            periodic("time limits", lambda: _sweep_seconds(self.config.timeouts), self._sweep),
            periodic("load", lambda: self.config.load.interval or NO_LOAD_SECONDS, self._load),
            periodic("KV events", 1.0, self._kv),
            periodic("queues", 1.0, self._queues),
            periodic("tokenizer downloads", 1.0, self._watch_downloads),
            periodic("policy files", FILE_WATCH_SECONDS, self._watch_policies),
            periodic("TLS files", FILE_WATCH_SECONDS, self._watch_certificates),
            asyncio.create_task(self._measure_lag(), name="event loop lag"),
            periodic("admission", ADMISSION_SECONDS, self._admission),
            periodic("wall clock", CLOCK_SECONDS, self._clocks),
            asyncio.create_task(self._tick(), name="guard"),
            asyncio.create_task(self._rebalance(), name="rebalancing"),
        ]

    async def stop(self) -> None:
        """Stops the periodic tasks."""
        tasks: list[asyncio.Task[Any]] = [
            *self._tasks,
            *self._checks.running.values(),
            *self._reads.running.values(),
        ]
        tasks += [*self._probes.running.values(), *self.fleet.pages.values()]
        if self._downloads is not None:
            tasks += self._downloads.running.values()
        for task in tasks:
            task.cancel()
        self.fleet.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin_checks(self) -> None:
        """Starts a check of each engine whose last check is over. A slow engine delays no other."""
        now = time.monotonic()
        self.fleet.forget_unserved(now)
        self._remind(now)
        await self._checks.begin_all(list(self.fleet.engines()))

    async def _check(self, engine: Engine) -> None:
        health = self.config.health
        try:
            status, _ = await engine.upstream.get(health.path, health.timeout)
            if status >= 500:
                raise UpstreamError("status", f"GET {health.path}: status {status}")
            if engine.stalled:
                await self._generates(engine)
            if engine.identified and self._models_due(engine):
                await self.fleet.read_models(engine)
            if not engine.identified or time.monotonic() >= engine.ask_again_at:
                await self.fleet.identify(engine)
            if self.fleet.model_of(engine) is None:
                return  # removed, or replaced because it serves another model
            if engine.misfit is not None:
                raise ValueError(engine.misfit)
            await self._awake(engine)
            if engine.unfit is not None:
                engine.ask_anew()  # it may have been restarted with the missing setting
                raise ValueError(engine.unfit)
        except (UpstreamError, ValueError) as error:
            reason = str(error)
            if isinstance(error, UpstreamError) and error.kind == "resources":
                self._lacks_resources(reason)
                return
            if not engine.healthy and engine.last_error != reason:
                level = engine.quiet or engine.down_level
                log.log(level, "engine not usable", engine=engine.name, reason=reason)
            if isinstance(error, UpstreamError):
                kind = error.kind
            elif engine.misfit is not None:
                kind = "other_model" if engine.capabilities.models else "no_model"
            else:
                kind = "unidentified" if engine.unfit is None else "unfit"
            engine.failed(kind, reason)
        else:
            engine.last_error = None
            engine.succeeded()
            await self._probe(engine)

    @staticmethod
    def _models_due(engine: Engine) -> bool:
        """Whether an engine's list of models must be read again."""
        due = engine.misfit is not None or engine.models_due
        return due or time.monotonic() - engine.models_at >= MODELS_SECONDS

    async def _generates(self, engine: Engine) -> None:
        """Raises UpstreamError (stalled) if an engine does not answer a small request."""
        try:
            status = await engine.generate(self.config.health.ejection.probe_timeout)
        except UpstreamError as error:
            raise UpstreamError("stalled", str(error)) from None
        if status >= 500:
            raise UpstreamError("stalled", f"a small request got status {status}")

    async def _awake(self, engine: Engine) -> None:
        """Raises UpstreamError (paused) if an engine reports that it is paused or asleep."""
        for path in engine.capabilities.pause_pages:
            try:
                status, body = await engine.upstream.get(path, self.config.health.timeout)
            except UpstreamError as error:
                if error.kind == "timeout":
                    continue  # /is_paused waits for a step of the engine, which may take long
                raise
            if status == 200 and engine.adapter.paused(body):
                status, page = await self.fleet.page(engine, METRICS_PAGE, paused=True)
                engine.sleeps(status == 200 and await read_page(page, engine.adapter.asleep))
                state = "asleep" if engine.asleep else "paused"
                raise UpstreamError("paused", f"{state}: GET {path}: {body[:80].decode(errors='replace')}")
        engine.sleeps(False)

    async def _probe(self, engine: Engine) -> None:
        """Tests with a small request whether an engine works again after its ejection."""
        service, model = engine.service, self.fleet.model_of(engine)
        if model is None or service.state != "EJECTED" or time.monotonic() < service.until:
            return
        try:
            status = await engine.generate(self.config.health.ejection.probe_timeout)
        except UpstreamError as error:
            model.probed(engine, f"probe: {error}")
        else:
            if status not in SATURATED:
                model.probed(engine, f"probe: status {status}" if status >= 500 else None)

    def _lacks_resources(self, reason: str) -> None:
        """Logs, at most once a minute, that engines cannot be checked."""
        now = time.monotonic()
        if now >= self._warn_again_at:
            self._warn_again_at = now + 60.0
            log.error("the router lacks resources to check engines; they keep their state", reason=reason)

    async def _load(self) -> None:
        """Starts to read the load of each healthy engine whose last read is over."""
        if self.config.load.interval is None:
            return
        engines = (engine for model in self.fleet.models for engine in model.engines.values())
        await self._reads.begin_all([each for each in engines if each.healthy and each.load_pages])

    async def _load_of(self, engine: Engine) -> None:
        for path in engine.load_pages:
            try:
                status, body = await self.fleet.page(engine, path)
                if status != 200:
                    raise UpstreamError("status", f"GET {path}: status {status}")
            except UpstreamError as error:
                engine.load_unread(str(error))
                return
            await engine.report_page(path, body)

    async def _kv(self) -> None:
        for model in self.fleet.models:
            model.wire()
            await self._checks.begin_all(model.kv.watch(model.engines.values()))

    async def _queues(self) -> None:
        for model in self.fleet.models:
            model.queues.look(time.monotonic())
            model.weights.look()

    async def _admission(self) -> None:
        now = time.monotonic()
        for model in self.fleet.models:
            if model.programs.follows or model.held.admits:
                model.held.release(now)
            model.programs.warn(now)
            if model.trials is not None:
                model.trials.canary.look(now)

    async def _clocks(self) -> None:
        for model in self.fleet.models:
            if model.priority is not None:
                model.priority.follow()

    async def _sweep(self) -> None:
        now = time.monotonic()
        self._overdue(now)
        for model in list(self.fleet.models):
            model.review()
            await asyncio.sleep(0)  # a review of 4,096 engines takes 10 ms
        await in_turns(self._sweep_engines(list(self.fleet.engines()), now), ENGINES_PER_TURN)

    def _sweep_engines(self, engines: Iterable[Engine], now: float) -> Iterator[None]:
        for engine in engines:
            engine.upstream.expire(now)
            silent = engine.watchdog.sweep(now)
            if silent is not None and silent > self.config.health.stall_seconds and engine.healthy:
                self._suspect(engine, silent, now)
            yield

    def _suspect(self, engine: Engine, silent: float, now: float) -> None:
        """Probes an engine whose streams have got no token for too long."""
        model = self.fleet.model_of(engine)
        if model is None or engine in self._probes.running:
            return
        prefill = model.queued_prefill_seconds(engine) if engine.watchdog.prefilling else 0.0
        if silent > engine.watchdog.limit(self.config.health.stall_seconds, prefill):
            self._probes.begin(engine)

    async def _probe_silent(self, engine: Engine) -> None:
        """Takes a silent engine out of service if it does not answer a small request either."""
        began = time.monotonic()
        seconds = self.config.health.ejection.probe_timeout
        try:
            await engine.generate(seconds)
        except UpstreamError as error:
            if engine.watchdog.token_at < began and engine.healthy and error.kind != "resources":
                silent = time.monotonic() - engine.watchdog.token_at
                reason = f"no token for {silent:.0f} s, and a small request failed: {error}"
                engine.failed("stalled", reason)
        else:
            engine.watchdog.token_at = time.monotonic()  # it works; its streams wait for something else

    async def _measure_lag(self) -> None:
        """Measures the delay of the event loop, forever."""
        clock = asyncio.get_running_loop().time
        while True:
            began, busy = clock(), time.thread_time()
            due = began + LAG_PERIOD_SECONDS
            await asyncio.sleep(LAG_PERIOD_SECONDS)
            now = clock()
            self.metrics.loop_lag.observe(max(now - due, 0.0))
            self.metrics.lateness.note(began, due, now, busy=time.thread_time() - busy)

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            following = now + 5.0
            for model in self.fleet.models:
                try:
                    events, deadline = model.router.tick(now)
                except Exception:
                    log.exception("the hot-spot guard failed", model=model.name)
                    continue
                following = min(following, deadline)
                self._log_growth(model, now)
                for event in events:
                    kind = str(event["event"])
                    self.metrics.events[model.name, kind] += 1
                    details = {k: v for k, v in event.items() if k != "event"}
                    model.activity.note(now, "guard", 0, "", None, None, kind, None, None, details)
                    log.info("hot-spot guard", model=model.name, what=kind, **details)
            await asyncio.sleep(min(max(following - time.monotonic(), 0.05), 5.0))

    def _log_growth(self, model: Model, now: float) -> None:
        """Logs, at most once a minute, decisions in which a policy scored no engine or failed."""
        fallbacks = model.router.policy_fallbacks()
        for message, count, details in (
            (
                "policy scored no engine; used the engine with the fewest requests",
                model.router.unscored,
                {},
            ),
            (
                "policy failed; used its fallback",
                model.fallbacks(fallbacks),
                {"reason": fallbacks["problem"]},
            ),
        ):
            logged, at = model.logged.get(message, (0, -math.inf))
            if count > logged and now >= at + GROWTH_LOG_SECONDS:
                model.logged[message] = (count, now)
                decisions = count - logged
                log.warning(message, model=model.name, decisions=decisions, total=count, **details)

    async def _watch_policies(self) -> None:
        """Replaces policies whose files have changed, also those on trial."""
        if models := [each for each in self.fleet.models if each.policies.files]:
            from lmetric.server.background.policy_watch import replace_changed

            for model in models:
                await replace_changed(model)

    async def _watch_downloads(self) -> None:
        """Starts downloads of tokenizers that are due."""
        if self._downloads is None:
            if not any(model.tokenizers.wanted for model in self.fleet.models):
                return
            from lmetric.server.background.downloads import Downloads

            self._downloads = Downloads(self.fleet)
        await self._downloads.begin()

    async def _watch_certificates(self) -> None:
        """Uses certificates whose files have changed."""
        for context in self._certificates():
            context.refresh()

    async def _rebalance(self) -> None:
        """Runs the rebalancing rounds of each model when they are due, forever."""
        while True:
            now = time.monotonic()
            following = now + 1.0
            for model in self.fleet.models:
                mover = model.mover
                if mover is None:
                    continue
                if now >= mover.due:
                    try:
                        mover.round(now)
                    except Exception:
                        log.exception("rebalancing failed", model=model.name)
                following = min(following, mover.due)
            await asyncio.sleep(max(following - time.monotonic(), 0.001))


def _sweep_seconds(timeouts: Timeouts) -> float:
    """Returns the time between two checks of the time limits: a part of the shortest one."""
    shortest = min(
        *(timeouts.first_byte, timeouts.answer, timeouts.between_chunks),
        *(timeouts.slow_client, timeouts.body, timeouts.keep_alive),
        *(() if timeouts.request is None else (timeouts.request,)),
    )
    return min(max(shortest / 4, 0.02), 0.5)
