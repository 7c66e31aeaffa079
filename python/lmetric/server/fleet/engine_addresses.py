"""Addresses of engines, as gateways have them."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from lmetric.server.fleet.engine import Engine

_PORTS = {"http": 80, "https": 443}


def address_of(engine: Engine) -> str:
    """Returns IP:PORT of an engine; the host's name if its URL has no IP address."""
    return _address_at(engine.config.url)


@lru_cache(maxsize=16_384)  # the most engines of a router
def _address_at(url: str) -> str:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    return shortest(f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 80)}")


@lru_cache(maxsize=4096)
def shortest(address: str) -> str:
    """Returns IP:PORT with the IP address in its shortest spelling. Other texts stay."""
    host, _, port = address.rpartition(":")
    try:
        ip = ip_address(host.strip("[]"))
    except ValueError:
        return address
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


class EngineAddresses:
    """The engines of a model by their addresses: a search does not read all engines."""

    def __init__(self) -> None:
        # By IP:PORT, and by IP, the engines by name. Data-parallel ranks share an address.
        self._engines: dict[str, dict[str, Engine]] = {}

    def add(self, engine: Engine) -> None:
        """Adds an engine of the model."""
        for address in addresses_of(engine):
            self._engines.setdefault(address, {})[engine.name] = engine

    def remove(self, engine: Engine) -> None:
        """Removes an engine that leaves the model."""
        for address in addresses_of(engine):
            at_address = self._engines[address]
            del at_address[engine.name]
            if not at_address:
                del self._engines[address]

    def at(self, address: str) -> Collection[Engine]:
        """Returns the engines at IP:PORT, or at all ports of an IP."""
        return self._engines.get(address, {}).values()


def addresses_of(engine: Engine) -> tuple[str, str]:
    """Returns IP:PORT of an engine, and its IP."""
    address = address_of(engine)
    return address, address.rpartition(":")[0]
