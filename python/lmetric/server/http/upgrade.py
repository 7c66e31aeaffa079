"""Passes the listening sockets of a running router to its successor.

Both processes then have the same sockets, with one queue of new connections. So no connection is
refused or reset: whoever accepts it serves it. (With SO_REUSEPORT, each process has a queue of its
own, and the kernel resets the connections in the queue of a process that closes its socket.)

The successor connects to the unix socket `upgrade_socket` and sends a word per line:

- ``sockets``: the answer carries the descriptors (SCM_RIGHTS) of all sockets.
- ``listening``: the successor accepts connections. The predecessor stops to accept and drains.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from lmetric.server.http.port import remove_stale

SOCKETS, LISTENING, DONE = b"sockets\n", b"listening\n", b"done\n"
MAX_WORD_BYTES = 64
ANSWER_SECONDS = 5.0
MAX_SOCKETS = 64

log = structlog.get_logger("lmetric.server")


class Words:
    """The words that come over a connection, one per line."""

    def __init__(self, connection: socket.socket, begun: bytes = b"") -> None:
        self._connection = connection
        self._received = begun

    async def next(self) -> bytes:
        """Returns the next word with its line end; empty at the end of the connection.

        Raises OSError, also for a word that is too long.
        """
        loop = asyncio.get_running_loop()
        while (end := self._received.find(b"\n") + 1) == 0:
            if len(self._received) > MAX_WORD_BYTES:
                raise OSError("a word is too long")
            if not (more := await loop.sock_recv(self._connection, MAX_WORD_BYTES)):
                return b""
            self._received += more
        word, self._received = self._received[:end], self._received[end:]
        return word


class Predecessor:
    """A running router, as its successor sees it. ``sockets``: copies of its listening sockets."""

    def __init__(self, connection: socket.socket, words: Words, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        self._connection = connection
        self._words = words

    def close_all_but(self, used: Sequence[socket.socket]) -> None:
        """Closes the sockets that this process does not use: clients would wait there forever."""
        for each in self.sockets:
            if each not in used:
                each.close()

    async def replace(self) -> None:
        """Tells it that this process accepts connections, and waits until it has stopped."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await loop.sock_sendall(self._connection, LISTENING)
                if await self._words.next() != DONE:
                    raise OSError("no answer")
        except (OSError, TimeoutError) as error:
            log.warning("the predecessor did not confirm that it drains", reason=str(error) or "no answer")
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connection to it. Without `replace`, it serves on."""
        self._connection.close()


async def find_predecessor(path: Path) -> Predecessor | None:
    """Returns the router that runs on this upgrade socket; None: there is none."""
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    sockets: list[socket.socket] = []
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await loop.sock_connect(connection, str(path))
            await loop.sock_sendall(connection, SOCKETS)
            await _readable(loop, connection)
            # The descriptors come with the first byte.
            begun, descriptors, _, _ = socket.recv_fds(connection, MAX_WORD_BYTES, MAX_SOCKETS)
            sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            words = Words(connection, begun)
            if await words.next() != DONE:
                raise OSError("no answer")
    except (OSError, TimeoutError) as error:
        for each in (connection, *sockets):
            each.close()
        if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
            log.warning("no listening sockets from a predecessor", path=str(path), reason=str(error))
        return None
    for each in sockets:
        os.set_inheritable(each.fileno(), False)
    return Predecessor(connection, words, sockets)


async def _readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    """Waits until a socket has data; `sock_recv` would lose the descriptors with it."""
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


class UpgradeSocket:
    """Serves successors. ``replaced`` is called when one of them accepts connections."""

    def __init__(self, path: Path, sockets: Sequence[socket.socket], replaced: Callable[[], None]) -> None:
        self._path = path
        self._sockets = sockets
        self._replaced = replaced
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, *, replace: bool) -> None:
        """Listens. ``replace``: the file is a predecessor's. Raises OSError.

        Only processes of the same user may connect.
        """
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            if not replace:
                remove_stale(self._path)
            new.unlink(missing_ok=True)
            listener.bind(str(new))
            new.chmod(0o600)
            listener.listen(4)
            new.rename(self._path)  # at once, so that there is a router to find at any time
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._socket = listener
        self._inode = self._path.stat().st_ino
        loop.add_reader(listener, self._accept, loop, listener)

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        task = loop.create_task(self._serve(loop, connection), name="upgrade")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            words = Words(connection)
            while word := await words.next():
                if word == SOCKETS:
                    log.info("a successor takes over the listening sockets")
                    socket.send_fds(connection, [DONE], [each.fileno() for each in self._sockets])
                elif word == LISTENING:
                    self._replaced()
                    await loop.sock_sendall(connection, DONE)

    def close(self) -> None:
        """Stops serving successors."""
        listener, self._socket = self._socket, None
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener)
        listener.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        for task in self._tasks:
            task.cancel()
