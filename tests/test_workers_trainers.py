"""Calls of trainers to a server with several workers: every worker follows them."""

from __future__ import annotations

import asyncio
import signal

import pytest

from server_world import FakeEngine
from test_workers import ADMIT, BLOCKS, replaced, serving, turn, until_programs, workers_of


async def test_sessions_end_in_all_workers_and_they_have_the_engines_that_a_trainer_added() -> None:
    added = FakeEngine()
    await added.start()
    try:
        async with serving(*ADMIT, engines=1, cache_blocks=BLOCKS) as (_, client, engines):
            await client.ask(turn(1), **{"x-session-id": "first"})
            await until_programs(client, gap=1)
            waiting = asyncio.create_task(client.ask(turn(2), **{"x-session-id": "second"}))
            await until_programs(client, held=1)
            path = "/finish_session?session_id="
            assert (await client.post(f"{path}nobody", None))[1]["programs"] == 0
            assert (await client.post(f"{path}first", None))[1]["programs"] == 1
            for _ in range(4):
                assert (await client.post(f"{path}first", None))[1]["programs"] == 0
            async with asyncio.timeout(30):
                await waiting
            await until_programs(client, held=0, gap=1)
            assert (await client.post(f"{path}second", None))[1]["programs"] == 1
            await until_programs(client, gap=0, running=0)
            status, got = await client.post("/workers", {"url": added.url})
            assert status == 200
            for _ in range(6):  # each on a new connection, so by either worker
                assert set((await client.get("/list_workers"))["urls"]) == {engines[0].url, added.url}
            status, _ = await client.post("/admin/weights", {"version": 4, "engines": [got["worker_id"]]})
            assert status == 200
            for _ in range(6):
                shown = {each["url"]: each["weights"] for each in await client.get("/debug/engines")}
                assert shown == {engines[0].url: None, added.url: "4"}
            assert (await client.post(f"/remove_worker?url={added.url}", None))[0] == 200
            for _ in range(6):
                assert (await client.get("/list_workers"))["urls"] == [engines[0].url]
    finally:
        await added.stop()


@pytest.mark.nightly
async def test_a_new_worker_has_the_engines_and_the_last_weights() -> None:
    added = FakeEngine()
    await added.start()
    try:
        async with serving(engines=1) as (process, client, engines):
            assert (await client.post("/workers", {"url": added.url}))[0] == 200
            for version in range(31):
                assert (await client.post("/admin/weights", {"version": version}))[0] == 200
            old = workers_of(process)
            process.process.send_signal(signal.SIGUSR2)
            await replaced(process, old)
            for _ in range(6):
                shown = {each["url"]: each["weights"] for each in await client.get("/debug/engines")}
                assert shown == dict.fromkeys((engines[0].url, added.url), "30")
    finally:
        await added.stop()
