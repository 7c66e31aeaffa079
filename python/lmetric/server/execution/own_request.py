"""The step for the client's own request, which most ways end with."""

from __future__ import annotations

from typing import Any

from lmetric.engines.handover import with_fields
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import dumps
from lmetric.server.fleet.engine import Engine


def own_request(p: Progress, engine: Engine) -> Step:
    """Returns the step for the client's own request.

    An available KV transfer is fetched once, if the engine can.
    """
    kv = p.kv
    if p.call is None and kv is None:
        return Step(engine, p.body, "pass", limit_seconds=p.limit_seconds, stream=p.stream)
    inside, fields = p.inside, {}
    if kv is not None and kv.tokens and not p.unmergeable:
        fields = kv.take(engine, p.now, goes_on=False, total=p.total)
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
        _body(p, inside, fields, wants_ids=wants_ids),
        "whole" if whole else "pass",
        limit_seconds=p.limit_seconds,
        stream=p.stream,
        kv=kv if fields else None,
        observed=p.stream and wants_ids,
        hides_ids=wants_ids and not p.request.get("return_token_ids"),
        checks_prompt=checks,
    )


def _body(p: Progress, inside: bool, fields: Any, *, wants_ids: bool) -> bytes:
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
