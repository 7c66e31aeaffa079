"""Synthetic traffic in which requests share one prefix for two minutes: a hot spot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.traces import Trace

# Short prompts of their own and long answers behind one long prefix. P-token differs by a factor of
# a hundred between holders and other instances, and batches grow. The lengths are our choice.
HOT: dict[str, Any] = {
    "synthetic": "requests", "rate": 60, "duration_seconds": 300,
    "input_tokens": {"p50": 60, "mean": 80, "max": 1000},
    "output_tokens": {"p50": 400, "mean": 500, "max": 2000},
    "prefixes": {"count": 50, "zipf": 0.8, "tokens": {"p50": 1000, "mean": 1500, "max": 6000}},
    "block_tokens": 64,
}  # fmt: skip
SURGE = (100.0, 220.0)  # seconds
BEFORE = 0.02  # Share of the surge's rate that a known prefix has before and after the surge.


Mask = NDArray[np.bool_]


def surge(seed: int, share: float, tokens: int, *, known: bool) -> tuple[Trace, Mask, Mask]:
    """Returns a trace in which `share` of the arrivals begins with one prefix for two minutes, a
    mask of these requests, and a mask of all requests with the prefix. With `known`, a few requests
    come before, so some instance already holds the prefix; else it is new to all instances."""
    length = HOT["duration_seconds"]
    hot_spot = {"start_seconds": 0, "seconds": length, "share": share, "tokens": tokens}
    trace = check_synthetic({**HOT, "seed": seed, "hot_spot": hot_spot}, "hot").make()
    first = trace.hash_ids[trace.hash_offsets[:-1]]
    ids, counts = np.unique(first, return_counts=True)
    # The hot family has the highest number; other ids beyond it occur once.
    hot = first == ids[counts > len(trace) * share / 2].max()
    during = (trace.arrival_seconds >= SURGE[0]) & (trace.arrival_seconds < SURGE[1])
    kept_outside = np.random.default_rng(seed).random(len(trace)) < (BEFORE if known else 0.0)
    keep = ~hot | during | kept_outside
    return trace.where(keep), (hot & during)[keep], hot[keep]
