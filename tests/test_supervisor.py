"""The supervisor of workers, without processes: what it keeps, adds up and tries again."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from lmetric._core import Board, LmetricError, __version__
from lmetric.config import ConfigError, ServerConfig
from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.app import Server
from lmetric.server.http.port import Bound
from lmetric.server.process import WorkerProcess
from lmetric.server.supervisor import merge as merging
from lmetric.server.supervisor import supervisor as module
from lmetric.server.supervisor.merge import merge, read, without_gone
from lmetric.server.supervisor.supervisor import LIVE_UPDATES, Process, Supervisor
from lmetric.server.worker import channel as channels
from lmetric.server.worker.channel import Channel, ChannelClosedError, NoAnswerError
from lmetric.server.worker.repeats import AdminChange
from server_world import world
from waiting import PATIENCE_SECONDS, until

PAGE = "# TYPE a counter\na_total {}\n"


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    bound = socket.create_server(("127.0.0.1", 0))
    it = Supervisor(ServerConfig(workers=1), (), Bound([bound], shared=False), reread=None)
    yield it
    it.processes.clear()
    await it.close()


def post(name: str, what: str) -> AdminChange:
    return AdminChange("POST", f"/admin/engines/{name}/{what}", (), b"", kept=(name, "draining"))


class Alone:
    """The only worker of a supervisor, in this process."""

    number = 0

    def __init__(self, supervisor: Supervisor) -> None:
        self.repeat = supervisor.repeat

    def is_repeated(self, mark: str | None) -> bool:
        return False


class Serving:
    """The channel of a server as a worker. It has the engines, and no canaries."""

    def __init__(self, server: Server) -> None:
        self.process = WorkerProcess(None)  # type: ignore[arg-type]
        self.process._server = server

    async def call(self, name: str, value: Any = None, **_: Any) -> Any:
        return await self.process._answer(name, value) if name == "engine_states" else None


@asynccontextmanager
async def administered(
    supervisor: Supervisor, discovered: Path | None = None
) -> AsyncIterator[Callable[..., Awaitable[list[str]]]]:
    """Yields a function that makes changes and returns the targets and bodies that are kept."""
    sources = [] if discovered is None else [{"file": discovered}]
    async with world(2, admin={"enabled": True}, indicators=PUSHED, discovery=sources) as w:
        w.server.front.worker = Alone(supervisor)  # type: ignore[assignment]
        worker = Process(0, 0, None, channel=Serving(w.server))  # type: ignore[arg-type]
        worker.ready = worker.started = True
        supervisor.processes.append(worker)

        async def change(method: str, path: str, value: Any = None) -> list[str]:
            body = None if value is None else orjson.dumps(value)
            async with w.client.request(method, w.url + path, data=body) as answer:
                assert answer.status == 200, await answer.text()
            return [f"{each.target} {each.body.decode()}" for each in supervisor._changes.values()]

        yield change
        w.server.front.worker = None


PUSHED = {name: {"source": "push"} for name in ("gpu_power", "heat")}
LASTING = {"url": "http://127.0.0.1:1", "name": "lasting", "model": "tiny"}
FURTHER = {"url": "http://127.0.0.1:2", "name": "pod", "model": "tiny"}


async def discover(supervisor: Supervisor, file: Path, *pods: str) -> None:
    """Lists these engines and no others, and waits until the worker that serves has them."""
    listed = [
        {**FURTHER, "url": f"http://127.0.0.1:{10 + number}", "name": name}
        for number, name in enumerate(pods)
    ]
    await asyncio.to_thread(file.write_bytes, orjson.dumps(listed))
    fleet = supervisor.processes[0].channel.process._server.fleet  # type: ignore[attr-defined]
    await until(lambda: [each.name for each in fleet.engines() if each.name.startswith("pod-")] == [*pods])


@pytest.fixture
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 12)


@pytest.mark.usefixtures("few_changes")
async def test_engines_that_come_and_go_displace_no_change(supervisor: Supervisor) -> None:
    async with administered(supervisor) as change:
        await change("POST", "/admin/engines", LASTING)
        await change("POST", "/admin/engines/e0/undrain")
        await change("POST", "/admin/engines/e0/drain")
        await change("DELETE", "/admin/engines/e1")
        for number in range(20):
            name, url = f"pod-{number}", f"http://127.0.0.1:{number + 10}"
            await change("POST", "/admin/engines", {**FURTHER, "url": url, "name": name})
            await change("POST", f"/admin/engines/{name}/drain")
            await change("DELETE", f"/admin/engines/{name}?drain=1")
            await change("POST", f"/add_worker?url={url}")
            await change("POST", f"/remove_worker?url={url}")
            await change("POST", "/workers", {"url": url})
            await change("POST", "/workers", {"url": url})
            await change("DELETE", f"/workers/127.0.0.1:{number + 10}")
            kept = await change("POST", f"/remove_worker?url={url}")
        assert kept == [
            f"/admin/engines {orjson.dumps(LASTING).decode()}",
            "/admin/engines/e0/drain ",
            "/admin/engines/e1 ",
        ]
        supervisor._forget_configured()  # as a reload does: the configuration lists e1 again
        assert await change("POST", "/remove_worker?url=http://127.0.0.1:9") == kept[:2]


@pytest.mark.usefixtures("few_changes")
async def test_later_values_replace_earlier_ones(supervisor: Supervisor) -> None:
    async with administered(supervisor) as change:
        await change("POST", "/admin/engines", FURTHER)
        await change("POST", "/admin/engines/e0/drain")
        for number in range(20):
            await change("POST", "/admin/weights", {"version": number, "engines": ["e0", "pod"]})
            await change("POST", "/admin/weights", {"version": number, "engines": ["pod"]})
            await change("POST", "/admin/engines/e0/indicators", {"gpu_power": number})
            await change("POST", "/admin/engines/pod/indicators", {"gpu_power": number})
            for policy in ("round_robin", "least_requests"):
                await change("PUT", "/admin/policy", {"policy": policy})
            await change("POST", "/admin/engines/e0/role", {"role": "both", "drain": number})
            await change("POST", "/admin/guard", {"on": number % 2 == 0})
        await change("POST", "/admin/engines/e0/indicators", {"heat": 1})
        kept = await change("DELETE", "/admin/engines/pod")
        assert kept == [
            "/admin/engines/e0/drain ",
            '/admin/weights {"version":19,"engines":["e0"]}',
            '/admin/engines/e0/indicators {"gpu_power":19}',
            '/admin/policy {"policy":"least_requests"}',
            '/admin/engines/e0/role {"role":"both","drain":19}',
            '/admin/guard {"on":false}',
            '/admin/engines/e0/indicators {"heat":1}',
        ]


async def test_of_values_replaced_in_part_the_others_are_kept(supervisor: Supervisor) -> None:
    async with administered(supervisor) as change:
        await change("POST", "/admin/engines/e0/indicators", {"gpu_power": 5, "heat": 1})
        await change("POST", "/admin/engines/e0/indicators", {"heat": 2})
        await supervisor._forget_past()
        assert sorted(f"{each.target} {each.body.decode()}" for each in supervisor._changes.values()) == [
            '/admin/engines/e0/indicators {"gpu_power":5}',
            '/admin/engines/e0/indicators {"heat":2}',
        ]


async def test_values_of_an_indicator_that_a_reload_dropped_are_not_kept(supervisor: Supervisor) -> None:
    async with administered(supervisor) as change:
        await change("POST", "/admin/engines/e0/indicators", {"gpu_power": 5, "heat": 1})
        server = supervisor.processes[0].channel.process._server  # type: ignore[attr-defined]
        config = server.config
        fewer = {name: each for name, each in config.indicators.items() if name != "heat"}
        for indicators in (fewer, config.indicators):
            await server.apply(server.prepare(config.model_copy(update={"indicators": indicators})))
        await supervisor._forget_past()
        assert [each.body for each in supervisor._changes.values()] == [b'{"gpu_power":5}']


async def test_a_worker_that_starts_has_made_no_decision_and_counted_nothing() -> None:
    """It answers while it repeats the changes of administrators."""
    starting = WorkerProcess(None)  # type: ignore[arg-type]
    assert await starting._answer("decisions", 3) == {}
    pages = [await starting._answer("metrics", False), PAGE.format(1)]
    assert merge(pages, openmetrics=False) == merge(pages[1:], openmetrics=False)


@pytest.mark.parametrize("came_back", [False, True])
@pytest.mark.parametrize("serves", [True, False])
async def test_a_new_worker_repeats_no_change_of_engines_that_discovery_has_removed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, came_back: bool, serves: bool
) -> None:
    """The next pod of a StatefulSet has the name of the pod that was drained before a rollout."""
    file = tmp_path / "engines.json"
    file.write_text("[]")
    repeated: list[str] = []

    async def ask(_: Process, change: AdminChange) -> tuple[int, bytes]:
        repeated.append(f"{change.target} {change.body.decode()}")
        return 200, b""

    async with administered(supervisor, file) as change:
        await discover(supervisor, file, "pod-a", "pod-b")
        await change("POST", "/admin/engines/e1/undrain")
        for name in ("e0", "pod-a", "pod-b"):
            await change("POST", f"/admin/engines/{name}/drain")
            await change("POST", f"/admin/engines/{name}/role", {"role": "both"})
            await change("POST", f"/admin/engines/{name}/indicators", {"heat": 1})
        kept = await change("POST", "/admin/weights", {"version": 1, "engines": ["e0", "pod-b"]})
        await discover(supervisor, file)
        if came_back:
            await discover(supervisor, file, "pod-a", "pod-b")
        supervisor.processes[0].started = serves
        monkeypatch.setattr(supervisor, "_ask", ask)
        worker = add(supervisor, {})
        worker.started = False
        await supervisor._catch_up(worker)
    if serves:
        kept = [each for each in kept if "/pod-" not in each]
        kept[-1] = '/admin/weights {"version":1,"engines":["e0"]}'
    assert repeated == kept
    assert len(supervisor._changes) == len(kept)


async def test_an_engine_that_has_restarted_has_no_announced_weights(supervisor: Supervisor) -> None:
    async with administered(supervisor) as change:
        await change("POST", "/admin/engines/e1/drain")
        await change("POST", "/admin/weights", {"version": 1})
        server = supervisor.processes[0].channel.process._server  # type: ignore[attr-defined]
        server.fleet.engine("e1").restarted()
        await supervisor._forget_past()
        kept = await change("POST", "/admin/guard", {"on": True})
    assert kept == [
        "/admin/engines/e1/drain ",
        '/admin/weights {"version":1,"engines":["e0"]}',
        '/admin/guard {"on":true}',
    ]


async def test_an_engine_that_only_discovery_lists_is_not_added_again(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    file = tmp_path / "engines.json"
    file.write_text("[]")
    async with administered(supervisor, file) as change:
        await change("POST", "/admin/engines", LASTING)
        await asyncio.to_thread(file.write_bytes, orjson.dumps([LASTING]))
        server = supervisor.processes[0].channel.process._server  # type: ignore[attr-defined]
        await until(lambda: server.front.discovery.members.of(f"file:{file}"))
        assert await change("DELETE", "/admin/engines/lasting")
        await supervisor._forget_past()
        assert server.fleet.engine("lasting") is not None
        assert await change("POST", "/admin/guard", {"on": True}) == ['/admin/guard {"on":true}']


async def test_a_removed_engine_that_discovery_lists_keeps_its_changes(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    file = tmp_path / "engines.json"
    file.write_text("[]")
    async with administered(supervisor, file) as change:
        server = supervisor.processes[0].channel.process._server  # type: ignore[attr-defined]
        engine, members = server.fleet.engine("e0"), server.front.discovery.members
        listed = orjson.dumps([{"url": engine.config.url, "name": "e0"}])
        await asyncio.to_thread(file.write_bytes, listed)
        await until(lambda: members.of(f"file:{file}"))
        await change("POST", "/admin/engines/e0/drain")
        await change("DELETE", "/admin/engines/e0")
        kept = await change("POST", "/admin/engines/e0/role", {"role": "both"})
        assert server.fleet.engine("e0") is engine
        assert engine.draining
    assert kept == [
        "/admin/engines/e0/drain ",
        "/admin/engines/e0 ",
        '/admin/engines/e0/role {"role":"both"}',
    ]


@pytest.mark.usefixtures("few_changes")
async def test_changes_of_engines_that_discovery_has_removed_displace_no_other(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    file = tmp_path / "engines.json"
    file.write_text("[]")
    async with administered(supervisor, file) as change:
        await change("POST", "/admin/engines", LASTING)
        await change("POST", "/admin/engines/e0/drain")
        for number in range(20):
            await discover(supervisor, file, f"pod-{number}")
            kept = await change("POST", f"/admin/engines/pod-{number}/drain")
            assert len(kept) <= module.MOST_CHANGES
    assert kept[:2] == [f"/admin/engines {orjson.dumps(LASTING).decode()}", "/admin/engines/e0/drain "]


async def test_a_change_that_workers_still_make_is_kept(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may switch a role minutes after another, once its engine is idle."""
    go = asyncio.Event()

    async def ask(*_: Any) -> tuple[int, bytes]:
        await go.wait()
        return 200, b""

    monkeypatch.setattr(supervisor, "_ask", ask)
    async with administered(supervisor):
        changing = asyncio.create_task(supervisor.repeat(post("e0", "drain")))
        await until(lambda: supervisor._spreading)
        await supervisor._forget_past()
        assert len(supervisor._changes) == 1
        go.set()
        await changing
        await supervisor._forget_past()
        assert not supervisor._changes, "e0 does not drain in the worker that serves"


