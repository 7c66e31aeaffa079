"""What runs beside the requests: checks of the engines, their load, time limits, the guard."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import structlog

from lmetric.server import priority
from lmetric.server.fleet import Engine, Fleet
from lmetric.server.front import Front
from lmetric.server.metrics import Metrics
from lmetric.server.upstream import UpstreamError

log = structlog.get_logger("lmetric.health")

# How often the wall clock is read for priorities, which routers must agree on.
CLOCK_SECONDS = 10.0


class Monitor:
    """The periodic tasks."""

    def __init__(self, fleet: Fleet, front: Front, metrics: Metrics) -> None:
        self.fleet = fleet
        self.front = front
        self.metrics = metrics
        self.config = fleet.config
        self._tasks: list[asyncio.Task[None]] = []

    async def check_all(self) -> None:
        """One round of checks, all engines at once."""
        self.fleet.forget_unserved(time.monotonic())
        await self.check(list(self.fleet.engines()))

    async def check(self, engines: Iterable[Engine]) -> None:
        """Checks these engines now, all at once."""
        await asyncio.gather(*(self._check(engine) for engine in engines))

    def start(self) -> None:
        """Starts the periodic tasks."""
        timeouts = self.config.timeouts
        shortest = min(
            *(timeouts.first_byte, timeouts.answer, timeouts.between_chunks),
            *(timeouts.slow_client, timeouts.body, timeouts.keep_alive),
        )
        sweep = min(max(shortest / 4, 0.02), 0.5)
        self._spawn("checks", self.config.health.interval, self.check_all)
        self._spawn("time limits", sweep, self._sweep)
        if self.config.load.interval is not None:
            self._spawn("load", self.config.load.interval, self._load)
        self._spawn("KV events", 1.0, self._kv)
        self._spawn("wall clock", CLOCK_SECONDS, self._clocks)
        self._tasks.append(asyncio.create_task(self._tick(), name="guard"))
        self._tasks.append(asyncio.create_task(self._reschedule(), name="rescheduling"))

    async def stop(self) -> None:
        """Stops them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, name: str, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def forever() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await work()
                except Exception:
                    log.exception("periodic task failed", task=name)

        self._tasks.append(asyncio.create_task(forever(), name=name))

    async def _check(self, engine: Engine) -> None:
        health = self.config.health
        try:
            status, _ = await engine.upstream.get(health.path, health.timeout)
            if status >= 500:
                raise UpstreamError("status", f"GET {health.path}: status {status}")
            if not engine.identified or time.monotonic() >= engine.ask_again_at:
                await self.fleet.identify(engine)
            if engine.unfit is not None:
                engine.ask_anew()  # it may be started again with what it needs
                raise ValueError(engine.unfit)
        except (UpstreamError, ValueError) as error:
            reason = str(error)
            if not engine.healthy and engine.last_error != reason:
                log.warning("engine not usable", engine=engine.name, reason=reason)
            engine.failed(error.kind if isinstance(error, UpstreamError) else "status", reason)
        else:
            engine.last_error = None
            engine.succeeded()

    async def _load(self) -> None:
        engines = [e for pool in self.fleet.pools for e in pool.engines.values() if e.healthy]
        await asyncio.gather(*(self._load_of(engine) for engine in engines))

    async def _load_of(self, engine: Engine) -> None:
        path = engine.capabilities.load_path
        if path is None:
            return
        try:
            status, body = await engine.upstream.get(path, self.config.health.timeout)
            if status != 200:
                raise UpstreamError("status", f"GET {path}: status {status}")
        except UpstreamError as error:
            engine.load_error = str(error)
            return
        load = engine.adapter.load(body)
        engine.load_error = None if load else f"GET {path}: no load under a known name"
        engine.report(load, path.partition("?")[0])

    async def _kv(self) -> None:
        for pool in self.fleet.pools:
            pool.wire()
            pool.kv.watch(pool.engines.values())

    async def _clocks(self) -> None:
        for pool in self.fleet.pools:
            priority.follow_clock(pool.router, pool.settings)

    async def _sweep(self) -> None:
        now = time.monotonic()
        self.front.check(now)
        for engine in self.fleet.engines():
            engine.upstream.expire(now)

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            following = now + 5.0
            for pool in self.fleet.pools:
                try:
                    events, deadline = pool.router.tick(now)
                except Exception:
                    log.exception("the guard failed", model=pool.name)
                    continue
                following = min(following, deadline)
                for event in events:
                    kind = str(event["event"])
                    self.metrics.events[pool.name, kind] += 1
                    details = {k: v for k, v in event.items() if k != "event"}
                    log.warning("hot-spot guard", model=pool.name, what=kind, **details)
            await asyncio.sleep(min(max(following - time.monotonic(), 0.05), 5.0))

    async def _reschedule(self) -> None:
        """Rounds of rescheduling, each pool's in its own time."""
        while True:
            now = time.monotonic()
            following = now + 1.0
            for pool in self.fleet.pools:
                mover = pool.mover
                if mover is None:
                    continue
                if now >= mover.due:
                    try:
                        mover.round(now)
                    except Exception:
                        log.exception("rescheduling failed", model=pool.name)
                following = min(following, mover.due)
            await asyncio.sleep(max(following - time.monotonic(), 0.001))
