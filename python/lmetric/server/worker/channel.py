"""Calls between the supervisor and one worker, over a pair of sockets that only they have."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from lmetric._core import LmetricError

log = structlog.get_logger("lmetric.workers")

_HEAD = struct.Struct("!I")
MAX_UNREAD_BYTES = 64 << 20  # of messages that the other end has not read; then calls fail

Answer = Callable[[str, Any], Awaitable[Any]]


class ChannelClosedError(Exception):
    """The process at the other end has ended."""


class NoAnswerError(ChannelClosedError):
    """The process at the other end does not answer in time, or reads no messages: it may be
    suspended."""


class Channel:
    """One end of the pair. Each end calls the other, and calls may overlap.

    ``answer`` is called with the name and the value of each call from the other end; what it
    returns, or an LmetricError that it raises, goes back.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="channel")

    @classmethod
    async def open(cls, end: socket.socket, answer: Answer) -> Channel:
        """Opens an end of the pair."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, answer)

    async def call(self, name: str, value: Any = None, *, seconds: float | None = None) -> Any:
        """Calls the other end.

        ``seconds``: how long to wait for the answer; None: until the other end ends.

        Raises:
            LmetricError: as the other end raised it.
            ChannelClosedError: the other end has ended.
            NoAnswerError: it did not answer in time, or has not read `MAX_UNREAD_BYTES`.
        """
        if self.closed.is_set():
            raise ChannelClosedError
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            raise NoAnswerError
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(("call", number, name, value))
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise NoAnswerError from None
        finally:
            del self._waiting[number]

    def _send(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        self._writer.write(_HEAD.pack(len(data)) + data)

    async def _run(self) -> None:
        try:
            while True:
                (size,) = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                data = await self._reader.readexactly(size)
                try:
                    message = pickle.loads(data)
                except Exception as problem:  # of any kind: a class of another version decides
                    log.error(
                        "a message between processes cannot be read: the installed files may have another "
                        "version than the server; restart the server",
                        reason=f"{type(problem).__name__}: {problem}",
                    )
                    return
                if message[0] == "call":
                    task = asyncio.create_task(self._reply(*message[1:]), name=f"call {message[2]}")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    continue
                _, number, value, error = message
                future = self._waiting.get(number)
                if future is None or future.done():
                    continue
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ChannelClosedError())
            self._writer.close()

    async def _reply(self, number: int, name: str, value: Any) -> None:
        result: Any = None
        error: LmetricError | None = None
        try:
            result = await self._answer(name, value)
        except LmetricError as raised:
            error = raised if _travels(raised) else LmetricError(str(raised))
        except Exception as raised:
            if isinstance(raised, ChannelClosedError) and self.closed.is_set():
                return  # the caller has ended, and the answer needed it
            log.exception("a call between processes failed", call=name)
            error = LmetricError(f"{name}: {type(raised).__name__}: {raised}")
        if not self.closed.is_set():
            self._send(("reply", number, result, error))

    async def close(self) -> None:
        """Ends the channel."""
        for task in [*self._tasks, self._task]:
            task.cancel()
        await asyncio.gather(*self._tasks, self._task, return_exceptions=True)


def _travels(error: Exception) -> bool:
    """Returns whether the other end can read an error as it is."""
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # of any kind: the error decides how it is made again
        return False
