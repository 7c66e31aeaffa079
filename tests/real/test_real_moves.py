"""Streams that move between two vLLM engines: the client receives the answer of a single engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from constants import configured
from lmetric.options import SplitAt
from lmetric.server import Server
from lmetric.server.fleet.rebalancer import Movable, Rebalancer
from server_world import decision_id
from split_world import CHAT, COMPLETIONS, equal, heard, told
from test_real_pd import counted
from test_real_split import cutting, fresh, request
from vllm_process import NIXL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Start = Callable[..., list[VllmEngine]]
# A token takes a millisecond or two. The target shares two cores with the source: computing ahead
# takes the time of a few hundred tokens, and of thousands on a crowded machine. Engines compile an
# operation on first use, for seconds: a stream may then end before it moves, and the test retries.
TOKENS, FIRST, SECOND, ATTEMPTS = 3000, 20, 200, 16
# Slow engines; the last where a stream was to move on before it had a token where it went.
HARMLESS = {"migrated", "ended", "long_gap", "not_movable"}
USAGE = {"include_usage": True}
# On two cores that four processes want, a token of a busy engine may take a second.
PATIENT: dict[str, Any] = {
    "policy": "round_robin",
    "health": {"timeout": 30},
    "timeouts": {"connect": 30},
    "rebalance": "star",
    "migration_by": "recompute",
    "migration_max_gap_seconds": 30.0,
}


@pytest.fixture(scope="module", params=["plain", "nixl"])
def flags(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the engines; tests with the same follow each other."""
    return {"plain": {}, "nixl": {"kv_transfer_config": NIXL}}[request.param]


@dataclass
class Here:
    """A router in this event loop, whose moves a test may begin itself."""

    server: Server
    session: aiohttp.ClientSession
    engines: list[VllmEngine]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def mover(self) -> Rebalancer:
        found = self.server.fleet.models[0].mover
        assert found is not None
        return found

    async def until(self, true: Callable[[], object], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not true():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)

    async def move(self, stream: asyncio.Task[Any], count: int) -> None:
        """Begins to move the one stream to the other engine, unless the stream ends before.

        The stream must have `count` tokens and must not be moving already.
        """

        def begun(ticket: int, request: Movable) -> bool:
            if request.known_tokens < count or request.migration is not None:
                return False
            (target,) = (engine.name for engine in self.engines if engine.name != request.ticket.instance)
            # After an earlier move, the stream must have a token on its new engine first.
            self.mover.begin(ticket, target, time.monotonic())
            return request.migration is not None

        await self.until(
            lambda: stream.done() or any(begun(*each) for each in list(self.mover.running.items()))
        )

    async def moved(
        self, path: str, body: dict[str, Any], want: dict[str, Any], *counts: int
    ) -> tuple[dict[str, Any], Any]:
        """The answer to a request that moves at `counts` tokens, which is `want`; its record."""
        for _ in range(ATTEMPTS):
            # Each attempt has its own salt, so it finds no cached blocks of an earlier attempt.
            salted = body | {"cache_salt": fresh("attempt")}
            stream = asyncio.create_task(listened(self.session, self.url, path, salted))
            for count in counts:
                await self.move(stream, count)
            said = await stream
            equal(said, want)
            record = self.record(said)
            if len(record["migrations"]) == len(counts):
                return said, record
            print("not moved:", record["migrations"], dict(self.mover.outcomes))
        raise AssertionError(f"not moved {len(counts)} times in {ATTEMPTS} attempts: {self.mover.outcomes}")

    def record(self, said: dict[str, Any]) -> Any:
        return self.server.fleet.models[0].router.explain(decision_id(said["headers"]))


