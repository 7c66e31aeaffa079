"""Several worker processes behind one port for gateways, over real sockets: `epp --workers N`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple

import aiohttp
import grpc
import orjson
import pytest

from cli_world import refused
from epp_world import (
    PROMPT,
    WHOLE,
    Exchange,
    answer_body,
    answer_head,
    begin,
    changed,
    connect,
    request_body,
    request_head,
)
from lmetric.server.http.port import PortError
from lmetric.server.supervisor.ports import hold
from server_world import FakeEngine
from test_server_process import RUN, Process, engine, router
from test_server_reload import logged
from test_workers import FLAGS, Client, replaced, until_seen, workers_of
from waiting import until

RUN_PICKER = RUN.replace("'serve'", "'epp'")
EACH = ("--set", "epp.port=0", "--policy", "least_requests", *FLAGS)
LISTENING = '"listening for gateways"'


class Gateway:
    """Connections of a gateway, and their streams."""

    def __init__(self, stack: AsyncExitStack, target: str) -> None:
        self._stack = stack
        self.target = target
        self.channels: list[grpc.aio.Channel] = []

    async def begin(self, connections: int) -> list[Exchange]:
        """Begins a stream on each of these new connections."""
        channels = [await self._stack.enter_async_context(connect(self.target)) for _ in range(connections)]
        self.channels += channels
        return [begin(channel) for channel in channels]

    async def pick(self, connections: int) -> tuple[list[Exchange], list[str]]:
        """Sends a request on each of these new connections. Returns the picked engines, too."""
        streams = await self.begin(connections)
        return streams, [first(await stream.ask()) for stream in streams]


class Pickers(NamedTuple):
    """A picker of two workers."""

    process: Process
    client: Client  # of its pages
    gateway: Gateway
    engines: Sequence[FakeEngine]


def first(asked: tuple[str, dict[str, str], bytes]) -> str:
    """The picked engine, without its replacements."""
    return asked[0].split(",")[0]


async def answer(stream: Exchange) -> int:
    """Sends the engine's answer to the end. Returns the number of the worker that picked."""
    await stream.send(answer_head(200, content_type="application/json"), answer_body(WHOLE, True))
    head = (await stream.next()).response_headers.response.header_mutation
    assert await stream.body("response_body") == WHOLE
    await stream.end()
    return int(changed(head)["x-lmetric-decision"].split("-")[0]) >> 48


@asynccontextmanager
async def picking(engines: int) -> AsyncIterator[Pickers]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(engine()) for _ in range(engines)]
        urls = [word for fake in fakes for word in ("--engine", fake.url)]
        process = await stack.enter_async_context(router(*urls, *EACH, run=RUN_PICKER))
        await process.listening(60)
        while sum(LISTENING in line for line in process.log) < 2:  # any worker may be first
            await logged(process, LISTENING)
        lines = [orjson.loads(line) for line in process.log if LISTENING in line]
        (target,) = {line["address"] for line in lines}
        assert sorted(line["worker"] for line in lines) == [0, 1]
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        )
        yield Pickers(process, Client(process.url, session), Gateway(stack, target), fakes)


async def test_workers_count_each_others_picks_until_one_is_killed_and_keep_their_port() -> None:
    async with picking(4) as (process, client, gateway, engines):
        streams, picks = await gateway.pick(24)
        # Each pick was an engine with the fewest requests of all.
        assert Counter(picks) == {f"{each.host}:{each.port}": 6 for each in engines}
        assert await client.metric("lmetric_epp_streams") == 24
        assert await client.metric('lmetric_epp_requests_total{outcome="picked"}') == 24
        assert await client.metric("lmetric_epp_decision_seconds_count") == 24
        assert await client.metric("lmetric_instance_in_flight") == 24
        await until_seen(client, 24)
        assert {await answer(stream) for stream in streams} == {0, 1}
        await client.until_metric("lmetric_epp_streams", 0)
        await client.until_metric("lmetric_instance_in_flight", 0)
        assert await client.metric("lmetric_instance_bs") == 0
        assert await client.metric("lmetric_decisions_total") == 24
        # A second picker at the port is refused.
        port = int(gateway.target.rpartition(":")[2])
        values = {"engines": [{"url": engines[0].url}], "port": 0, "epp__port": port}
        for workers in (2, 1):
            code, line = await refused(picks=True, workers=workers, **values)
            assert code == 3
            assert f"127.0.0.1:{port}" in line
            assert "epp.port" in line
        # A killed worker is replaced, and leaves no count behind.
        streams, _ = await gateway.pick(20)
        assert await client.metric("lmetric_decisions_total") == 24 + 20
        old = workers_of(process)
        os.kill(old[0], signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{old[0]}").exists())  # its last thread closes the port
        # The other worker picks meanwhile.
        more, picks = await gateway.pick(10)
        by_worker = Counter([await answer(stream) for stream in more])
        assert set(picks) <= {f"{each.host}:{each.port}" for each in engines}
        lost = 0
        for stream in streams:
            try:
                by_worker[await answer(stream)] += 1
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                lost += 1
        assert 0 < lost < 20, by_worker
        assert by_worker.total() == 30 - lost
        await until(lambda: len(workers_of(process)) == 2)
        await client.until_metric("lmetric_instance_in_flight", 0)
        assert await client.metric("lmetric_instance_bs") == 0
        assert await client.metric("lmetric_epp_streams") == 0
        assert await client.metric("lmetric_decisions_total") == 24 + 30


@pytest.mark.nightly
async def test_a_rolling_restart_loses_no_stream() -> None:
    async with picking(2) as (process, client, gateway, _):
        old = workers_of(process)
        streams, _ = await gateway.pick(8)
        unfinished = await gateway.begin(8)  # their requests are not whole yet
        body = orjson.dumps(PROMPT)
        for stream in unfinished:
            await stream.send(request_head(), request_body(body[:5], False))
        await client.until_metric("lmetric_epp_streams", 16)
        process.process.send_signal(signal.SIGUSR2)
        # GOAWAY has reached all connections.
        for channel in gateway.channels:
            async with asyncio.timeout(60):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert set(old) <= set(workers_of(process)), "they still have streams"
        for stream in unfinished:
            await stream.send(request_body(body[5:], True))
            await stream.picked()
        assert await client.metric("lmetric_instance_in_flight") == 16
        numbers = {await answer(stream) for stream in [*streams, *unfinished]}
        # The connections go on, to the new workers.
        again = [begin(channel) for channel in gateway.channels]
        for stream in again:
            await stream.ask()
        assert not numbers & {await answer(stream) for stream in again}
        await replaced(process, old)
        assert await client.metric('lmetric_epp_requests_total{outcome="picked"}') == 32
        assert await client.metric("lmetric_instance_in_flight") == 0
        process.process.terminate()
        assert await process.ended() == 0


async def test_only_one_socket_holds_a_port_and_others_may_share_it() -> None:
    held = await hold("127.0.0.1", 0, "epp.port")
    port = held.port
    with closing(held.sockets[0]):
        fix = "Address already in use; stop the process that uses the port, or set another epp.port"
        with pytest.raises(PortError, match=rf"127\.0\.0\.1:{port}: {fix}"):
            await hold("127.0.0.1", port, "epp.port")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            with pytest.raises(PortError, match="Address already in use"):
                await hold("127.0.0.1", port, "epp.port")
    again = await hold("127.0.0.1", port, "epp.port")
    again.sockets[0].close()
