"""Look-ups of host names for aiohttp."""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from lmetric.host_names import look_up


class Resolver(AbstractResolver):
    """A resolver of aiohttp that uses `look_up`, and not the event loop's threads."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Returns the addresses of a host name. ``family``: 0: IPv4 and IPv6."""
        return [
            ResolveResult(
                hostname=host, host=ip, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            for kind, ip in await look_up(host)
            if family in (kind, socket.AF_UNSPEC)
        ]

    async def close(self) -> None:
        """Does nothing."""
