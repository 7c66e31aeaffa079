"""Runs the checks of a client: each prints a line of JSON with its name and its error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

URL = sys.argv[1]
MODEL = "tiny"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def run(checks: Iterable[Callable[[], Any]]) -> None:
    """Runs all checks; a failed one is an exception."""
    for check in checks:
        found: dict[str, Any] = {"check": check.__name__, "ok": True}
        try:
            check()
        except Exception as error:  # whatever a client raises
            found |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(found), flush=True)


def expect(kind: type[Exception], call: Callable[[], Any]) -> None:
    """Raises AssertionError unless the call raises this error."""
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")
