"""Engines that health checks mark as down: requests without a first token move (UX, section 4)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from lmetric.server.fleet.summary import summary
from server_world import STREAM_HEAD, STREAM_TAIL, FakeEngine, Request, World, answer, chunk, token, world

STREAM = {"model": "tiny", "prompt": "x", "stream": True}
PLAIN = {"model": "tiny", "prompt": "x"}
HEALTH = {"interval": 0.05, "timeout": 0.5, "down_after": 2, "up_after": 1}


class Freezing(FakeEngine):
    """Answers nothing while it is frozen. Before that, streams have `tokens`."""

    tokens = 0

    def __init__(self) -> None:
        super().__init__(behave=self.wait)
        self.thawed = asyncio.Event()
        self.thawed.set()

    async def wait(self, engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if self.tokens:
            writer.write(STREAM_HEAD + chunk(token("a")) * self.tokens)
        await self.thawed.wait()
        if not self.tokens:
            return await answer(engine, request, writer)
        writer.write(chunk(token("b", "length")) + STREAM_TAIL)
        return True

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.method == "GET":
            await self.thawed.wait()
        return await super()._answer(request, writer)


@asynccontextmanager
async def frozen(
    *bodies: dict[str, Any], others: int = 1, tokens: int = 0, health: Any = HEALTH, **config: Any
) -> AsyncIterator[tuple[World, Freezing, list[asyncio.Task[Any]]]]:
    """Requests that the first engine has got; then it is frozen, and the others accept requests."""
    engine = Freezing()
    engine.tokens = tokens
    fakes = [engine, *(FakeEngine() for _ in range(others))]
    async with world(fakes, health=health, **config) as w:
        await w.until(lambda: all(each.unusable is None for each in w.server.fleet.engines()))
        router = w.server.fleet.models[0].router
        for number in range(others):
            router.update_instance(f"e{number + 1}", draining=True)
        engine.thawed.clear()
        running = [asyncio.create_task(w.post(body)) for body in bodies]
        await engine.asked(len(bodies))
        for number in range(others):
            router.update_instance(f"e{number + 1}", draining=False)
        yield w, engine, running
        engine.thawed.set()


def down(w: World) -> bool:
    return not w.server.fleet.models[0].engines["e0"].healthy


async def test_requests_without_a_token_move() -> None:
    few = {"budget_ratio": 0, "min_per_second": 0.1}  # one in 10 s: those of a lost engine are free
    async with frozen(*[STREAM, PLAIN] * 4, retries=few) as (w, _, running):
        for status, headers, _ in await asyncio.gather(*running):
            assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        assert down(w)
        [model] = w.server.fleet.models
        assert +model.retry_budget.outcomes == {"free": 8}
        assert model.router.stats()["retries"] == 8
        assert not +model.outliers.ejected


async def test_the_problem_of_a_frozen_engine_names_what_to_do() -> None:
    async with frozen(STREAM) as (w, _, running):
        assert (await running[0])[0] == 200
        [problem] = [
            each for each in summary(w.server.fleet, names=True)["warnings"] if each["names"] == ["e0"]
        ]
        assert (problem["what"], problem["cause"]) == ("not usable", "no answer in time")
        assert problem["fix"].startswith("restart the engine if its process hangs")
        assert "other engines get its requests" in problem["fix"]


async def test_streams_with_a_token_stay() -> None:
    async with frozen(STREAM, tokens=1) as (w, engine, running):
        await w.until(lambda: down(w))
        w.server.front.check(time.monotonic())
        engine.thawed.set()
        status, headers, got = await running[0]
        assert (status, headers["x-lmetric-instance"]) == (200, "e0")
        assert got.endswith(b"data: [DONE]\n\n")
        assert not w.engines[1].requests


async def test_without_another_engine_they_wait() -> None:
    async with frozen(STREAM, PLAIN, others=0) as (w, engine, running):
        await w.until(lambda: down(w))
        w.server.front.check(time.monotonic())
        engine.thawed.set()
        assert [(await each)[0] for each in running] == [200, 200]
        assert len(engine.requests) == 2


@pytest.mark.parametrize("kind", ["paused", "unfit", "status"])
async def test_an_engine_that_answers_keeps_its_requests(kind: str) -> None:
    async with frozen(STREAM, health={"interval": 3600, "down_after": 1}) as (w, engine, running):
        it = w.server.fleet.models[0].engines["e0"]
        it.failed(kind, "its own report")
        assert down(w)
        w.server.front.check(time.monotonic())
        engine.thawed.set()
        status, headers, _ = await running[0]
        assert (status, headers["x-lmetric-instance"]) == (200, "e0")
        assert not w.engines[1].requests


@pytest.mark.parametrize("drained", [True, False])
async def test_an_engine_that_was_drained_and_then_stopped_is_no_warning(drained: bool) -> None:
    with capture_logs() as log:
        async with world(2, admin=True, health=HEALTH) as w:
            if drained:
                assert (await w.post({}, "/admin/engines/e0/drain"))[0] == 200
            log.clear()
            await w.engines[0].stop()
            await w.until(lambda: down(w))
            it = w.server.fleet.models[0].engines["e0"]
            failures = it.failures
            await w.until(lambda: it.failures > failures + 2)
            shown = orjson.loads((await w.get("/debug/live"))[1])
            (problem,) = [each for each in shown["problems"] if each["what"].startswith("e0: ")]
    assert (problem["what"], problem["level"]) == (
        ("e0: draining", "note") if drained else ("e0: down", "bad")
    )
    lines = {(each["event"], each["log_level"]) for each in log if each.get("engine") == "e0"}
    assert ("engine down", "info" if drained else "warning") in lines
    assert ("warning" in {level for _, level in lines}) is not drained
