"""Engines that parse the token ids of other engines: vLLM with `--enable-scale-out`.

They render a chat into token ids, continue token ids, and parse them into content, reasoning and
tool calls. So they can continue a chat whose engine failed.
"""

from __future__ import annotations

from lmetric.engines.handover import dumps
from lmetric.server.fleet.engine import Engine
from lmetric.server.upstream.connection import UpstreamError

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"
PROBE = dumps(
    {
        "stream": True,
        "generate_chunk": {"choices": []},
        "prompt_token_ids": [],
        "chat_request": {"messages": []},
    }
)


async def parses(engine: Engine, seconds: float) -> bool:
    """Returns whether an engine parses token ids.

    It parses a chat without tokens. Without the flag, or in an older version, it refuses the path.
    Raises UpstreamError if no connection is possible.
    """
    if engine.capabilities.engine != "vllm" or not engine.capabilities.token_ids:
        return False
    try:
        status, _ = await engine.upstream.post(DERENDER, PROBE, seconds)
    except UpstreamError as error:
        if error.before_sending:
            raise
        return False
    return status == 200
