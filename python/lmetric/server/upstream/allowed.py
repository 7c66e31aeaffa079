"""Addresses allowed for engines that an administrator adds over /admin."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from lmetric.connection_errors import reason_of
from lmetric.host_names import look_up
from lmetric.server.api.errors import ApiError, bad

RESOLVE_SECONDS = 5.0

# Link-local addresses, and addresses where clouds serve a machine's credentials and settings.
FORBIDDEN = tuple(
    map(
        ip_network,
        (
            *("169.254.0.0/16", "fe80::/10"),  # AWS, Google Cloud, Azure, and most others
            *("fd00:ec2::254/128", "fd20:ce::254/128"),  # AWS and Google Cloud by IPv6
            "100.100.100.200/32",  # Alibaba Cloud
            "168.63.129.16/32",  # Azure's host
            "192.0.0.192/32",  # Oracle Cloud
        ),
    )
)
_NAT64 = ip_network("64:ff9b::/96")


class AllowedEngines:
    """The rules of `admin.allowed_engines`. None: any address that is not in `FORBIDDEN`."""

    def __init__(self, rules: Sequence[str] | None) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: list[str] = [] if rules is not None else ["*"]
        for rule in rules or ():
            try:
                self._networks.append(ip_network(rule, strict=False))
            except ValueError:
                self._names.append(rule.lower())

    def permits(self, host: str, address: str) -> bool:
        """Returns whether the router may connect to this IP address.

        ``host``: the host in the engine's URL.
        """
        ip = _plain(ip_address(address))
        if any(ip in network for network in self._networks):
            return True
        named = any(fnmatchcase(host.lower(), name) for name in self._names)
        return named and not any(ip in network for network in FORBIDDEN)

    async def resolve(self, host: str) -> str:
        """Resolves a host, checks its addresses, and returns the first one.

        Raises ApiError: 403 if one of them is not allowed, 400 if the look-up fails.
        """
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                found = await look_up(host)
        except (OSError, UnicodeError, TimeoutError) as error:
            reason = reason_of(error) or f"no answer within {RESOLVE_SECONDS:g} s"
            raise bad(f"cannot look up the address of {host!r}: {reason}", "url") from None
        for _, address in found:
            if not self.permits(host, address):
                raise ApiError(
                    403,
                    f"admin.allowed_engines does not allow engines at {host!r} ({address})",
                    param="url",
                    code="engine_not_allowed",
                )
        return found[0][1]


def _plain(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Returns the IPv4 address embedded in an IPv6 address, else the address itself."""
    if isinstance(ip, IPv4Address):
        return ip
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip
