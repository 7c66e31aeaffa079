"""Intervals of figures over requests: blocks of neighbors are drawn, because requests that queue
behind one another are not independent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 20  # requests that are drawn together
DRAWS = 1000


def draws(requests: int, seed: int = 0, count: int = DRAWS) -> Iterator[NDArray[np.int64]]:
    """Returns indices of `requests` requests, drawn in blocks of neighbors with replacement,
    `count` times."""
    rng = np.random.default_rng(seed)
    length = min(BLOCK, requests)
    blocks = -(-requests // length)
    for _ in range(count):
        starts = rng.integers(0, requests - length + 1, blocks)
        yield (starts[:, None] + np.arange(length)).ravel()[:requests]


def interval(values: Callable[[NDArray[np.int64]], float], requests: int) -> list[float]:
    """Returns the middle 95% of `values` over the draws: [low, high]."""
    low, high = np.percentile([values(drawn) for drawn in draws(requests)], (2.5, 97.5))
    return [float(low), float(high)]
