"""A worker process. Its arguments: the descriptor of its socket to the supervisor, and the version
of the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from typing import Any

from lmetric._core import LmetricError, __version__
from lmetric.config import ADMIN, ServerConfig
from lmetric.server.app import Server, runner
from lmetric.server.http.port import Bound
from lmetric.server.observe.exposition import render
from lmetric.server.observe.families import families
from lmetric.server.observe.logs import configure_logging, process_fields
from lmetric.server.worker.channel import Channel, ChannelClosedError
from lmetric.server.worker.worker import Start, Worker


class WorkerProcess:
    """A worker, as its supervisor calls it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._channel: Channel
        self._server: Server | None = None
        self._worker: Worker | None = None
        self._first, self._second = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Works until a signal, or until the supervisor has ended. Then it drains."""
        self._channel = await Channel.open(self._end, self._answer)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, lambda: None)  # the supervisor's
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_soon)
        orphaned = asyncio.create_task(self._channel.closed.wait(), name="supervisor")
        orphaned.add_done_callback(lambda _: self._first.set())
        await self._first.wait()
        orphaned.cancel()
        if self._server is None or self._worker is None:
            return
        try:
            await self._server.drain(self._second)
        finally:
            await self._server.stop()
            with contextlib.suppress(ChannelClosedError, LmetricError, TimeoutError):
                async with asyncio.timeout(1.0):
                    page = await self._metrics(openmetrics=False)
                    await self._channel.call("ended", (self._worker.number, page))
            await self._channel.close()

    def _end_soon(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    async def _answer(self, name: str, value: Any) -> Any:
        match name:
            case "start":
                return await self._start(value)
            case "metrics":
                return await self._metrics(value)
            case "reload":
                return await self._reload(value)
            case "replace":
                assert self._server is not None
                self._server.is_replaced = True
                return self._end_soon()
            case "live":
                return self.worker.receive(*value)
            case "keys":
                self.worker.issued.merge(value)
                return None
            case "replica":
                return self.worker.apply_load(value)
            case "state":
                self.worker.state_problem = value
                return None
            case "counts":
                return self.worker.add_counts(*value)
            case "canaries":
                return self.worker.receive_results(value)
            case "decisions":
                from lmetric.server.http.home import latest_decisions  # the first such page loads it

                # None: it starts, and has made no decision.
                models = () if self._server is None else self._server.fleet.models
                return await latest_decisions(models, value)
            case "copies":
                return await self.worker.copies()
            case "engine_states":
                assert self._server is not None
                return _engine_states(self._server)
            case "begin_copying":
                return self.worker.begin_copying(value)
            case "become":
                return self.worker.become(value)
            case "adopt" | "release":
                return await self._accept_for(name, value)
        raise LmetricError(f"unknown call {name!r} of the supervisor")

    async def _start(self, start: Start) -> dict[str, Any]:
        process_fields["worker"] = start.place
        configure_logging(start.config.log)
        self._worker = worker = Worker(start, self._channel)
        server = Server(
            start.config,
            Bound(worker.sockets(start.place), shared=start.is_shared),
            start.further,
            picks=start.gateway_port is not None,
            worker=worker,
        )
        worker.begin()
        await server.start()
        self._server = server
        gc.freeze()
        return server.report

    @property
    def worker(self) -> Worker:
        """The worker, once it was started."""
        assert self._worker is not None
        return self._worker

    async def _accept_for(self, name: str, place: int) -> None:
        if self._server is None:  # it has adopted none: the supervisor calls it once it listens
            return
        if name == "adopt":
            await self._server.listeners.adopt(place, self.worker.sockets(place))
        else:
            self._server.listeners.release(place)

    async def _metrics(self, openmetrics: bool) -> str:
        if self._server is None:  # it starts, and has counted nothing
            return ""
        return (await render(families(self._server.metrics), openmetrics)).decode()

    async def _reload(self, config: ServerConfig) -> dict[str, Any]:
        assert self._server is not None
        change = await asyncio.to_thread(self._server.prepare, config)
        return await self._server.apply(change)


def _engine_states(server: Server) -> dict[str, tuple[Any, ...]]:
    """Returns the fields of each engine's `EngineState`, by its name.

    Pickle calls Python for each named tuple: 16,384 of them stop the event loop for 75 ms.
    """
    added = {each.config.label for each in server.front.discovery.members.of(ADMIN)}
    return {
        each.name: (each.draining, each.role_set, each.weights, each.pushed, each.name in added)
        for each in server.fleet.engines()
    }


def main() -> None:
    """Runs the worker, on uvloop if it is installed."""
    descriptor, version = sys.argv[1:]
    if version.rpartition(".")[0] != __version__.rpartition(".")[0]:
        sys.exit(
            f"lmetric-router: the server runs version {version}, but the installed files have version "
            f"{__version__}: no worker starts; restart the server to finish the upgrade"
        )
    end = socket.socket(fileno=int(descriptor))
    gc.collect()  # as in `run_server`
    with runner() as loop:
        loop.run(WorkerProcess(end).run())
