"""Metrics of admission: held and refused requests."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.server.fleet.fleet import Fleet

# By metric: its meaning, and its name in `Router.admission`.
_COUNTERS = {
    "lmetric_admission_free": ("Requests that admission let run at once", "free"),
    "lmetric_admission_holds": ("Requests held for room or for a limit of their tenant", "held"),
    "lmetric_admission_releases": ("Held requests that ran later", "admitted"),
    "lmetric_admission_hold_seconds": ("Seconds for which released requests were held", "held_seconds"),
}
_GAUGES = {
    "lmetric_admission_expected_wait_seconds": (
        "Predicted wait of a request behind all waiting requests of the tenant with the most",
        "expected_wait_seconds",
    ),
    "lmetric_admission_service_tokens_per_second": (
        "Rate at which engines take waiting requests: uncached prompt tokens plus twice the answer tokens",
        "service_tokens_per_second",
    ),
}


def admission_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Yields the metrics of all models, with their present values."""
    waiting = GaugeMetricFamily(
        "lmetric_waiting_requests",
        "Requests that wait in the router for room, a limit of their tenant or a place in a cache",
        labels=("model", "tenant"),
    )
    refused = CounterMetricFamily(
        "lmetric_refused_requests",
        "Requests refused with 429, by reason: deadline, queue, budget, programs",
        labels=("model", "tenant", "reason"),
    )
    of_level = GaugeMetricFamily(
        "lmetric_level_waiting_requests",
        "Requests that wait in the router, by priority level; absent without levels",
        labels=("model", "level"),
    )
    for model in fleet.models:
        for level, count in model.held.waiting_by_level().items():
            of_level.add_metric((model.name, str(level)), count)
        for tenant, count in model.held.waiting().items():
            waiting.add_metric((model.name, tenant), count)
        for (tenant, reason), count in model.held.refused.items():
            refused.add_metric((model.name, tenant, reason), count)
    yield from (waiting, of_level, refused)
    told = [(model.name, found) for model in fleet.models if (found := model.held.snapshot()) is not None]
    for name, (text, key) in _COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("model",))
        for model_name, values in told:
            counter.add_metric((model_name,), values[key])
        yield counter
    for name, (text, key) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("model",))
        for model_name, values in told:
            if values[key] is not None:
                gauge.add_metric((model_name,), values[key])
        yield gauge
