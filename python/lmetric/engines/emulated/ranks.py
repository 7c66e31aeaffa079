"""Data-parallel ranks of an emulated engine: each has a queue, a cache and KV events of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lmetric.engines.emulated.driver import Driver
from lmetric.engines.emulated.errors import ApiError
from lmetric.engines.emulated.kv_feed import KvFeed
from lmetric.engines.emulated.metrics import EngineMetrics


@dataclass(frozen=True, slots=True)
class Rank:
    """One of them."""

    driver: Driver
    metrics: EngineMetrics
    kv_feed: KvFeed | None


def chosen(ranks: Sequence[Rank], header: str | None) -> Rank:
    """The rank in `X-data-parallel-rank`, else the least loaded by vLLM's weights. Raises
    ApiError."""
    if header is not None:
        with contextlib.suppress(ValueError):
            if 0 <= int(header) < len(ranks):
                return ranks[int(header)]
            raise ApiError(400, f"data_parallel_rank {header} is out of range [0, {len(ranks)}).")

    def load(rank: Rank) -> int:
        now = rank.driver.engine.load()
        return 4 * int(now["waiting"]) + int(now["running"])

    return ranks[0] if len(ranks) == 1 else min(ranks, key=load)


class MetricsPage(Collector):
    """/metrics: each metric once, with the samples of all ranks."""

    def __init__(self, ranks: Sequence[EngineMetrics]) -> None:
        self._ranks = ranks
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing in advance: `collect` is asked only when someone scrapes."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        for family, *others in zip(*(rank.collect() for rank in self._ranks), strict=True):
            for other in others:
                family.samples += other.samples
            yield family
