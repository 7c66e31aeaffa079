"""The supervisor of worker processes: it owns the port, starts workers and replaces them.

The supervisor answers no requests. It keeps the sockets open, so connections that wait to be
accepted survive the end of a worker. It adds up the workers' metrics, and passes each change of an
administrator on to all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from typing import Any

import aiohttp
import orjson
import structlog

from lmetric._core import Board, Budgets, LmetricError, __version__
from lmetric.config import CanaryConfig, ConfigError, EngineConfig, ServerConfig
from lmetric.server.api.issued import IssuedKey, IssuedKeys
from lmetric.server.http.port import Bound
from lmetric.server.observe.key_store import KeyStore
from lmetric.server.observe.startup import LISTENING
from lmetric.server.observe.state import StateFolder
from lmetric.server.observe.usage import UsageTable
from lmetric.server.supervisor.merge import merge, merge_ended, without_gone
from lmetric.server.supervisor.ports import divide
from lmetric.server.supervisor.sharing import Sharing
from lmetric.server.upstream.request_errors import request_error
from lmetric.server.worker import memory
from lmetric.server.worker.channel import Channel, ChannelClosedError, NoAnswerError
from lmetric.server.worker.repeats import (
    MARK,
    POLICY,
    REMOVED,
    WEIGHTS,
    AdminChange,
    EngineState,
    left_of,
)
from lmetric.server.worker.worker import Copies, Start, router_id, socket_path

log = structlog.get_logger("lmetric.workers")

START_SECONDS = 120.0  # for a worker to check its engines and listen
METRICS_SECONDS = 5.0
RESULTS_SECONDS = 5.0  # the next results of a worker's canaries wait for the other workers
REPEAT_SECONDS = 30.0
SHORT_LIFE_SECONDS = 10.0  # a worker that ends sooner is replaced after a pause
MOST_PAUSE_SECONDS = 30.0
CANARY = "/admin/canary/"
LIVE_UPDATES = 4  # updates of the live page, by sending worker, that a worker may leave unanswered
MOST_CHANGES = 10_000  # changes of administrators that a new worker repeats


class Process:
    """A worker process, as its supervisor sees it."""

    def __init__(
        self, number: int, place: int, process: asyncio.subprocess.Process, channel: Channel
    ) -> None:
        self.number = number  # its area of the shared memory
        self.place = place  # which of the configured workers it is
        self.process = process
        self.channel = channel
        self.began = time.monotonic()
        self.ready = False  # it answers the supervisor
        self.started = False  # it listens
        self.leaving = False  # the supervisor has asked it to end
        self.replacing = False  # the next worker of its place starts
        self.changing = asyncio.Lock()  # changes of administrators reach it in their order
        self.page = ""  # its last metrics
        self.unanswered = 0  # updates of the live page

    def signal(self, number: int) -> None:
        """Sends a signal."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


async def _first(answers: Iterable[Coroutine[Any, Any, Any]]) -> Any:
    """Returns the first answer that is not None. A worker that stands still delays no other."""
    asked = [asyncio.create_task(each) for each in answers]
    try:
        for answer in asyncio.as_completed(asked):
            if (found := await answer) is not None:
                return found
        return None
    finally:
        for each in asked:
            each.cancel()


