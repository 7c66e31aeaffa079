"""A worker process: its first message from the supervisor, and its exchange with the others."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import structlog

from lmetric._core import Board, LmetricError
from lmetric.config import EngineConfig, ServerConfig
from lmetric.server.api.issued import IssuedKey, IssuedKeys
from lmetric.server.api.replica_pages import ID_DIGITS
from lmetric.server.fleet.canary import Canary, Copy
from lmetric.server.fleet.canary_run import Update
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.periodic import periodic
from lmetric.server.fleet.problem import Problem
from lmetric.server.worker import memory
from lmetric.server.worker.channel import Channel, ChannelClosedError
from lmetric.server.worker.repeats import AdminChange

MOST_SENDERS = 4 * Board.WRITERS  # workers whose messages are remembered, also ended ones
MOST_NAMES = 4096  # models that the shared memory numbers
# Time between two writes of the load that changes without a request, with and without running
# requests. An idle process pays 0.2 ms of CPU time each time it wakes.
PUBLISH_SECONDS, IDLE_SECONDS = 0.05, 0.2
PROGRAMS_SECONDS = 20.0  # for another worker to send its agent programs
UNANSWERED_UPDATES = 8  # of the live page, one each second
RESULTS_SECONDS = 0.5  # time between two messages with results of canaries

log = structlog.get_logger("lmetric.workers")
# Why a worker counts budgets alone.
_ALONE = {"full": "the shared memory is full", "locked": "another worker has stopped with its lock"}

T = TypeVar("T")


class Start(NamedTuple):
    """The first message to a worker.

    Attributes:
        further: engines of ``config`` that no configuration file names.
        number: the worker's area of the shared memory.
        place: which of the workers it is.
        sockets: by place, descriptors of the listening sockets.
        is_shared: whether systemd has the sockets, too.
        memory: descriptor of the shared memory.
        folder: folder of the workers' own sockets.
        secret: random bytes, the same in all workers.
        gateway_port: the port for gateways, which all workers share; None: no gateway sends the
            requests.
    """

    config: ServerConfig
    further: Sequence[EngineConfig]
    number: int
    place: int
    sockets: Sequence[Sequence[int]]
    is_shared: bool
    memory: int
    folder: str
    secret: bytes
    gateway_port: int | None


class Results(NamedTuple):
    """Results of one worker's canaries, by model.

    Attributes:
        worker: the process, by a number that no other process of the server has.
        number: of the worker's messages, from 1 on.
    """

    worker: int
    number: int
    updates: Mapping[str, Update]


class Copies(NamedTuple):
    """The canaries of a worker, by model, and the last messages of all workers in them."""

    received: Mapping[int, int]
    canaries: Mapping[str, Copy]


class Worker:
    """This process as one of several workers."""

    def __init__(self, start: Start, channel: Channel) -> None:
        self.number = start.number
        self.secret = start.secret
        self.path = socket_path(start.folder, start.number)
        self.board: Board = memory.board(start.memory, start.number)
        self._sockets = start.sockets
        self.place = start.place
        self.gateway_port = start.gateway_port
        self.channel = channel
        self._models: list[Model] = []
        self._is_full = False
        self._budgets_alone: str | None = None  # why this worker counts some budgets alone
        self.state_problem: Problem | None = None  # of the supervisor's files
        # Set by the server. Shows on the live page what the clients of a worker did.
        self.show: Callable[[int, Any], None] | None = None
        self._sending: set[asyncio.Task[None]] = set()  # updates of the live page
        self._alarming: asyncio.Task[None] | None = None
        self._sending_results = asyncio.Lock()
        self._sent = 0  # messages with results of this worker's canaries
        self._process = secrets.randbits(64)  # the IDs of processes come back
        # By worker: the number of its last message. The latest message is last.
        self._received: dict[int, int] = {}
        self._early: list[Results] | None = []  # messages before the copies of the canaries
        self._tasks: list[asyncio.Task[None]] = []
        self._own: asyncio.Server | None = None
        # Set by the server. Returns the usage that this worker has counted since the last call.
        self.take_usage: Callable[[], Sequence[Any]] | None = None
        # Set by the server. Makes room for budgets. Returns why some count in this worker alone.
        self.tidy_budgets: Callable[[], str | None] | None = None
        self.issued = IssuedKeys(stored=start.config.state_folder is not None)
        self.router = router_id(start.secret)
        # Set by the server. Applies a load message that another worker has received; returns the
        # version of the load that counts here.
        self.apply_load: Callable[[bytes], int | None]
        # Set by the server. Adds the budgets of other routers.
        self.add_counts: Callable[..., None]

    def sockets(self, place: int) -> list[socket.socket]:
        """Returns the listening sockets of a worker, each to be closed."""
        return [socket.socket(fileno=os.dup(each)) for each in self._sockets[place]]

    def join(self, model: Model) -> None:
        """Exchanges a model's load with the other workers from now on."""
        model.router.join(self.board, model.name)
        model.set_label_key(hmac.digest(self.secret, model.name.encode(), "sha256")[:16])
        canary = model.try_policies().canary
        canary.share()
        canary.on_alarm = self._send_alarm
        self._models.append(model)

    def number_model(self, name: str, made: int) -> int:
        """Returns the number of a model, the same in all workers."""
        number = self.board.number_of(name)
        return number if number is not None else MOST_NAMES + made

    def begin(self) -> None:
        """Starts to write the load that changes without a request, and to answer other workers."""
        self._tasks.append(periodic("workers' load", self._pause, self._publish))

    async def start(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Catches up with the other workers. Raises LmetricError.

        ``protocol``: of connections on the worker's own socket.
        """
        loop = asyncio.get_running_loop()
        await self._get_programs()
        more: Any = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._own = await loop.create_unix_server(protocol, self.path, **more)
        await self.channel.call("catch_up", self.number)
        self._tasks.append(periodic("workers' canaries", RESULTS_SECONDS, self.send_results))
        self._tasks.append(periodic("workers' usage", RESULTS_SECONDS, self._send_usage))

    async def _get_programs(self) -> None:
        """Waits until this worker knows the agent programs of the others. Raises LmetricError."""
        end = time.monotonic() + PROGRAMS_SECONDS
        while not all(model.router.has_programs_of_workers for model in self._models):
            if time.monotonic() > end:
                raise LmetricError(
                    f"no other worker has sent its agent programs within {PROGRAMS_SECONDS:.0f} s; "
                    "end the workers that do not answer"
                )
            await asyncio.sleep(PUBLISH_SECONDS / 2)

    def _pause(self) -> float:
        is_idle = not any(model.router.in_flight() for model in self._models)
        return IDLE_SECONDS if is_idle else PUBLISH_SECONDS

    async def _publish(self) -> None:
        published = [model.router.publish_load() for model in self._models]
        has_room = all(published)
        if not has_room and not self._is_full:
            log.error(
                "other workers do not count the requests to some engines: the shared memory is full",
                engines=sum(len(model.engines) for model in self._models),
            )
        self._is_full = not has_room
        alone = None if self.tidy_budgets is None else self.tidy_budgets()
        if alone is not None and self._budgets_alone is None:
            log.error(f"this worker counts some budgets alone: {_ALONE[alone]}", worker=self.number)
        self._budgets_alone = alone

    def forget(self, name: str) -> None:
        """Forgets a model that was removed."""
        for model in [each for each in self._models if each.name == name]:
            self._models.remove(model)
            model.router.leave()

    def send(self, update: Any) -> None:
        """Sends the live pages of the other workers what the clients of this one did.

        They miss an update if the supervisor leaves too many unanswered.
        """
        if len(self._sending) < UNANSWERED_UPDATES:
            task = asyncio.create_task(self._send_update(update), name="live page")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_update(self, update: Any) -> None:
        with contextlib.suppress(ChannelClosedError):
            # As bytes, so that the supervisor passes it on without reading its requests.
            await self.channel.call("live", (self.number, pickle.dumps(update)))

    def receive(self, worker: int, update: bytes) -> None:
        """Shows what the clients of another worker did."""
        if self.show is not None:
            self.show(worker, pickle.loads(update))

    async def send_results(self) -> None:
        """Sends the other workers the results of this one's canaries since the last call."""
        async with self._sending_results:
            await self._send_updates(self._unsent())

    def _unsent(self) -> dict[str, Update]:
        found = ((model.name, model.try_policies().canary.unsent()) for model in self._models)
        updates = {name: update for name, update in found if update is not None}
        self._sent += bool(updates)
        return updates

    async def _send_updates(self, updates: dict[str, Update]) -> None:
        if updates:
            results = Results(self._process, self._sent, updates)
            with contextlib.suppress(ChannelClosedError):
                await self.channel.call("canaries", (self.number, results))

    def _send_alarm(self) -> None:
        self._alarming = asyncio.create_task(self.send_results(), name="canaries")

    def receive_results(self, results: Results) -> None:
        """Adds the results of another worker's canaries, once."""
        if self._early is not None:
            self._early.append(results)
            return
        last = self._received.pop(results.worker, 0)
        self._received[results.worker] = max(last, results.number)
        if len(self._received) > MOST_SENDERS:
            del self._received[next(iter(self._received))]
        if results.number > last:
            for canary, update in self._canaries(results.updates):
                canary.receive_results(update)

    async def copies(self) -> Copies:
        """Returns the canaries for a worker that starts later."""
        async with self._sending_results:
            updates = self._unsent()
            found = ((model.name, model.try_policies().canary.copy()) for model in self._models)
            canaries = {name: copy for name, copy in found if copy is not None}
            copies = Copies({**self._received, self._process: self._sent}, canaries)
            await self._send_updates(updates)
        return copies

    def begin_copying(self, copies: Copies) -> None:
        """Ends the canaries of which other workers have copies, so that policies may change."""
        for canary, copy in self._canaries(copies.canaries):
            canary.give_way(copy)

    def become(self, copies: Copies) -> None:
        """Goes on with the canaries of another worker."""
        for canary, copy in self._canaries(copies.canaries):
            try:
                canary.become(copy)
            except LmetricError as error:
                log.error("cannot go on with the canary of the other workers", reason=str(error))
        self._received = dict(copies.received)
        early, self._early = self._early or [], None
        for results in early:
            self.receive_results(results)

    def _canaries(self, named: Mapping[str, T]) -> Iterator[tuple[Canary, T]]:
        models = (model for model in self._models if model.name in named)
        return ((model.try_policies().canary, named[model.name]) for model in models)

    async def _send_usage(self) -> None:
        if self.take_usage is not None and (rows := self.take_usage()):
            with contextlib.suppress(ChannelClosedError):
                await self.channel.call("usage", rows)

    async def usage_rows(self) -> list[Any]:
        """Returns the usage of all workers; that of the others may miss the last half second."""
        await self._send_usage()
        rows: list[Any] = await self.channel.call("usage_rows")
        return rows

    async def pass_on(self, body: bytes, version: int | None) -> dict[str, Any]:
        """Gives a load message of another router to all processes. Returns the answer to it.

        ``version``: of the load that counts here.
        """
        answer: dict[str, Any] = await self.channel.call("replica", (self.number, body, version))
        return answer

    async def keys_page(self, router: str, after: int, copied: int) -> bytes:
        """Returns records of issued API keys for another router."""
        page: bytes = await self.channel.call("replica_keys", (router, after, copied))
        return page

    async def change_keys(self, keys: Sequence[IssuedKey]) -> None:
        """Stores issued or revoked API keys, in all workers. Raises LmetricError."""
        await self.channel.call("change_keys", keys)

    async def metrics(self, openmetrics: bool) -> str:
        """Returns the metrics of all workers."""
        text: str = await self.channel.call("metrics", openmetrics)
        return text

    async def decisions(self, limit: int) -> list[dict[str, bytes]]:
        """Returns the latest decisions of the other workers that answer in time.

        ``limit``: the most decisions of each model, by worker.
        """
        found: list[dict[str, bytes]] = await self.channel.call("decisions", (self.number, limit))
        return found

    async def repeat(self, change: AdminChange) -> list[str]:
        """Makes a change in all other workers. Returns what went wrong."""
        failed: list[str] = await self.channel.call("repeat", change)
        return failed

    async def find(self, target: str, headers: tuple[tuple[str, str], ...]) -> bytes | None:
        """Returns a page as another worker answers it; None: none has it."""
        page: bytes | None = await self.channel.call("find", (self.number, target, headers))
        return page

    async def reload(self) -> dict[str, Any]:
        """Reloads the configuration of all workers. Returns the changes. Raises LmetricError."""
        report: dict[str, Any] = await self.channel.call("reload")
        return report

    def is_repeated(self, mark: str | None) -> bool:
        """Returns whether a request comes from the supervisor, for this worker alone."""
        if mark is None:
            return False
        return hmac.compare_digest(mark.encode("utf-8", "surrogateescape"), self.secret.hex().encode())

    async def stop(self) -> None:
        """Stops the exchange."""
        if self._own is not None:
            self._own.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.send_results()
        await self._send_usage()


def router_id(secret: bytes) -> str:
    """Returns the ID of this start of the router for other routers."""
    return hmac.digest(secret, b"replicas", "sha256").hex()[:ID_DIGITS]


def socket_path(folder: str, number: int) -> str:
    """Returns the path of a worker's own socket, for the supervisor."""
    return os.path.join(folder, f"{number}.sock")
