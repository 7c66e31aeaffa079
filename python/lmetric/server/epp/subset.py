"""The engines to which a gateway limits a request."""

from __future__ import annotations

from lmetric.server.api.errors import ApiError
from lmetric.server.epp import messages
from lmetric.server.epp.addresses import address_of
from lmetric.server.epp.ext_proc_pb2 import Metadata
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.model import Model


class Subset:
    """The engines of a request's subset, by IP:PORT or IP."""

    def __init__(self, addresses: frozenset[str]) -> None:
        self._addresses = addresses

    @classmethod
    def of(cls, metadata: Metadata) -> Subset | None:
        """Returns the subset in a message; None: it has none. An empty list is a subset."""
        hint = metadata.filter_metadata
        if messages.SUBSET_HINT not in hint:
            return None
        fields = hint[messages.SUBSET_HINT].fields
        if messages.SUBSET not in fields:
            return None
        value = fields[messages.SUBSET]
        if value.HasField("list_value"):
            texts = [entry.string_value for entry in value.list_value.values]
        else:
            texts = value.string_value.split(",")
        return cls(frozenset(text.strip() for text in texts if text.strip()))

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
