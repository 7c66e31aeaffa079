"""Prefill/decode disaggregation: one engine computes the prompt, another decodes.

The prefill's answer is for the router. The decode engine gets the client's own request
(`own_request`) and fetches the prefill's KV cache. If it cannot, it computes the prompt itself,
which costs time but gives the same answer. If a connector runs both steps at once (`at_once`), both
engines get the same body together.
"""

from __future__ import annotations

from math import inf
from typing import Any

import orjson

from lmetric.engines.handover import FirstSegment, HandoverError
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine


def prefill(p: Progress, engine: Engine, now: float) -> Step:
    """Returns the prefill step.

    Raises HandoverError if the engine has no KV transfer for the request.
    """
    body, kv = first_body(p, engine), p.kv
    checks = False
    if kv is not None:
        # A prefix fetch may have prepared a part of the prompt.
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
    """Returns the two steps that run at once. `opens`: the first is the open segment."""
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
    """Returns the body of the prefill, or of both steps if they run at once.

    Raises HandoverError.
    """
    connector, handover = engine.connector, engine.handover
    if connector is None or handover is None:
        raise HandoverError(f"{engine.name} has no KV transfer")
    if p.first is None:
        p.first = FirstSegment(p.client_request.path, p.body)
    return connector.first(p.first, engine.host, handover)
