"""Restarts: a new process replaces a running one, and no connection is refused or reset."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator

import orjson
import pytest

from lmetric_lab.ports import free_ports
from test_server_process import RUN, Process, engine, router

BODY = orjson.dumps({"model": "tiny", "prompt": "a"})
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)


async def answer(reader: asyncio.StreamReader) -> tuple[str, bool]:
    """Returns the status of an answer, and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    return head.split(b" ")[1].decode(), b"connection: close" not in head


class Load:
    """Clients that send requests until they are stopped. ``results``: counts by outcome."""

    def __init__(self, port: int, clients: int = 8) -> None:
        self.port = port
        self.results: Counter[str] = Counter()
        self._clients = clients
        self._over = False

    async def _new_connections(self) -> None:
        while not self._over:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(POST + b"connection: close\r\n\r\n" + BODY)
                self.results[(await answer(reader))[0]] += 1
                writer.close()
            except (OSError, asyncio.IncompleteReadError) as error:
                self.results[type(error).__name__] += 1

    async def _kept_connections(self) -> None:
        """Sends requests on one connection until the router closes it after an answer."""
        while not self._over:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                kept = True
                while kept and not self._over:
                    writer.write(POST + b"\r\n" + BODY)
                    status, kept = await answer(reader)
                    self.results[status] += 1
                    await asyncio.sleep(0.01)
                writer.close()
            except (OSError, asyncio.IncompleteReadError) as error:
                self.results[type(error).__name__] += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        kinds = (self._new_connections, self._kept_connections)
        tasks = [asyncio.create_task(kind()) for kind in kinds for _ in range(self._clients)]
        try:
            yield
        finally:
            self._over = True
            await asyncio.gather(*tasks)

    async def more(self, requests: int) -> None:
        """Waits until this many further requests have ended."""
        wanted = self.results.total() + requests
        async with asyncio.timeout(60):
            while self.results.total() < wanted:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)


@pytest.mark.nightly
async def test_a_second_process_on_the_port_is_refused() -> None:
    (port,) = free_ports(1)
    flags = ("--port", str(port))
    async with engine() as fake, router("--engine", fake.url, *flags) as first:
        await first.listening()
        async with router("--engine", fake.url, *flags) as second:
            assert await second.ended() == 3
            assert "Address already in use" in "".join(second.log)


@contextlib.asynccontextmanager
async def activated(listener: socket.socket, *flags: str) -> AsyncIterator[Process]:
    """A router with a socket of systemd: sd_listen_fds(3)."""
    run = f'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$0" -c "$1" "${{@:2}}" 3<&{listener.fileno()}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", run, sys.executable, RUN, "--log-json", *flags),
        stderr=asyncio.subprocess.PIPE,
        pass_fds=[listener.fileno()],
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_restart_under_systemd_loses_no_connection() -> None:
    """systemd keeps the socket, so that connections wait while no process runs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        port = listener.getsockname()[1]
        async with engine() as fake, activated(listener, "--engine", fake.url) as first:
            await first.listening()
            assert first.url == f"http://127.0.0.1:{port}"
            load = Load(port)
            async with contextlib.AsyncExitStack() as second_process, load.running():
                await load.more(200)
                first.process.send_signal(signal.SIGTERM)
                assert await first.ended() == 0
                second = await second_process.enter_async_context(activated(listener, "--engine", fake.url))
                await second.listening()
                await load.more(200)
            assert set(load.results) == {"200"}, load.results


async def test_the_address_of_a_given_socket_counts_for_access() -> None:
    """`host` says 127.0.0.1, and the socket listens on all addresses."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        async with engine() as fake, activated(listener, "--engine", fake.url, "--set", "admin=true") as r:
            assert await r.ended() == 2
            assert "admin.enabled needs admin.token" in "".join(r.log)
            assert "'0.0.0.0'" in "".join(r.log)
