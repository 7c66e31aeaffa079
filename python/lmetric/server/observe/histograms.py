"""Histograms of times, and the latencies of requests by class and by instance."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.samples import Exemplar

from lmetric._core import Buckets

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)
# Bounds of times that the router itself takes.
SHORT_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)


class Histogram(Buckets):
    """Counts of values in buckets. ``bounds`` are the upper bounds, inclusive and ascending."""

    __slots__ = ("bounds", "exemplars")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.exemplars: dict[int, Exemplar] | None = None  # by bucket; None: none yet

    def exemplify(self, value: float, trace_id: str) -> None:
        """Keeps a value, which `observe` has added, as the example of its bucket."""
        if self.exemplars is None:
            self.exemplars = {}
        bucket = bisect_left(self.bounds, value)
        self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def cumulative(self) -> list[int]:
        """Returns the number of values up to each bound, and last of all values."""
        return list(accumulate(self.counts))

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Returns cumulative counts by upper bound, as Prometheus expects them."""
        rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        examples = self.exemplars or {}
        for index, count in enumerate(self.cumulative()):
            bound = str(self.bounds[index]) if index < len(self.bounds) else "+Inf"
            example = examples.get(index)
            rows.append((bound, float(count)) if example is None else (bound, float(count), example))
        return rows


class Latencies:
    """Latency histograms, in seconds. All have the bounds `SECONDS`."""

    __slots__ = ("seconds", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram(SECONDS)
        self.tpot = Histogram(SECONDS)
        self.seconds = Histogram(SECONDS)
