"""The supervisor of workers, without processes: what it keeps, adds up and tries again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from lmetric.config import ConfigError, ServerConfig
from lmetric.server.http.port import Bound
from lmetric.server.supervisor import supervisor as module
from lmetric.server.supervisor.supervisor import LIVE_UPDATES, MOST_CHANGES, Process, Supervisor
from lmetric.server.worker import channel as channels
from lmetric.server.worker.channel import Channel, NoAnswerError
from lmetric.server.worker.repeats import AdminChange
from waiting import until

PAGE = "# TYPE a counter\na_total {}\n"


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    bound = socket.create_server(("127.0.0.1", 0))
    it = Supervisor(ServerConfig(workers=1), (), Bound([bound], shared=False), reread=None)
    yield it
    it.processes.clear()
    await it.close()


def post(page: str, value: Any, method: str = "POST") -> AdminChange:
    return AdminChange(method, f"/admin/engines/{page}", (), orjson.dumps(value))


async def test_pushed_values_displace_no_change(supervisor: Supervisor) -> None:
    await supervisor.repeat(post("e/drain", None))
    for number in range(MOST_CHANGES + 1):
        await supervisor.repeat(post("e/indicators", {"gpu_power": number}))
    await supervisor.repeat(post("e/indicators", {"heat": 1}))
    kept = [(each.target, each.body) for each in supervisor._changes.values()]
    assert kept == [
        ("/admin/engines/e/drain", b"null"),
        ("/admin/engines/e/indicators", b'{"gpu_power":10000}'),
        ("/admin/engines/e/indicators", b'{"heat":1}'),
    ]
    await supervisor.repeat(post("e?drain=5", None, "DELETE"))
    targets = [each.target for each in supervisor._changes.values()]
    assert targets == ["/admin/engines/e/drain", "/admin/engines/e?drain=5"]


class Answering:
    """The channel of a worker whose metrics wait."""

    def __init__(self, page: str) -> None:
        self.page, self.asked, self.go = page, asyncio.Event(), asyncio.Event()

    async def call(self, name: str, _: Any, **__: Any) -> str:
        assert name == "metrics"
        self.asked.set()
        await self.go.wait()
        return self.page


async def test_a_worker_that_ends_during_a_scrape_counts_once(supervisor: Supervisor) -> None:
    """A sum that falls again looks like a restart: rates would have the whole count."""
    answering = [Answering(PAGE.format(number)) for number in (1.0, 10.0)]
    for place, channel in enumerate(answering):
        worker = Process(place, place, None, channel=channel)  # type: ignore[arg-type]
        worker.ready = True
        supervisor.processes.append(worker)
    ending = supervisor.processes[1]
    scrape = asyncio.create_task(supervisor.metrics(openmetrics=False))
    await answering[0].asked.wait()
    answering[1].go.set()
    await answering[1].asked.wait()
    supervisor._ended_page = ending.page = answering[1].page
    supervisor.processes.remove(ending)
    answering[0].go.set()
    assert (await scrape).splitlines()[1] == "a_total 11.0"


async def test_a_process_that_cannot_be_started_is_an_error_that_is_tried_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory or processes, the place of a worker stayed empty for ever."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    for _ in range(40):  # more than there are numbers
        with pytest.raises(ConfigError, match="Resource temporarily unavailable; free memory"):
            await supervisor._start(0)


async def test_a_worker_that_stands_still_costs_the_others_nothing(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second, each worker sends an update: those of the others once waited for it for ever."""
    monkeypatch.setattr(module, "RESULTS_SECONDS", 0.1)
    seen: list[tuple[str, Any]] = []

    async def answer(name: str, value: Any) -> None:
        seen.append((name, value))

    ends, reading = [], []
    for number in range(3):
        ours, theirs = socket.socketpair()
        worker = Process(number, number, None, channel=await Channel.open(ours, answer))  # type: ignore[arg-type]
        worker.ready = True
        supervisor.processes.append(worker)
        ends.append(theirs)
        if number == 2:  # the second worker reads nothing
            reading.append(await Channel.open(theirs, answer))
    tasks = len(asyncio.all_tasks())
    still = supervisor.processes[1].channel
    for update in range(200):
        async with asyncio.timeout(5):
            await supervisor._asked("live", (0, b"x" * 10_000))
            await until(lambda: len(seen) == update + 1)  # noqa: B023
    assert len(asyncio.all_tasks()) - tasks <= 3 * LIVE_UPDATES
    assert still._writer.transport.get_write_buffer_size() < 3 * LIVE_UPDATES * 11_000
    for _ in range(3):
        async with asyncio.timeout(5):
            await supervisor._asked("canaries", (0, "results"))
    assert seen[200:] == [("canaries", "results")] * 3
    # No call waits for a worker with too many unread messages.
    monkeypatch.setattr(channels, "MAX_UNREAD_BYTES", 1_000_000)
    with pytest.raises(NoAnswerError):
        await still.call("large", bytes(4_000_000), seconds=0.1)  # more than the socket takes
    async with asyncio.timeout(5):
        with pytest.raises(NoAnswerError):
            await still.call("metrics", False)
    for each in [*reading, *(worker.channel for worker in supervisor.processes)]:
        await each.close()
    for end in ends:
        end.close()
