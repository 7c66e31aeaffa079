"""The connection of a request's client, as the execution of the request sees it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from lmetric._core import Peer


class Payer(Protocol):
    """The counts of a client address."""

    is_gateway: bool
    running: int


class ClientPort(Protocol):
    """The connection of the request's client."""

    relay: Any  # its `InFlightRequest`, or None
    transport: asyncio.Transport | None
    peer: Peer

    @property
    def payer(self) -> Payer | None:
        """The client whose limits the request counts against; None: it has disconnected."""

    @property
    def sender(self) -> str:
        """The IP address of the request's client; empty: of a unix socket."""

    @property
    def writing_paused(self) -> bool:
        """Whether the client reads too slowly."""

    def release_body(self) -> None:
        """Releases the counted bytes of the request's body."""

    def answered(self, goes_on: bool) -> None:
        """Ends the request in flight. ``goes_on``: the connection may carry another request."""
