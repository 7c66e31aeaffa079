"""Accepts TLS connections of clients.

`loop.create_server` tells a protocol of a connection only after its handshake, so connections that
never finish one would count against no limit. This listener counts them from the start.
"""

import asyncio
import contextlib
import errno
import socket

import structlog

from lmetric.server.http.connection import ClientConnection
from lmetric.server.http.frontend import Frontend

HANDSHAKE_SECONDS = 10.0
SHUTDOWN_SECONDS = 5.0  # for the client to confirm the end of TLS
ACCEPTS = 64  # most connections accepted before other events are served
RETRY_SECONDS = 1.0
# The process lacks descriptors or memory: accepting again at once would fail again.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = structlog.get_logger("lmetric.server")


class TlsListener:
    """Accepts connections on a socket. Each connection uses the certificate of its time."""

    def __init__(self, listener: socket.socket, front: Frontend) -> None:
        self._socket = listener
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None

    def start(self, backlog: int) -> None:
        """Listens. Raises OSError."""
        self._socket.setblocking(False)
        self._socket.listen(backlog)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stops accepting. Connections and handshakes continue."""
        if self._retry is not None:
            self._retry.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                log.error("cannot accept connections", reason=error.strerror)
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(
                    RETRY_SECONDS, self._loop.add_reader, self._socket, self._accept
                )
                return
            connection = self._front()
            if not connection.open_account(self._front.entrance.forwarding.peer(address, secure=True)):
                accepted.close()  # without TLS, it cannot get the error
                continue
            accepted.setblocking(False)
            task = self._loop.create_task(self._shake_hands(accepted, connection), name="TLS handshake")
            running = self._front.handshakes.running
            running.add(task)
            task.add_done_callback(running.discard)

    async def _shake_hands(self, accepted: socket.socket, connection: ClientConnection) -> None:
        assert self._front.tls is not None
        outcomes = self._front.handshakes.outcomes
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._front.tls.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except TimeoutError:
            outcomes["timeout"] += 1
        except OSError as error:  # bad TLS, no TLS, or the client left
            timed_out = isinstance(error, ConnectionAbortedError) and "longer than" in str(error)
            outcomes["timeout" if timed_out else "failed"] += 1
        else:
            outcomes["done"] += 1
        finally:
            if connection.transport is None:
                connection.close_account()
                with contextlib.suppress(OSError):
                    accepted.close()
