"""Compares a model's tokenizer with an engine's own. Routers with a tokenizer load this module."""

from __future__ import annotations

from typing import Any

import orjson
import structlog

from lmetric.server.fleet.engine import Engine
from lmetric.server.upstream.connection import UpstreamError
from lmetric.tokens.prompt import PromptTokenizer
from lmetric.tokens.verify import NotVerifiable, verify

log = structlog.get_logger("lmetric.fleet")


async def compare(
    tokenizer: PromptTokenizer, engine: Engine, *, model: str, name: str, seconds: float
) -> None:
    """Compares the tokenizer with the engine's own, on some prompts, and logs a difference.

    ``name``: a model name that the engine serves. ``seconds``: time limit of each request. Raises
    UpstreamError if no connection is possible.
    """

    async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return await engine.upstream.post(path, orjson.dumps(body), seconds)

    try:
        differences = await verify(tokenizer, post, name)
    except (NotVerifiable, UpstreamError) as error:
        if isinstance(error, UpstreamError) and error.before_sending:
            raise
        log.info("cannot compare tokens", model=model, engine=engine.name, reason=str(error))
        return
    engine.compared = tokenizer
    engine.tokens_differ = str(differences[0]) if differences else None
    if differences:
        log.warning(
            "the engine tokenizes prompts differently from the router",
            model=model,
            engine=engine.name,
            differences=[str(difference) for difference in differences],
        )
