"""Counts of requests, latencies by class and by instance, and the router's own time.

Labels are bounded: classes come from the configuration, further tenants share a series, and
instances that have left the fleet are dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.observe.histograms import (
    SHORT_SECONDS,
    Histogram,
    Latencies,
)

if TYPE_CHECKING:
    from lmetric.server.execution.fallback import FallbackStep
    from lmetric.server.fleet.model import Model


class InstanceRequests:
    """Latencies and compared tokens of the requests of one instance."""

    __slots__ = ("compared", "latencies", "over", "under")

    def __init__(self) -> None:
        self.latencies = Latencies()
        # Prompt tokens, and the tokens by which predictions were above and below the reports.
        self.compared = self.over = self.under = 0


MOST_SERIES = 20_000  # of `lmetric_requests_total`, after which tenants that no file lists share one


def drop_gone(instances: dict[str, InstanceRequests], model: Model) -> None:
    """Drops the metrics of instances that have left the fleet."""
    for name in [name for name in instances if name not in model.engines]:
        del instances[name]


class RequestMetrics(Observer):
    """Counts and times of requests for engines."""

    def __init__(self, fleet: Fleet) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by model, tenant and status
        self.classes: dict[tuple[str, str], Latencies] = {}  # by model and SLO class
        self.instances: dict[str, dict[str, InstanceRequests]] = {}  # by model and instance
        self.prioritized: Counter[str] = Counter()
        self.aliased: Counter[tuple[str, str]] = Counter()  # by alias, and name in its place
        self.fallbacks: Counter[FallbackStep] = Counter()
        self.overhead: dict[str, Histogram] = {}
        self.decisions: dict[str, Histogram] = {}
        fleet.on_model_removed.append(self._forget)

    def _forget(self, model: str) -> None:
        """Drops the counts of a model that was removed."""
        for by_model in (self.instances, self.prioritized, self.overhead, self.decisions):
            by_model.pop(model, None)
        self.requests = Counter({key: count for key, count in self.requests.items() if key[0] != model})
        self.classes = {key: times for key, times in self.classes.items() if key[0] != model}

    def sent(self, request: ClientRequest, relay: InFlightRequest) -> None:
        """Records the start of a request at an engine."""
        model = request.model.name if request.model is not None else ""
        decisions = self.decisions.get(model)
        if decisions is None:
            decisions = self.decisions[model] = Histogram(SHORT_SECONDS)
            self.overhead[model] = Histogram(SHORT_SECONDS)
        decisions.observe(request.decision_ended - request.decision_began)
        if not request.was_held and (request.fallback is None or request.fell_back is None):
            self.overhead[model].observe(time.monotonic() - request.started)

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Records a request for an engine that ended."""
        model = "" if request.model is None else request.model.name
        requests, key = self.requests, (model, request.tenant, request.status)
        count = requests.get(key)
        if count is None:
            count = 0
            if len(requests) >= MOST_SERIES and request.caller.any_tenant:
                key = model, OTHER_TENANTS, request.status
                count = requests[key]
        requests[key] = count + 1
        if request.priority is not None:
            self.prioritized[model] += 1
        if request.alias is not None:
            fell_back = request.fell_back
            name = request.model_name if fell_back is None else fell_back.model
            self.aliased[request.alias, name or ""] += 1
        if request.fallback is not None:
            self.fallbacks.update(request.fallback.steps)
        if relay is None or (usage := relay.usage) is None:
            return
        times = self.classes.get((model, request.slo_class))
        if times is None:
            times = self.classes[model, request.slo_class] = Latencies()
        instances, name = self.instances.get(model), relay.instance or ""
        if instances is None:
            instances = self.instances[model] = {}
        instance = instances.get(name)
        if instance is None:
            if request.model is not None and len(instances) > 2 * len(request.model.engines):
                drop_gone(instances, request.model)  # also if nobody scrapes
            instance = instances[name] = InstanceRequests()
        own, now = instance.latencies, request.ended_at
        seconds = now - request.started
        times.seconds.observe(seconds)
        own.seconds.observe(seconds)
        if first := usage.first_token_at:
            ttft = first - request.started
            times.ttft.observe(ttft)
            own.ttft.observe(ttft)
            if request.trace is not None and request.trace.sampled:
                times.ttft.exemplify(ttft, request.trace.hex_id)
            further = usage.output_tokens - 1
            if further > 0:
                tpot = (now - first) / further
                times.tpot.observe(tpot)
                own.tpot.observe(tpot)
        reported = usage.cached_tokens
        if reported is not None and (predicted := relay.predicted_cached_tokens) is not None:
            instance.compared += usage.prompt_tokens or 0
            if predicted > reported:
                instance.over += predicted - reported
            else:
                instance.under += reported - predicted
