"""Upgrades: a new process replaces a running one, and no connection is refused or reset."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
from structlog.testing import capture_logs

from lmetric.server.http.upgrade import UpgradeSocket, find_predecessor
from lmetric_lab.ports import free_ports
from server_world import STREAM_HEAD, STREAM_TAIL, FakeEngine, chunk, token
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


async def test_a_successor_takes_over_without_a_lost_connection(tmp_path: Path) -> None:
    """Three processes serve one port after each other under load."""
    gate = asyncio.Event()

    async def behave(fake: FakeEngine, request: object, writer: asyncio.StreamWriter) -> bool:
        from server_world import Request, answer

        assert isinstance(request, Request)
        if not request.json.get("stream"):
            return await answer(fake, request, writer)
        writer.write(STREAM_HEAD + chunk(token("a")))
        await gate.wait()
        writer.write(chunk(token("b", "length")) + STREAM_TAIL)
        return True

    (port,) = free_ports(1)
    flags = ("--port", str(port), "--set", f"upgrade_socket={tmp_path}/upgrade.sock")
    async with engine(behave=behave) as fake, contextlib.AsyncExitStack() as processes:
        first = await processes.enter_async_context(router("--engine", fake.url, *flags))
        await first.listening()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stream = orjson.dumps({"model": "tiny", "prompt": "a", "stream": True})
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(stream)
        writer.write(head + stream)
        await reader.readuntil(b"\r\n\r\n")
        load = Load(port)
        async with load.running():
            await load.more(200)
            old = first
            for _ in range(2):
                new = await processes.enter_async_context(router("--engine", fake.url, *flags))
                await new.listening()
                await load.more(200)
                if old is not first:
                    assert await old.ended() == 0
                old = new
            # A signal to a process that already drains does not hurry it.
            first.process.send_signal(signal.SIGTERM)
            await load.more(100)
            assert first.process.returncode is None, "its stream runs"
            gate.set()
            assert b"[DONE]" in await reader.readuntil(b"[DONE]")
            writer.close()
            assert await first.ended() == 0
            await load.more(100)
        assert set(load.results) == {"200"}, load.results
        assert load.results["200"] > 800
        old.process.send_signal(signal.SIGTERM)
        assert await old.ended() == 0
        assert not (tmp_path / "upgrade.sock").exists(), "the last process removes it"


async def test_words_arrive_in_any_pieces(tmp_path: Path) -> None:
    """python.md 6.11: a word was whatever one `recv` of ten bytes returned."""
    path = tmp_path / "upgrade.sock"
    replaced: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as served:
        upgrade = UpgradeSocket(path, [served], lambda: replaced.append(True))
        upgrade.start(replace=False)
        for pieces in (b"sockets\nlistening\n",), tuple(bytes([each]) for each in b"sockets\nlistening\n"):
            reader, writer = await asyncio.open_unix_connection(str(path))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(10):
                assert await reader.readexactly(10) == b"done\ndone\n"
            writer.close()
        assert replaced == [True, True]
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"x" * 1000)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        upgrade.close()

    async def predecessor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readline()
            for piece in (b"do", b"ne", b"\n"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

    server = await asyncio.start_unix_server(predecessor, str(path))
    async with server:
        found = await find_predecessor(path)
        assert found is not None
        with capture_logs() as lines:
            await found.replace()
        assert not lines


async def test_without_an_upgrade_socket_a_second_process_is_refused(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    flags = ("--port", str(port))
    more = ("--set", f"upgrade_socket={tmp_path}/upgrade.sock")
    async with engine() as fake, router("--engine", fake.url, *flags) as first:
        await first.listening()
        async with router("--engine", fake.url, *flags, *more) as second:
            assert await second.ended() == 3
            assert "Address already in use" in "".join(second.log)


async def test_a_dead_successor_changes_nothing(tmp_path: Path) -> None:
    """A successor that takes the sockets and ends before it listens."""
    from lmetric.server.http.upgrade import find_predecessor

    (port,), path = free_ports(1), tmp_path / "upgrade.sock"
    async with (
        engine() as fake,
        router("--engine", fake.url, "--port", str(port), "--set", f"upgrade_socket={path}") as first,
    ):
        await first.listening()
        found = await find_predecessor(path)
        assert found is not None
        assert [each.getsockname() for each in found.sockets] == [("127.0.0.1", port)]
        found.close_all_but([])
        found.close()
        load = Load(port)
        async with load.running():
            await load.more(100)
        assert set(load.results) == {"200"}
        assert first.process.returncode is None


async def test_a_unix_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    flags = ("--host", f"unix:{path}", "--set", f"upgrade_socket={tmp_path}/upgrade.sock")
    async with engine() as fake, router("--engine", fake.url, *flags) as first:
        await first.listening()
        async with router("--engine", fake.url, *flags) as second:
            await second.listening()
            assert await first.ended() == 0
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(POST + b"connection: close\r\n\r\n" + BODY)
            assert (await answer(reader))[0] == "200"
            writer.close()
            second.process.send_signal(signal.SIGTERM)
            assert await second.ended() == 0
            assert not path.exists()


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
