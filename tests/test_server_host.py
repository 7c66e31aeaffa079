"""Signals to a router's process, and the file of its unix socket."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from lmetric.config import ServerConfig
from lmetric.server.http.port import bind
from server_world import FakeEngine, Request
from test_server_process import RUN, Process, router
from test_server_reload import Site, logged, status
from waiting import until

WORKERS = [1, pytest.param(2, marks=pytest.mark.nightly)]


# A process that gets SIGTERM as soon as `main` runs, from itself.
EARLY = (
    "import os; import lmetric.cli as cli; real = cli.uncollected; "
    f"cli.uncollected = lambda: (os.kill(os.getpid(), 15), real())[1]; {RUN}"
)


class Gated(FakeEngine):
    """An engine that answers no page until its gate is open: the router's start waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        self.page_reads.append(request.path)
        await self.gate.wait()
        return await super()._answer(request, writer)


@contextlib.asynccontextmanager
async def gated() -> AsyncIterator[Gated]:
    fake = Gated()
    await fake.start()
    try:
        yield fake
    finally:
        fake.gate.set()
        await fake.stop()


@pytest.mark.parametrize("workers", WORKERS)
async def test_sigterm_during_the_start_ends_it(workers: int, tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    flags = ("--workers", str(workers), "--host", f"unix:{path}", "--set", "health.timeout=60")
    async with gated() as fake, router("--engine", fake.url, *flags) as r:
        await until(lambda: fake.page_reads)
        assert path.exists()
        r.process.send_signal(signal.SIGTERM)
        assert await r.ended() == 0
        assert "stopped during the start" in r.log[-1]
        assert not path.exists()


async def test_sigterm_ends_the_first_process_of_a_container_during_its_start() -> None:
    """The kernel ignores a signal to it that has no handler: `docker stop` once had no effect."""
    alone = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    trial = await asyncio.create_subprocess_exec(*alone, "true", stderr=asyncio.subprocess.DEVNULL)
    if await trial.wait():
        pytest.skip("this machine allows no namespaces")
    async with gated() as fake:
        process = await asyncio.create_subprocess_exec(
            *(*alone, sys.executable, "-c", EARLY, "--port", "0", "--engine", fake.url, "--log-json"),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert await Process(process).ended() == 128 + signal.SIGTERM
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("workers", WORKERS)
async def test_sighup_during_the_start_reloads_at_its_end(workers: int, tmp_path: Path) -> None:
    async with gated() as fake, aiohttp.ClientSession() as client:
        site = Site(tmp_path, fake)
        site.write({"sk-old": "one"}, "engine-old", ["one"])
        flags = ("--config", str(site.config), "--workers", str(workers), "--set", "health.timeout=60")
        async with router(*flags) as r:
            await until(lambda: fake.page_reads)
            site.write({"sk-new": "one"}, "engine-old", ["one"])
            r.process.send_signal(signal.SIGHUP)
            fake.gate.set()
            await r.listening()
            await logged(r, "configuration reloaded")
            assert [await status(client, r.url, key) for key in ("sk-old", "sk-new")] == [401, 200]


async def test_the_file_of_a_unix_socket_is_removed_once(tmp_path: Path) -> None:
    """File systems use the number of a removed file again: the next process's file may have it."""
    config = ServerConfig(host=f"unix:{tmp_path / 'router.sock'}")
    first, second = await bind(config), None
    try:
        first.sockets[0].close()
        first.remove_file()
        second = await bind(config)
        assert second.path is not None
        first._inode = second.path.stat().st_ino
        first.remove_file()
        assert second.path.exists()
    finally:
        if second is not None:
            second.sockets[0].close()
            second.remove_file()
