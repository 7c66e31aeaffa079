"""Fields of `vllm_xargs` that the schedulers of lmetric-vllm read from a request."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from lmetric.engines.xargs_names import GAMMA as GAMMA
from lmetric.engines.xargs_names import HANDICAP as HANDICAP
from lmetric.engines.xargs_names import MOST_SLO_MS as MOST_SLO_MS

TOKEN_SLO = "token_slo_ms"
"""The request's own time between tokens."""
LEAST_SHARE = 0.25
"""Shortest time between tokens of a request, as a share of the engine's: it slows the prompts of
all requests."""
SHOWN = 100
"""Longest text of a request's value in a message."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, SHOWN


def number_in(extra: Mapping[str, Any] | None, name: str) -> float | None:
    """Returns a field's number; NaN: it is not a number; None: the request has no such field."""
    given = (extra or {}).get(name)
    if given is None:
        return None
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def shown(given: Any) -> str:
    """Returns a field's value for a message, cut to `SHOWN` characters."""
    text = _SHORT.repr(given)  # a list may have a million elements
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def own_token_slo(extra: Mapping[str, Any] | None, engine_seconds: float) -> float | None:
    """Returns the time between tokens in `vllm_xargs`, in seconds; None: it has none.

    A time below `LEAST_SHARE` of the engine's own (`engine_seconds`) counts as that share.

    Raises:
        ValueError: the value is not a number above 0 up to `MOST_SLO_MS`.
    """
    millis = number_in(extra, TOKEN_SLO)
    if millis is None:
        return None
    if not 0 < millis <= MOST_SLO_MS:
        given = shown((extra or {})[TOKEN_SLO])
        raise ValueError(f"vllm_xargs.{TOKEN_SLO} is {given}, not a number above 0 up to {MOST_SLO_MS}")
    return max(millis / 1e3, LEAST_SHARE * engine_seconds)
