"""Metrics of requests, as Prometheus families."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from lmetric.server.fleet.fleet import Fleet
from lmetric.server.observe.exposition import HistogramTable, Table, labels_text
from lmetric.server.observe.histograms import SECONDS
from lmetric.server.observe.requests import InstanceRequests, RequestMetrics, drop_gone

# Bounds shown for each instance: fewer than for each class, because fleets have 1,000 instances.
_INSTANCE_BOUNDS = {
    "ttft": (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 50.0),
    "tpot": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    "seconds": (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
}
_LATENCIES = (
    ("ttft", "time_to_first_token_seconds", "Time from a streamed request to its first token"),
    ("tpot", "time_per_output_token_seconds", "Mean time per output token of a stream after the first"),
    ("seconds", "request_seconds", "Time from a request to the end of its answer"),
)
_ACCURACY = (
    (
        "lmetric_instance_compared_prompt_tokens",
        "Prompt tokens of requests whose predicted and reported cached tokens were compared",
    ),
    ("lmetric_instance_overpredicted_tokens", "Predicted cached tokens that the engine did not report"),
    ("lmetric_instance_underpredicted_tokens", "Reported cached tokens that the router did not predict"),
)


def request_metrics(fleet: Fleet, requests: RequestMetrics) -> Iterator[Metric]:
    """Yields the metrics, with their present values."""
    statuses = CounterMetricFamily(
        "lmetric_requests", "Requests for engines, by status", labels=("model", "tenant", "code")
    )
    for (model, tenant, status), count in requests.requests.items():
        statuses.add_metric((model, tenant, str(status)), count)
    yield statuses
    prioritized = CounterMetricFamily(
        "lmetric_prioritized_requests",
        "Requests to which the router gave a priority for the engine's queue",
        labels=("model",),
    )
    for model, count in requests.prioritized.items():
        prioritized.add_metric((model,), count)
    yield prioritized
    aliased = CounterMetricFamily(
        "lmetric_alias_requests",
        "Requests with an alias, by the name in its place",
        labels=("alias", "model"),
    )
    for names, count in requests.aliased.items():
        aliased.add_metric(names, count)
    yield aliased
    fallbacks = CounterMetricFamily(
        "lmetric_model_fallbacks",
        "Requests that changed to another model, by why the model before did not serve them",
        labels=("model", "to", "reason"),
    )
    for step, count in requests.fallbacks.items():
        fallbacks.add_metric(step, count)
    yield fallbacks
    for name, text, times in (
        (
            "lmetric_router_overhead_seconds",
            "Time from a whole request to its sending to an engine, without requests that were held",
            requests.overhead,
        ),
        ("lmetric_decision_seconds", "Time of a routing decision", requests.decisions),
    ):
        family = HistogramMetricFamily(name, text, labels=("model",))
        for model, histogram in times.items():
            family.add_metric((model,), histogram.buckets(), histogram.sum)
        yield family
    for attribute, name, text in _LATENCIES:
        family = HistogramMetricFamily(f"lmetric_{name}", text, labels=("model", "slo_class"))
        for labels, latencies in requests.classes.items():
            histogram = getattr(latencies, attribute)
            family.add_metric(labels, histogram.buckets(), histogram.sum)
        yield family
    yield from _instance_metrics(fleet, requests)


def _instance_metrics(fleet: Fleet, requests: RequestMetrics) -> Iterator[Metric]:
    """Yields the metrics of each instance, and forgets instances that have left."""
    rows: list[tuple[dict[str, str], InstanceRequests]] = []
    for model in fleet.models:
        instances = requests.instances.get(model.name, {})
        drop_gone(instances, model)
        rows += [({"instance": name, "model": model.name}, each) for name, each in instances.items()]
    for attribute, name, text in _LATENCIES:
        shown = [SECONDS.index(bound) for bound in _INSTANCE_BOUNDS[attribute]]
        found = ((labels, getattr(each.latencies, attribute)) for labels, each in rows)
        title = f"{text}, by instance"
        yield HistogramTable(
            f"lmetric_instance_{name}", title, ("model", "instance"), shown=shown, rows=found
        )
    tables = [Table(name, text, "counter", labels=("model", "instance")) for name, text in _ACCURACY]
    for labels, each in rows:
        if each.compared:
            where = labels_text(labels)
            for table, value in zip(tables, (each.compared, each.over, each.under), strict=True):
                table.add(where, value)
    yield from tables
