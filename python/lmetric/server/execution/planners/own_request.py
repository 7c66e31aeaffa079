"""The client's own request on one engine, whose answer goes to the client.

It runs alone, or after a prefill, a split in the prompt or a prefix fetch. In these cases the
engine fetches their KV cache.
"""

from __future__ import annotations

from math import inf
from typing import Any

from lmetric.engines.handover import with_fields
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine


def step(p: Progress, engine: Engine, now: float) -> Step:
    """Returns the step for the request.

    An available KV transfer is fetched once, if the engine can.
    """
    kv = p.kv
    if p.call is None and kv is None:
        return Step(engine, p.body, "pass", p.limit_seconds, p.stream)
    inside, fields = p.inside, {}
    if kv is not None and kv.tokens and not p.unmergeable:
        fields = kv.take(engine, now, goes_on=False, total=p.total)
        if not fields:
            kv.tokens = 0  # no transfer: a second call must not count it again
    observed = p.observed and p.continues_at(engine)
    # If a chat continues inside its prompt, the engine renders the chat again. Its tokens must be
    # those of the fetched cache, and the engine does not check that.
    checks = inside and p.chat and bool(fields)
    # A whole answer may contain the engine's KV transfer fields, which must not reach the client.
    tells = engine.handover is not None and bool(engine.handover.bidirectional)
    whole = bool(fields) and not p.stream and (tells or inside)
    wants_ids = observed or checks
    return Step(
        engine,
        _body(p, inside, fields, wants_ids),
        "whole" if whole else "pass",
        p.limit_seconds,
        p.stream,
        carries_kv=bool(fields),
        kv_until=kv.until if kv is not None else inf,
        observed=p.stream and wants_ids,
        hides_ids=wants_ids and not p.request.get("return_token_ids"),
        checks_prompt=checks,
    )


def _body(p: Progress, inside: bool, fields: Any, wants_ids: bool) -> bytes:
    """Returns the client's body with the router's fields added.

    If a completion fetches a part of its prompt, its prompt becomes token ids.
    """
    if not wants_ids:
        more = fields
    elif "return_token_ids" in p.request:
        return dumps({**p.request, **fields, "return_token_ids": True})
    else:
        more = {**fields, "return_token_ids": True}
    body = p.body
    if inside and fields and not p.chat:
        body = dumps({**p.request, "prompt": p.prompt})
    return with_fields(body, more) if more else body


def stripped(answer: dict[str, Any], choices: list[Any], hides_ids: bool) -> bytes:
    """Returns an answer without fields that only the router requested: null, as vLLM's default."""
    if hides_ids:
        names = ("prompt_token_ids", "token_ids")
        for part in (answer, *choices):
            part |= {name: None for name in names if name in part}
    if "kv_transfer_params" in answer:
        answer["kv_transfer_params"] = None
    return dumps(answer)
