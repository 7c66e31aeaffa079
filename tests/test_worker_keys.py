"""Issued API keys of several workers, and their rotation under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from server_world import answer
from test_server_keys_shared import BODY, configuration, process
from test_server_process import engine
from test_workers import check_reads, workers_of
from waiting import until


async def test_all_workers_know_a_key_before_its_answer_also_a_worker_that_starts_later(
    tmp_path: Path,
) -> None:
    async with engine(behave=answer) as fake:
        file = configuration(tmp_path, fake, workers=2)
        (tmp_path / "keys.yaml").write_text("{sk-1: acme, sk-2: other}")
        async with process(file) as (running, client):
            # A tenant reads its decisions from every worker.
            own, others = {"api-key": "sk-1"}, {"api-key": "sk-2"}
            url = f"{client.url}/v1/completions"
            async with client.session.post(url, json=BODY, headers=own) as made_by:
                assert made_by.status == 200
                page = f"{client.url}/debug/decisions/{made_by.headers['x-lmetric-decision']}"
            await check_reads(client.session, page, own, 200)
            await check_reads(client.session, page, others, 404)
            for _ in range(5):
                made = await client.issue()
                # Each request is a new connection, which any worker accepts.
                assert [await client.use(made) for _ in range(8)] == [200] * 8
                await client.revoke(made)
                assert [await client.use(made) for _ in range(8)] == [401] * 8
            kept, ended = await client.issue(), await client.issue()
            await client.revoke(ended)
            old = workers_of(running)
            os.kill(old[0], signal.SIGKILL)
            await until(lambda: len(workers_of(running)) == 2 and workers_of(running) != old)
            os.kill(old[1], signal.SIGKILL)
            await until(lambda: len(workers_of(running)) == 2 and old[1] not in workers_of(running))
            assert [await client.use(kept) for _ in range(8)] == [200] * 8
            assert [await client.use(ended) for _ in range(8)] == [401] * 8
            late = await client.issue()
            running.process.kill()  # directly after the answer
            await running.ended()
        async with process(file) as (_, client):
            assert [await client.use(each) for each in (kept, ended, late)] == [200, 401, 200]
            _, listed = await client.call("GET", "/admin/keys")
            states = Counter(row["state"] for row in listed)
            assert states == {"active": 2 + 2, "revoked": 6}  # two of the keys file
            async with client.session.get(f"{client.url}/metrics") as page:
                assert 'lmetric_api_keys{source="admin"} 2.0' in await page.text()


@pytest.mark.nightly
async def test_requests_see_no_401_while_keys_rotate(tmp_path: Path) -> None:
    """Eight clients send requests without a pause, and each uses the newest key."""
    async with engine(behave=answer) as fake:
        file = configuration(tmp_path, fake, workers=2)
        async with process(file) as (_, client):
            current = await client.issue()
            counts = Counter[int]()
            stopping = False

            async def send() -> None:
                async with aiohttp.ClientSession() as session:
                    while not stopping:
                        headers = {"x-api-key": current["key"]}
                        url = f"{client.url}/v1/completions"
                        async with session.post(url, json=BODY, headers=headers) as response:
                            await response.read()
                            counts[response.status] += 1

            senders = [asyncio.create_task(send()) for _ in range(8)]
            in_use = Counter[str]()
            for _ in range(5):
                old, current = current, await client.issue()
                seen = counts.total()
                await until(lambda n=seen: counts.total() > n + 50)  # requests with the old key have ended
                await client.revoke(old)
                in_use[str(await client.use(old))] += 1
                seen = counts.total()
                await until(lambda n=seen: counts.total() > n + 50)
            stopping = True
            await asyncio.gather(*senders)
            assert set(counts) == {200}
            assert in_use == {"401": 5}
