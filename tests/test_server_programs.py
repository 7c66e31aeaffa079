"""Agent programs behind the server: held, released, refused and abandoned requests."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from server_world import World, decision_id, world
from waiting import PATIENCE_SECONDS

SETTINGS = {
    "kind": "admit",
    "min_tokens": 100,
    "theta": 1.0,
    "resume": 1.0,
    "growth": 0.0,
    "max_hold_seconds": 3600,
}


@asynccontextmanager
async def small_cache(**settings: Any) -> AsyncIterator[World]:
    """A router over one engine whose cache holds 1,600 tokens."""
    async with world(1, cache_blocks=100, programs={**SETTINGS, **settings}) as w:
        yield w


def body(name: int, tokens: int = 1200) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [name * 1000 + i % 900 for i in range(tokens)], "max_tokens": 3}


async def programs(w: World) -> dict[str, Any]:
    _, text = await w.get("/debug/programs")
    told: dict[str, Any] = orjson.loads(text)
    return next(iter(told.values()))


async def held(w: World, count: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await programs(w))["states"]["held"] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def send(w: World, name: int) -> tuple[int, Any]:
    status, _, answer = await w.post(body(name))
    return status, answer


async def test_a_program_waits_until_another_counts_as_ended() -> None:
    async with small_cache(forget_seconds=1) as w:
        assert (await send(w, 1))[0] == 200
        waiting = asyncio.create_task(w.post(body(2)))
        await held(w, 1)
        assert not waiting.done()
        _, live = await w.get("/debug/live")
        assert orjson.loads(live)["programs"]["tiny"] == {
            "holds": True,
            "held": 1,
            "longest_hold_seconds": 0.0,
        }
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, headers, _ = await waiting
        assert status == 200
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert record["program_tokens"] == 1200
        assert record["held_seconds"] > 0.3
        told = await programs(w)
        assert told["admitted"] == 1
        assert 0.3 < told["held_seconds"] < 20
        _, metrics = await w.get("/metrics")
        assert b"lmetric_program_holds_total" in metrics
        assert b'lmetric_programs_holding{model="tiny"} 1.0' in metrics
        assert b"lmetric_working_set_ratio" in metrics
        await w.settled()


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    async with small_cache() as w:
        assert (await send(w, 1))[0] == 200
        waiting = asyncio.create_task(send(w, 2))
        await held(w, 1)
        waiting.cancel()
        await held(w, 0)
        await w.settled()


async def test_new_programs_beyond_the_longest_hold_are_refused_with_a_time() -> None:
    async with small_cache(max_hold_seconds=0) as w:
        assert (await send(w, 1))[0] == 200
        status, answer = await send(w, 2)
        assert status == 429
        error = answer["error"]
        assert error["code"] == "caches_full"
        assert "would wait about" in error["message"]
        assert (await programs(w))["refused"] == 1
        assert (await send(w, 1))[0] == 200  # the running program goes on


async def test_programs_are_not_held_while_no_engine_takes_requests() -> None:
    async with small_cache() as w:
        assert (await send(w, 1))[0] == 200
        waiting = asyncio.create_task(send(w, 2))
        await held(w, 1)
        w.server.fleet.models[0].router.update_instance("e0", draining=True)
        for status, answer in [await send(w, 3), await waiting]:
            assert (status, answer["error"]["code"]) == (503, "no_engine")
        await w.settled()


async def test_chats_are_never_held() -> None:
    async with small_cache() as w:
        assert (await send(w, 1))[0] == 200
        for name in range(2, 8):
            status, _, _ = await w.post(body(name, tokens=50))
            assert status == 200
        assert (await programs(w))["other_requests"] == 6


async def test_observe_holds_nothing_and_counts_what_admit_would_hold() -> None:
    async with small_cache(kind="observe") as w:
        for name in range(4):
            assert (await send(w, name))[0] == 200
        told = await programs(w)
        assert told["held"] == 3
        (engine,) = told["instances"].values()
        assert engine["expected_tokens"] > 2 * engine["capacity_tokens"]


async def test_a_server_that_stops_ends_held_requests() -> None:
    async with small_cache() as w:
        assert (await send(w, 1))[0] == 200
        waiting = asyncio.create_task(send(w, 2))
        await held(w, 1)
        for relay in list(w.server.front.relays):
            relay.stop()
        try:
            status, _ = await waiting
        except aiohttp.ClientError:
            status = 503
        assert status == 503


async def test_a_session_that_says_it_is_final_frees_its_place_with_the_answer() -> None:
    async with small_cache() as w:
        status, _, _ = await w.post(body(1), headers={"x-session-final": "true"})
        assert status == 200
        assert (await send(w, 2))[0] == 200
        told = await programs(w)
        assert (told["held"], told["states"]["paused"], told["states"]["gap"]) == (0, 1, 1)
        await w.settled()


async def test_fifty_equal_prompts_at_once_are_one_program() -> None:
    async with small_cache() as w:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(send(w, 1) for _ in range(50)))
        assert {status for status, _ in answers} == {200}
        told = await programs(w)
        assert (sum(told["states"].values()), told["held"], told["refused"]) == (1, 0, 0)
        await w.settled()


async def test_a_flood_of_one_tenant_does_not_hold_another_for_long() -> None:
    """Twenty programs of one tenant wait. A program of another tenant is admitted next."""
    settings = {**SETTINGS, "forget_seconds": 4}
    async with world(1, cache_blocks=100, programs=settings, tenants={"a": {}, "b": {}}) as w:
        assert (await send(w, 1))[0] == 200
        flood = [asyncio.create_task(w.post(body(name), headers={"x-tenant": "a"})) for name in range(2, 22)]
        await held(w, 20)
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, _, _ = await w.post(body(30), headers={"x-tenant": "b"})
        assert status == 200
        assert sum(task.done() for task in flood) <= 2
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await w.settled()


# Fairness: security F7, attack 52, over sockets.

ATTACKERS, VICTIMS = 60, 6
PLACE_SECONDS = 10.0


async def attack(w: World, victims: str) -> list[tuple[int, float]]:
    """Returns status and seconds of the first requests of six programs of a tenant.

    They come when 60 programs of tenant `a`, which return every 2 s, fill two caches of 64,000
    tokens.
    """

    async def turn(name: int, tokens: int, tenant: str) -> int:
        prompt = [name * 10_000 + token % 9000 for token in range(tokens)]
        key = {"authorization": f"Bearer sk-{tenant}"}
        status, _, _ = await w.post({"model": "tiny", "prompt": prompt, "max_tokens": 3}, headers=key)
        return status

    async def returns(name: int) -> None:
        await asyncio.sleep(name / 30)
        while True:
            begun = time.monotonic()
            await turn(name, 3500, "a")
            await asyncio.sleep(max(0.0, begun + 2 - time.monotonic()))

    async def comes(name: int) -> tuple[int, float]:
        begun = time.monotonic()
        status = await turn(100 + name, 3000, victims)
        return status, time.monotonic() - begun

    attackers = [asyncio.create_task(returns(name)) for name in range(ATTACKERS)]
    try:
        router = w.server.fleet.models[0].router
        await w.until(lambda: (router.programs() or {})["states"]["held"] > 0)
        return await asyncio.gather(*map(comes, range(VICTIMS)))
    finally:
        for each in attackers:
            each.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)


async def test_held_programs_of_another_tenant_get_a_place(tmp_path: Path) -> None:
    """Security F7: each within 10 s, although the first tenant's programs never rest."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-a: a\nsk-v: v\n")
    auth = {"keys_file": str(keys)}
    async with world(2, programs={"kind": "admit"}, cache_blocks=4000, auth=auth) as w:
        waits = await attack(w, "v")
        assert [status for status, _ in waits] == [200] * VICTIMS
        assert max(seconds for _, seconds in waits) < PLACE_SECONDS
        await w.settled()


async def test_without_tenants_a_held_program_gets_a_place_or_a_429() -> None:
    """Security F7: `max_hold_seconds` ends each wait."""
    programs = {"kind": "admit", "max_hold_seconds": 3}
    async with world(2, programs=programs, cache_blocks=4000) as w:
        waits = await attack(w, "v")
        assert {status for status, _ in waits} <= {200, 429}
        assert max(seconds for _, seconds in waits) < 3 + PLACE_SECONDS
        await w.settled()
