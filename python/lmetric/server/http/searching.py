"""Requests for unknown models, which wait until the engines have been asked again."""

from __future__ import annotations

from lmetric.server.http.threads import PendingWork


class PendingSearch(PendingWork[None]):
    """A request that waits for a search of its model (`Fleet.seek`)."""

    def _explain(self) -> str:
        return "; the engines were asked for its model"
