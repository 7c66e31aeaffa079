"""Stored responses that clients made through other routers of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import aiohttp
import orjson

from lmetric.server.api.replica_pages import STORED_PAGE
from lmetric.server.api.stored import MAX_ID_LENGTH, Holder
from lmetric.server.background.addresses import Address

if TYPE_CHECKING:
    from lmetric.server.background.replicas import Replicas

# Searches at once. Each sends a message to all routers, and clients may invent IDs.
MOST_SEARCHES = 64
ANSWER_SECONDS = 1.0


class StoredSearch:
    """Asks the other routers which engine holds a response."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._searches: set[asyncio.Task[Holder | None]] = set()

    @property
    def on(self) -> bool:
        """Whether there are other routers."""
        return self._replicas.on

    def begin(self, tenant: str, response_id: str) -> asyncio.Task[Holder | None] | None:
        """Begins a search of a tenant's response; its result is None if no router knows it.

        None: there are too many searches, or no response has this ID.
        """
        if len(self._searches) >= MOST_SEARCHES:
            return None
        if not 0 < len(response_id) <= MAX_ID_LENGTH:
            return None
        task = asyncio.create_task(self._find(tenant, response_id), name="stored response")
        self._searches.add(task)
        task.add_done_callback(self._searches.discard)
        return task

    async def _find(self, tenant: str, response_id: str) -> Holder | None:
        query = urlencode({"tenant": tenant, "id": response_id}, errors="surrogateescape")
        async for holder in self._answers(f"{STORED_PAGE}?{query}"):
            if holder is not None:
                return holder
        return None

    async def _answers(self, page: str) -> AsyncIterator[Holder | None]:
        others = [each for each in self._replicas.addresses.values() if not each.own]
        asked = [asyncio.create_task(self._ask(each, page), name="stored response") for each in others]
        try:
            for answer in asyncio.as_completed(asked):
                yield await answer
        finally:
            for task in asked:
                task.cancel()

    async def _ask(self, address: Address, page: str) -> Holder | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                told = orjson.loads(await self._replicas.call(address, None, page=page))
            holder = Holder(told["model"], told["engine"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError):
            return None  # it does not know the response; the exchange of load reports lost routers
        return holder if all(isinstance(each, str) for each in holder) else None
