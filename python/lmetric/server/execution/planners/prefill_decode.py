"""Prefill and decode: one engine computes the prompt, another decodes.

The prefill's answer is the router's. What it hands over is fetched by the decode engine, which is sent the
client's own request (`own_request`); else that computes the prompt itself, which costs time and never the
answer. Where a connector runs both at once (`at_once`), they are sent the same body together.
"""

from __future__ import annotations

from math import inf
from typing import Any

import orjson

from lmetric.engines.handover import HandoverError
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine


def prefill(p: Progress, engine: Engine, now: float) -> Step:
    """The prompt at an engine, for another to decode. Raises HandoverError where it hands nothing over."""
    body, kv = first_body(p, engine), p.kv
    checks = False
    if kv is not None:
        # The front of the prompt may have been fetched for it.
        inside = p.inside
        fields = kv.take(engine, now, goes_on=True, total=p.total)
        if kv.used:
            more: dict[str, Any] = dict(fields)
            checks = inside and p.chat
            if checks:
                more["return_token_ids"] = True
            elif inside:
                more["prompt"] = p.prompt
            body = dumps(orjson.loads(body) | more)
    return Step(
        engine,
        body,
        "whole",
        p.rules.timeouts.first_byte,
        for_client=False,
        carries_kv=kv is not None and kv.used,
        kv_until=kv.until if kv is not None else inf,
        checks_prompt=checks,
    )


def pair(p: Progress, first: Engine, second: Engine, body: bytes, *, opens: bool) -> list[Step]:
    """Both at once. `opens`: the first is the open segment."""
    prefills = Step(
        first,
        body,
        "whole",
        p.rules.timeouts.first_byte,
        beside=True,
        for_client=False,
        advances_ticket=opens,
    )
    return [prefills, Step(second, body, "pass", p.limit_seconds, p.stream)]


def first_body(p: Progress, engine: Engine) -> bytes:
    """The prefill's body, or that of both engines where they run at once. Raises HandoverError."""
    connector, handover = engine.connector, engine.handover
    if connector is None or handover is None:
        raise HandoverError(f"{engine.name} hands nothing over")
    request = p.call.request if p.call is not None else orjson.loads(p.body)
    return connector.first(p.asked.path, p.body, request, engine.host, handover)
