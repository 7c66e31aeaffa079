"""What runs beside the requests: checks of the engines, their load, time limits, the guard."""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable

import structlog

from lmetric.server.fleet import Engine, Fleet
from lmetric.server.front import Front
from lmetric.server.metrics import Metrics
from lmetric.server.upstream import UpstreamError

log = structlog.get_logger("lmetric.health")

_GAUGE = re.compile(
    rb"^(?:vllm|sglang):(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_running_reqs"
    rb"|num_queue_reqs|token_usage)"
    rb'(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?'
    rb" +([0-9.eE+-]+)",
    re.MULTILINE,
)
_MEANING = {
    b"num_requests_running": "running",
    b"num_running_reqs": "running",
    b"num_requests_waiting": "waiting",
    b"num_queue_reqs": "waiting",
    b"kv_cache_usage_perc": "kv_usage",
    b"token_usage": "kv_usage",
}


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
        self._tasks.append(asyncio.create_task(self._tick(), name="guard"))

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
            if engine in self.fleet.unplaced:
                await self.fleet.discover(engine)
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
        try:
            status, body = await engine.upstream.get("/metrics", self.config.health.timeout)
        except UpstreamError as error:
            log.debug("no load report", engine=engine.name, reason=str(error))
            return
        if status == 200 and engine.pool is not None:
            report = parse_load(body)
            if report:
                engine.pool.router.engine_report(engine.name, **report)

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


def parse_load(text: bytes) -> dict[str, float]:
    """The load in an engine's /metrics, with the names of ``Router.engine_report``.

    Counts are summed over data-parallel ranks; of the KV usage the highest counts.
    """
    report: dict[str, float] = {}
    for name, value in _GAUGE.findall(text):
        meaning = _MEANING[name]
        try:
            number = float(value)
        except ValueError:
            continue
        if not math.isfinite(number) or number < 0:
            continue
        before = report.get(meaning, 0.0)
        report[meaning] = max(before, number) if meaning == "kv_usage" else before + number
    return report
