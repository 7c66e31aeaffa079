"""The state and the metrics of the exchange between routers, also without an exchange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from lmetric.server.background.replicas import Replicas


def state(replicas: Replicas | None, process: str) -> dict[str, Any]:
    """Returns the content of /debug/replicas. ``process``: ID of this process."""
    if replicas is not None:
        return replicas.state()
    return {"router": process, "sent_to": [], "received_from": [], "not_looked_up": {}, "redis": None}


def metrics(replicas: Replicas | None) -> Iterator[Metric]:
    """Yields the metrics of the exchange."""
    routers = GaugeMetricFamily("lmetric_replicas", "Other routers whose in-flight load counts here")
    routers.add_metric((), 0 if replicas is None else len(replicas.routers))
    yield routers
    messages = CounterMetricFamily(
        "lmetric_replica_messages",
        "Messages between routers: sent and received, by outcome",
        labels=("direction", "outcome"),
    )
    for (direction, outcome), count in () if replicas is None else replicas.counts.items():
        messages.add_metric((direction, outcome), count)
    yield messages
    up = GaugeMetricFamily("lmetric_redis_up", "1: budgets are shared through Redis; 0: it cannot be used")
    if replicas is not None and replicas.redis is not None:
        up.add_metric((), float(replicas.redis.reached is True))
    yield up
