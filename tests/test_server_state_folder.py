"""The lock of `state_folder`: one router at a time uses the folder. Writes of its files."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml
from structlog.testing import capture_logs

from cli_world import refused
from lmetric._core import Budgets
from lmetric.config import ConfigError
from lmetric.server.fleet.problem import Problem
from lmetric.server.observe import state
from lmetric.server.observe.state import LOCK, StateFiles, StateFolder
from lmetric.server.observe.usage import UsageTable
from server_world import FakeEngine, world
from test_server_process import BODY, Process, engine, router
from test_workers import replaced, workers_of
from waiting import until


def configuration(folder: Path, fake: FakeEngine, **more: Any) -> str:
    file = folder / "router.yaml"
    values = {"engines": [{"url": fake.url}], "state_folder": str(folder / "state"), **more}
    file.write_text(yaml.safe_dump(values))
    return str(file)


async def check_refused(file: str, holder: Process, folder: Path) -> None:
    """Checks that a second router does not start, and why."""
    code, line = await refused(file=file, port=0)
    assert code == 2  # of a wrong configuration
    assert "\n" not in line
    expected = f"state_folder: another router uses {folder}/state (process {holder.process.pid}), and two"
    assert expected in line
    assert "stop that router, or set another folder" in line


async def test_a_second_router_is_refused_until_the_first_one_is_killed(tmp_path: Path) -> None:
    async with engine() as fake:
        file = configuration(tmp_path, fake)
        async with router("--config", file) as first:
            await first.listening(60)
            await check_refused(file, first, tmp_path)
            first.process.kill()
            await first.process.wait()
            async with router("--config", file) as second:
                await second.listening(60)


async def test_reloads_a_rolling_restart_and_killed_workers_keep_the_lock(tmp_path: Path) -> None:
    async with engine() as fake:
        file = configuration(tmp_path, fake, workers=2)
        async with router("--config", file) as first:
            await first.listening(60)
            first.process.send_signal(signal.SIGHUP)
            old = workers_of(first)
            first.process.send_signal(signal.SIGUSR2)
            await replaced(first, old)
            await check_refused(file, first, tmp_path)
            old = workers_of(first)
            for worker in old:
                os.kill(worker, signal.SIGKILL)
            await replaced(first, old)
            await check_refused(file, first, tmp_path)
            first.process.kill()
            await first.process.wait()
            # The next router starts at once, also while workers of a killed supervisor end.
            async with router("--config", file) as second:
                await second.listening(60)


async def test_routers_of_one_process_take_the_folder_in_turn(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    said = re.escape(f"another router uses {folder} (process {os.getpid()})")
    for _ in range(2):
        async with world(1, state_folder=str(folder)):
            with pytest.raises(ConfigError, match=said):
                async with world(1, state_folder=str(folder)):
                    pass


async def test_a_lock_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match=rf"state_folder: cannot use {tmp_path}/{LOCK}: Is a directory"):
        async with world(1, state_folder=str(tmp_path)):
            pass


async def test_a_stop_waits_for_a_write_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes at once would truncate the file that the other one is about to rename."""
    fsync, replace_file = os.fsync, state.replace_file
    count, writers, most = 0, 0, 0

    def slow(descriptor: int) -> None:
        time.sleep(0.1)
        fsync(descriptor)

    def counted(path: Path, content: bytes) -> None:
        nonlocal writers, most
        writers += 1
        most = max(most, writers)
        try:
            replace_file(path, content)
        finally:
            writers -= 1

    def save() -> dict[str, bytes]:
        nonlocal count
        count += 1
        return dict.fromkeys(("a.bin", "b.bin"), b"%d" % count)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(state, "replace_file", counted)
    monkeypatch.setattr(state, "WRITE_SECONDS", 0.01)
    files = StateFiles(tmp_path, "*.bin", save, restore=lambda saved: None)
    with capture_logs() as logs:
        files.start()
        await until(lambda: writers)
        await files.stop()
    assert not logs
    assert most == 1
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}  # noqa: ASYNC240
    assert written == dict.fromkeys(("a.bin", "b.bin"), b"%d" % count)


async def test_budgets_are_saved_beside_the_loop(tmp_path: Path) -> None:
    """Reading 65,000 windows takes some 0.1 s of CPU time, which once stopped the loop."""
    threads: set[int] = set()
    core: Any = Budgets(time.time() - time.monotonic())

    def save(times: tuple[float, float]) -> bytes:
        threads.add(threading.get_ident())
        return bytes(core.save(times))

    watched: Any = SimpleNamespace(save=save, restore=core.restore)
    folder = StateFolder(tmp_path, watched, UsageTable())
    folder.start()
    await until(lambda: (tmp_path / "budgets.bin").exists())
    await folder.stop()
    assert threads
    assert threading.get_ident() not in threads


async def test_ready_names_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    async with world(1, state_folder=str(folder), **LIMITED) as w:
        assert unsaved(w.server.fleet.own_problems()) == []
        (folder / "budgets.new").mkdir()  # in the place of the file that replaces the old one
        assert (await w.post(headers={"x-tenant": "acme"}))[0] == 200
        await until(lambda: unsaved(w.server.fleet.own_problems()))
        assert unsaved(w.server.fleet.own_problems()) == [f"{folder}: Is a directory"]
        (folder / "budgets.new").rmdir()
        await until(lambda: not unsaved(w.server.fleet.own_problems()))


LIMITED = {"tenants": {"acme": {"budgets": [{"counts": "requests", "limit": 9, "per": "day"}]}}}


def unsaved(problems: Iterable[Problem]) -> list[str]:
    return [each.reason for each in problems if each.what == "state"]


async def test_all_workers_name_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The supervisor writes the files, and the workers answer /ready."""
    async with (
        engine() as fake,
        router("--config", configuration(tmp_path, fake, workers=2, **LIMITED)) as r,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client,
    ):
        await r.listening(60)

        async def until_named(wanted: bool) -> None:
            """Waits until pages of both workers name the folder, or do not."""
            same = 0
            async with asyncio.timeout(60):
                while same < 8:
                    async with client.get(r.url + "/ready") as page:
                        warnings = (await page.json())["warnings"]
                    is_named = any(each["what"] == "state" for each in warnings)
                    same = same + 1 if is_named is wanted else 0

        blocking = tmp_path / "state" / "budgets.new"
        blocking.mkdir()
        async with client.post(r.url + "/v1/completions", json=BODY, headers={"x-tenant": "acme"}) as answer:
            assert answer.status == 200
        await until_named(True)
        killed = workers_of(r)[0]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: len(workers_of(r)) == 2 and killed not in workers_of(r))
        await until_named(True)
        blocking.rmdir()
        await until_named(False)
