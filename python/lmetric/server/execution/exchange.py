"""A request for an engine: as its client sent it, and what answers for it until it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lmetric._core import RequestHead
from lmetric.config import ServerConfig, Timeouts
from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.pool import Pool

FAILED = "the router failed; its log says why"
STOPPING = "the router is shutting down"


class ClientPort(Protocol):
    """The connection of the client that asks."""

    relay: InFlightRequest | None
    body_size: int

    @property
    def writing_paused(self) -> bool:
        """Whether the client does not keep up."""

    def release_body(self) -> None:
        """The request's body is no longer kept."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of answering. Each request reads it, and reading a model of pydantic takes
    several times as long."""

    attempts: int
    failures: frozenset[str]
    statuses: frozenset[int]
    show_engines: bool
    timeouts: Timeouts

    @classmethod
    def of(cls, config: ServerConfig) -> Rules:
        """The rules of a configuration."""
        retries = config.retries
        return cls(
            retries.attempts,
            frozenset(retries.failures),
            frozenset(retries.statuses),
            config.errors.show_engines,
            config.timeouts,
        )


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A request for an engine as its client sent it; ``done`` is told whether the connection goes on."""

    client: ClientPort
    transport: asyncio.Transport
    head: RequestHead
    http11: bool
    keep_alive: bool
    done: Callable[[bool], None]
    path: str = field(init=False)
    started: float = field(default_factory=time.monotonic)  # seconds on the monotonic clock
    address: str | None = None  # of the client, for the access log
    cors: bytes = b""  # lines of the answer's head; empty: CORS is off
    tenant: str = ""
    pool: Pool | None = None
    priority: int | None = None  # the router's, lower first; None: requests are not ordered
    drops_priority: bool = False  # the client's own does not go on
    prompt_bytes: int = 0  # 0 where the prompt was given as tokens

    def __post_init__(self) -> None:
        self.path = self.head.path

    def overdue(self, limit_seconds: float | None, now: float) -> str | None:
        """Why the request has taken too long; None: it has not. `limit_seconds` None: no limit."""
        if limit_seconds is None or now - self.started <= limit_seconds:
            return None
        return f"the request took longer than {limit_seconds:g} s (timeouts.request)"


class InFlightRequest:
    """What answers for a request until it ends: its client's connection and the server tell it what happens.

    The counts are what is known of the answer when it has ended. Most requests change few of these: what
    they leave is not set for each of them.
    """

    committed = False  # the client has something of an engine's answer
    close_client = False
    reason = ""  # why it ended, where it did not end well
    status = 0
    output_tokens = 0
    prompt_tokens: int | None = None  # as the engine counted them
    cached_tokens: int | None = None  # of the prompt, as the engine counted them
    first_token_at: float | None = None

    @property
    def decision(self) -> str | None:
        """Label of its routing decision; None: it was not routed."""
        return None

    @property
    def instance(self) -> str | None:
        """The engine that answered, or was tried last; None: it was not routed."""
        return None

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        """Ends the request in the middle, unless it has ended; ``error`` is for a client that has nothing."""
        raise NotImplementedError

    def client_gone(self) -> None:
        """The client left."""
        self._leave("the client left")

    def client_slow(self) -> None:
        """The client does not keep up."""

    def client_ready(self) -> None:
        """The client caught up."""

    def check(self, now: float) -> None:
        """Called now and then: ends what takes too long."""

    def stop(self) -> None:
        """The server stops."""
        error = ApiError(503, STOPPING, code="shutting_down", headers={"retry-after": "5"})
        self._leave(STOPPING, None if self.committed else error)

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""
        self._leave("internal error", None if self.committed else ApiError(500, FAILED))
