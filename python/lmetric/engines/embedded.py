"""Emulated engines as child processes, which start and stop together and end with the parent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from lmetric.engines.errors import EngineStartError

_READY_SECONDS = 60.0
_STOP_SECONDS = 5.0

_log = logging.getLogger("lmetric.engines.embedded")


@dataclass(frozen=True, slots=True)
class EmbeddedEngine:
    """One running child process."""

    url: str
    kv_events_endpoint: str | None
    kv_events_replay_endpoint: str | None
    process: asyncio.subprocess.Process


class EmbeddedEngines:
    """``async with EmbeddedEngines([[], []]) as engines: engines.urls``.

    Args:
        flags: the flags of each engine, as of ``lmetric-router engine``. Each gets a free port.
        kv_events: engines publish KV events on local sockets, which /kv_event_sources lists.

    Raises:
        EngineStartError: an engine did not start; the message has its log. The others are stopped.
    """

    def __init__(self, flags: Sequence[Sequence[str]], *, kv_events: bool = False) -> None:
        self._flags = [[*each, "--port", "0", "--exit-with-parent"] for each in flags]
        self._sockets = tempfile.TemporaryDirectory(prefix="lmetric-") if kv_events else None
        if self._sockets is not None:
            for number, each in enumerate(self._flags):
                socket = f"ipc://{self._sockets.name}/{number}"
                each += ["--kv-events-endpoint", socket, "--kv-events-replay-endpoint", f"{socket}-replay"]
        self._children: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self.engines: list[EmbeddedEngine] = []

    @property
    def urls(self) -> list[str]:
        """URLs of the engines, in order."""
        return [engine.url for engine in self.engines]

    async def __aenter__(self) -> EmbeddedEngines:
        _log.info("starting %d emulated engines", len(self._flags))
        try:
            starts = [self._start(number, flags) for number, flags in enumerate(self._flags)]
            # Wait for all engines, so that the started ones can be stopped if one fails.
            results = await asyncio.gather(*starts, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                self.engines.append(result)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stops the engines: SIGTERM, then SIGKILL after a time limit."""
        await asyncio.gather(*(stop_process(child, _STOP_SECONDS) for child in self._children))
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._readers.clear()
        if self._sockets is not None:
            self._sockets.cleanup()

    async def _start(self, number: int, flags: Sequence[str]) -> EmbeddedEngine:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lmetric_lab.emulated",
            *flags,
            stdin=asyncio.subprocess.PIPE,  # closes with this process, and then the engine ends
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the parent, which stops the engines
        )
        self._children.append(child)
        assert child.stdout is not None
        assert child.stderr is not None
        said: deque[str] = deque(maxlen=5)
        reader = asyncio.create_task(self._relay(number, child.stderr, said))
        self._readers.append(reader)
        try:
            line = await asyncio.wait_for(child.stdout.readline(), _READY_SECONDS)
        except TimeoutError:
            raise EngineStartError(f"engine {number} was not ready within {_READY_SECONDS:.0f} s") from None
        if not line:
            code = await child.wait()
            await reader
            why = " / ".join(said) or "it printed nothing"
            raise EngineStartError(f"engine {number} ended with code {code}: {why}")
        ready = orjson.loads(line)
        return EmbeddedEngine(
            ready["url"], ready["kv_events_endpoint"], ready["kv_events_replay_endpoint"], child
        )

    @staticmethod
    async def _relay(number: int, stderr: asyncio.StreamReader, said: deque[str]) -> None:
        """Forwards the log of an engine."""
        while line := await stderr.readline():
            text = line.decode(errors="replace").rstrip()
            said.append(text)
            _log.info("engine %d: %s", number, text)


async def stop_process(process: asyncio.subprocess.Process, patience_seconds: float) -> None:
    """Stops a child: SIGTERM, then SIGKILL if it has not ended after `patience_seconds`."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), patience_seconds)
    except TimeoutError:
        _log.warning("process %d does not stop: killed", process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
