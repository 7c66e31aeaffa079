"""Engines with far more requests than the others of their role: the hot spots of a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

HOT_TIMES = 2.0  # a hot engine has more than this many times the mean batch of its role
HOT_MORE = 4.0  # and at least this many requests more than the mean
HOT_SHOWN = 5


def hot_spots(engines: Mapping[str, Sequence[Any]], batch: NDArray[np.float64]) -> dict[str, Any]:
    """Returns the hot engines and the busiest engine, by their batch above the mean of their role.

    Only usable engines of the same model and role are compared, and only if there are several.

    Args:
        engines: columns ``name``, ``model``, ``role`` and ``state``.
        batch: requests of each engine; NaN: unknown.

    Returns:
        ``hot``: at most `HOT_SHOWN` engines, the highest first. ``busiest``: the engine with the
        most requests above the mean; None: no engine has more than the mean. Each engine has
        ``name``, ``model``, ``role``, ``batch``, ``mean`` and ``times`` (batch divided by mean).
    """
    means = _means(engines, batch)
    above = np.where(np.isnan(means), -np.inf, batch - means)
    hot = np.flatnonzero((above >= HOT_MORE) & (batch > HOT_TIMES * means))
    shown = hot[np.argsort(-above[hot], kind="stable")][:HOT_SHOWN]
    most = int(np.argmax(above)) if len(above) else 0

    def described(index: int) -> dict[str, Any]:
        keys = {key: engines[key][index] for key in ("name", "model", "role")}
        own, mean = float(batch[index]), float(means[index])
        return {**keys, "batch": own, "mean": round(mean, 2), "times": round(own / mean, 2)}

    busiest = described(most) if len(above) and above[most] > 0 else None
    return {"hot": [described(index) for index in shown.tolist()], "busiest": busiest}


def _means(engines: Mapping[str, Sequence[Any]], batch: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the mean batch of each engine's group; NaN: it has no group to compare with."""
    codes: dict[tuple[Any, Any], int] = {}
    states = zip(engines["model"], engines["role"], engines["state"], strict=True)
    group = np.array(
        [
            codes.setdefault((model, role), len(codes)) if state == "usable" else -1
            for model, role, state in states
        ],
        dtype=np.int64,
    )
    group[np.isnan(batch)] = -1
    known = group >= 0
    sizes = np.bincount(group[known], minlength=len(codes) + 1)
    sums = np.bincount(group[known], weights=batch[known], minlength=len(codes) + 1)
    means = np.where(sizes > 1, sums / np.maximum(sizes, 1), np.nan)
    return np.where(known, means[group], np.nan)
