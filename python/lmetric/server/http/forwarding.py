"""Proxies in front of the router: which ones are trusted, and the client that they report."""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from lmetric._core import Peer

UNIX = "unix"  # the rule for all clients of a unix socket, and their name in logs
# Bytes of X-Forwarded-For that are read, from its end: a dozen addresses. Clients set the length.
READ_BYTES = 512
CACHED = 4096  # senders whose client is cached
CACHE_BYTES = CACHED * (READ_BYTES + 512)  # the bound on its memory; 512: objects of an entry

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Forwarding:
    """The rules of `forwarded.trusted_proxies`."""

    def __init__(self, rules: Sequence[str]) -> None:
        self._unix = UNIX in rules
        self._networks = [ipaddress.ip_network(rule) for rule in rules if rule != UNIX]
        # Requests of one proxy often come from the same few clients.
        self._cached = lru_cache(CACHED)(self._client)

    def peer(self, peername: object, *, secure: bool) -> Peer:
        """Returns the sender of a connection's requests. ``secure``: the connection uses TLS."""
        address = _peer_address(peername)
        return Peer(address, secure, self._trusts(_parse(address)) if address else self._unix)

    def _trusts(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)

    def trusts(self, address: str) -> bool:
        """Returns whether an address is that of a trusted proxy."""
        return self._trusts(_parse(address))

    def client(self, address: str, forwarded_for: bytes | None) -> str:
        """Returns the address of the client of a trusted proxy.

        It is the last address of X-Forwarded-For that is no trusted proxy: a client can write only
        those before it. Without such an address: the proxy's own.
        """
        if forwarded_for is not None and len(forwarded_for) > READ_BYTES:
            # The first entry of the rest may be cut.
            forwarded_for = forwarded_for[-READ_BYTES:].partition(b",")[2]
        return self._cached(address, forwarded_for)

    def _client(self, address: str, forwarded_for: bytes | None) -> str:
        nearest = address
        for entry in reversed((forwarded_for or b"").split(b",")):
            found = _parse(entry.decode("latin-1").strip())
            if found is None:
                break  # the addresses before it may be invented
            nearest = str(found)
            if not self._trusts(found):
                break
        return nearest


def _peer_address(peername: object) -> str:
    """Returns the IP address of a socket's peer; empty for clients of a unix socket."""
    if not isinstance(peername, tuple):
        return ""
    host = str(peername[0])
    if ":" not in host:
        return host
    parsed = _parse(host)
    return host if parsed is None else str(parsed)


def _parse(text: str) -> _Address | None:
    """Returns an address in one of the spellings of X-Forwarded-For: alone, or with a port."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
