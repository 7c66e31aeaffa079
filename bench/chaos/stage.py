"""A scene of engines and routers, and the rules that every scenario checks at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from engines import EngineProcess
from routers import OwnRouter, fleet, samples, settled
from traffic import Asked, Traffic

RATE = 15.0  # requests per second


class RuleError(AssertionError):
    """A router broke a rule. The message has the rule and what was found."""


def never(_: Asked) -> bool:
    """No request may be lost."""
    return False


@dataclass
class Stage:
    """Engines, a client, and the routers that were started.

    Args:
        engines: running engines.
        session: a client that uses a new connection per request.
        folder: for files of the routers.
        seed: seed of the traffic.
    """

    engines: Sequence[EngineProcess]
    session: aiohttp.ClientSession
    folder: Path
    seed: int
    routers: list[OwnRouter] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines."""
        return [engine.url for engine in self.engines]

    async def router(self, config: Mapping[str, Any] | None = None, **more: Any) -> OwnRouter:
        """Starts a router before all engines."""
        engines = more.pop("engines", self.urls)
        router = OwnRouter(self.folder, engines, config, **more)
        self.routers.append(router)
        await router.start(self.session)
        return router

    def traffic(self, *routers: OwnRouter, rate: float = RATE) -> Traffic:
        """Requests for routers."""
        return Traffic([router.url for router in routers], self.seed, rate)

    async def check(
        self, traffic: Traffic, may_be_lost: Callable[[Asked], bool] = never
    ) -> dict[str, float | str]:
        """Checks all rules, and returns figures. Raises RuleError.

        Each request has ended once, with the bytes of an undisturbed engine, unless it may be
        lost; even then its answer must not be another one. Nothing is in flight, at the routers
        and at the engines. No callback of a router took over 50 ms of CPU time of a reference
        machine.
        """
        await traffic.judge([self.engines[0].direct_url], self.session)
        lost = [asked for asked in traffic.asked if asked.outcome != "right"]
        wrong = [asked for asked in lost if asked.outcome == "wrong" or not may_be_lost(asked)]
        if wrong:
            raise RuleError(f"{len(wrong)} of {len(traffic.asked)} requests were lost, first: {wrong[:3]}")
        for router in self.routers:
            if router.running:
                await self.check_router(router)
        await self.check_engines()
        return {"requests": len(traffic.asked), "lost": len(lost)}

    async def check_router(self, router: OwnRouter) -> None:
        """Checks that a router counts nothing, and that its event loop was free."""
        left = await settled(router, self.session)
        if left != "0":
            raise RuleError(f"{router.name} counts {left} requests in flight, expected 0")
        if slow := router.slow_callbacks():
            raise RuleError(f"callbacks of {router.name} took over 50 ms: {slow}")

    async def check_engines(self) -> None:
        """Checks that no engine has a request."""
        for engine in self.engines:
            await until(lambda engine=engine: self.engine_is_idle(engine), f"{engine.name} is idle")

    async def engine_is_idle(self, engine: EngineProcess) -> bool:
        """Whether an engine has no request."""
        async with self.session.get(f"{engine.direct_url}/metrics") as response:
            page = await response.text()
        running = samples(page, "vllm:num_requests_running") | samples(page, "vllm:num_requests_waiting")
        return not any(running.values())


async def until(true: Callable[[], Awaitable[object]], what: str, seconds: float = 20.0) -> float:
    """Waits until a condition is true. Returns the seconds. Raises RuleError."""
    began = time.monotonic()
    while not await true():
        if time.monotonic() - began > seconds:
            raise RuleError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


@asynccontextmanager
async def stage(folder: Path, seed: int, count: int = 3, *, kv_events: bool = False) -> AsyncIterator[Stage]:
    """A stage with engines, whose routers are stopped at its end."""
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(fleet(seed, count, kv_events=kv_events))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        it = Stage(engines, session, folder, seed)
        try:
            yield it
        finally:
            for router in it.routers:
                await router.stop()