class Answering:
    """The channel of a worker whose metrics wait."""

    def __init__(self, page: str) -> None:
        self.page, self.asked, self.go = page, asyncio.Event(), asyncio.Event()

    async def call(self, name: str, _: Any, **__: Any) -> str:
        assert name == "metrics"
        self.asked.set()
        await self.go.wait()
        return self.page


ENGINES = """# TYPE lmetric_engine_state gauge
lmetric_engine_state{instance="b",model="tiny",state="HEALTHY"} 1.0
lmetric_engine_state{model="",instance="c \\" {,",state="DOWN"} 1.0
"""
MODELS = """# TYPE lmetric_guard_on gauge
lmetric_guard_on{model="tiny"} 0.0
"""
OF_MODELS = """# TYPE lmetric_requests counter
lmetric_requests_total{model="tiny",tenant="",code="200"} 1.0
lmetric_requests_total{model="gone",tenant="",code="200"} 2.0
lmetric_requests_total{model="",tenant="",code="404"} 3.0
# TYPE lmetric_seconds histogram
lmetric_seconds_bucket{slo_class="",model="gone",le="1.0"} 4.0
# TYPE lmetric_alias_requests counter
lmetric_alias_requests_total{alias="a",model="gone"} 5.0
# TYPE lmetric_model_fallbacks counter
lmetric_model_fallbacks_total{model="gone",to="tiny",reason="down"} 6.0
"""
COUNTED = """# TYPE lmetric_instance_decisions counter
lmetric_instance_decisions_total{model="tiny",instance="a"} 1.0
lmetric_instance_decisions_total{model="tiny",instance="b"} 2.0
lmetric_instance_decisions_total{model="tiny",instance="c \\" {,"} 3.0
# TYPE lmetric_requests counter
lmetric_requests_total{model="tiny",tenant=",instance=\\"a\\"",code="200"} 4.0
"""