@contextlib.asynccontextmanager
async def moving(engines: list[VllmEngine], **config: Any) -> AsyncIterator[Here]:
    """Starts a router whose own rounds are an hour apart. At the end nothing may be in flight."""
    given = {
        "port": 0,
        "engines": [{"url": e.url} for e in engines],
        "experimental": True,
        "rebalance": {"kind": "star", "period_seconds": 3600.0},
    }
    with configured(PATIENT | given | config) as settings:
        server = Server(settings)
        await server.start()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
                here = Here(server, session, engines)
                model = server.fleet.models[0]
                await here.until(lambda: all(engine.identified for engine in model.engines.values()))
                yield here
                router = model.router
                await here.until(lambda: not (router.in_flight() or server.front.relays))
                assert not here.mover.running
                assert not here.mover.moves
                indicators = router.indicators()
                for name in ("bound_bs", "bound_tokens", "tokens"):
                    assert not indicators[name].any(), name
                # Engines were asked past the router, too, and their last reports may count that.
                await here.until(lambda: not router.indicators()["bs"].any())
            for engine in engines:
                if engine.healthy():
                    assert await at_work(engine) == 0
        finally:
            await server.stop()


async def at_work(engine: VllmEngine) -> float:
    """Requests that run or wait in an engine, by itself."""
    return await counted(engine, "num_requests_running") + await counted(engine, "num_requests_waiting{")


