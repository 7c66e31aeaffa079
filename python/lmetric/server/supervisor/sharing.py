"""Exchange between a router with workers and other routers: load, budgets and API keys.

Each worker publishes its own load. The supervisor publishes the budgets and the versions of the API
keys, because all workers share these. A message of another router reaches one worker, which gives
it to the supervisor, and the supervisor to all workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lmetric._core import Budgets
from lmetric.config import ServerConfig
from lmetric.server.api.issued import IssuedKey, IssuedKeys
from lmetric.server.background.key_exchange import KeyExchange
from lmetric.server.background.redis_budgets import RedisState
from lmetric.server.background.replicas import Replicas


class Sharing:
    """The exchange of all workers with other routers.

    ``router``: ID of this start of the router. ``tell``: calls all workers but that of a number,
    and returns their answers. ``change``: stores API keys in all workers. Raises ConfigError.
    """

    def __init__(
        self,
        config: ServerConfig,
        router: str,
        budgets: Budgets,
        keys: IssuedKeys,
        *,
        change: Callable[[Sequence[IssuedKey]], Awaitable[list[IssuedKey]]],
        tell: Callable[[str, Any, int | None], Awaitable[list[Any]]],
    ) -> None:
        self._budgets = budgets
        self._tell = tell
        self._has_keys = config.auth.identifies
        self._replicas = Replicas(config.replicas, lambda: (), budgets, router=router, process=router)
        self._replicas.on_counts = self._tell_counts
        self.keys = KeyExchange(self._replicas, keys, change)

    async def begin(self) -> None:
        """Copies the API keys of other routers, before the workers start."""
        if self._has_keys:
            await self.keys.begin()

    async def start(self) -> None:
        """Starts to send messages."""
        await self._replicas.start()

    async def stop(self) -> None:
        """Stops the exchange."""
        await self.keys.stop()
        await self._replicas.stop()

    async def receive(self, worker: int, body: bytes, version: int | None) -> dict[str, Any]:
        """Applies a load message that a worker has applied, in all other processes.

        ``body``: none for this router's own message. ``version``: of the load that counts in the
        worker. Returns the answer to the message.
        """
        versions = [version]
        if body:
            versions.append(self._replicas.apply(body))
            versions += await self._tell("replica", body, worker)
        return self._replicas.answer(None if None in versions else version)

    async def _tell_counts(self, state: RedisState, counts: Sequence[bytes]) -> None:
        await self._tell("counts", (state, counts), None)

    async def counts(self) -> tuple[RedisState | None, list[bytes]] | None:
        """Returns what a worker that starts must know; None: other routers share no budgets."""
        if not self._replicas.shares:
            return None
        saved = await asyncio.to_thread(self._budgets.save, (time.monotonic(), time.time()))
        return self._replicas.redis, [saved]
