"""Several worker processes behind one port, over real sockets: `workers: N`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
import pytest_asyncio
from pydantic import ValidationError

from cli_world import refused
from lmetric._core import LmetricError
from lmetric.canary import Splitter
from lmetric.config import ServerConfig
from lmetric.server.supervisor.merge import merge
from server_world import STREAM_HEAD, STREAM_TAIL, FakeEngine, chunk, plain, token
from test_server_process import Process, engine, router
from waiting import until

ADMIN = {"authorization": "Bearer secret"}
STREAM = {"model": "tiny", "prompt": "a", "stream": True}
OPEN = ("--workers", "2", "--set", "admin.enabled=true")  # administrators on this machine need no token
FLAGS = (*OPEN, "--set", "admin.token=secret")


class Client:
    """A client that uses a new connection for each request."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.headers = ADMIN
        self.session = session

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path, headers=self.headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def post(self, path: str, value: Any, **headers: str) -> tuple[int, Any]:
        async with self.session.post(
            self.url + path, json=value, headers={**self.headers, **headers}
        ) as answer:
            body = await answer.read()
            return answer.status, orjson.loads(body) if body.startswith(b"{") else None

    async def ask(self, body: Any, **headers: str) -> tuple[str, int]:
        """Sends a request; returns its engine and the number of its decision."""
        url = self.url + "/v1/completions"
        async with self.session.post(url, json=body, headers={**self.headers, **headers}) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            number = int(answer.headers["x-lmetric-decision"].split("-")[0])
            return answer.headers["x-lmetric-instance"], number

    async def stream(self) -> aiohttp.ClientResponse:
        return await self.session.post(self.url + "/v1/completions", json=STREAM)

    async def metric(self, line: str) -> float:
        async with self.session.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(line))

    async def until_metric(self, line: str, value: float) -> None:
        async with asyncio.timeout(60):
            while await self.metric(line) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(
    *flags: str,
    engines: int = 1,
    base: tuple[str, ...] = FLAGS,
    cache_blocks: int | None = None,
    **fake: Any,
) -> AsyncIterator[tuple[Process, Client, list[FakeEngine]]]:
    started: list[FakeEngine] = []
    try:
        for _ in range(engines):
            started.append(FakeEngine(**fake))
            await started[-1].start()
        urls = [each for fake in started for each in ("--engine", fake.url)]
        if cache_blocks is not None:
            listed = ", ".join(f"{{url: {fake.url!r}, cache_blocks: {cache_blocks}}}" for fake in started)
            urls = ["--set", f"engines=[{listed}]"]
        async with router(*urls, *base, *flags) as process:
            await process.listening(60)
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                yield process, Client(process.url, session), started
    finally:
        for fake in started:
            await fake.stop()


def workers_of(process: Process) -> list[int]:
    """Returns the process IDs of the workers."""
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text()
    return [int(each) for each in children.split()]


async def replaced(process: Process, old: list[int]) -> None:
    """Waits until two other workers run."""
    await until(lambda: len(workers_of(process)) == 2 and not set(workers_of(process)) & set(old))


async def whole(_: FakeEngine, __: Any, writer: asyncio.StreamWriter) -> bool:
    writer.write(plain(200, {"id": "x", "choices": []}))
    return True


SHARED = pytest.mark.asyncio(loop_scope="module")
Shared = tuple[Process, Client, list[FakeEngine]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Shared]:
    """Two workers for tests that leave them as they were: a start takes 3 seconds of CPU time."""
    async with serving(base=OPEN, engines=2, behave=whole) as (process, client, engines):
        client.headers = {}
        yield process, client, engines