@pytest.mark.parametrize("page", [ENGINES, ENGINES.replace('"b"', '"a"'), ""])
@pytest.mark.parametrize("started", [False, True])
async def test_engines_that_are_gone_leave_the_counts_of_ended_workers(
    supervisor: Supervisor, page: str, started: bool
) -> None:
    answering = Answering(page)
    answering.go.set()
    worker = Process(0, 0, None, channel=answering)  # type: ignore[arg-type]
    worker.ready, worker.started = True, started
    supervisor.processes.append(worker)
    supervisor._ended_page = merge([], [COUNTED], openmetrics=True)
    shown = await supervisor.metrics(openmetrics=False)
    gone = {ENGINES: "a", "": None}.get(page, "b") if started else None
    expected = [line for line in COUNTED.splitlines() if "{" in line and f'instance="{gone}"' not in line]
    for text in (shown, supervisor._ended_page):  # not only hidden: new engines must not fill the memory
        assert [line for line in text.splitlines() if "_total{" in line] == expected


def test_models_that_are_gone_leave_the_counts_of_ended_workers() -> None:
    """A model that comes back begins at 0 in all workers. Of names, running workers keep counts."""
    samples = [line for line in OF_MODELS.splitlines() if "{" in line]
    for pages, left in (([MODELS, ENGINES], {1, 3, 5, 6}), ([ENGINES], range(1, 7)), ([], range(1, 7))):
        text = merge(pages, [without_gone(OF_MODELS, pages)], openmetrics=False)
        counted = [line for line in text.splitlines() if line in samples]
        assert counted == [line for line in samples if int(line[-3]) in left]


