"""The client's own request at one engine, whose answer is the client's: alone, or as what follows a prefill,
a cut in the prompt or a prefix fetch, whose KV cache the engine then fetches."""

from __future__ import annotations

from math import inf
from typing import Any

from lmetric.engines.handover import with_fields
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine


def step(p: Progress, engine: Engine, now: float) -> Step:
    """The request at an engine. What is handed over is fetched where the engine can, once."""
    kv = p.kv
    if p.call is None and kv is None:
        return Step(engine, p.body, "pass", p.limit_seconds, p.stream)
    inside, fields = p.inside, {}
    if kv is not None and kv.tokens and not p.unmergeable:
        fields = kv.take(engine, now, goes_on=False, total=p.total)
        if not fields:
            kv.tokens = 0  # nothing is handed over: asked again, it would be counted again
    observed = p.observed
    # A chat that goes on inside its prompt is rendered anew, and must become the very tokens whose cache is
    # fetched: nobody else would see that it does not.
    checks = inside and p.chat and bool(fields)
    # Not streamed, its answer may tell where the engine holds what it computed: no client's business.
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
    """The client's bytes with the router's fields ahead; of a completion whose prompt's front is fetched, the
    prompt as the token ids that another engine has computed some of."""
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
    """An answer without what only the router asked for: null, as vLLM answers if nobody asks."""
    if hides_ids:
        names = ("prompt_token_ids", "token_ids")
        for part in (answer, *choices):
            part |= {name: None for name in names if name in part}
    if "kv_transfer_params" in answer:
        answer["kv_transfer_params"] = None
    return dumps(answer)
