"""The guard of the event loop's turns finds long turns, names them, and no others."""

import asyncio
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from turn_guard import LIMIT_SECONDS, REFERENCE_SECONDS, TurnGuard, speed

from lmetric.server.http.entrance import Entrance
from lmetric_lab.emulated.text import Text
from server_world import world
from split_world import COMPLETIONS, asked, body_of, both, split
from test_server_process import BODY, RUN, Process, engine, router

BUSY_SECONDS = 8 * LIMIT_SECONDS
MOST_SECONDS = 30.0  # CPU time, after which a turn ends though nobody has seen it


def long_seconds() -> float:
    """Returns the CPU time of a turn that is much too long, however slow the machine is now."""
    return BUSY_SECONDS * max(1.0, speed() / REFERENCE_SECONDS)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def slow_down(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, seconds: float) -> None:
    """Makes each call of a method take more CPU time."""
    call = getattr(owner, method)

    def slow(*values: Any) -> Any:
        spin(seconds)
        return call(*values)

    monkeypatch.setattr(owner, method, slow)


class Reports(list[str]):
    """The reports of guards, and the guards."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: list[TurnGuard] = []


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Collects what the guard of this test reports, instead of a failure."""
    found = Reports()

    def collects(self: TurnGuard, report: Any, own: bool) -> None:
        found.guards.append(self)
        begin(self, found.append, own)

    begin = TurnGuard.__init__
    monkeypatch.setattr(TurnGuard, "__init__", collects)
    return found


async def test_a_long_turn_of_the_server_is_named(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Entrance.ask

    def slow(*values: Any) -> Any:
        """Takes so long that the guard's thread has seen a long turn, also on a busy machine."""
        (guard,) = reports.guards
        seconds, end = long_seconds(), time.thread_time() + MOST_SECONDS
        while sum(guard._looked.values()) < seconds and time.thread_time() < end:
            sum(range(1000))
        return ask(*values)

    monkeypatch.setattr(Entrance, "ask", slow)
    async with world(1) as w:
        assert (await w.post())[0] == 200
        await asyncio.sleep(0.05)
    (report,) = reports
    assert "connection.py" in report
    assert "data_received" in report


async def test_neither_the_test_nor_many_short_turns_nor_its_garbage_count(reports: Reports) -> None:
    async with world(1) as w:
        spin(BUSY_SECONDS)
        await asyncio.sleep(0.02)
        end = time.thread_time() + BUSY_SECONDS
        while time.thread_time() < end:
            assert (await w.get("/health"))[0] == 200
        gc.collect()
        await asyncio.sleep(0.02)
    assert reports == []


async def test_the_engines_of_the_tests_do_not_count(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with split(both()) as w:
        slow_down(monkeypatch, Text, "encode", BUSY_SECONDS)
        await asked(w, COMPLETIONS, body_of(COMPLETIONS, "a short prompt", max_tokens=2))
    assert reports == []


async def test_a_slow_machine_has_a_higher_limit(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, Entrance, "ask", 2 * LIMIT_SECONDS)
    monkeypatch.setattr("turn_guard.REFERENCE_SECONDS", 0.0001)  # this machine is much slower
    async with world(1) as w:
        assert (await w.post())[0] == 200
        await asyncio.sleep(0.05)
    assert reports == []


def taken(file: Path) -> str:
    """Returns the text of a file and removes it, else the fixture fails the test."""
    text = file.read_text()
    file.unlink()
    return text


SLOW = """
import time
from lmetric.server.http.entrance import Entrance
asked = Entrance.ask
def ask(self, client, head, body):
    end = time.thread_time() + SECONDS
    while time.thread_time() < end: sum(range(1000))
    asked(self, client, head, body)
Entrance.ask = ask
"""


async def test_long_turns_of_a_routers_process_are_found() -> None:
    """The environment that the fixture sets makes the process watch itself."""
    flags = ("--log-json", "--port", "0")
    async with engine() as fake, aiohttp.ClientSession() as session:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"SECONDS = {long_seconds()}\n{SLOW}{RUN}", *flags),
            *("--engine", fake.url),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            it = Process(process)
            await it.listening()
            async with session.post(it.url + "/v1/completions", json=BODY) as response:
                assert response.status == 200
            process.terminate()
            await it.ended()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    text = await asyncio.to_thread(taken, Path(os.environ["TURN_GUARD_FILE"]))
    assert "a turn of the event loop took" in text
    assert "ask" in text


async def test_a_reload_in_a_routers_process_is_short() -> None:
    """Security F15: the guard is on while a process reloads its configuration."""
    async with engine() as fake, router("--engine", fake.url) as process:
        await process.listening()
        for _ in range(3):
            process.process.send_signal(signal.SIGHUP)
            await asyncio.sleep(0.2)
        process.process.terminate()
        assert await process.ended() == 0
