"""Stored responses that clients made through other routers of the fleet."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import aiohttp
import orjson

from lmetric.server.api.errors import ApiError
from lmetric.server.api.replica_pages import STORED_PAGE
from lmetric.server.api.stored import MAX_ID_LENGTH, Holder
from lmetric.server.background.addresses import Address

if TYPE_CHECKING:
    from lmetric.server.background.replicas import Replicas

# Searches at once, of all clients and of one tenant. Each sends a message to all routers, and
# clients may invent IDs.
MOST_SEARCHES = 64
TENANT_SEARCHES = 16
ANSWER_SECONDS = 1.0
# After this time without an answer to its messages, a router counts as gone, with its knowledge.
GONE_SECONDS = 60.0


class StoredSearch:
    """Asks the other routers which engine holds a response."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._searches: Counter[str] = Counter()  # by tenant

    @property
    def on(self) -> bool:
        """Whether there are other routers."""
        return self._replicas.on

    def begin(self, tenant: str, response_id: str) -> asyncio.Task[Holder | None] | None:
        """Begins a search of a tenant's response; its result is None if no router knows it.

        The search raises ApiError (503) if it cannot find that out now. None: no response has this
        ID.
        """
        if not 0 < len(response_id) <= MAX_ID_LENGTH:
            return None
        return asyncio.create_task(self._find(tenant, response_id), name="stored response")

    async def _find(self, tenant: str, response_id: str) -> Holder | None:
        searches = self._searches
        if searches.total() >= MOST_SEARCHES or (tenant and searches[tenant] >= TENANT_SEARCHES):
            many = "too many requests search other routers for stored responses"
            raise _not_now(many, code="too_many_searches")
        query = urlencode({"tenant": tenant, "id": response_id}, errors="surrogateescape")
        gone = time.monotonic() - GONE_SECONDS  # the exchange of load notes when a router is lost or back
        addresses = self._replicas.addresses.values()
        others = [each for each in addresses if not each.own and each.lost_since > gone]
        silent: list[Address] = []
        asking = [self._ask(each, f"{STORED_PAGE}?{query}", silent) for each in others]
        asked = [asyncio.create_task(each, name="stored response") for each in asking]
        searches[tenant] += 1
        try:
            for answer in asyncio.as_completed(asked):
                if (holder := await answer) is not None:
                    return holder
        finally:
            searches[tenant] -= 1
            if not searches[tenant]:
                del searches[tenant]
            for task in asked:
                task.cancel()
        if silent:
            lacking = f"{len(silent)} of {len(others)} routers that may know the response do not answer"
            raise _not_now(lacking, code="replicas_unreachable")
        return None

    async def _ask(self, address: Address, page: str, silent: list[Address]) -> Holder | None:
        """Returns the holder that a router names. Without an answer, adds it to ``silent``."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                told = orjson.loads(await self._replicas.call(address, None, page=page))
            if told == {}:
                return None  # it does not know the response
            holder = Holder(told["model"], told["engine"])
            if all(isinstance(each, str) for each in holder):
                return holder
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError):
            pass  # the exchange of load reports lost routers
        silent.append(address)
        return None


def _not_now(why: str, *, code: str) -> ApiError:
    return ApiError(503, f"{why}; retry", code=code, headers={"retry-after": "1"})
