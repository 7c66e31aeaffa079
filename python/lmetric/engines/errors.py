"""Errors of engine processes, and the messages of error answers from engines and proxies."""

from __future__ import annotations

from typing import Any

import orjson

_LONGEST = 300  # characters


class EngineStartError(Exception):
    """The engine cannot start: a port in use, a bad endpoint, a bad profile. The message is one
    line."""


def error_text(body: bytes) -> str:
    """The message of an error answer or error event on one line; empty if it has none.

    It is the message of an OpenAI error object. Older versions of vLLM and SGLang return this
    object without a wrapper, and FastAPI uses `detail`. For other answers (a proxy's page) it is
    the body.
    """
    try:
        said: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    text = said if isinstance(said, str) else body[: 16 * _LONGEST].decode(errors="replace")
    return " ".join(text[: 4 * _LONGEST].split())[:_LONGEST]
