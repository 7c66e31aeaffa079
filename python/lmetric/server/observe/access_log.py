"""The access log: a line for each request for an engine, and a line for refused requests."""

from __future__ import annotations

import structlog

from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer
from lmetric.server.observe.live import REFUSED

REFUSALS_SECONDS = 60.0  # between two lines about refusals for the same reason
# Longest note of a refused request, in characters.
NOTE_LENGTH = 200

log = structlog.get_logger("lmetric.access")


class AccessLog(Observer):
    """Logs each request for an engine that has ended."""

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Logs a request."""
        error = request.error
        done = relay or InFlightRequest()
        note = done.reason
        if error is not None and not note:
            note = error.code or error.message[:NOTE_LENGTH] or "the engine's own error"
        usage = done.usage
        first_token_at = usage.first_token_at if usage is not None else None
        fields = {
            "status": request.status,
            "engine": done.instance,
            "ttft_seconds": None if first_token_at is None else round(first_token_at - request.started, 6),
            "duration_seconds": round(request.ended_at - request.started, 6),
            "note": note or None,
            "model": (request.model.name if request.model is not None else None) or None,
            **request.earlier_names,
            "prompt_tokens": usage.prompt_tokens if usage is not None else None,
            "cached_tokens": usage.cached_tokens if usage is not None else None,
            "output_tokens": usage.output_tokens if usage is not None else None,
            "decision": done.decision,
            "request_id": request.head.request_id,
            "tenant": request.tenant or None,
            "client": request.address,
            "path": request.path,
            "trace_id": None if request.trace is None else request.trace.hex_id,
        }
        log.info("request", **{name: value for name, value in fields.items() if value is not None})


class RefusalLog:
    """Logs the reasons of refused requests: the first at once, further ones once a minute."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str | int | None], tuple[float, int]] = {}  # last line, count

    def count(self, request: ClientRequest, error: ApiError) -> None:
        """Counts a request that the router refused with an error."""
        if error.status not in REFUSED:
            return
        model = request.model.name if request.model is not None else ""
        key, now = (model, error.code), request.ended_at
        logged_at, requests = self._reasons.get(key, (-REFUSALS_SECONDS, 0))
        if now - logged_at < REFUSALS_SECONDS:
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
