"""Addresses of the other routers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, MutableMapping, Sequence
from urllib.parse import urlsplit

import aiohttp
import structlog

from lmetric import host_names
from lmetric.server.api.replica_pages import PATH
from lmetric.server.upstream.connection import connect_error

log = structlog.get_logger("lmetric.replicas")

# Limit on the processes that a router sends to and receives from; the core has the same limit.
MOST_ADDRESSES = 64


class Address:
    """An address of another router, or of this one."""

    def __init__(self, url: str, ip: str, port: int) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self.server_hostname = parts.hostname if parts.scheme == "https" else None
        self.place = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        self.url = f"{parts.scheme}://{self.place}{parts.path.rstrip('/')}{PATH}"
        self.own = False
        self.reached: bool | None = None  # None: not tried yet
        self.error: str | None = None
        self.lost_at: float | None = None  # Unix time of the first failure since it was reached
        self.lost_since = math.inf  # the same on the monotonic clock; infinity: it is reached
        self.keys_unreadable = False
        self.sending: asyncio.Task[None] | None = None
        self.version: int | None = None  # last load that it received; None: the next message is full
        self.full_at = -math.inf  # time of the last full message, monotonic clock


async def look_up(
    urls: Sequence[str],
    known: Mapping[tuple[str, str], Address],
    not_found: MutableMapping[str, str],
) -> dict[tuple[str, str], Address]:
    """Returns the addresses of all URLs. If a look-up fails, the known addresses stay.

    ``not_found``: by URL, why its last look-up failed; it is updated.
    """
    found: dict[tuple[str, str], Address] = {}
    for gone in not_found.keys() - set(urls):
        del not_found[gone]
    names = [host_names.look_up(urlsplit(url).hostname or "") for url in urls]
    for url, answer in zip(urls, await asyncio.gather(*names, return_exceptions=True), strict=True):
        if isinstance(answer, OSError):
            reason = str(connect_error(answer))
            if not_found.get(url) != reason:
                not_found[url] = reason
                log.warning("cannot look up the address of replicas", url=url, reason=reason)
            found |= {key: address for key, address in known.items() if key[0] == url}
            continue
        if isinstance(answer, BaseException):
            raise answer
        not_found.pop(url, None)
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for _, ip in answer:
            key = (url, ip)
            found[key] = known.get(key) or Address(url, ip, port)
    if len(found) > MOST_ADDRESSES:
        log.warning("too many replicas; the rest is ignored", found=len(found), most=MOST_ADDRESSES)
        found = dict(sorted(found.items())[:MOST_ADDRESSES])
    return found


async def read_answer(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Reads an answer. Raises ValueError if it is too long; its connection is then closed."""
    body = bytearray()
    while part := await answer.content.read(most + 1 - len(body)):
        body += part
        if len(body) > most:
            raise ValueError(f"an answer of more than {most} bytes")
    return bytes(body)
