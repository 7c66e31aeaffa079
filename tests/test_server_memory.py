"""Memory of a router's own process under attack, against the bounds of docs/how-to/deploying.md.

Security F2 (heads), F5 (KV events), F11 (slow readers). Each test prints its figures (`pytest -s`).
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
import yaml

from lmetric._core import EventFeed
from lmetric.config import ServerConfig
from lmetric.server.http.client_load import UNREAD_BYTES
from lmetric.server.upstream.reading import WAITING_BYTES
from server_world import STREAM_HEAD, FakeEngine, Request, chunk, token
from test_event_feed import Publisher, publisher, stored
from test_server_kv_hostile import anywhere, reporting
from test_server_process import Process, engine, router
from tls_world import Authority

MB = 1 << 20
HEAD_BYTES = 64 << 10  # the default limit on heads
# Of connections and the allocator, besides the bounded buffers.
MORE_BYTES = 128 * MB
BODY = b'{"prompt":"a","stream":true,"max_tokens":100000}'
ASK = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)

pytestmark = pytest.mark.nightly


class Memory:
    """The resident memory of a process: ``base`` at the begin, and the largest since."""

    def __init__(self, process: Process) -> None:
        self._status = Path(f"/proc/{process.process.pid}/status")
        self.base = self._now("VmRSS")

    def _now(self, name: str) -> int:
        (line,) = (line for line in self._status.read_text().splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) << 10

    @property
    def peak(self) -> int:
        return self._now("VmHWM")

    def check(self, what: str, bound: int) -> None:
        """Asserts that the process has grown by at most this many bytes."""
        grown = self.peak - self.base
        print(f"\n{what}: {self.base / MB:.0f} MB, and {grown / MB:.0f} MB more; bound {bound / MB:.0f} MB")
        assert grown <= bound, what


@contextlib.asynccontextmanager
async def running(*flags: str) -> AsyncIterator[tuple[Process, Memory]]:
    """A router in its own process, whose log is read."""
    async with router(*flags) as process:
        await process.listening()
        stderr = process.process.stderr
        assert stderr is not None

        async def drain() -> None:
            while line := await stderr.readline():
                process.log.append(line.decode())

        reading = asyncio.create_task(drain())
        yield process, Memory(process)
        reading.cancel()


async def metrics(url: str, context: ssl.SSLContext | None = None) -> dict[str, float]:
    connector = aiohttp.TCPConnector(ssl=context or True)
    async with aiohttp.ClientSession(connector=connector) as client, client.get(url + "/metrics") as page:
        lines = [line for line in (await page.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def opened(url: str, data: bytes) -> socket.socket:
    """A client that sends data and reads nothing."""
    client, loop = socket.socket(), asyncio.get_running_loop()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", int(url.rpartition(":")[2])))
    await loop.sock_sendall(client, data)
    return client


async def endless(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
    """A stream that sends as fast as its reader reads."""
    writer.write(STREAM_HEAD)
    block = chunk(token("x" * 900)) * 64
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(block)
            await writer.drain()
    return False


async def test_800_unfinished_heads() -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    fields = [b"a%d: %b\r\n" % (number, b"x" * 8000) for number in range(7)]
    head += b"".join(fields) + b"b: "
    head += b"y" * (HEAD_BYTES - 10 - len(head))
    async with engine() as fake, running("--engine", fake.url) as (process, memory):
        clients = [await opened(process.url, head) for _ in range(800)]
        await asyncio.sleep(3)
        limits = ServerConfig().limits
        seen = await metrics(process.url)
        refused = sum(value for name, value in seen.items() if "body_bytes" in name and "refusals" in name)
        assert seen["lmetric_client_body_bytes"] <= limits.max_body_bytes_total
        assert refused or seen["lmetric_client_body_bytes"] >= 800 * (HEAD_BYTES - 10)
        memory.check("800 unfinished heads", min(800 * HEAD_BYTES, limits.max_body_bytes_total) + MORE_BYTES)
        for client in clients:
            client.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_500_slow_readers(tls: bool, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, context = authority.issue("router"), authority.client()
    files = [f"tls.certificate_file={pair.certificate}", f"tls.key_file={pair.key}"]
    flags = [part for file in files for part in ("--set", file)] if tls else []
    clients: list[Any] = []
    async with engine(behave=endless) as fake, running("--engine", fake.url, *flags) as (process, memory):
        for _ in range(500):
            if tls:
                port = int(process.url.rpartition(":")[2])
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, limit=1024)
                writer.write(ASK)
                writer.transport.pause_reading()
                clients.append(writer)
            else:
                clients.append(await opened(process.url, ASK))
        await asyncio.sleep(15)
        seen = await metrics(process.url, context if tls else None)
        assert 0 < seen["lmetric_client_unread_bytes"] <= UNREAD_BYTES
        memory.check(
            f"500 slow readers, {'TLS' if tls else 'plain'}", UNREAD_BYTES + WAITING_BYTES + MORE_BYTES
        )
        for client in clients:
            client.transport.abort() if tls else client.close()


async def status(url: str) -> dict[str, dict[str, Any]]:
    """The KV events of each engine, by its name."""
    async with aiohttp.ClientSession() as client, client.get(url + "/debug/engines") as page:
        return {each["name"]: each for each in await page.json()}


def raw(events: Publisher, payload: bytes) -> None:
    events.pub.send_multipart((events.topic, events.next.to_bytes(8, "big"), payload))
    events.next += 1


async def test_hostile_kv_feeds(tmp_path: Path) -> None:
    """Blocks beyond the index, blocks without parents, lies about sizes, and too large messages.

    The router counts what it has refused.
    """
    config = tmp_path / "router.yaml"
    with publisher(replay=False) as blocks, publisher(replay=False) as lies, publisher(replay=False) as large:
        async with contextlib.AsyncExitStack() as stack:
            feeds = {"blocks": blocks, "lies": lies, "large": large}
            engines = []
            for name, events in feeds.items():
                fake = await stack.enter_async_context(reporting(anywhere(events.endpoint)))
                engines.append({"url": fake.url, "name": name})
            settings = {"block_size": 16, "kv_events": {"without_tokenizer": True}, "engines": engines}
            config.write_text(yaml.safe_dump(settings))
            process, memory = await stack.enter_async_context(running("--config", str(config)))
            async with asyncio.timeout(30):
                while not all(events.heard() for events in feeds.values()):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.05)
            for batch in range(60):
                first, count = batch * 10_000, 10_000
                ids = [number % 30_000 for number in range(16 * count)]
                blocks.publish(stored([first + number + 1 for number in range(count)], ids))
                orphans = [stored([batch * 1000 + n], [n] * 16, parent=10**12 + n) for n in range(1000)]
                blocks.publish(*orphans)
                await asyncio.sleep(0.02)
            for _ in range(100):
                raw(lies, b"\x91" * 3_900_000)
                raw(lies, msgpack.packb([0.0])[:-9] + b"\xdd\xff\xff\xff\xff" + bytes(3_900_000))
                await asyncio.sleep(0.02)
            for _ in range(10):
                raw(large, bytes(60 * MB))
                await asyncio.sleep(0.1)
            await asyncio.sleep(10)
            seen = {
                name: each["kv_events"]["ranks"]["0"] for name, each in (await status(process.url)).items()
            }
            print({name: (each["blocks_stored"], each["skipped"]) for name, each in seen.items()})
            # Only blocks at the begin of a prompt, or behind a known block, are in the index.
            assert seen["blocks"]["blocks_stored"] == 60 * 10_000
            assert seen["blocks"]["unknown_parent"] == 60 * 1000
            assert seen["lies"]["skipped"] == {"malformed_batch": 200}
            assert seen["lies"]["last_error"]
            assert "4194304 bytes" in seen["large"]["over_limit"]
            bound = 2 * ServerConfig().index_bytes + len(feeds) * EventFeed.MAX_SOURCE_BYTES + MORE_BYTES
            memory.check("hostile KV feeds", bound)