async def listened(
    session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    """The answer that the client receives, with the longest gap between two pieces, in seconds."""
    async with session.post(url + path, json=body) as response:
        assert response.status == 200, await response.read()
        raw, gaps, last = b"", [], 0.0
        async for piece in response.content.iter_any():
            now = time.monotonic()
            gaps.append(now - last if raw else 0.0)
            last = now
            raw += piece
        said = heard(raw) if body.get("stream") else told(orjson.loads(raw))
        return said | {"headers": response.headers, "gap": max(gaps)}


async def alone(here: Any, engine: VllmEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of one engine that computes everything itself."""
    return await listened(here.session, engine.url, path, body | {"cache_salt": fresh("alone")})


def streams(words: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Chats and completions, with and without token ids; usage at the end, in each chunk, never."""
    each = {"include_usage": True, "continuous_usage_stats": True}
    return [
        (path, request(path, words, tokens, stream=True, stream_options=usage, return_token_ids=ids))
        for path, usage, ids in [
            (COMPLETIONS, USAGE, True),
            (COMPLETIONS, each, False),
            (CHAT, USAGE, True),
            (CHAT, None, False),
        ]
    ]


async def test_to_and_fro(vllm_engines: Start, flags: dict[str, Any]) -> None:
    """Each stream is moved to the other engine, and back."""
    engines = vllm_engines(2, **flags)
    async with moving(engines) as here:
        bodies = [each for shape in [(20, TOKENS), (900, TOKENS)] for each in streams(*shape)]
        for number, (path, body) in enumerate(bodies):
            want = await alone(here, engines[number % 2], path, body)
            said, record = await here.moved(path, body, want, FIRST, SECOND)
            (first, to), (second, back) = record["migrations"]
            assert {to, back} == {engine.name for engine in engines}
            assert (said["headers"]["x-lmetric-instance"], record["outcome"]) == (back, "finished")
            prompt = record["prompt_tokens"]
            assert prompt + FIRST <= first < second < prompt + TOKENS
            assert second >= prompt + SECOND
            print(
                f"{path} prompt {prompt}: moved at {first - prompt} and {second - prompt},",
                f"longest gap {said['gap'] * 1e3:.0f} ms, unmoved {want['gap'] * 1e3:.0f} ms",
            )
        assert set(here.mover.outcomes) <= HARMLESS


async def test_what_was_cut_moves_too(vllm_engines: Start, flags: dict[str, Any]) -> None:
    engines = vllm_engines(2, **flags)
    async with moving(engines, split=SplitAt(fraction=0.1), split_recompute=True) as here:
        for number, (path, body) in enumerate(streams(20, TOKENS)):
            want = await alone(here, engines[number % 2], path, body)
            # Its cut lies at about 300; what was made until then comes at once.
            _, record = await here.moved(path, body, want, SECOND)
            assert (len(record["cuts"]), record["outcome"]) == (1, "finished")
        assert set(here.mover.outcomes) <= HARMLESS


async def test_a_client_that_leaves_while_its_stream_moves(
    vllm_engines: Start, flags: dict[str, Any]
) -> None:
    engines = vllm_engines(2, **flags)
    async with moving(engines) as here:
        body = request(COMPLETIONS, 900, TOKENS, stream=True)
        task = asyncio.create_task(listened(here.session, here.url, COMPLETIONS, body))
        await here.move(task, FIRST)
        assert here.mover.moves
        task.cancel()
        await here.until(lambda: not here.mover.moves)
        assert here.mover.outcomes == {"ended": 1}
        async with asyncio.timeout(10):
            while sum([await at_work(e) for e in engines]):  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.05)


async def test_star_moves_what_piles_up(vllm_engines: Start, tmp_path: Path) -> None:
    """A process with `rebalance: star`: one engine gets every stream, then another takes some."""
    engines = vllm_engines(2, kv_transfer_config=NIXL)
    config = PATIENT | {
        "rebalance": {"kind": "star", "period_seconds": 0.2},
        "migration_by": "fetch",
        "migration_max_concurrent": 2,
        "admin": True,
    }
    async with cutting(engines, tmp_path, **config) as world:
        bodies = [streams(60, TOKENS)[number % 4] for number in range(8)]
        want = [await alone(world, engines[0], path, body) for path, body in bodies]

        async def drain(verb: str) -> None:
            path = f"{world.url}/admin/engines/{engines[1].name}/{verb}"
            async with world.session.post(path) as response:
                assert response.status == 200, await response.read()

        async def piled_up() -> bool:
            return bool((await world.indicator("bs"))[engines[0].name] == len(bodies))

        await drain("drain")
        tasks = [asyncio.create_task(listened(world.session, world.url, path, body)) for path, body in bodies]
        await world.until(piled_up, seconds=60)
        await drain("undrain")
        moves = 0
        for said, one in zip(await asyncio.gather(*tasks), want, strict=True):
            equal(said, one)
            record = await world.record(said["headers"])
            assert said["headers"]["x-lmetric-instance"] == engines[0].name
            moves += len(record["migrations"])
            print("moves", record["migrations"], f"longest gap {said['gap'] * 1e3:.0f} ms")
        page = (await world.page("/metrics")).splitlines()
        counts = [
            line
            for line in page
            if line.startswith(("lmetric_migrated_requests", "lmetric_migrations_total"))
        ]
        print(counts)
        assert f'lmetric_migrated_requests_total{{model="tiny"}} {float(moves)}' in counts
        assert moves > 0


async def test_a_source_that_dies_while_its_stream_moves(vllm_engines: Start, flags: dict[str, Any]) -> None:
    engines = vllm_engines(2, **flags)
    async with moving(engines) as here:
        path, body = COMPLETIONS, request(COMPLETIONS, 900, TOKENS, stream=True, return_token_ids=True)
        want = await alone(here, engines[0], path, body)
        for _ in range(ATTEMPTS):
            task = asyncio.create_task(listened(here.session, here.url, path, body))
            await here.move(task, FIRST)
            running = next(iter(here.mover.running.values()), None)
            if running is not None and running.migration is not None and running.known_tokens < TOKENS // 2:
                break
            equal(await task, want)
        assert running is not None
        here.mover.outcomes.clear()
        (dying,) = (engine for engine in engines if engine.name == running.ticket.instance)
        await asyncio.to_thread(dying.kill)
        equal(await task, want)
        # The router may see the end of the move or the engine's death first, within milliseconds.
        assert set(here.mover.outcomes) <= {"migrated", "source_failed"}, here.mover.outcomes
        assert sum(here.mover.outcomes.values()) == 1
