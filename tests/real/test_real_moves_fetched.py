"""Moves of streams between two vLLM engines by fetching."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from split_world import COMPLETIONS, equal
from test_real_moves import (
    ATTEMPTS,
    FIRST,
    HARMLESS,
    SECOND,
    TOKENS,
    Start,
    alone,
    at_work,
    listened,
    moving,
    streams,
)
from test_real_pd import fetched
from test_real_split import request
from vllm_process import NIXL

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

FETCH: dict[str, Any] = {"migration_by": "fetch"}


@pytest.mark.parametrize("words", [20, 900])
async def test_to_and_fro(vllm_engines: Start, words: int) -> None:
    """Each request is fetched by the other engine, and back."""
    engines = vllm_engines(2, kv_transfer_config=NIXL)
    async with moving(engines, **FETCH) as here:
        bodies = streams(words, TOKENS)
        for number, (path, body) in enumerate(bodies):
            want = await alone(here, engines[number % 2], path, body)
            before = await fetched(engines)
            said, record = await here.moved(path, body, want, FIRST, SECOND)
            (first, to), (second, back) = record["migrations"]
            assert {to, back} == {engine.name for engine in engines}
            prompt = record["prompt_tokens"]
            assert prompt + FIRST <= first < second < prompt + TOKENS
            came = await fetched(engines) - before
            print(
                f"{path} prompt {prompt}:",
                f"moved at {first - prompt} and {second - prompt}, {came:.0f} tokens fetched,",
                f"longest gap {said['gap'] * 1e3:.0f} ms, unmoved {want['gap'] * 1e3:.0f} ms",
            )
            assert came >= prompt + FIRST
        handovers = here.server.fleet.models[0].kv_transfers
        print(dict(here.mover.outcomes), dict(handovers))
        assert set(here.mover.outcomes) <= HARMLESS
        assert set(handovers) == {"transferred"}
        assert handovers["transferred"] >= 2 * len(bodies)


async def test_a_client_that_leaves_while_its_request_moves(vllm_engines: Start) -> None:
    """The request stops at both engines, and later requests get correct answers."""
    engines = vllm_engines(2, kv_transfer_config=NIXL)
    async with moving(engines, **FETCH) as here:
        task = asyncio.create_task(
            listened(here.session, here.url, COMPLETIONS, request(COMPLETIONS, 900, TOKENS, stream=True))
        )
        await here.move(task, FIRST)
        assert here.mover.moves
        task.cancel()
        await here.until(lambda: not here.mover.moves)
        assert here.mover.outcomes == {"ended": 1}
        async with asyncio.timeout(10):
            while sum([await at_work(e) for e in engines]):  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.05)
        for path, body in streams(60, 100):
            equal(
                await listened(here.session, here.url, path, body),
                await alone(here, engines[0], path, body),
            )


async def test_a_source_that_dies_while_its_request_moves(vllm_engines: Start) -> None:
    engines = vllm_engines(2, kv_transfer_config=NIXL)
    async with moving(engines, **FETCH) as here:
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
        assert "source_failed" in here.mover.outcomes or here.record(task.result())["migrations"]
