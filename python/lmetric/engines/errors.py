"""What an error answer says, whichever engine or proxy gave it."""

from __future__ import annotations

from typing import Any

import orjson

_LONGEST = 300  # characters


def error_text(body: bytes) -> str:
    """The words of an error answer, or of an error event's data, on one line; empty where it says nothing.

    That is the message of an OpenAI error object. It stands bare in answers of older vLLMs and of SGLang, and
    as `detail` in FastAPI's own. Of anything else (a proxy's page) it is the body itself.
    """
    try:
        said: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    text = said if isinstance(said, str) else body.decode(errors="replace")
    return " ".join(text.split())[:_LONGEST]