class Gate:
    """An engine's behavior: each stream sends one token and waits for the gate."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, _: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(token("a")))
        await self.open.wait()
        writer.write(chunk(token("b", "stop")) + STREAM_TAIL)
        return True


async def test_workers_count_each_others_requests_and_outlive_their_supervisor_until_streams_end() -> None:
    gate = Gate()
    async with serving("--policy", "least_requests", engines=4, behave=gate) as (process, client, engines):
        assert len(workers_of(process)) == 2
        streams = [await client.stream() for _ in range(40)]
        # Each request went to an engine with the fewest of all.
        assert [len(each.requests) for each in engines] == [10] * 4
        # The first digits of a decision's number name its worker.
        decisions = [int(each.headers["x-lmetric-decision"].split("-")[0]) for each in streams]
        assert {number >> 48 for number in decisions} == {0, 1}
        assert len(set(decisions)) == 40
        assert await client.metric("lmetric_decisions_total") == 40
        assert await client.metric("lmetric_instance_in_flight") == 40
        assert await client.metric("lmetric_instance_bs") == 40
        # Any worker explains any decision, and shows the requests of all.
        for stream in streams[:6]:
            label = stream.headers["x-lmetric-decision"]
            assert (await client.get(f"/debug/decisions/{label}"))["id"] == label
        await until_seen(client, 40)
        gate.open.set()
        bodies = [await stream.read() for stream in streams]
        assert all(token("b", "stop") in body for body in bodies)
        await client.until_metric("lmetric_instance_in_flight", 0)
        assert await client.metric("lmetric_instance_bs") == 0
        # The workers of a killed supervisor finish their streams, and end.
        workers = workers_of(process)
        gate.open.clear()
        streams = [await client.stream() for _ in range(4)]
        process.process.kill()
        await until(lambda: not alive(process.process.pid))
        gate.open.set()
        for stream in streams:
            assert token("b", "stop") in await stream.read()
        await until(lambda: not any(map(alive, workers)))
        await process.ended()


@SHARED
async def test_the_live_pages_of_all_workers_show_end_to_end_times_of_all_requests(shared: Shared) -> None:
    _, client, _ = shared
    numbers = [(await client.ask({"model": "tiny", "prompt": "a"}))[1] for _ in range(20)]
    assert {number >> 48 for number in numbers} == {0, 1}
    async with asyncio.timeout(60):
        for _ in range(6):  # pages of both workers
            while True:
                page = await client.get("/debug/live")
                if {int(each["id"].split("-")[0]) for each in page["requests"]} >= {*numbers}:
                    break
                await asyncio.sleep(0.1)
            fields, points = page["history"]["fields"], page["history"]["points"]
            rows = [dict(zip(fields, point, strict=True)) for point in points]
            # Seconds in which requests ended, on any worker, have their times.
            busy = [row for row in rows if row["requests_per_second"]]
            assert busy
            assert all(row["e2e_p50"] > 0 and row["ttft_p50"] is None for row in busy)


@pytest.mark.nightly
async def test_workers_show_each_others_requests_while_one_stands_still() -> None:
    async def ask(client: Client) -> int | None:
        """Returns the worker of a request; None: it reached the worker that stands still."""
        try:
            async with asyncio.timeout(3):
                return (await client.ask({"model": "tiny", "prompt": "a"}))[1] >> 48
        except TimeoutError:
            return None

    async with serving("--workers", "3", behave=whole) as (process, client, _):
        still = workers_of(process)[0]
        os.kill(still, signal.SIGSTOP)
        try:
            served = Counter[int | None]()
            for _ in range(2):
                served.update(await asyncio.gather(*(ask(client) for _ in range(24))))
                await asyncio.sleep(1)  # further updates of the live page
            answered, pages = served.total() - served.pop(None), 0
            assert len(served) == 2
            async with asyncio.timeout(60):
                while pages < 6:  # pages of both workers
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(2):
                            page = await client.get("/debug/live")
                            shown = sum(each["status"] == 200 for each in page["requests"])
                            pages = pages + 1 if shown == answered else 0
        finally:
            os.kill(still, signal.SIGCONT)


@SHARED
async def test_each_worker_lists_the_latest_decisions_of_all(shared: Shared) -> None:
    _, client, _ = shared
    made = [(await client.ask({"model": "tiny", "prompt": "a"}))[1] for _ in range(20)]
    assert {number >> 48 for number in made} == {0, 1}
    for limit in (20, 3, 1):
        for _ in range(6):  # pages of both workers
            page = await client.get(f"/debug/decisions?limit={limit}")
            assert [int(each["id"].split("-")[0]) for each in page] == made[: -limit - 1 : -1]


@SHARED
async def test_lines_of_the_log_name_their_worker(shared: Shared) -> None:
    """Also those of a reload, which is another call of the supervisor than the start."""
    process, client, _ = shared
    assert process.process.stderr is not None
    assert (await client.post("/admin/reload", None))[0] == 200
    reloaded = list[Any]()
    async with asyncio.timeout(60):
        while len(reloaded) < 2:
            line = orjson.loads(await process.process.stderr.readline())
            if line["event"] == "configuration reloaded":
                reloaded.append(line.get("worker"))
    assert sorted(reloaded) == [0, 1]


async def check_reads(session: aiohttp.ClientSession, url: str, headers: dict[str, str], status: int) -> None:
    """Checks the status of a decision's page, whichever worker answers."""
    for _ in range(8):
        async with session.get(url, headers=headers) as answer:
            assert answer.status == status, (headers, await answer.text())


