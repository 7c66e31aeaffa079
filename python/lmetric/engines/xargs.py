"""Fields of `vllm_xargs` that the schedulers of lmetric-vllm read from a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TOKEN_SLO = "token_slo_ms"
"""The request's own time between tokens."""
MOST_SLO_MS = 60_000
"""Longest time between two tokens, milliseconds."""
HANDICAP = "boost_handicap_seconds"
"""The handicap of the request's tenant, set by the router."""
GAMMA = "boost_gamma"
"""The gamma that the router learned over all engines, 1/s."""


def number_in(extra: Mapping[str, Any] | None, name: str) -> float | None:
    """Returns a field's number; NaN: it is not a number; None: the request has no such field."""
    given = (extra or {}).get(name)
    if given is None:
        return None
    try:
        return float(given)
    except (TypeError, ValueError):
        return math.nan


def own_token_slo(extra: Mapping[str, Any] | None) -> float | None:
    """Returns the time between tokens in `vllm_xargs`, in seconds; None: it has none.

    Raises:
        ValueError: the value is not a number above 0 up to `MOST_SLO_MS`.
    """
    millis = number_in(extra, TOKEN_SLO)
    if millis is None:
        return None
    if not 0 < millis <= MOST_SLO_MS:
        given = (extra or {})[TOKEN_SLO]
        raise ValueError(f"vllm_xargs.{TOKEN_SLO} is {given!r}, not a number above 0 up to {MOST_SLO_MS}")
    return millis / 1e3
