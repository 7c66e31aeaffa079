"""The engines to which a gateway limits a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import ip_address

from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.engine_addresses import EngineAddresses, addresses_of, shortest
from lmetric.server.fleet.model import Model

_MOST_CHARACTERS = 64  # an address with its port has fewer


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


def index_addresses(model: Model) -> None:
    """Keeps the addresses of a model's engines from now on."""
    model.addresses = EngineAddresses()
    for engine in model.engines.values():
        model.addresses.add(engine)


class Subset:
    """The engines of a request's subset, by IP:PORT or IP."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = dict.fromkeys(addresses)

    def __contains__(self, engine: Engine) -> bool:
        return any(address in self._addresses for address in addresses_of(engine))

    def names_in(self, model: Model) -> Iterator[str]:
        """Yields the names of the model's engines in the subset, each once."""
        addresses = model.addresses
        assert addresses is not None  # kept by whoever gives requests a subset
        found = (engine.name for each in self._addresses for engine in addresses.at(each))
        return iter(dict.fromkeys(found))

    def no_engine_error(self, model: Model, reason: str) -> ApiError:
        """Returns the error for a request that none of its engines can accept now."""
        return ApiError(
            503,
            f"{model.name}: the gateway limits the request to a subset, and no engine in it can accept it",
            engines=f"{', '.join(sorted(self._addresses)) or 'the subset is empty'}: {reason}",
            code="no_engine",
            headers={"retry-after": "2"},
        )
