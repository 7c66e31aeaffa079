"""The access log: a line for each request for an engine."""

from __future__ import annotations

import structlog

from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer
from lmetric.server.observe.refusals import NOTE_LENGTH

log = structlog.get_logger("lmetric.access")


class AccessLog(Observer):
    """Logs each request for an engine that has ended."""

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Logs a request."""
        error = request.error
        done = relay or InFlightRequest()
        note = done.reason
        if error is not None and not error.code and not note:
            note = error.message[:NOTE_LENGTH] or "the engine's own error"
        usage = done.usage
        first_token_at = usage.first_token_at if usage is not None else None
        fields = {
            "status": request.status,
            "engine": done.instance,
            "ttft_seconds": None if first_token_at is None else round(first_token_at - request.started, 6),
            "duration_seconds": round(request.ended_at - request.started, 6),
            "code": error.code if error is not None else None,
            "note": note or None,
            "model": (request.model.name if request.model is not None else None) or None,
            **request.earlier_names,
            "prompt_tokens": usage.prompt_tokens if usage is not None else None,
            "cached_tokens": usage.cached_tokens if usage is not None else None,
            "output_tokens": usage.output_tokens if usage is not None else None,
            "decision": done.label,
            "request_id": request.head.request_id,
            "tenant": request.tenant or None,
            "client": request.address,
            "path": request.head.path,
            "trace_id": None if request.trace is None else request.trace.hex_id,
        }
        log.info("request", **{name: value for name, value in fields.items() if value is not None})
