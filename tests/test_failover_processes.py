"""Engine processes that are killed or stopped under 16 streams: no stream breaks.

The client gets the bytes of an undisturbed run. Only these values differ, as between any two runs:
`id`, `created`, and the usage's `cached_tokens` (null if a stream continued on another engine).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from constants import configured
from lmetric.server import Server
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions
from split_world import CHAT, COMPLETIONS, body_of
from waiting import until

STREAMS, TOKENS, SEEN = 16, 150, 5
# Values that differ between any two runs.
RUN = re.compile(rb'"id":"[^"]*"|"created":\d+|"prompt_tokens_details":(null|\{[^}]*\})')
TOKEN = re.compile(rb'"(?:text|content)":"[^"]')
# A token takes about 10 ms, so all streams still run when the engine fails.
ENGINE = EngineOptions(clock_speed=1.0)


class World:
    """Two engine processes and a router."""

    def __init__(self, server: Server, engines: EmbeddedEngines, client: aiohttp.ClientSession) -> None:
        self.server = server
        self.engines = engines
        self.client = client
        self.heard: list[bytes] = []

    async def stream(self, number: int, path: str, body: dict[str, Any]) -> bytes:
        """Returns the bytes of one stream, without the values that differ between runs."""
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with self.client.post(url, json=body) as response:
            assert response.status == 200
            async for piece in response.content.iter_any():
                self.heard[number] += piece
        return RUN.sub(b"", self.heard[number])

    async def run(self, path: str, bodies: list[dict[str, Any]], fault: signal.Signals | None) -> list[bytes]:
        """Returns the answers of streams at once. `fault`: of the first engine, in the middle."""
        self.heard = [b""] * len(bodies)
        tasks = [asyncio.create_task(self.stream(n, path, body)) for n, body in enumerate(bodies)]
        if fault is not None:
            await until(lambda: all(len(TOKEN.findall(raw)) >= SEEN for raw in self.heard), 30)
            assert not any(task.done() for task in tasks)
            os.kill(self.engines.engines[0].process.pid, fault)
        return await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def world(**config: Any) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        engines = await stack.enter_async_context(EmbeddedEngines(2, ENGINE))
        values = {
            "port": 0,
            "engines": [{"url": url, "name": f"e{n}"} for n, url in enumerate(engines.urls)],
            "policy": "round_robin",
            "load": {"interval": None},
        }
        server = Server(stack.enter_context(configured(values | config)))
        await server.start()
        stack.push_async_callback(server.stop)
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        await stack.enter_async_context(client)
        model = server.fleet.models[0]
        await until(lambda: all(each.identified for each in model.engines.values()))
        yield World(server, engines, client)
        await until(lambda: not model.router.in_flight() and not server.front.relays)


def bodies_of(path: str, sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns different requests, with and without usage, and with prompts of different lengths."""
    bodies = []
    for n in range(STREAMS):
        usage = [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
        prompt = f"Story {n} of the quiet river and of all who lived by it. " * (1 + 5 * (n % 3))
        body = body_of(path, prompt, stream=True, max_tokens=TOKENS, stream_options=usage[n % 3])
        bodies.append(body | sampling)
    return bodies


def tokens_of(raw: bytes) -> int:
    """Returns the completion tokens in the usage of a stream; 0: it has no usage."""
    counts = [
        (orjson.loads(line.removeprefix(b"data: "))["usage"] or {}).get("completion_tokens", 0)
        for line in raw.split(b"\n\n")
        if b'"usage"' in line and b'"choices":[]' in line
    ]
    return counts[-1] if counts else 0


@pytest.mark.parametrize(
    ("path", "sampling"),
    [
        pytest.param(CHAT, {"temperature": 0.9, "seed": 3}, id="sampled chats"),
        pytest.param(COMPLETIONS, {"temperature": 0}, id="greedy completions", marks=pytest.mark.nightly),
    ],
)
async def test_killing_one_of_two_engines_breaks_no_stream(path: str, sampling: dict[str, Any]) -> None:
    """The emulated engine's next token depends on the tokens before it, also when sampled.

    So equal bytes mean that no token is lost or doubled.
    """
    bodies = bodies_of(path, sampling)
    async with world() as w:
        expected = await w.run(path, bodies, None)
        found = await w.run(path, bodies, signal.SIGKILL)
        assert found == expected
        assert all(tokens_of(raw) in (0, TOKENS) for raw in w.heard)
        assert sum(tokens_of(raw) == TOKENS for raw in w.heard) > STREAMS // 2
        model = w.server.fleet.models[0]
        assert model.failovers == {"continued": STREAMS // 2}
        assert not model.not_resumable


@pytest.mark.parametrize("path", [pytest.param(CHAT, marks=pytest.mark.nightly), COMPLETIONS])
async def test_an_engine_that_hangs_breaks_no_stream(path: str) -> None:
    """A stopped process keeps its connections open: only `between_chunks` shows that it hangs."""
    bodies = bodies_of(path, {})
    async with world(timeouts={"between_chunks": 1.0, "connect": 1.0}) as w:
        expected = await w.run(path, bodies, None)
        try:
            assert await w.run(path, bodies, signal.SIGSTOP) == expected
        finally:
            w.engines.engines[0].process.send_signal(signal.SIGCONT)
        assert w.server.fleet.models[0].failovers == {"continued": STREAMS // 2}


async def test_requests_of_a_stopped_engine_move_when_it_is_marked_as_down() -> None:
    """UX, section 4: eight requests without a token waited until the engine was continued."""
    health = {"interval": 0.1, "timeout": 0.3, "down_after": 2}
    async with world(health=health) as w:
        process = w.engines.engines[0].process
        os.kill(process.pid, signal.SIGSTOP)
        try:
            bodies = [body_of(COMPLETIONS, f"Story {n}", stream=True, max_tokens=3) for n in range(16)]
            answers = await w.run(COMPLETIONS, bodies, None)
            assert all(raw.endswith(b"data: [DONE]\n\n") for raw in answers)
            stopped = w.server.fleet.models[0].engines["e0"]
            assert not stopped.healthy
            assert w.server.fleet.models[0].router.stats()["retries"] == 8
        finally:
            process.send_signal(signal.SIGCONT)


async def test_without_failover_the_streams_of_a_killed_engine_break() -> None:
    bodies = bodies_of(COMPLETIONS, {})
    async with world(stream_failover=False) as w:
        expected = await w.run(COMPLETIONS, bodies, None)
        found = await w.run(COMPLETIONS, bodies, signal.SIGKILL)
        assert sum(one != other for one, other in zip(found, expected, strict=True)) == STREAMS // 2
        assert w.server.fleet.models[0].failovers == {"not_resumable": STREAMS // 2}