async def test_tenants_of_ended_workers_are_bounded(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker counts other tenants. A tenant that a running worker shows must not fall."""
    monkeypatch.setattr(merging, "MOST_SERIES", 4)

    def page(*tenants: str) -> str:
        counted = Counter(tenants).items()
        lines = [f'lmetric_requests_total{{model="m",tenant="{each}",code="200"}} {n}' for each, n in counted]
        return "\n".join(["# TYPE lmetric_requests counter", *lines, ""])

    pages = [page("", "a", "b", "b"), page("", "b", "c"), page("c", "d", OTHER_TENANTS)]
    seen: list[dict[str, float]] = []
    running = add(supervisor, {})
    running.page = page("b", "e")
    for last in pages:
        worker = add(supervisor, {})
        worker.page, worker.leaving = last, True
        worker.process.go.set()  # type: ignore[attr-defined]
        await supervisor._watch(worker)
        samples = read(supervisor._ended_page)["lmetric_requests"].samples.items()
        seen.append({key.split('"')[3]: float(value) for key, (value, _) in samples})
    assert seen == [
        {"": 1, "a": 1, "b": 2},
        {"": 2, "a": 1, "b": 3, "c": 1},
        {"": 2, "b": 3, OTHER_TENANTS: 1 + 2 + 1 + 1},
    ]
    assert read(supervisor._ended_page)["lmetric_requests"].kind == "counter"


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


async def test_a_worker_waits_for_a_free_area_of_the_memory(supervisor: Supervisor) -> None:
    """Without one, the place of a worker stayed empty for ever."""
    supervisor._numbers = set(range(Board.WRITERS - 1))
    waiting = asyncio.create_task(supervisor._take_number())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    supervisor._numbers.discard(7)
    assert await waiting == 7
    waiting = asyncio.create_task(supervisor._take_number())
    await asyncio.sleep(0)
    supervisor.end(signal.SIGTERM)
    with pytest.raises(LmetricError, match="the server ends"):
        await waiting


class Telling:
    """The channel of a worker that answers each call with a value, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, list[str]()

    async def call(self, name: str, *_: Any, **__: Any) -> Any:
        self.calls.append(name)
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        pass


class Standing(Telling):
    """The channel of a worker that stands still."""

    async def call(self, name: str, *_: Any, **__: Any) -> Any:
        self.calls.append(name)
        await asyncio.Event().wait()


class Ended:
    """A process that was killed, once `go` is set."""

    pid = 1

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def wait(self) -> int:
        await self.go.wait()
        return -signal.SIGKILL


def add(supervisor: Supervisor, answer: Any) -> Process:
    number = len(supervisor.processes)
    worker = Process(number, number, Ended(), channel=Telling(answer))  # type: ignore[arg-type]
    worker.ready = worker.started = True
    supervisor.processes.append(worker)
    supervisor._numbers.add(number)
    return worker


@pytest.mark.parametrize(
    ("answers", "reloaded"),
    [
        ((NoAnswerError(), {"a": 1}, ChannelClosedError(), LmetricError("b")), {"a": 1}),
        ((NoAnswerError(), LmetricError("refused"), {"a": 1}), None),
        ((ChannelClosedError(), ChannelClosedError()), {}),
        ((NoAnswerError(), ChannelClosedError(), NoAnswerError()), None),
    ],
)
async def test_a_reload_reaches_all_workers_that_answer(
    supervisor: Supervisor, answers: tuple[Any, ...], reloaded: dict[str, Any] | None
) -> None:
    """The first one decides. A worker that stands still or refuses keeps no other from it."""
    workers = [add(supervisor, answer) for answer in answers]
    supervisor._reread = lambda: ServerConfig(workers=1, port=1)
    if reloaded is None:
        with pytest.raises(LmetricError, match=r"refused|no worker answered within 30 s"):
            await supervisor.reload()
        told = next(
            (number for number, each in enumerate(answers, 1) if str(each) == "refused"), len(answers)
        )
        assert [len(each.channel.calls) for each in workers] == [1] * told + [0] * (len(answers) - told)  # type: ignore[attr-defined]
        assert supervisor.config.port != 1
    else:
        assert await supervisor.reload() == reloaded
        assert all(each.channel.calls == ["reload"] for each in workers)  # type: ignore[attr-defined]
        assert supervisor.config.port == 1


@pytest.mark.parametrize("starts", [True, False])
async def test_a_worker_that_ends_while_the_next_one_starts_is_replaced_once(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    worker, other = add(supervisor, None), add(supervisor, None)
    supervisor._is_divided = True
    watching = asyncio.create_task(supervisor._watch(worker))
    go, started = asyncio.Event(), list[int]()

    async def start(place: int) -> dict[str, Any]:
        started.append(place)
        await go.wait()
        if len(started) == 1 and not starts:
            raise ConfigError("no memory")
        return {}

    monkeypatch.setattr(supervisor, "_start", start)
    restarting = asyncio.create_task(supervisor.restart())
    await until(lambda: bool(started))
    worker.process.go.set()  # type: ignore[attr-defined]
    async with asyncio.timeout(30):
        await watching
    assert supervisor.processes == [other]
    go.set()
    await restarting
    assert started == ([0, 1] if starts else [0, 0])
    # Meanwhile another worker accepts the connections.
    calls = other.channel.calls  # type: ignore[attr-defined]
    assert calls == ["adopt", "release", *(["replace"] if starts else [])]


async def test_a_worker_that_stands_still_delays_no_other(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing, refusing = add(supervisor, None), add(supervisor, ChannelClosedError())
    standing.channel = Standing(None)  # type: ignore[assignment]

    async def ask(worker: Process, _: AdminChange) -> tuple[int, bytes]:
        if worker is standing:
            await asyncio.Event().wait()
        return (404, b"") if worker is refusing else (200, b"page")

    monkeypatch.setattr(supervisor, "_ask", ask)
    monkeypatch.setattr(module, "METRICS_SECONDS", 0.1)
    assert await supervisor.find(-1, "/debug/decisions/1", ()) is None
    add(supervisor, {"a": 1})
    async with asyncio.timeout(10):
        assert await supervisor._ask_serving("copies", module.REPEAT_SECONDS) == {"a": 1}
        assert await supervisor.find(-1, "/debug/decisions/1", ()) == b"page"
    assert standing.channel.calls == ["copies"]


async def test_connections_of_ended_workers_are_accepted_by_workers_that_listen(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they wait until their place has a worker again: up to 30 s if its start fails."""

    async def replace(_: int) -> None:
        pass

    monkeypatch.setattr(supervisor, "_replace", replace)
    supervisor._is_divided = True
    workers = [add(supervisor, None) for _ in range(4)]
    first, starting, accepting, last = workers
    starting.started = False

    def calls() -> list[int]:
        return [each.channel.calls.count("adopt") for each in (starting, accepting, last)]  # type: ignore[attr-defined]

    async def end(worker: Process) -> None:
        watching = asyncio.create_task(supervisor._watch(worker))
        worker.process.go.set()  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            await watching

    await end(first)
    assert calls() == [0, 1, 0], "a worker that starts accepts nothing"
    await end(accepting)
    assert calls() == [0, 1, 2], "those of both places"
    await end(last)
    assert calls() == [0, 1, 2]
    starting.started = True
    await supervisor._release(last.place)
    assert calls() == [2, 1, 2], "those of the places that are still empty"


async def test_workers_that_end_together_are_replaced_at_once_and_adopted_once(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that adopts a place twice, or after its release, would accept there for good."""
    replaced: list[int] = []

    both = asyncio.Event()

    async def replace(place: int) -> None:
        replaced.append(place)
        if len(replaced) == 2:
            both.set()

    monkeypatch.setattr(supervisor, "_replace", replace)
    supervisor._is_divided = True
    first, second, last = (add(supervisor, None) for _ in range(3))
    asked, held, channel = asyncio.Event(), asyncio.Event(), last.channel
    calls: list[tuple[str, int]] = []

    async def call(name: str, place: int, **_: Any) -> None:
        calls.append((name, place))
        if name == "adopt":
            asked.set()
            await held.wait()

    monkeypatch.setattr(channel, "call", call)
    watching = [asyncio.create_task(supervisor._watch(each)) for each in (first, second)]
    first.process.go.set()  # type: ignore[attr-defined]
    second.process.go.set()  # type: ignore[attr-defined]
    async with asyncio.timeout(30):
        await asked.wait()
        await both.wait()
        assert calls == [("adopt", 0)], "it stands still; both are replaced meanwhile"
        supervisor._adopters.pop(0)  # as if its worker listened again
        held.set()
        await asyncio.gather(*watching)
    assert calls == [("adopt", 0), ("release", 0), ("adopt", 1)]


async def test_a_change_during_the_start_of_a_worker_comes_after_the_earlier_ones(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an engine that was drained, and undrained just now, would be drained there."""
    made: list[str] = []
    running = most = 0

    async def ask(_: Process, change: AdminChange) -> tuple[int, bytes]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        made.append(change.target)
        return 200, b""

    monkeypatch.setattr(supervisor, "_ask", ask)
    worker = add(supervisor, {})
    async with asyncio.timeout(30):
        await asyncio.gather(*(supervisor._repeat(worker, post("e", "undrain")) for _ in range(9)))
    assert most == 9, "changes of one worker do not wait for each other"
    made.clear()
    supervisor.processes.clear()
    for number in range(200):
        await supervisor.repeat(post(f"e{number}", "drain"))
    worker = add(supervisor, {})
    worker.ready = worker.started = False
    catching_up = asyncio.create_task(supervisor._catch_up(worker))
    await until(lambda: len(made) > 50)
    await supervisor.repeat(post("e199", "undrain"))
    await catching_up
    assert made == [f"/admin/engines/e{number}/drain" for number in range(200)] + [
        "/admin/engines/e199/undrain"
    ]


async def test_a_new_worker_knows_the_counts_of_budgets(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def counts() -> bytes:
        return b"counts"

    monkeypatch.setattr(supervisor._sharing, "counts", counts)
    worker = add(supervisor, {})
    worker.started = False
    await supervisor._catch_up(worker)
    calls = worker.channel.calls  # type: ignore[attr-defined]
    assert calls.index("counts") < calls.index("become")


async def test_a_worker_that_starts_during_a_reload_is_told(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API key that was removed must not stay in one of the workers."""
    go, process, channel = asyncio.Event(), Ended(), Telling({})

    async def execute(_: set[int]) -> tuple[Any, Any]:
        return process, channel

    async def call(name: str, *_: Any, **__: Any) -> Any:
        if name == "start":
            await go.wait()
        channel.calls.append(name)
        return {}

    monkeypatch.setattr(channel, "call", call)
    monkeypatch.setattr(supervisor, "_execute", execute)
    add(supervisor, {})
    supervisor._reread = lambda: ServerConfig(workers=1, port=1)
    start = asyncio.create_task(supervisor._start(1))
    await until(lambda: len(supervisor.processes) == 2)
    await supervisor.reload()
    assert channel.calls == []
    go.set()
    await start
    supervisor.processes[1].leaving = True
    process.go.set()
    await asyncio.gather(*supervisor._watchers)
    assert channel.calls == ["start", "reload"]


async def test_a_process_that_ends_while_its_call_waits_for_its_own_answer_is_no_fault() -> None:
    """SIGTERM during the start of a worker that got the changes so far once left a traceback."""
    ours, theirs = socket.socketpair()
    asked = asyncio.Event()

    async def catch_up(name: str, value: Any) -> Any:
        asked.set()
        return await channel.call("keys")

    async def stand_still(name: str, value: Any) -> Any:
        await asyncio.Event().wait()

    channel, other = await Channel.open(ours, catch_up), await Channel.open(theirs, stand_still)
    with capture_logs() as logs:
        call = asyncio.create_task(other.call("catch_up"))
        await asked.wait()
        await other.close()
        with pytest.raises(ChannelClosedError):
            await call
        await channel.closed.wait()
        await until(lambda: not channel._tasks)
    assert logs == []
    await channel.close()


async def test_a_message_of_another_version_ends_the_channel_and_names_the_remedy() -> None:
    async def answer(*_: Any) -> None:
        return None

    ours, theirs = socket.socketpair()
    with theirs, capture_logs() as logs:
        channel = await Channel.open(ours, answer)
        waiting = asyncio.create_task(channel.call("metrics"))
        message = b"clmetric.server.worker.worker\nClassOfAnotherVersion\n."
        theirs.sendall(len(message).to_bytes(4, "big") + message)
        with pytest.raises(ChannelClosedError):
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        await channel.close()
    [line] = logs
    assert line["event"].endswith("restart the server")
    assert "ClassOfAnotherVersion" in line["reason"]


@pytest.mark.parametrize(("version", "starts"), [("0.0.1", False), (__version__ + "9", True)])
def test_a_worker_of_another_minor_version_does_not_start(version: str, starts: bool) -> None:
    """The files may be replaced under a running supervisor. Patches keep the messages."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "lmetric.worker_process", str(theirs.fileno()), version]
        ours.close()  # a worker that starts ends with its supervisor
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
    assert (done.returncode == 0, done.stderr == "") == (starts, starts)
    assert starts or "no worker starts; restart the server to finish the upgrade" in done.stderr
