"""While weights change: each answer is labeled with the version with which its engine began it."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from server_world import (
    STREAM_HEAD,
    STREAM_TAIL,
    FakeEngine,
    Request,
    World,
    chunk,
    plain,
    token,
    usage,
    world,
)

ENGINES, CLIENTS = 4, 48


@dataclass(eq=False)
class Versioned(FakeEngine):
    """An engine whose answers name the version of its weights. While it is paused, like vLLM,
    requests wait, and begin with the next version."""

    version: int = 0
    running: int = 0
    going: asyncio.Event = field(default_factory=asyncio.Event)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.method == "GET":
            return await super()._answer(request, writer)
        await self.going.wait()
        self.running += 1
        began = self.version
        await asyncio.sleep(random.random() * 0.004)
        assert self.version == began, "the trainer changes the weights of an idle engine"
        text = str(began)
        if request.json.get("stream"):
            writer.write(STREAM_HEAD + chunk(token(text, "length")) + STREAM_TAIL)
        else:
            choices = [{"index": 0, "text": text, "finish_reason": "length"}]
            writer.write(plain(200, {"choices": choices, "usage": usage()}))
        self.running -= 1
        return True


class Trainer:
    """Gives one engine after the other new weights, without a break."""

    def __init__(self, it: World, *, drains: bool) -> None:
        self.it, self.drains, self.updates = it, drains, 0

    async def run(self) -> None:
        while True:
            for name, engine in zip([f"e{n}" for n in range(ENGINES)], self.it.engines, strict=True):
                assert isinstance(engine, Versioned)
                await self._update(name, engine)
                await asyncio.sleep(0.002)

    async def _update(self, name: str, engine: Versioned) -> None:
        if self.drains:
            await self._post(f"/admin/engines/{name}/drain", {})
            known = self.it.server.fleet.engine(name)
            assert known is not None
            while known.running:  # noqa: ASYNC110 - as a trainer that reads /debug/engines
                await asyncio.sleep(0.001)
        engine.going.clear()
        while engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        engine.version += 1
        await self._post("/admin/weights", {"version": engine.version, "engines": [name]})
        engine.going.set()
        if self.drains:
            await self._post(f"/admin/engines/{name}/undrain", {})
        self.updates += 1

    async def _post(self, path: str, body: Any) -> None:
        status, _, got = await self.it.post(body, path)
        assert status == 200, got


async def labels(answers: int, *, drains: bool) -> tuple[int, int, float, int]:
    """Answers, wrong labels, seconds, and updates meanwhile."""
    engines = [Versioned() for _ in range(ENGINES)]
    async with world([*engines], admin=True) as it:
        for engine in engines:
            engine.going.set()
        assert (await it.post({"version": 0}, "/admin/weights"))[0] == 200
        trainer = Trainer(it, drains=drains)
        numbers, wrong, done = iter(range(answers)), 0, 0

        async def client(place: int) -> None:
            nonlocal wrong, done
            for number in numbers:
                body = {"model": "tiny", "prompt": [place, number], "max_tokens": 1}
                status, headers, got = await it.post({**body, "stream": number % 2 == 0})
                assert status == 200, got
                if number % 2 == 0:
                    event = got.split(b"data: ")[1].split(b"\n")[0]
                    got = orjson.loads(event)
                wrong += headers["x-lmetric-weights"] != got["choices"][0]["text"]
                done += 1

        began = time.monotonic()
        updating = asyncio.create_task(trainer.run())
        await asyncio.gather(*(client(place) for place in range(CLIENTS)))
        seconds = time.monotonic() - began
        updating.cancel()
        await it.until(lambda: not it.server.fleet.models[0].router.in_flight())
        return done, wrong, seconds, trainer.updates


@pytest.mark.parametrize("answers", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
async def test_no_answer_has_another_version_than_its_engine_began_with(answers: int) -> None:
    """The order of docs/how-to/rl_trainers.md: drain, update, announce, undrain."""
    done, wrong, seconds, updates = await labels(answers, drains=True)
    print(
        f"{done} answers, {done / seconds:.0f}/s; {updates} updates, {updates / seconds:.1f}/s; {wrong} wrong"
    )
    assert (done, wrong) == (answers, 0)
    assert updates > answers / 500


async def test_a_request_that_waits_in_a_paused_engine_has_the_old_label() -> None:
    """Why trainers drain first: the router cannot know that the engine has not begun it."""
    _, wrong, _, updates = await labels(500, drains=False)
    assert updates > 1
    assert wrong > 0
