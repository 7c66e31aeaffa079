"""Requests that the router refused: their reasons in the log, and the last ones by their ID."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import structlog

from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest
from lmetric.server.observe.live import REFUSED

LOG_SECONDS = 60.0  # between two lines about refusals for the same reason
KEPT = 2048  # refused requests that are remembered
NOTE_LENGTH = 200  # longest note of a refused request in a log, in characters
MESSAGE_LENGTH = 500  # longest message that is remembered, in characters

log = structlog.get_logger("lmetric.access")


class Refusal(NamedTuple):
    """A request that the router refused. ``ended_at``: seconds on the monotonic clock."""

    ended_at: float
    model: str
    status: int
    code: str | int | None
    message: str


class Refusals:
    """Logs refusals for a reason at once, further ones once a minute. Remembers the last ones."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str | int | None], tuple[float, int]] = {}  # last line, count
        # By tenant and ID of the request. Clients without a key take no place of a tenant's.
        self._of_tenants: OrderedDict[tuple[str, str], Refusal] = OrderedDict()
        self._of_nobody: OrderedDict[tuple[str, str], Refusal] = OrderedDict()

    def add(self, request: ClientRequest, error: ApiError) -> None:
        """Adds a request that the router answered with an error."""
        model, now = request.model.name if request.model is not None else "", request.ended_at
        last = self._of_tenants if request.tenant else self._of_nobody
        key = request.tenant, request.head.request_id
        last.pop(key, None)
        last[key] = Refusal(now, model, error.status, error.code, error.message[:MESSAGE_LENGTH])
        if len(last) > KEPT:
            last.popitem(last=False)
        if error.status in REFUSED:
            self._log(model, error, now)

    def _log(self, model: str, error: ApiError, now: float) -> None:
        key = (model, error.code)
        logged_at, requests = self._reasons.get(key, (-LOG_SECONDS, 0))
        if now - logged_at < LOG_SECONDS:
            self._reasons[key] = logged_at, requests + 1
            return
        self._reasons[key] = now, 0
        log.warning(
            "requests refused",
            status=error.status,
            reason=error.code,
            requests=requests + 1,
            model=model or None,
            message=error.message[:NOTE_LENGTH],
        )

    def forget(self, model: str) -> None:
        """Forgets when the refusals of a model that was removed were logged."""
        self._reasons = {key: logged for key, logged in self._reasons.items() if key[0] != model}

    def record(self, request_id: str, tenant: str | None) -> dict[str, Any] | None:
        """Returns what `/debug/decisions/ID` shows of a refused request; None: it is not known.

        ``tenant``: sees its own requests; None: sees the last of all.
        """
        found = self._of_tenants.get((tenant or "", request_id))
        if tenant is None:
            every = (*self._of_tenants.items(), *self._of_nobody.items())
            same = (each for (_, known), each in every if known == request_id)
            found = max(same, key=lambda each: each.ended_at, default=None)
        if found is None:
            return None
        shown = {"id": request_id, "model": found.model or None, "status": found.status, "code": found.code}
        because = f"the router refused it with status {found.status}: {found.message}"
        return shown | {"outcome": "refused", "because": because, "timeline": []}
