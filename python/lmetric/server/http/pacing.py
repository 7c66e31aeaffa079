"""Reading in turns: a connection that reads much leaves time to the others."""

from typing import Any

import aiohttp
from aiohttp.web_protocol import RequestHandler

from lmetric.server.http.account import ConnectionAccount
from lmetric.server.http.client_load import Client
from lmetric.server.upstream.reading import read_on_later

if not hasattr(RequestHandler, "_pause_transport_reading"):
    raise ImportError(
        f"aiohttp {aiohttp.__version__} lacks what the server builds on: install 3.14.4 or a later 3.14"
    )


class PacedHandler(RequestHandler):
    """An aiohttp connection whose bytes count for its client.

    Its large reads take turns with those of other connections.
    """

    __slots__ = ("_late", "_resting", "account")

    account: ConnectionAccount

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: list[bytes] = []  # reads that a later turn processes
        self._resting = False  # reading is paused until the next turn of the loop

    @property
    def payer(self) -> Client | None:
        """The client that pays for the request in flight; None: it has disconnected."""
        return self.account.payer

    def release_body(self) -> None:
        """Releases the counted bytes of the request's body."""
        if self.account.body_size:
            self.account.keep_body(0)

    def _received(self, data: bytes) -> None:
        """Processes a read."""
        raise NotImplementedError

    def _is_full(self) -> bool:
        """Returns whether reading stays paused."""
        raise NotImplementedError

    def _rest_reading(self) -> None:
        """Leaves the rest of the loop's turn to other connections."""
        if not self._resting:
            self._resting = True
            self._pause_transport_reading()
            read_on_later(self._loop, self._read_on)

    def _keep_late(self, data: bytes) -> None:
        """Keeps a read for a later turn."""
        client = self.account.client
        if client is None or not client.hold(len(data)):
            self.force_close()
        else:
            self._late.append(data)

    def _resume_transport_reading(self) -> None:
        if not self._resting:  # else `_read_on` resumes
            super()._resume_transport_reading()

    def _read_on(self) -> None:
        if self._late:
            read_on_later(self._loop, self._read_on)
            data = self._late.pop(0)
            if self.account.client is not None:
                self.account.client.release(len(data))
            if self.transport is not None and not self.transport.is_closing():
                self._received(data)
            return
        self._resting = False
        if not self._is_full() and not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _drop_late(self) -> None:
        """Drops the reads that wait for a turn."""
        if self.account.client is not None:
            self.account.client.release(sum(map(len, self._late)))
        self._late.clear()
