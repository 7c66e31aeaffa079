"""The engines to which a gateway limits a request, and their addresses as gateways have them."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.model import Model

_PORTS = {"http": 80, "https": 443}
_MOST_CHARACTERS = 64  # an address with its port has fewer


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


def shortest_of_subset(text: str) -> str:
    """Returns an entry of a subset, IP:PORT or IP, in the spelling of `address_of`."""
    return _shortest_entry(text) if len(text) <= _MOST_CHARACTERS else text


@lru_cache(maxsize=16_384)  # the most engines of a router
def _shortest_entry(text: str) -> str:
    try:
        ip = ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return shortest(text)
    return f"[{ip}]" if ip.version == 6 else str(ip)


class Subset:
    """The engines of a request's subset, by IP:PORT or IP."""

    def __init__(self, addresses: frozenset[str]) -> None:
        self._addresses = addresses

    def __contains__(self, engine: Engine) -> bool:
        address = address_of(engine)
        return address in self._addresses or address.rpartition(":")[0] in self._addresses

    def no_engine_error(self, model: Model, reason: str) -> ApiError:
        """Returns the error for a request that none of its engines can accept now."""
        return ApiError(
            503,
            f"{model.name}: the gateway limits the request to a subset, and no engine in it can accept it",
            engines=f"{', '.join(sorted(self._addresses)) or 'the subset is empty'}: {reason}",
            code="no_engine",
            headers={"retry-after": "2"},
        )
