"""Metrics of requests: counts, latencies by class and by instance, the router's own time.

Labels are bounded: classes and tenants come from the configuration, and instances that have left
the fleet are dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.observe.exposition import HistogramTable, Table, labels_text
from lmetric.server.observe.histograms import (
    SECONDS,
    SHORT_SECONDS,
    Histogram,
    Latencies,
    observe_both,
)

if TYPE_CHECKING:
    from lmetric.server.execution.fallback import FallbackStep

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


class InstanceRequests:
    """Latencies and compared tokens of the requests of one instance."""

    __slots__ = ("compared", "latencies", "over", "under")

    def __init__(self) -> None:
        self.latencies = Latencies()
        self.compared = self.over = self.under = 0  # tokens

    def compare(self, prompt_tokens: int, predicted: int, reported: int) -> None:
        """Adds a request's predicted and reported cached tokens."""
        self.compared += prompt_tokens
        if predicted > reported:
            self.over += predicted - reported
        else:
            self.under += reported - predicted


MOST_SERIES = 20_000  # of `lmetric_requests_total`, after which tenants of tokens share one


class RequestMetrics(Observer):
    """Counts and times of requests for engines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by model, tenant and status
        self._classes: dict[tuple[str, str], Latencies] = {}  # by model and SLO class
        self._instances: dict[str, dict[str, InstanceRequests]] = {}  # by model and instance
        self._prioritized: Counter[str] = Counter()
        self._aliased: Counter[tuple[str, str]] = Counter()  # by alias, and name in its place
        self._fallbacks: Counter[FallbackStep] = Counter()
        self._overhead: dict[str, Histogram] = {}
        self._decisions: dict[str, Histogram] = {}
        fleet.on_model_removed.append(self._forget)

    def _forget(self, model: str) -> None:
        """Drops the counts of a model that was removed."""
        for by_model in (self._instances, self._prioritized, self._overhead, self._decisions):
            by_model.pop(model, None)
        self.requests = Counter({key: count for key, count in self.requests.items() if key[0] != model})
        self._classes = {key: times for key, times in self._classes.items() if key[0] != model}

    def sent(self, request: ClientRequest, relay: InFlightRequest) -> None:
        """Records the start of a request at an engine."""
        model = request.model.name if request.model is not None else ""
        decisions = self._decisions.get(model)
        if decisions is None:
            decisions = self._decisions[model] = Histogram(SHORT_SECONDS)
            self._overhead[model] = Histogram(SHORT_SECONDS)
        decisions.observe(request.decision_ended - request.decision_began)
        if not request.was_held and request.fell_back is None:
            self._overhead[model].observe(time.monotonic() - request.started)

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Records a request for an engine that ended."""
        model, now = request.model.name if request.model is not None else "", request.ended_at
        key = model, request.tenant, request.status
        # The issuers of tokens may name any number of tenants.
        if request.caller.issuer and len(self.requests) >= MOST_SERIES and key not in self.requests:
            key = model, OTHER_TENANTS, request.status
        self.requests[key] += 1
        if request.priority is not None:
            self._prioritized[model] += 1
        if request.alias is not None:
            fell_back = request.fell_back
            name = request.model_name if fell_back is None else fell_back.model
            self._aliased[request.alias, name or ""] += 1
        if request.fallback is not None:
            self._fallbacks.update(request.fallback.steps)
        usage = relay.usage if relay is not None else None
        if usage is None or relay is None:
            return
        times = self._classes.get((model, request.slo_class))
        if times is None:
            times = self._classes[model, request.slo_class] = Latencies()
        instance = self._of_instance(model, relay.instance or "")
        own = instance.latencies
        observe_both(times.seconds, own.seconds, now - request.started)
        first = usage.first_token_at
        if first:
            ttft = first - request.started
            observe_both(times.ttft, own.ttft, ttft)
            if request.trace is not None and request.trace.sampled:
                times.ttft.exemplify(ttft, request.trace.hex_id)
            further = usage.output_tokens - 1
            if further > 0:
                observe_both(times.tpot, own.tpot, (now - first) / further)
        reported = usage.cached_tokens
        if reported is not None and (predicted := relay.predicted_cached_tokens) is not None:
            instance.compare(usage.prompt_tokens or 0, predicted, reported)

    def _of_instance(self, model: str, name: str) -> InstanceRequests:
        instances = self._instances.get(model)
        if instances is None:
            instances = self._instances[model] = {}
        found = instances.get(name)
        if found is None:
            found = instances[name] = InstanceRequests()
        return found

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics, with their present values."""
        requests = CounterMetricFamily(
            "lmetric_requests", "Requests for engines, by status", labels=("model", "tenant", "code")
        )
        for (model, tenant, status), count in self.requests.items():
            requests.add_metric((model, tenant, str(status)), count)
        yield requests
        prioritized = CounterMetricFamily(
            "lmetric_prioritized_requests",
            "Requests to which the router gave a priority for the engine's queue",
            labels=("model",),
        )
        for model, count in self._prioritized.items():
            prioritized.add_metric((model,), count)
        yield prioritized
        aliased = CounterMetricFamily(
            "lmetric_alias_requests",
            "Requests with an alias, by the name in its place",
            labels=("alias", "model"),
        )
        for names, count in self._aliased.items():
            aliased.add_metric(names, count)
        yield aliased
        fallbacks = CounterMetricFamily(
            "lmetric_model_fallbacks",
            "Requests that changed to another model, by why the model before did not serve them",
            labels=("model", "to", "reason"),
        )
        for step, count in self._fallbacks.items():
            fallbacks.add_metric(step, count)
        yield fallbacks
        for name, text, times in (
            (
                "lmetric_router_overhead_seconds",
                "Time from a whole request to its sending to an engine, without requests that were held",
                self._overhead,
            ),
            ("lmetric_decision_seconds", "Time of a routing decision", self._decisions),
        ):
            family = HistogramMetricFamily(name, text, labels=("model",))
            for model, histogram in times.items():
                family.add_metric((model,), histogram.buckets(), histogram.sum)
            yield family
        for attribute, name, text in _LATENCIES:
            family = HistogramMetricFamily(f"lmetric_{name}", text, labels=("model", "slo_class"))
            for labels, latencies in self._classes.items():
                histogram = getattr(latencies, attribute)
                family.add_metric(labels, histogram.buckets(), histogram.sum)
            yield family
        yield from self._instance_metrics()

    def _instance_metrics(self) -> Iterator[Metric]:
        """Yields the metrics of each instance, and forgets instances that have left."""
        rows: list[tuple[dict[str, str], InstanceRequests]] = []
        for model in self._fleet.models:
            instances = self._instances.get(model.name, {})
            for name in [name for name in instances if name not in model.engines]:
                del instances[name]
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
