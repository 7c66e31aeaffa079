"""Direct: a request about a stored response, which only the engine that holds it can answer.

It passes any answer on, like the plain way, without a decision, a ticket and retries.
"""

from __future__ import annotations

from typing import Any

from lmetric._core import END, ENGINE_ERROR
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, Rules
from lmetric.server.execution.failures import STATUSES, blame, broken
from lmetric.server.execution.plan import Attempt, Ended, EngineLost, OtherEngine, Step, Way, ticket_kind
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.runner import Runner
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.model import Model


def direct(p: Progress, engine: Engine, method: bytes) -> Way[None]:
    """Sends the request to its engine, and passes the answer on to the client."""
    limit_seconds = p.rules.timeouts.first_byte
    step = Step(engine, b"", "pass", limit_seconds=limit_seconds, method=method, advances_ticket=False)
    try:
        attempt, flags = yield step
        if not p.committed:
            p.commit(attempt)
            if flags & END and not flags & ENGINE_ERROR:
                p.main = None
            else:
                yield None  # until the end of the answer
    except OtherEngine:  # only for its gateway, which forwards the answer
        raise Ended(None, "cancelled") from None
    except EngineLost as lost:
        p.reason, code = lost.reason, ticket_kind(lost.kind)
        blame(p, lost)
        engines = f"{engine.name}: {lost.client_reason}"
        if p.committed:
            raise broken(p, engines, lost.kind) from None
        message = "the engine that holds the response did not answer"
        headers = {"retry-after": "1"}
        error = ApiError(STATUSES[code], message, engines=engines, code=code, headers=headers)
        raise Ended(error) from None


class DirectRunner(Runner):
    """One request about a stored response. It has neither a decision nor a ticket."""

    decision: Any = None
    ticket: Any = None
    label: Any = None

    def __init__(
        self,
        rules: Rules,
        client_request: ClientRequest,
        model: Model,
        *,
        engine: Engine,
        method: bytes,
    ) -> None:
        Progress.__init__(self, rules, client_request, model=model)
        self.instance = engine.name
        self._run = direct(self, engine, method)

    def commit(self, attempt: Attempt) -> None:
        """Forwards the answer from now on. Its usage counted when the response was made."""
        super().commit(attempt)
        self.answered = None

    def _comment(self, attempt: Attempt, comments: bytes) -> None:
        self.commit(attempt)  # no other engine could answer, and later comments pass

    def _abort(self, reason: str, failure: str, error: ApiError | None) -> None:
        """Ends the request. A begun answer ends with its connection."""
        self.close_client = self.committed or error is None
        super()._abort(reason, failure, None if self.committed else error)

    def _finish(self, failure: str | None, error: ApiError | None) -> None:
        super()._finish(None, error)  # no ticket to close

    def head_lines(self, engine: str) -> bytes:
        """Returns the router's own lines in the head of the answer."""
        lines = f"x-request-id: {self.client_request.head.request_id}\r\n"
        if self.rules.show_engines:
            lines += f"x-lmetric-instance: {engine}\r\n"
        return lines.encode("latin-1")