class Supervisor:
    """Starts and supervises the workers of one server.

    ``config``: with the engines of ``further``, which no configuration file names. ``reread`` reads
    the configuration again. ``gateways``: sockets that hold the port for gateways; None: no gateway
    sends the requests.
    """

    def __init__(
        self,
        config: ServerConfig,
        further: Sequence[EngineConfig],
        bound: Bound,
        reread: Callable[[], ServerConfig] | None,
        gateways: Bound | None = None,
    ) -> None:
        self._secret = secrets.token_bytes(32)
        self.config = salted(config, self._secret)
        self._reread_config = self.config  # as the last reload got it: without `further`
        self._further = further
        self._bound = bound
        self._reread = reread
        self._gateways = gateways
        self._workers = config.worker_count
        self._sockets = divide(bound, self._workers)
        self._is_divided = self._sockets[0] is not self._sockets[-1]
        self._memory = memory.make()
        self._board = memory.board(self._memory, Board.WRITERS - 1)
        # The clock of all workers begins here.
        self._budgets = Budgets(time.time() - time.monotonic(), self._board)
        self._usage = UsageTable()
        self._state: StateFolder | None = None
        folder = config.state_folder
        self._keys = KeyStore(folder, IssuedKeys(stored=folder is not None))
        self._sharing = Sharing(
            self.config,
            router_id(self._secret),
            self._budgets,
            keys=self._keys.keys,
            change=self._store_keys,
            tell=self._tell,
        )
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="lmetric-")
        except OSError as error:
            raise ConfigError(
                f"no folder for the sockets of the workers: {error.strerror or error}; make /tmp writable, "
                "or set TMPDIR to a writable folder"
            ) from None
        self.processes: list[Process] = []
        self._numbers: set[int] = set()  # areas of the shared memory in use
        # By place without a worker: the worker that accepts its connections; None: none does.
        self._adopters: dict[int, Process | None] = {}
        self._adopting = asyncio.Lock()  # no place is adopted twice
        self._watchers: set[asyncio.Task[None]] = set()
        self._showing: set[asyncio.Task[None]] = set()  # updates of live pages
        self._telling: set[asyncio.Task[list[Any]]] = set()  # messages about state files
        self._changes: dict[tuple[str, ...], AdminChange] = {}  # for new workers
        self._spreading: list[tuple[str, ...] | None] = []  # changes that not all workers have made
        self._ended_page = ""  # metrics of the workers that have ended
        self._failures = 0  # ends in a row of workers that lived a short time
        self._reloading = asyncio.Lock()
        self._canaries = asyncio.Lock()  # a command reaches all workers, or none of a copy
        self._restarting = asyncio.Lock()
        self._ending = False

    async def start(self) -> dict[str, Any]:
        """Starts all workers. Returns the report of the first one. Raises LmetricError."""
        if self.config.state_folder is not None:
            folder = self.config.state_folder
            self._state = StateFolder(folder, self._budgets, self._usage, on_problem=self._state_changed)
        self._keys.read()
        await self._sharing.begin()
        starts = [asyncio.create_task(self._start(place)) for place in range(self._workers)]
        try:
            reports = await asyncio.gather(*starts)
        except BaseException:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        if self._state is not None:
            self._state.start()
        await self._sharing.start()
        return reports[0]

    async def _take_number(self) -> int:
        """Takes an area of the shared memory, once one is free. Raises LmetricError."""
        while len(self._numbers) >= Board.WRITERS - 1:  # streams of the last restart still run
            if self._ending:
                raise LmetricError("the server ends")
            await asyncio.sleep(0.1)
        number = min(set(range(Board.WRITERS - 1)) - self._numbers)
        self._numbers.add(number)
        return number

    async def _start(self, place: int) -> dict[str, Any]:
        """Starts a worker. Returns its report once it listens. Raises LmetricError."""
        number = await self._take_number()
        sockets = [[each.fileno() for each in own] for own in self._sockets]
        try:
            process, channel = await self._execute({self._memory, *(each for own in sockets for each in own)})
        except OSError as error:
            self._numbers.discard(number)
            reason = error.strerror or str(error)
            raise ConfigError(
                f"a worker process cannot be started: {reason}; free memory, or raise the "
                "limits of processes and open files"
            ) from None
        worker = Process(number, place, process, channel=channel)
        self.processes.append(worker)
        start = Start(
            config=self.config,
            further=self._further,
            number=number,
            place=place,
            sockets=sockets,
            is_shared=self._bound.shared,
            memory=self._memory,
            folder=self._folder.name,
            secret=self._secret,
            gateway_port=None if self._gateways is None else self._gateways.port,
        )
        watcher = asyncio.create_task(self._watch(worker), name=f"worker {number}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        try:
            async with asyncio.timeout(START_SECONDS):
                report: dict[str, Any] = await channel.call("start", start)
            async with self._reloading:
                if start.config is not self.config:  # a reload leaves out workers that start
                    await channel.call("reload", self._reread_config, seconds=REPEAT_SECONDS)
                worker.started = True
        except NoAnswerError:
            worker.signal(signal.SIGKILL)
            raise ConfigError("a worker process does not answer; it is ended") from None
        except ChannelClosedError:
            raise ConfigError("a worker process ended while it started; its log has the reason") from None
        except TimeoutError:
            worker.signal(signal.SIGKILL)
            raise ConfigError(f"a worker process was not ready within {START_SECONDS:.0f} s") from None
        except BaseException:
            worker.signal(signal.SIGTERM)
            raise
        return report

    async def _execute(self, passed: set[int]) -> tuple[asyncio.subprocess.Process, Channel]:
        """Starts a process with these descriptors, and a channel to it. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "lmetric.worker_process",
                    str(theirs.fileno()),
                    __version__,
                    pass_fds=(theirs.fileno(), *passed),
                    start_new_session=True,  # Ctrl-C reaches only the supervisor
                )
            except BaseException:
                ours.close()
                raise
        return process, await Channel.open(ours, self._asked)

    async def _catch_up(self, worker: Process) -> None:
        """Makes the changes of administrators so far in a worker that does not listen yet."""
        async with self._canaries, worker.changing:
            worker.ready = True
            if self._state is not None and self._state.problem is not None:
                await worker.channel.call("state", self._state.problem)
            await worker.channel.call("keys", self._keys.keys.all())
            if (counts := await self._sharing.counts()) is not None:
                await worker.channel.call("counts", counts)
            copies: Copies = await self._ask_serving("copies", REPEAT_SECONDS) or Copies({}, {})
            await worker.channel.call("begin_copying", copies)
            await self._forget_past()
            for change in list(self._changes.values()):
                if (problem := await self._change(worker, change)) is not None:
                    log.warning("a new worker cannot repeat an administrator's change", reason=problem)
            await worker.channel.call("become", copies)

    def _state_changed(self) -> None:
        """Sends the workers, which answer /ready, the problem of the state files."""
        assert self._state is not None
        task = asyncio.create_task(self._tell("state", self._state.problem, None), name="state files")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _ask_serving(self, name: str, seconds: float) -> Any:
        """Returns the answer of the worker that serves and answers first; None: none answers."""

        async def ask(worker: Process) -> Any:
            with contextlib.suppress(ChannelClosedError, LmetricError):
                return await worker.channel.call(name, seconds=seconds)

        return await _first(ask(each) for each in self.processes if each.started)

    async def _watch(self, worker: Process) -> None:
        """Waits for the end of a worker, and replaces it if nobody asked it to end."""
        code = await worker.process.wait()
        await worker.channel.close()
        self._board.clear(worker.number)
        try:
            running = [each.page for each in self.processes if each is not worker]
            self._ended_page = merge_ended(self._ended_page, worker.page, running)
        except ValueError:  # its replacement does not depend on metrics
            log.exception("the metrics of a worker that ended are lost", worker=worker.place)
        self.processes.remove(worker)
        self._numbers.discard(worker.number)
        with contextlib.suppress(OSError):
            os.unlink(socket_path(self._folder.name, worker.number))
        if worker.leaving or self._ending or not worker.started:  # whoever starts a worker sees its failure
            return
        why = {"signal": signal.Signals(-code).name} if code < 0 else {"code": code}
        log.error(
            "a worker process ended; it is replaced", worker=worker.place, pid=worker.process.pid, **why
        )
        if not any(each.started and each.place == worker.place for each in self.processes):
            self._adopters[worker.place] = None
        adopting = asyncio.create_task(self._let_adopt(), name="adopt")  # a worker may stand still
        if not worker.replacing:
            short = time.monotonic() - worker.began < SHORT_LIFE_SECONDS
            self._failures = self._failures + 1 if short else 0
            await self._replace(worker.place)
        await adopting

    async def _replace(self, place: int) -> None:
        """Starts a worker in the place of a worker that has ended, until one listens."""
        while not self._ending:
            if self._failures:
                await asyncio.sleep(min(2.0 ** (self._failures - 1), MOST_PAUSE_SECONDS))
            try:
                await self._start(place)
            except LmetricError as error:
                self._failures += 1
                log.error("cannot replace a worker process", worker=place, reason=str(error))
            else:
                log.info("a worker process was replaced", worker=place)
                await self._release(place)
                return

    async def _release(self, place: int) -> None:
        """Ends the adoption of a worker's connections."""
        self._adopters.pop(place, None)
        if self._is_divided:  # a worker that stood still may adopt them later
            await self._tell("release", place, None)
            await self._let_adopt()

    async def _let_adopt(self) -> None:
        """Lets another worker accept the connections of each worker that has ended.

        Called again when another worker listens, or when the accepting worker ends.
        """
        for place in list(self._adopters) if self._is_divided else ():
            async with self._adopting:
                for other in [each for each in self.processes if each.started and not each.leaving]:
                    adopter = self._adopters.get(place)
                    has_one = adopter is not None and adopter in self.processes and not adopter.leaving
                    if has_one or place not in self._adopters:  # it may be released meanwhile
                        break
                    with contextlib.suppress(ChannelClosedError, LmetricError):
                        await other.channel.call("adopt", place, seconds=METRICS_SECONDS)
                        if place in self._adopters:
                            self._adopters[place] = other
                        else:
                            await other.channel.call("release", place, seconds=METRICS_SECONDS)
                        break

    # -- calls of the workers

    async def _asked(self, name: str, value: Any) -> Any:
        match name:
            case "metrics":
                return await self.metrics(value)
            case "decisions":
                asking, limit = value
                return await self._tell(name, limit, asking, seconds=METRICS_SECONDS)
            case "repeat":
                return await self.repeat(value)
            case "find":
                return await self.find(*value)
            case "change_keys":
                return await self._sharing.keys.publish(value)
            case "reload":
                return await self.reload()
            case "replica":
                return await self._sharing.receive(*value)
            case "replica_keys":
                return await self._sharing.keys.answer(*value)
            case "usage":
                return self._usage.add_rows(value)
            case "usage_rows":
                return self._usage.rows()
            case "live":
                return self._show(value[0], value)
            case "canaries":
                asking, results = value
                await self._tell(name, results, asking, seconds=RESULTS_SECONDS)
                return None
            case "catch_up":
                return await self._catch_up(self._process(value))
            case "ended":
                number, page = value
                self._process(number).page = page
                return None
        raise LmetricError(f"unknown call {name!r} of a worker")

    def _process(self, number: int) -> Process:
        return next(each for each in self.processes if each.number == number)

    async def metrics(self, openmetrics: bool) -> str:
        """Returns the sums of the workers' metrics."""
        asked = sorted((each for each in self.processes if each.ready), key=lambda each: each.place)

        async def ask(worker: Process) -> None:
            with contextlib.suppress(ChannelClosedError, LmetricError):
                worker.page = await worker.channel.call("metrics", openmetrics, seconds=METRICS_SECONDS)

        await asyncio.gather(*map(ask, asked))
        # The last page of a worker that has ended meanwhile is in `_ended_page`.
        pages = [worker.page for worker in asked if worker in self.processes]
        ended = left = self._ended_page
        if any(worker.started for worker in asked):  # it knows all engines
            left = await asyncio.to_thread(without_gone, ended, pages)
        if self._ended_page is ended:
            self._ended_page = left
        return await asyncio.to_thread(merge, pages, [left], openmetrics=openmetrics)

    async def repeat(self, change: AdminChange) -> list[str]:
        """Makes an administrator's change in all workers that have not made it."""
        mark, headers = dict(change.headers).get(MARK), dict(change.headers)
        headers[MARK] = self._secret.hex()
        change = change._replace(headers=tuple(headers.items()))
        if change.target.startswith(CANARY):  # a new worker copies the canaries of another one
            async with self._canaries:
                return await self._repeat_in_others(change, mark)
        # Added and removed engines, and the steps of trainers, must not displace other changes.
        if change.removed:
            self._forget_engines(set(change.removed), self._changes.copy())
        if change.kept is not None:
            if len(self._changes) >= MOST_CHANGES and change.kept not in self._changes:
                await self._forget_past()
            self._keep(change.kept, change)
        self._spreading.append(change.kept)
        try:
            return await self._repeat_in_others(change, mark)
        finally:
            self._spreading.remove(change.kept)

    def _keep(self, what: tuple[str, ...], change: AdminChange) -> None:
        """Keeps a change for new workers, behind all others."""
        self._changes.pop(what, None)
        self._changes[what] = change
        if len(self._changes) > MOST_CHANGES:
            del self._changes[next(iter(self._changes))]

    async def _forget_past(self) -> None:
        """Leaves out changes that no longer hold in a worker that serves. If none answers: none.

        Discovery and reloads remove engines, and later engines may have the same names.
        """
        settled = {what: each for what, each in self._changes.items() if what not in self._spreading}
        found: dict[str, tuple[Any, ...]] | None = await self._ask_serving("engine_states", METRICS_SECONDS)
        if found is None:
            return
        engines = {name: EngineState._make(fields) for name, fields in found.items()}
        for what, change in settled.items():
            if self._changes.get(what) is not change:
                continue
            left = left_of(what, change, engines)
            if left is None or left[1] is not change:
                del self._changes[what]
            if left is not None and left[1] is not change:
                self._keep(*left)
        named = {name for what in settled for name in (what[2:] if what[:2] == WEIGHTS else what[:1])}
        self._forget_engines(named - {"", *engines}, settled)

    def _forget_engines(self, names: Set[str], earlier: Mapping[tuple[str, ...], AdminChange]) -> None:
        """Leaves out earlier changes of engines that are gone, but not the removal of an engine."""
        changes, self._changes = self._changes, {}
        for what, change in changes.items():
            if earlier.get(what) is not change or what[1] == REMOVED:
                self._keep(what, change)
            elif what[:2] == WEIGHTS and not names.isdisjoint(what[2:]):
                left = [each for each in what[2:] if each not in names]
                body = orjson.dumps({**orjson.loads(change.body), "engines": left})
                if left:
                    self._keep((*WEIGHTS, *left), change._replace(body=body))
            elif what[0] not in names:
                self._keep(what, change)

    def _forget_configured(self) -> None:
        """Leaves out the changes of what a reload has set to the configuration again."""
        for what in [what for what in self._changes if what[:2] == POLICY or what[1] == REMOVED]:
            del self._changes[what]

    async def _repeat_in_others(self, change: AdminChange, mark: str | None) -> list[str]:
        others = [each for each in self.processes if each.ready and str(each.number) != mark]
        failed = await asyncio.gather(*(self._repeat(each, change) for each in others))
        return [problem for problem in failed if problem is not None]

    async def find(self, asking: int, target: str, headers: tuple[tuple[str, str], ...]) -> bytes | None:
        """Returns a page from the first other worker that has it."""
        request = AdminChange("GET", target, (*headers, (MARK, self._secret.hex())), b"")

        async def ask(worker: Process) -> bytes | None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with asyncio.timeout(METRICS_SECONDS):
                    status, page = await self._ask(worker, request)
                return page if status == 200 else None
            return None

        others = [each for each in self.processes if each.ready and each.number != asking]
        found: bytes | None = await _first(map(ask, others))
        return found

    async def _store_keys(self, keys: Sequence[IssuedKey]) -> list[IssuedKey]:
        """Stores API keys, and waits until all workers know them. Raises LmetricError.

        A worker that does not answer within `REPEAT_SECONDS` follows before its next request.
        Returns the changed records.
        """
        try:
            return await self._keys.change(keys)
        finally:  # a revocation applies even if it cannot be stored
            known = [key for each in keys if (key := self._keys.keys.find(bytes.fromhex(each.sha256)))]
            await asyncio.gather(*(self._send_keys(each, known) for each in self.processes if each.ready))

    async def _send_keys(self, worker: Process, keys: Sequence[IssuedKey]) -> None:
        with contextlib.suppress(ChannelClosedError):
            await worker.channel.call("keys", keys, seconds=REPEAT_SECONDS)

    async def _tell(
        self, name: str, value: Any, asking: int | None, *, seconds: float = REPEAT_SECONDS
    ) -> list[Any]:
        """Calls all workers but the asking one. Returns the answers of those that answer."""

        async def tell(worker: Process) -> list[Any]:
            try:
                return [await worker.channel.call(name, value, seconds=seconds)]
            except ChannelClosedError:
                return []

        others = [each for each in self.processes if each.ready and each.number != asking]
        return [answer for found in await asyncio.gather(*map(tell, others)) for answer in found]

    def _show(self, asking: int, value: Any) -> None:
        """Sends an update of the live page to all workers but the asking one. Waits for none.

        A worker that stands still misses updates, so that they do not fill the memory.
        """
        for worker in self.processes:
            if not worker.ready or worker.number == asking:
                continue
            if worker.unanswered < LIVE_UPDATES * len(self.processes):
                task = asyncio.create_task(self._show_in(worker, value), name="live page")
                self._showing.add(task)
                task.add_done_callback(self._showing.discard)

    async def _show_in(self, worker: Process, value: Any) -> None:
        worker.unanswered += 1
        try:
            with contextlib.suppress(ChannelClosedError, LmetricError):
                await worker.channel.call("live", value)
        finally:
            worker.unanswered -= 1

    async def _repeat(self, worker: Process, change: AdminChange) -> str | None:
        """Makes a change in a worker, behind those that it repeats at its start."""
        async with worker.changing:
            pass
        return await self._change(worker, change)

    async def _change(self, worker: Process, change: AdminChange) -> str | None:
        try:
            status, said = await self._ask(worker, change)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"worker {worker.place}: {request_error(error)}"
        if status < 300:
            return None
        return f"worker {worker.place}: status {status}: {said[:200].decode(errors='replace')}"

    async def _ask(self, worker: Process, request: AdminChange) -> tuple[int, bytes]:
        """Sends a request to a worker's own socket."""
        connector = aiohttp.UnixConnector(socket_path(self._folder.name, worker.number))
        timeout = aiohttp.ClientTimeout(total=REPEAT_SECONDS)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(
                request.method,
                f"http://worker{request.target}",
                data=request.body or None,
                headers=list(request.headers),
            ) as answer,
        ):
            return answer.status, await answer.read()

    # -- commands

    async def reload(self) -> dict[str, Any]:
        """Reads the configuration again, and applies it in all workers. Raises LmetricError.

        If the first worker refuses the configuration, nothing changes. Workers that start follow
        when they have started.
        """
        if self._reread is None:
            raise ConfigError("there is no configuration file to read again")
        async with self._reloading:
            config = salted(await asyncio.to_thread(self._reread), self._secret)

            silent: list[Process] = []

            async def tell(worker: Process) -> dict[str, Any] | LmetricError | None:
                try:
                    report: dict[str, Any] = await worker.channel.call(
                        "reload", config, seconds=REPEAT_SECONDS
                    )
                except NoAnswerError:  # it reads the configuration later
                    silent.append(worker)
                    return None
                except ChannelClosedError:  # the next worker starts with it
                    return None
                except LmetricError as error:
                    return error
                return report

            started = [each for each in self.processes if each.started]
            report = None
            while started and report is None:
                report = await tell(started.pop(0))
            if isinstance(report, LmetricError):
                raise report
            if report is None and silent:
                raise ConfigError(f"no worker answered within {REPEAT_SECONDS:g} s; reload again")
            for error in await asyncio.gather(*map(tell, started)):
                if isinstance(error, LmetricError):  # the first one has it, and cannot go back
                    log.error("a worker does not take the configuration of the others", reason=str(error))
            self.config = config.model_copy(update={"engines": [*config.engines, *self._further]})
            self._reread_config = config
            self._forget_configured()
            return report or {}

    async def restart(self) -> None:
        """Replaces all workers one by one, each once the next one listens. Loses no stream."""
        if self._restarting.locked():
            return
        async with self._restarting:
            for worker in sorted(self.processes, key=lambda each: each.place):
                # The worker may replace another, which has just ended.
                while not worker.started and worker in self.processes:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                if self._ending or worker.leaving or worker not in self.processes:
                    continue
                worker.replacing = True
                try:
                    await self._start(worker.place)
                except LmetricError as error:
                    log.error("rolling restart stopped; the old workers go on", reason=str(error))
                    worker.replacing = False
                    if worker not in self.processes:  # it ended meanwhile
                        await self._replace(worker.place)
                    return
                worker.leaving = True
                if worker not in self.processes:
                    await self._release(worker.place)
                await self._let_adopt()  # in its place
                with contextlib.suppress(ChannelClosedError):
                    await worker.channel.call("replace", seconds=REPEAT_SECONDS)
            log.info("rolling restart done", workers=self._workers)

    def end(self, number: int) -> None:
        """Asks all workers to drain; a second time, to end at once."""
        self._ending = True
        self._close_sockets()  # so that the last worker to close one refuses connections
        for worker in self.processes:
            worker.leaving = True
            worker.signal(number)

    def _close_sockets(self) -> None:
        for each in (each for own in self._sockets for each in own):
            each.close()

    async def wait(self) -> None:
        """Waits for the end of all workers."""
        while self._watchers:
            await asyncio.wait(self._watchers)

    async def close(self) -> None:
        """Ends the workers that are left, and frees the memory."""
        self.end(signal.SIGKILL)
        await self.wait()
        await self._sharing.stop()
        if self._state is not None:
            await self._state.stop()
        for each in () if self._gateways is None else self._gateways.sockets:
            each.close()
        self._bound.remove_file()
        self._folder.cleanup()
        os.close(self._memory)


