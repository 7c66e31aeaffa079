"""Routers as processes, and what they show of themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

sys.path.insert(0, str(Path(__file__).parent.parent / "http"))

from engines import EngineProcess
from line_up import SUBJECTS
from proc import cpu_seconds, rss_mib, tree

from lmetric_lab.ports import free_ports

WATCHED = Path(__file__).with_name("watched.py")
RUN = "import sys; from lmetric.cli import main; sys.argv[0] = 'lmetric-router'; main()"


class Router:
    """A router as a process.

    Args:
        command: its command line.
        port: the port that it listens on.
        log: the file of its log; None: a file without a name.
        environ: more environment variables.
        preset: called in the new process before the router starts.
        model: the engines' model.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        log: Path | None = None,
        environ: Mapping[str, str] | None = None,
        preset: Callable[[], None] | None = None,
        model: str = "chaos",
    ) -> None:
        self._command = command
        self._model = model
        self.url = f"http://127.0.0.1:{port}"
        self._log_path = log
        self._log: Any = tempfile.TemporaryFile() if log is None else log.open("ab")  # noqa: SIM115
        self._environ = environ or {}
        self._preset = preset
        self._process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Starts it, and waits until it answers a request."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LMETRIC_")}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=self._log,
            stderr=self._log,
            env=environ | self._environ,
            start_new_session=True,
            preexec_fn=self._preset,
        )
        body = {"model": self._model, "prompt": "hello", "max_tokens": 1}
        async with asyncio.timeout(120):
            while True:
                try:
                    async with session.post(f"{self.url}/v1/completions", json=body) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                if self._process.returncode is not None:
                    raise RuntimeError(f"the router ended: {self.log()}")
                await asyncio.sleep(0.1)

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    def rss_mib(self) -> float:
        """Its resident memory, MiB."""
        return rss_mib(tree(self.pid))

    def cpu_seconds(self) -> float:
        """Its CPU time so far."""
        return cpu_seconds(tree(self.pid))

    def open_files(self) -> int:
        """The number of its open files."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def log(self, end: int = 4000) -> str:
        """The end of its log."""
        if self._log_path is not None:
            return self._log_path.read_text(errors="replace")[-end:]
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-end:]

    async def kill(self) -> None:
        """Kills it and its children."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def terminate(self) -> int:
        """Sends SIGTERM. Returns its exit code."""
        self._process.terminate()
        async with asyncio.timeout(60):
            return await self._process.wait()

    async def stop(self) -> None:
        """Kills it, and closes its log."""
        await self.kill()
        self._log.close()


class OwnRouter(Router):
    """lmetric-router as a process, with a configuration, whose callbacks are timed.

    Args:
        folder: gets its files.
        engines: URLs of the engines.
        config: more keys of the configuration.
        port: the port; default: a free one.
        timed: run on asyncio's loop and time its callbacks; else on uvloop.
    """

    def __init__(
        self,
        folder: Path,
        engines: Sequence[str | Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        *,
        port: int | None = None,
        timed: bool = True,
        **more: Any,
    ) -> None:
        port = port or free_ports(1)[0]
        self.name = f"r{port}"
        entries = [
            {"url": each, "name": f"e{number}"} if isinstance(each, str) else dict(each)
            for number, each in enumerate(engines)
        ]
        values = {"engines": entries, "port": port, "log": {"json": True}, **(config or {})}
        self._callbacks = folder / f"{self.name}.callbacks"
        file = folder / f"{self.name}.yaml"
        file.write_bytes(orjson.dumps(values))
        run = [str(WATCHED), str(self._callbacks)] if timed else ["-c", RUN]
        super().__init__([sys.executable, *run, "serve", "--config", str(file)], port, **more)
        self._ready_at = 0.0

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Starts it, and waits until it answers a request."""
        await super().start(session)
        self._ready_at = time.monotonic()

    def slow_callbacks(self, limit_seconds: float = 0.05) -> list[str]:
        """The callbacks since the start that took more CPU time than a limit."""
        if not self._callbacks.exists():
            return []
        found = [line.split(" ", 2) for line in self._callbacks.read_text().splitlines()]
        return [
            f"{float(seconds):.3f} s: {what}"
            for at, seconds, what in found
            if float(at) > self._ready_at and float(seconds) > limit_seconds
        ]

    async def page(self, session: aiohttp.ClientSession, path: str) -> Any:
        """One of its JSON pages."""
        async with session.get(self.url + path) as response:
            assert response.status == 200, f"{path}: {response.status} {await response.text()}"
            return await response.json()

    async def column(self, session: aiohttp.ClientSession, name: str) -> dict[str, float]:
        """An indicator by engine."""
        told = await self.page(session, "/debug/indicators")
        return {engine: row[name] for model in told.values() for engine, row in model.items()}

    async def metric(self, session: aiohttp.ClientSession, name: str) -> dict[str, float]:
        """The samples of a metric, by labels."""
        async with session.get(f"{self.url}/metrics") as response:
            return samples(await response.text(), name)


def samples(page: str, name: str) -> dict[str, float]:
    """The samples of a metric on a page in Prometheus' text format, by labels."""
    found = {}
    for line in page.splitlines():
        whole, _, value = line.rpartition(" ")
        if whole == name or whole.startswith(f"{name}{{"):
            found[whole.removeprefix(name)] = float(value)
    return found


@asynccontextmanager
async def fleet(seed: int, count: int = 3, *, kv_events: bool = False) -> AsyncIterator[list[EngineProcess]]:
    """Engines that run."""
    engines = [EngineProcess(f"e{number}", seed + number, kv_events=kv_events) for number in range(count)]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@asynccontextmanager
async def routed(
    subject: str, engines: Sequence[EngineProcess], session: aiohttp.ClientSession, python: Path
) -> AsyncIterator[Router]:
    """A router before the engines."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        command = SUBJECTS[subject](python, port, [engine.url for engine in engines], Path(folder))
        router = Router(command, port)
        try:
            await router.start(session)
            yield router
        finally:
            await router.stop()


async def in_flight(router: Router, session: aiohttp.ClientSession) -> float | None:
    """The number of requests in flight that the router counts; None: it has no such page."""
    async with session.get(f"{router.url}/debug/indicators") as response:
        if response.status != 200:
            return None
        told = await response.json()
    return float(sum(values["bs"] for model in told.values() for values in model.values()))


async def settled(router: Router, session: aiohttp.ClientSession) -> str:
    """The requests in flight after some seconds."""
    count = None
    for _ in range(50):
        count = await in_flight(router, session)
        if not count:
            break
        await asyncio.sleep(0.1)
    return "" if count is None else f"{count:g}"
