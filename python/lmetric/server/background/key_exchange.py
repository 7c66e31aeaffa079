"""The exchange of issued API keys between routers.

The answer to each load message has the version of the receiver's keys. A router that does not have
this version gets the records that changed since its last one. Records come only from configured
addresses: whoever knows the token of the replicas can read them, but cannot add any.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import aiohttp
import structlog

from lmetric._core import LmetricError
from lmetric.server.api.issued import MOST_KEYS, IssuedKey, IssuedKeys, KeyTable, decode
from lmetric.server.api.replica_pages import KEYS_PAGE
from lmetric.server.background.addresses import MOST_ADDRESSES, Address

if TYPE_CHECKING:
    from lmetric.server.background.replicas import Replicas

MOST_RECORDS = 100  # in an answer
MOST_ANSWER_BYTES = 256 << 10  # with the longest names
AT_ONCE = 4  # routers from which this one copies keys
FIRST_SECONDS = 2.0  # for the copies at the start
CONFIRM_SECONDS = 5.0  # for the other routers to copy a change

log = structlog.get_logger("lmetric.keys")


class KeyExchange:
    """Copies the issued keys of the other routers.

    ``change`` stores records, and returns those that have changed.
    """

    def __init__(
        self,
        replicas: Replicas,
        keys: IssuedKeys,
        change: Callable[[Sequence[IssuedKey]], Awaitable[list[IssuedKey]]],
    ) -> None:
        self._replicas = replicas
        self._keys = keys
        self._change = change
        self._copied: dict[str, int] = {}  # by router: the version of its keys that this one has
        self._confirmed: dict[str, int] = {}  # by router: the version of this one's keys that it has
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        replicas.keys_version = lambda: self._keys.version
        replicas.on_keys_version = self._follow

    async def begin(self) -> None:
        """Copies the keys of all routers that answer within `FIRST_SECONDS`.

        Called before the router listens: a key that was revoked meanwhile must not be valid.
        """
        await self._replicas.connect()
        copies = [self._copy(each, None) for each in self._replicas.addresses.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await asyncio.gather(*copies)

    async def stop(self) -> None:
        """Ends the copies."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _follow(self, address: Address, router: str, version: int) -> None:
        """Copies the keys of a router if it has others than the last copy."""
        if version <= self._copied.get(router, 0) or router in self._tasks:
            return
        task = self._tasks[router] = asyncio.create_task(self._copy(address, router), name="API keys")
        task.add_done_callback(lambda _: self._tasks.pop(router, None))

    async def _copy(self, address: Address, router: str | None) -> None:
        """Copies keys. ``router``: at the address; None: not known yet."""
        async with self._places:
            try:
                await self._copy_all(address, router)
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # the exchange of load reports it
            except (ValueError, LmetricError) as error:
                if router is not None and not address.keys_unreadable:
                    address.keys_unreadable = True
                    log.warning(
                        "cannot copy API keys of another router", address=address.place, reason=str(error)
                    )
            else:
                address.keys_unreadable = False

    async def _copy_all(self, address: Address, router: str | None) -> None:
        copied = after = self._copied.get(router, 0) if router is not None else 0
        keys: list[IssuedKey] = []
        while True:
            query = urlencode({"after": after, "copied": copied, "router": self._replicas.router})
            body = await self._replicas.call(
                address, None, page=f"{KEYS_PAGE}?{query}", most=MOST_ANSWER_BYTES
            )
            table = decode(body)
            if router is None:
                router = table.router
            if table.router != router or router == self._replicas.router:
                return  # another process has the address now; the next answer to a message has its ID
            keys += table.keys
            after = table.version
            if len(table.keys) >= MOST_RECORDS and len(keys) < MOST_KEYS:
                continue
            if not keys:
                return
            await self._add(router, keys)
            if len(self._copied) > 2 * MOST_ADDRESSES:  # of processes that have ended
                self._copied.clear()
            self._copied[router] = copied = after
            keys = []

    async def _add(self, router: str, keys: list[IssuedKey]) -> None:
        changed = await self._change(keys)
        if changed:
            ended = sum(bool(key.revoked) for key in changed)
            log.info("API keys of another router", router=router, keys=len(changed), revoked=ended)

    async def publish(self, keys: Sequence[IssuedKey]) -> None:
        """Stores issued or revoked keys, and waits until the other routers have them.

        Raises LmetricError.
        """
        try:
            await self._change(keys)
        finally:  # a revocation applies even if it cannot be stored
            await self._confirmed_by_all()

    async def answer(self, router: str, after: int, copied: int) -> bytes:
        """Returns the first records that changed after a version, for another router.

        ``copied``: the version that it has stored.
        """
        if router in self._replicas.routers:
            self._confirmed = {each: self._confirmed.get(each, 0) for each in self._replicas.routers}
            self._confirmed[router] = copied
        keys, version = self._keys.since(after, MOST_RECORDS)
        return KeyTable(keys, self._replicas.router, version).encode()

    async def _confirmed_by_all(self) -> None:
        """Waits until all routers that send their load have this router's keys.

        After `CONFIRM_SECONDS`, it logs the others and returns.
        """
        version = self._keys.version

        def late() -> list[str]:
            routers = self._replicas.routers
            return [router for router in routers if self._confirmed.get(router, 0) < version]

        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                while late():  # noqa: ASYNC110 - the exchange has no event for it
                    await asyncio.sleep(self._replicas.config.interval / 10)
        except TimeoutError:
            log.warning("other routers have not copied a change of API keys yet", routers=late())