def salted(config: ServerConfig, secret: bytes) -> ServerConfig:
    """Returns a configuration whose canaries put a session into the same arm in all workers."""

    def drawn(canary: CanaryConfig | None) -> CanaryConfig | None:
        if canary is None or canary.salt is not None:
            return canary
        salt = hmac.digest(secret, repr(canary).encode(), "sha256").hex()[:16]
        return canary.model_copy(update={"salt": salt})

    models = [
        model if model.canary is None else model.model_copy(update={"canary": drawn(model.canary)})
        for model in config.models
    ]
    return config.model_copy(update={"canary": drawn(config.canary), "models": models})


async def supervise(
    config: ServerConfig,
    further: Sequence[EngineConfig],
    bound: Bound,
    *,
    reread: Callable[[], ServerConfig] | None,
    gateways: Bound | None,
    started: Callable[[], None],
) -> int:
    """Serves with several workers until SIGTERM or Ctrl-C. Returns the first signal.

    SIGHUP reloads the configuration, SIGUSR2 replaces the workers one by one. ``gateways``: see
    `Supervisor`. ``started`` is called when all signals have their handlers. Raises LmetricError.
    """
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(config, further, bound, reread=reread, gateways=gateways)
    tasks: set[asyncio.Task[Any]] = set()
    caught: list[int] = []
    ended = asyncio.Event()

    def run(work: Any) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def reload() -> None:
        try:
            report = await supervisor.reload()
        except LmetricError as error:
            log.error("cannot reload the configuration; the old one stays in use", reason=str(error))
        else:
            if restart := report.get("restart_needed"):
                log.warning("these settings change only with a restart", settings=restart)

    def on_signal(number: int) -> None:
        caught.append(number)
        supervisor.end(signal.SIGTERM)
        ended.set()

    try:
        report = await supervisor.start()
        gc.freeze()  # as in `run_server`: messages of workers make full garbage collections frequent
        loop.add_signal_handler(signal.SIGHUP, lambda: run(reload()))
        loop.add_signal_handler(signal.SIGUSR2, lambda: run(supervisor.restart()))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        started()
        (log.warning if report["warnings"] else log.info)(LISTENING, **report)
        await ended.wait()
        await supervisor.wait()
    finally:
        for task in list(tasks):
            task.cancel()
        await supervisor.close()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            loop.remove_signal_handler(number)
    return caught[0]
