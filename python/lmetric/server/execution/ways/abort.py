"""Abort: an engine ends an answer early, with finish_reason `abort`.

An engine aborts by order of a trainer or an operator (vLLM: `/pause`, `/sleep`, `/abort_requests`),
and when it shuts down. An ordered abort is the client's answer. After any other, another engine
continues. vLLM in development mode shows the difference: it reports whether it is paused, but not
while it shuts down.
"""

from __future__ import annotations

from typing import Any

from lmetric.server.execution.plan import EngineLost, Step, Way
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine


class Aborted(EngineLost):
    """An engine ended a merged stream with this choice, whose finish_reason is `abort`."""

    def __init__(self, step: Step, choice: dict[str, Any]) -> None:
        super().__init__(step.engine, "engine_error", "it ended with finish_reason abort", step=step)
        self.choice = choice


def aborts_by_order(p: Progress, engine: Engine) -> Way[bool]:
    """Returns whether an engine that aborted an answer did so by order.

    Then it still reports whether it is paused: after a long `/sleep`, late.
    """
    p.abandon()
    pages = engine.capabilities.pause_pages
    if not pages or p.client_request.gateway is not None:
        return False
    step = p.own_step(engine, b"", pages[0], method=b"GET", side=False)
    step.limit_seconds = p.rules.timeouts.between_chunks
    try:
        attempt, _ = yield step
    except EngineLost:
        return False
    return attempt.reader.status == 200
