"""Requests for unknown models and stored responses, which wait until others have been asked."""

from __future__ import annotations

from lmetric.server.api.stored import Holder
from lmetric.server.http.threads import PendingWork


class PendingSearch(PendingWork[None]):
    """A request that waits for a search of its model (`Fleet.seek`)."""

    def _explain(self) -> str:
        return "; the engines were asked for its model"


class StoredPendingSearch(PendingWork[Holder | None]):
    """A request that waits for a search of a stored response."""

    def _explain(self) -> str:
        return "; other routers were asked for the stored response"
