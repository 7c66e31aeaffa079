"""A router before emulated prefill and decode engines, all in this event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from constants import configured
from lmetric.server import Server
from lmetric_lab.emulated import EngineOptions, EngineServer
from waiting import PATIENCE_SECONDS, until

PROMPT = "the history of the quiet river and of all who lived by it " * 12
STANDSTILL = 1e-4
"""Speed of an engine's clock: one step takes minutes, however busy the machine is."""
BODY: dict[str, Any] = {"model": "emulated", "prompt": PROMPT, "max_tokens": 20}


def nixl(role: str, **changes: Any) -> EngineOptions:
    """An emulated vLLM."""
    given = {"port": 0, "role": role, "kv_connector": "nixl", "clock_speed": 10.0}
    return EngineOptions.model_validate(given | changes)


def sglang(role: str, **changes: Any) -> EngineOptions:
    """The stand-in for SGLang."""
    given = {"port": 0, "role": role, "api": "sglang", "clock_speed": 10.0}
    return EngineOptions.model_validate(given | changes)


@dataclass
class Pd:
    """Engines by name (p0, p1, d0, …, by role), their server, and a client."""

    engines: dict[str, EngineServer]
    server: Server
    client: aiohttp.ClientSession
    stopped: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def outcomes(self) -> dict[str, int]:
        """The outcomes of KV transfers."""
        return dict(self.server.fleet.models[0].kv_transfers)

    async def post(
        self, body: Any = BODY, path: str = "/v1/completions", url: str | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Returns status, headers (lower case) and the parsed JSON."""
        async with self.client.post((url or self.url) + path, json=body) as response:
            low = {name.lower(): value for name, value in response.headers.items()}
            return response.status, low, await response.json()

    async def text(self, body: Any = BODY) -> str:
        """Returns the text of an answer without streaming."""
        status, _, answer = await self.post(body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    async def stream(self, body: Any = BODY) -> str:
        """Returns the text of a stream. An error stands in angle brackets."""
        async with self.client.post(f"{self.url}/v1/completions", json=body | {"stream": True}) as response:
            raw = await response.text()
            assert response.status == 200, raw
        *events, end, _ = raw.split("\n\n")
        assert end == "data: [DONE]"
        said = [orjson.loads(event.removeprefix("data: ")) for event in events]
        return "".join(f"<{e['error']['code']}>" if "error" in e else e["choices"][0]["text"] for e in said)

    async def alone(self, body: Any = BODY) -> str:
        """Returns the answer of a single engine."""
        async with EngineServer(EngineOptions(port=0, clock_speed=100.0)) as engine:
            status, _, answer = await self.post(body, url=engine.url)
        assert status == 200
        return str(answer["choices"][0]["text"])

    def load(self, name: str) -> dict[str, Any]:
        """Returns an engine's own counts."""
        (rank,) = self.engines[name]._ranks
        return dict(rank.driver.engine.load())

    def busy(self, name: str) -> int:
        """Returns the number of requests in an engine."""
        load = self.load(name)
        return int(load["running"] + load["waiting"])

    async def kill(self, name: str) -> None:
        """Kills an engine in the middle of its work."""
        engine = self.engines[name]
        self.stopped.add(name)
        runner = engine._runner
        assert runner is not None
        for site in list(runner.sites):
            await site.stop()
        stopping = asyncio.create_task(engine.stop())
        while not stopping.done():  # connections accepted last would keep it from stopping
            for protocol in list(runner.server.connections if runner.server else []):
                if protocol.transport is not None:
                    protocol.transport.abort()
            await asyncio.sleep(0.001)
        await stopping

    def pace(self, name: str, speed: float) -> None:
        """Changes the speed of an engine's clock from now on."""
        (rank,) = self.engines[name]._ranks
        clock = rank.driver.clock
        now = clock.now()
        clock._speed = speed
        clock._origin = clock._loop.time() - now / speed
        rank.driver._schedule()

    def slow_down(self) -> None:
        """Lets no engine end a long answer while a test waits: a step takes about half a second."""
        for name in self.engines.keys() - self.stopped:
            self.pace(name, 0.02)

    def resume(self) -> None:
        """Lets engines run whose clocks stand still."""
        for name in self.engines.keys() - self.stopped:
            self.pace(name, 1.0)

    async def until(self, true: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until a condition is true."""
        await until(true, seconds)

    def in_flight(self) -> int:
        return sum(model.router.in_flight() for model in self.server.fleet.models)


@contextlib.asynccontextmanager
async def pd(
    *options: EngineOptions, roles: dict[str, str] | None = None, **config: Any
) -> AsyncIterator[Pd]:
    """Starts a router before such engines. At the end, no request may be in flight."""
    engines: dict[str, EngineServer] = {}
    async with contextlib.AsyncExitStack() as stack:
        for each in options:
            letter = each.role[0]
            name = f"{letter}{sum(other.startswith(letter) for other in engines)}"
            engines[name] = EngineServer(each)
            await stack.enter_async_context(engines[name])
        values = {
            "port": 0,
            "engines": [
                {"url": engine.url, "name": name, "role": (roles or {}).get(name)}
                for name, engine in engines.items()
            ],
            "model": "emulated",
            "experimental": True,
            "tokenizer": "off",
            "load": {"interval": None},
            **config,
        }
        server = Server(stack.enter_context(configured(values)))
        await server.start()
        stack.push_async_callback(server.stop)
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS))
        await stack.enter_async_context(client)
        world = Pd(engines, server, client)
        yield world
        await world.until(lambda: not world.in_flight() and not server.front.relays)
        await world.until(lambda: not any(world.busy(n) for n in engines if n not in world.stopped))
        indicators = server.fleet.models[0].router.indicators()
        for name in ("bs", "bound_bs", "bound_tokens", "tokens"):
            assert not indicators[name].any(), name
