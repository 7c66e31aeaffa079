"""The beginning that all requests of a conversation share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from lmetric.server.api.request import ParsedRequest

# Of prompts without roles, and of uploads.
FIRST_BYTES = 4096


def beginning(call: ParsedRequest) -> bytes:
    """Returns the beginning that all requests of a conversation share.

    Of messages, these are all up to the user's first one, with the instructions. Otherwise, it is
    the start of the prompt or of the body. It parses the body: call it in a thread for a large one.
    """
    fields = call.request
    turns = fields.get("messages", fields.get("input"))
    if isinstance(turns, list) and turns and all(isinstance(each, dict) for each in turns):
        heads = [fields.get("system"), fields.get("instructions")]
        return orjson.dumps([*heads, *_until_user(turns)])
    if call.text is not None:
        return call.text[:FIRST_BYTES]
    if call.tokens is not None:
        return call.tokens[: FIRST_BYTES // 4].tobytes()
    return call.body[:FIRST_BYTES]


def _until_user(turns: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for turn in turns:
        yield turn
        if turn.get("role") == "user":
            return
