"""A request's own time between tokens: `token_slo_ms` of `vllm_xargs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOKEN_SLO = "token_slo_ms"
"""Its name in `vllm_xargs`."""
MOST_SLO_MS = 60_000
"""Longest time between two tokens, milliseconds."""


def own_token_slo(extra: Mapping[str, Any] | None) -> float | None:
    """Returns the time between tokens in `vllm_xargs`, in seconds; None: it has none.

    Raises:
        ValueError: the value is not a number above 0 up to `MOST_SLO_MS`.
    """
    given = (extra or {}).get(TOKEN_SLO)
    if given is None:
        return None
    try:
        millis = float(given)
    except (TypeError, ValueError):
        millis = 0.0
    if not 0 < millis <= MOST_SLO_MS:
        raise ValueError(f"vllm_xargs.{TOKEN_SLO} is {given!r}, not a number above 0 up to {MOST_SLO_MS}")
    return millis / 1e3
