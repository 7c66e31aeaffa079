"""Emulated engines as processes, each behind a proxy that breaks its connections on request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from typing import Literal

import orjson

# The ways in which a proxy treats bytes. "refuse": nobody listens. "silent": connections stay open,
# and nothing passes. "reset": connections are reset. "slow": bytes are late. "garbage",
# "half chunk", "short" and "500", "503": answers to POSTs are replaced; pages still pass.
Mode = Literal["pass", "refuse", "silent", "reset", "slow", "garbage", "half chunk", "short", "500", "503"]

SLOW_SECONDS = 0.3  # delay of each piece
TOKENS_PER_SECOND = 40


def _plain(status: bytes, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        size,
        body,
    )


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ERROR = b'{"error": {"message": "out of memory", "type": "server_error", "code": %b}}'
# By mode: the bytes that answer a POST. Then the connection closes, except after a whole answer.
_ANSWERS: dict[Mode, bytes] = {
    "half chunk": _STREAM + b'40\r\ndata: {"choices": [{"ind',
    "short": _plain(b"200 OK", b'{"choices": [', length=400),
    "500": _plain(b"500 Internal Server Error", _ERROR % b"500"),
    "503": _plain(b"503 Service Unavailable", _ERROR % b"503"),
}


class Proxy:
    """Passes connections to an engine, or breaks them."""

    def __init__(self, target: int, seed: int) -> None:
        self.target = target  # the engine's port
        self.port = 0
        self.mode: Mode = "pass"
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Listens, at the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def set(self, mode: Mode) -> None:
        """Changes the mode, also for open connections."""
        if mode == "refuse" and self._server is not None:
            self._server.close()
            self._server = None
        elif self._server is None:
            await self.start()
        self.mode = mode
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if mode in ("refuse", "reset"):
            self.break_all()

    def break_all(self) -> None:
        """Resets all connections."""
        for writer in list(self._open):
            writer.transport.abort()

    async def stop(self) -> None:
        """Closes everything."""
        if self._server is not None:
            self._server.close()
        self.break_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "reset":
            writer.transport.abort()
            return
        self._open.add(writer)
        engine: asyncio.StreamWriter | None = None
        try:
            answers, engine = await asyncio.open_connection("127.0.0.1", self.target)
            self._open.add(engine)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._requests(reader, engine, writer))
                tasks.create_task(self._answers(answers, writer))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for each in (writer, engine):
                if each is not None:
                    self._open.discard(each)
                    each.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, engine: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        replaced = False
        while data := await reader.read(65536):
            await self._audible()
            if data.startswith(b"POST") and (answer := self._instead()) is not None:
                client.write(answer)
                await client.drain()
                if self.mode not in ("500", "503"):
                    break
                replaced = True
                continue
            replaced &= not data.startswith((b"GET", b"POST"))
            if replaced:
                continue  # the rest of a body
            engine.write(data)
            await engine.drain()
        raise ConnectionResetError

    def _instead(self) -> bytes | None:
        """Returns the answer that replaces the engine's; None: the engine answers."""
        if self.mode == "garbage":
            return self._random.randbytes(self._random.randrange(1, 400))
        return _ANSWERS.get(self.mode)

    async def _answers(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._audible()
            if self.mode == "slow":
                await asyncio.sleep(SLOW_SECONDS)
            if self.mode == "garbage":
                data = self._random.randbytes(len(data))
            elif self.mode in ("half chunk", "short"):
                client.write(data[: len(data) // 2])
                await client.drain()
                break
            client.write(data)
            await client.drain()
        raise ConnectionResetError

    async def _audible(self) -> None:
        """Waits while the network is cut."""
        while self.mode == "silent":
            await self._changed.wait()


class EngineProcess:
    """An emulated engine as a process, and its proxy.

    ``kv_events``: it publishes the events of its cache, at endpoints of free ports.
    """

    def __init__(self, name: str, seed: int, *, kv_events: bool = False) -> None:
        self.name = name
        self.events_port = 0
        self.replay_port = 0
        self._kv_events = kv_events
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None
        self.proxy = Proxy(0, seed)

    @property
    def url(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self.proxy.port}"

    @property
    def direct_url(self) -> str:
        """Address of the engine itself."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Starts the process, at the same port as before."""
        events = [
            *("--kv-events-endpoint", f"tcp://*:{self.events_port}"),
            *("--kv-events-replay-endpoint", f"tcp://*:{self.replay_port}"),
        ]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lmetric.cli", "engine", "--port", str(self._port)),
            *("--exit-with-parent", "--model", "chaos"),
            *(events if self._kv_events else ["--no-kv-events"]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            ready = orjson.loads(await self._process.stdout.readline())
        if not self._port:
            self._port = int(ready["url"].rpartition(":")[2])
            if self._kv_events:
                self.events_port = int(ready["kv_events_endpoint"].rpartition(":")[2])
                self.replay_port = int(ready["kv_events_replay_endpoint"].rpartition(":")[2])
            self.proxy.target = self._port
            await self.proxy.start()

    async def kill(self) -> None:
        """Kills the process. Its connections are reset."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def freeze(self, frozen: bool) -> None:
        """Stops the process, or lets it continue."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    async def stop(self) -> None:
        """Ends everything."""
        await self.proxy.stop()
        self.freeze(False)
        await self.kill()