@pytest.mark.nightly
async def test_a_tenant_reads_its_decisions_from_every_worker() -> None:
    """The gate has the same with keys, in test_worker_keys.py."""
    own, others = {"x-tenant": "acme"}, {"x-tenant": "other"}
    async with serving("--set", "tenants={acme: {}, other: {}}") as (_, client, _):
        body = {"model": "tiny", "prompt": "a"}
        async with client.session.post(client.url + "/v1/completions", json=body, headers=own) as answer:
            assert answer.status == 200
            page = f"{client.url}/debug/decisions/{answer.headers['x-lmetric-decision']}"
        await check_reads(client.session, page, own, 200)
        await check_reads(client.session, page, others, 404)


async def until_seen(client: Client, in_flight: int) -> None:
    """Waits until the live pages of both workers show all requests."""
    async with asyncio.timeout(60):
        for _ in range(6):
            while (await client.get("/debug/live"))["now"]["in_flight"] != in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_a_killed_worker_is_replaced_and_loses_only_its_own_connections() -> None:
    """Every worker finds a stored response, also after the worker that relayed it was killed."""
    gate = Gate()

    async def behave(fake: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        if request.path != "/v1/responses":
            return await gate(fake, request, writer)
        stored = {"id": request.json.get("request_id", "x"), "object": "response", "on": fake.url}
        writer.write(plain(200, stored))
        return True

    async with serving(engines=3, behave=behave) as (process, client, _):

        async def check_stored() -> None:
            for _, response in made:
                for _ in range(4):
                    asked = {"model": "tiny", "input": "b", "previous_response_id": response["id"]}
                    status, answer = await client.post("/v1/responses", asked)
                    assert (status, answer["on"]) == (200, response["on"])

        made = [await client.post("/v1/responses", {"model": "tiny", "input": "a"}) for _ in range(4)]
        assert [status for status, _ in made] == [200] * 4
        await check_stored()
        decided = await client.metric("lmetric_decisions_total")
        workers = workers_of(process)
        streams = [await client.stream() for _ in range(20)]
        by_worker = Counter(int(each.headers["x-lmetric-decision"].split("-")[0]) >> 48 for each in streams)
        assert await client.metric("lmetric_decisions_total") == decided + 20
        os.kill(workers[0], signal.SIGKILL)
        # New connections are accepted while the worker is away.
        more = [await client.stream() for _ in range(10)]
        gate.open.set()
        results = await asyncio.gather(*(each.read() for each in [*streams, *more]), return_exceptions=True)
        lost = sum(isinstance(each, aiohttp.ClientError) for each in results)
        assert lost in by_worker.values()
        await until(lambda: len(workers_of(process)) == 2 and workers_of(process) != workers)
        await client.until_metric("lmetric_instance_in_flight", 0)
        assert await client.metric("lmetric_instance_bs") == 0
        # The counts of the killed worker stay.
        assert await client.metric("lmetric_decisions_total") == decided + 30
        await check_stored()


async def test_a_rolling_restart_and_the_end_lose_no_stream_and_nothing_that_administrators_did(
    tmp_path: Path,
) -> None:
    gate = Gate()
    file = tmp_path / "router.yaml"
    file.write_text("retries: {attempts: 2}\n")
    flags = ("--config", str(file), "--set", "timeouts.drain_grace=0.5")
    async with serving(*flags, engines=2, behave=gate) as (process, client, engines):
        old = workers_of(process)
        name = engines[0].url.removeprefix("http://")
        assert (await client.post(f"/admin/engines/{name}/drain", None))[0] == 200
        for _ in range(6):  # whichever worker answers
            states = {each["name"]: each["draining"] for each in await client.get("/debug/engines")}
            assert states[name]
        streams = [await client.stream() for _ in range(10)]
        process.process.send_signal(signal.SIGUSR2)
        more: list[aiohttp.ClientResponse] = []
        async with asyncio.timeout(60):
            while len(set(workers_of(process)) - set(old)) < 2:
                more.append(await client.stream())
                await asyncio.sleep(0.05)
        gate.open.set()
        for stream in [*streams, *more]:
            assert token("b", "stop") in await stream.read()
        await replaced(process, old)
        for _ in range(6):
            states = {each["name"]: each["draining"] for each in await client.get("/debug/engines")}
            assert states[name]
        assert not engines[0].requests
        # A reload reaches all workers, by a request and by a signal; a bad one changes nothing.
        file.write_text("tenants: {acme: {budgets: [{counts: requests, limit: 3, per: hour}]}}\n")
        status, report = await client.post("/admin/reload", None)
        assert (status, report["tenants_changed"]) == (200, ["acme"])
        statuses = [
            (await client.post("/v1/completions", {"model": "tiny", "prompt": "a"}, **{"x-tenant": "acme"}))[
                0
            ]
            for _ in range(9)
        ]
        assert Counter(statuses) == {200: 3, 429: 6}
        file.write_text("tenants: {acme: {budgets: [{counts: requests, limit: x, per: hour}]}}\n")
        status, report = await client.post("/admin/reload", None)
        assert status == 400
        assert "limit" in report["error"]["message"]
        # The end is announced: new connections are answered until the streams have ended.
        gate.open.clear()
        streams = [await client.stream() for _ in range(6)]
        process.process.terminate()
        async with asyncio.timeout(60):
            while (further := await client.stream()).status == 200:
                streams.append(further)
        refusal = await further.json()
        assert refusal["error"]["code"] == "shutting_down"
        gate.open.set()
        for stream in streams:
            assert token("b", "stop") in await stream.read()
        assert await process.ended() == 0


@pytest.mark.nightly
async def test_a_new_worker_repeats_changes_that_came_with_an_earlier_token(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("admin: {enabled: true, token: secret}\n")
    base = ("--workers", "2", "--config", str(file))
    async with serving(engines=2, base=base) as (process, client, engines), engine() as further:
        name = engines[0].url.removeprefix("http://")
        assert (await client.post(f"/admin/engines/{name}/drain", None))[0] == 200
        assert (await client.post("/admin/engines", {"url": further.url, "name": "further"}))[0] == 200
        file.write_text("admin: {enabled: true, token: another}\n")
        assert (await client.post("/admin/reload", None))[0] == 200
        for marked in ({}, {"x-lmetric-worker": "0"}):
            assert (await client.post("/admin/reload", None, **marked))[0] == 401, "the earlier token is over"
        client.headers = {"authorization": "Bearer another"}
        old = workers_of(process)
        process.process.send_signal(signal.SIGUSR2)
        await replaced(process, old)
        for _ in range(6):  # whichever worker answers
            states = {each["name"]: each["draining"] for each in await client.get("/debug/engines")}
            assert states[name]
            assert "further" in states


@pytest.mark.nightly
async def test_a_new_worker_drains_no_later_engine_with_the_name_of_a_drained_one(tmp_path: Path) -> None:
    """As the pods of a StatefulSet, each drained before its replacement."""
    file = tmp_path / "engines.json"

    async def listed(*names: str) -> None:
        await asyncio.to_thread(file.write_bytes, orjson.dumps([by_name[each] for each in names]))
        for _ in range(6):  # whichever worker answers
            async with asyncio.timeout(60):
                while {each["name"] for each in await client.get("/debug/engines")} != {*names}:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async with engine() as a, engine() as b:
        by_name = {name: {"url": each.url, "name": name} for name, each in (("pod-0", a), ("pod-1", b))}
        file.write_bytes(orjson.dumps([*by_name.values()]))
        base = (*FLAGS, "--set", f"discovery=[{{file: {str(file)!r}}}]")
        async with serving(engines=0, base=base) as (process, client, _):
            await listed("pod-0", "pod-1")
            for name in by_name:
                assert (await client.post(f"/admin/engines/{name}/drain", None))[0] == 200
            await listed("pod-1")
            await listed("pod-0", "pod-1")
            old = workers_of(process)
            process.process.send_signal(signal.SIGUSR2)
            await replaced(process, old)
            for _ in range(6):
                drained = {each["name"]: each["draining"] for each in await client.get("/debug/engines")}
                assert drained == {"pod-0": False, "pod-1": True}


@pytest.mark.nightly
async def test_a_worker_that_starts_during_a_reload_follows_it(tmp_path: Path) -> None:
    """An API key that was removed, or a limit, must not stay as it was in one of the workers."""
    file = tmp_path / "router.yaml"
    file.write_text("policy: least_requests\n")
    async with serving("--config", str(file), engines=2) as (process, client, _):
        put = client.session.put(
            f"{client.url}/admin/policy", json={"policy": "round_robin"}, headers=client.headers
        )
        async with put as answer:
            assert answer.status == 200
        old = workers_of(process)
        process.process.send_signal(signal.SIGUSR2)
        await until(lambda: bool(set(workers_of(process)) - set(old)))
        budgets = "tenants: {acme: {budgets: [{counts: requests, limit: 3, per: hour}]}}\n"
        file.write_text(f"policy: least_requests\n{budgets}")
        status, report = await client.post("/admin/reload", None)
        assert (status, report["tenants_changed"]) == (200, ["acme"]), report
        await replaced(process, old)
        await client.until_metric("lmetric_instance_in_flight", 0)
        body, tenant = {"model": "tiny", "prompt": "a"}, {"x-tenant": "acme"}
        asked = [(await client.post("/v1/completions", body, **tenant))[0] for _ in range(12)]
        assert Counter(asked) == {200: 3, 429: 9}
        # The reload brought the configured policy back, also in workers that start later.
        for _ in range(6):
            assert [each["policy"] for each in await client.get("/admin/policy")] == ["least_requests"]


async def send_sessions(client: Client, sessions: range) -> None:
    """Sends a request of each session, each on a new connection."""
    for session in sessions:
        body = {"model": "tiny", "prompt": f"hello {session}", "user": f"s{session}"}
        assert (await client.post("/v1/completions", body))[0] == 200


async def canary_of(client: Client, requests: int) -> Any:
    """Returns the canary once all workers show this number of requests, all the same.

    Each question meets any worker: 16 answers in a row with this number come from all of them.
    Fewer could all be of a worker that has not yet sent its own results to the others.
    """
    seen: list[Any] = []
    async with asyncio.timeout(60):
        while len(seen) < 16:
            (found,) = await client.get("/admin/canary")
            run = found["canary"]
            for own in ("seconds", "warmup_left_seconds"):
                run.pop(own)
            run["ended_at"] = run["ended_at"] is not None  # each worker's own clock
            if sum(run["requests"].values()) == requests:
                seen.append(found)
            else:
                seen.clear()
                await asyncio.sleep(0.05)
    assert all(each == seen[0] for each in seen)
    return seen[0]


@pytest.mark.parametrize("by", ["command", pytest.param("configuration", marks=pytest.mark.nightly)])
async def test_a_session_keeps_its_arm_and_all_workers_have_one_canary(by: str) -> None:
    flags = ["--set", "canary={policy: round_robin, share: 0.5, warmup_seconds: 0}"]
    async with serving(*(flags if by == "configuration" else []), engines=2) as (process, client, _):
        if by == "command":
            body = {"policy": "round_robin", "share": 0.5, "warmup_seconds": 0}
            assert (await client.post("/admin/canary/start", body))[0] == 200
        sessions = range(120)
        for _ in range(2):
            await send_sessions(client, sessions)
        found = await canary_of(client, 240)
        old = workers_of(process)
        os.kill(old[0], signal.SIGKILL)
        await until(lambda: len(workers_of(process)) == 2 and workers_of(process) != old)
        await client.until_metric('lmetric_canary_state{model="tiny",state="running"}', 1)
        await send_sessions(client, sessions)
        found = await canary_of(client, 360)
        splitter = Splitter(found["canary"]["salt"], 0.5)
        places = [splitter.place(b"session s%d" % session) for session in sessions]
        canary = sum(place.canary for place in places)
        assert found["canary"]["requests"] == {"stable": 3 * (120 - canary), "canary": 3 * canary}
        buckets = [len({place.bucket for place in places if place.canary is arm}) for arm in (False, True)]
        assert list(found["canary"]["groups"].values()) == buckets
        assert found["canary"]["keys"] == {"session": 360}
        # Commands change all workers, also those that start later.
        status, found = await client.post("/admin/canary/promote", {})
        assert status == 200, found
        process.process.send_signal(signal.SIGUSR2)
        await replaced(process, workers_of(process))
        found = await canary_of(client, 360)
        assert (found["state"], found["stable_policy"]) == ("promoted", "round_robin")
        assert await client.metric("lmetric_canary_promotions_total") == 1
        assert (await client.post("/admin/canary/rollback", {}))[0] == 200
        found = await canary_of(client, 360)
        assert (found["state"], found["stable_policy"]) == ("rolled_back", "total_delay")
        # A new canary draws all sessions again, and the result of the last one is gone.
        body = {"policy": "round_robin", "share": 0.5, "warmup_seconds": 0}
        assert (await client.post("/admin/canary/start", body))[0] == 200
        again = await canary_of(client, 0)
        assert again["canary"]["salt"] != found["canary"]["salt"]


# Each engine's cache has room for one program, and for no second one until the first is forgotten.
ADMIT = ("--set", "programs=admit", "--policy", "least_requests")
BLOCKS = 186
FINAL = {"x-session-final": "true"}


def turn(program: int, number: int = 0) -> dict[str, Any]:
    """A turn of a program, longer than the last one."""
    prompt = [1000 * program + i % 900 for i in range(2500 + 16 * number)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 3}


async def programs_of(client: Client) -> dict[str, int]:
    """Returns the number of programs by state. All workers must show the same."""
    shown = [(await client.get("/debug/programs"))["tiny"]["states"] for _ in range(6)]
    assert all(each == shown[0] for each in shown), shown
    states: dict[str, int] = shown[0]
    return states


async def until_programs(client: Client, **states: int) -> None:
    """Waits until all workers show these numbers of programs."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(AssertionError):
                found = await programs_of(client)
                if all(found[state] == count for state, count in states.items()):
                    return
            await asyncio.sleep(0.05)


class Barrier:
    """An engine's behavior: the first requests wait until there are enough of them."""

    def __init__(self, requests: int) -> None:
        self.left = requests
        self.open = asyncio.Event()

    async def __call__(self, _: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.open.set()
        await self.open.wait()
        writer.write(plain(200, {"id": "x", "choices": []}))
        return True


async def begin_programs(client: Client, programs: range) -> dict[int, str]:
    """Sends first turns of programs, each while those before it run: no two share an engine.

    Two workers that choose within the same 0.1 ms may choose alike.
    """
    turns = []
    for program in programs:
        turns.append(asyncio.create_task(client.ask(turn(program))))
        if len(turns) < len(programs):  # the last one opens the barrier of the engines
            await until_programs(client, running=len(turns))
    answers = await asyncio.gather(*turns)
    return {program: engine for program, (engine, _) in zip(programs, answers, strict=True)}


async def test_programs_are_held_over_all_workers_and_keep_their_home_if_a_worker_is_killed() -> None:
    gate = asyncio.Event()
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def one_at_a_time(fake: FakeEngine, _: Any, writer: asyncio.StreamWriter) -> bool:
        running[fake.url] += 1
        most[fake.url] = max(most[fake.url], running[fake.url])
        await gate.wait()
        running[fake.url] -= 1
        writer.write(plain(200, {"id": "x", "choices": []}))
        return True

    kept = {"engines": 3, "cache_blocks": BLOCKS, "behave": one_at_a_time}
    async with serving(*ADMIT, **kept) as (process, client, engines):
        # The policy chooses where all instances have room. Two workers that choose within the same
        # 0.1 ms may choose alike, so each of the first programs runs before the next one comes.
        tasks = []
        for program in range(2):
            tasks.append(asyncio.create_task(client.ask(turn(program), **FINAL)))
            await until_programs(client, running=len(tasks))
        tasks += [asyncio.create_task(client.ask(turn(program), **FINAL)) for program in range(2, 10)]
        await until_programs(client, running=3, held=7)
        for path in ("/debug/live", "/debug/programs"):
            assert (await client.get(path)) is not None
        gate.set()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*tasks)
        assert {number >> 48 for _, number in answers} == {0, 1}
        assert list(most.values()) == [1, 1, 1], "programs of both workers had the same cache"
        await until_programs(client, running=0, held=0)
        assert await client.metric("lmetric_programs_started_total") == 10
        assert await client.metric("lmetric_waiting_requests") == 0
        assert await client.metric("lmetric_instance_in_flight") == 0
        # Programs keep their home, also after a worker was killed.
        behave = Barrier(3)
        for fake in engines:
            fake.behave = behave
        homes = await begin_programs(client, range(20, 23))
        assert sorted(homes.values()) == sorted(each.url.removeprefix("http://") for each in engines)
        # While others wait for room, the policy does not place programs.
        waiting = [asyncio.create_task(client.ask(turn(program))) for program in range(30, 38)]
        await until_programs(client, held=8, gap=3)
        for number in range(1, 4):
            for program, home in homes.items():
                assert (await client.ask(turn(program, number)))[0] == home
        old = workers_of(process)
        os.kill(old[0], signal.SIGKILL)
        await until(lambda: len(workers_of(process)) == 2 and workers_of(process) != old)
        for number in range(4, 8):
            for program, home in homes.items():
                assert (await client.ask(turn(program, number)))[0] == home
        # The waiting requests of the killed worker count no more; the others run in turn.
        await until(lambda: any(each.done() for each in waiting))
        left = sum(not each.done() for each in waiting)
        await until_programs(client, held=left, gap=3)
        assert await client.metric("lmetric_programs_started_total") == 10 + 11
        for program in homes:
            await client.ask(turn(program, 8), **FINAL)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until_programs(client, held=0, running=0)


@pytest.mark.nightly
async def test_a_rolling_restart_keeps_programs() -> None:
    async with serving(*ADMIT, engines=2, cache_blocks=BLOCKS, behave=Barrier(2)) as (process, client, _):
        homes = await begin_programs(client, range(2))
        waiting = asyncio.create_task(client.ask(turn(5)))
        await until_programs(client, held=1, gap=2)
        old = workers_of(process)
        process.process.send_signal(signal.SIGUSR2)
        await until(lambda: len(set(workers_of(process)) - set(old)) == 2)
        for program, home in homes.items():
            assert (await client.ask(turn(program, 1)))[0] == home
        for program in homes:
            await client.ask(turn(program, 2), **FINAL)
        await waiting  # on a worker that is leaving
        await replaced(process, old)
        await until_programs(client, held=0, running=0)


@pytest.mark.nightly
async def test_programs_are_followed_by_default() -> None:
    async with serving(engines=2, cache_blocks=BLOCKS) as (_, client, _):
        for number in range(4):
            await client.ask(turn(1, number))
        await client.until_metric("lmetric_program_turns_total", 3)
        assert await client.metric("lmetric_programs_started_total") == 1
        assert not (await client.get("/debug/programs"))["tiny"]["holds"]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@SHARED
async def test_a_second_server_on_the_port_is_refused(shared: Shared) -> None:
    process, _, engines = shared
    port = int(process.url.rpartition(":")[2])
    code, line = await refused(engines=[{"url": engines[0].url}], workers=2, port=port)
    assert code == 3
    assert "Address already in use" in line


async def test_a_start_that_fails_ends_all_workers_with_the_reason(tmp_path: Path) -> None:
    async with (
        engine() as fake,
        router("--engine", fake.url, *FLAGS, "--set", f"auth.keys_file={tmp_path}/none") as r,
    ):
        assert await r.ended() == 2
        assert "No such file" in "".join(r.log)


@pytest.mark.parametrize(
    "more",
    [
        {"rebalance": "star", "experimental": True, "migration_by": "fetch"},
        {"fleet_changes": "warm"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_settings_that_one_process_must_count_alone_are_refused(more: dict[str, Any]) -> None:
    ServerConfig.model_validate({**more})
    with pytest.raises(
        (ValidationError, LmetricError), match=rf"workers = 2: it is not valid with {next(iter(more))}"
    ):
        ServerConfig.model_validate({**more, "workers": 2})


PAGE = """# HELP a_total Help
# TYPE a_total counter
a_total{x="1"} 3.0
# HELP b Help
# TYPE b histogram
b_bucket{le="1.0"} 1.0
b_sum 0.5
# HELP lmetric_instance_bs Help
# TYPE lmetric_instance_bs gauge
lmetric_instance_bs{x="1"} 4.0
# HELP lmetric_client_connections Help
# TYPE lmetric_client_connections gauge
lmetric_client_connections 2.0
# HELP lmetric_canary_promotions Help
# TYPE lmetric_canary_promotions counter
lmetric_canary_promotions_total{x="1"} 5.0
"""


def test_a_page_of_all_workers_adds_counts_and_keeps_what_all_see() -> None:
    merged = merge(
        [PAGE, PAGE.replace('a_total{x="1"}', 'a_total{x="2"}')], ended=[PAGE], openmetrics=False
    ).splitlines()
    assert merged == [
        "# HELP a_total Help",
        "# TYPE a_total counter",
        'a_total{x="1"} 6.0',
        'a_total{x="2"} 3.0',
        "# HELP b Help",
        "# TYPE b histogram",
        'b_bucket{le="1.0"} 3.0',
        "b_sum 1.5",
        "# HELP lmetric_instance_bs Help",
        "# TYPE lmetric_instance_bs gauge",
        'lmetric_instance_bs{x="1"} 4.0',
        "# HELP lmetric_client_connections Help",
        "# TYPE lmetric_client_connections gauge",
        "lmetric_client_connections 4.0",
        "# HELP lmetric_canary_promotions_total Help",
        "# TYPE lmetric_canary_promotions_total counter",
        'lmetric_canary_promotions_total{x="1"} 5.0',
    ]


def test_labels_may_hold_any_text() -> None:
    """Tenants of tokens and names of models have any characters."""
    page = '# TYPE a counter\na_total{t="x # {y",u="} \\" 1"} 3.0\n'
    assert merge([page, page], openmetrics=False).splitlines()[1] == 'a_total{t="x # {y",u="} \\" 1"} 6.0'


def test_each_worker_has_its_own_queue() -> None:
    page = '# TYPE lmetric_level_waiting_requests gauge\nlmetric_level_waiting_requests{level="0"} 2.0\n'
    assert merge([page, page], openmetrics=False).splitlines()[1].endswith(" 4.0")


def test_an_openmetrics_page_keeps_its_end_and_its_exemplars() -> None:
    page = '# TYPE a counter\na_total 3.0 # {id="7"} 1.0\n# EOF\n'
    assert merge([page, page], openmetrics=True) == '# TYPE a counter\na_total 6.0 # {id="7"} 1.0\n# EOF\n'


@pytest.mark.parametrize("openmetrics", [False, True])
def test_pages_in_both_formats_add_up(openmetrics: bool) -> None:
    """A worker's last page need not have the format of a scrape after its end."""
    text = "# HELP a_total Help\n# TYPE a_total counter\na_total 3.0\n"
    other = '# HELP a Help\n# TYPE a counter\na_total 5.0 # {id="7"} 1.0\n# EOF\n'
    merged = merge([other], [merge([], ["", text], openmetrics=True)], openmetrics=openmetrics)
    if openmetrics:
        assert merged == '# HELP a Help\n# TYPE a counter\na_total 8.0 # {id="7"} 1.0\n# EOF\n'
    else:
        assert merged == "# HELP a_total Help\n# TYPE a_total counter\na_total 8.0\n"


@SHARED
async def test_without_a_token_administrators_on_this_machine_reach_all_workers(shared: Shared) -> None:
    _, client, engines = shared
    name = engines[0].url.removeprefix("http://")
    for change, drained in (("drain", True), ("undrain", False)):
        assert (await client.post(f"/admin/engines/{name}/{change}", None))[0] == 200
        for _ in range(6):
            states = {each["name"]: each["draining"] for each in await client.get("/debug/engines")}
            assert states[name] == drained


@SHARED
@pytest.mark.parametrize("mark", [b"\xff", b"a", "é".encode()])
async def test_a_client_cannot_break_a_page_with_the_mark_of_the_supervisor(
    mark: bytes, shared: Shared
) -> None:
    """Security: a byte that is no text made an error 500 with a traceback in the log."""
    place = urlsplit(shared[0].url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(
        b"GET /debug/decisions/99999999-0123456789abcdef HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"x-lmetric-worker: " + mark + b"\r\n\r\n"
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404 "), answer
