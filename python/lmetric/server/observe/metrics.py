"""Counters of the server and the routers, as Prometheus text."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from lmetric.server.execution.exchange import InFlightRequest
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.pool import Pool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)
_TOTALS = {
    "decisions": "requests placed",
    "no_instance": "requests for which no instance was left",
    "retries": "moves to the next of the ranking",
    "left_out": "instances left out of a decision: an indicator was absent, or the score no number",
    "unscored": "choices in which a policy scored no engine, so that the fewest requests decided",
    "filter_waived": "decisions in which the policy's filter left nobody and was waived",
    "split_requests": "requests cut at one of their tokens, to go on elsewhere",
    "moved_requests": "moves of running requests to another engine",
    "finished": "requests that ended well",
    "dropped": "tickets closed without an outcome",
    "prompt_tokens": "prompt tokens routed",
    "predicted_cached_tokens": "prompt tokens expected in the chosen instance's cache",
    "cached_tokens": "prompt tokens the engines found in their caches",
    "pulled_tokens": "prompt tokens fetched from another engine",
    "output_tokens": "output tokens that came back",
    "index_evicted_blocks": "blocks that left the KV index to keep its bound",
}

_NAMED = {"split_requests": "split", "moved_requests": "moved"}  # as the router's stats have it

_GAUGES = {
    "index_bytes": "Memory of the KV index",
    "guard_on": "Whether the hot-spot guard works",
    "guard_suspected": "Prefixes that the hot-spot guard suspects",
    "guard_filtering": "Prefixes that the hot-spot guard keeps off their holders",
}


class Histogram:
    """Counts by bucket; bounds are upper ends."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        total = 0
        rows = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class _Times:
    """What is measured per model."""

    __slots__ = ("seconds", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram(SECONDS)
        self.tpot = Histogram(SECONDS)
        self.seconds = Histogram(SECONDS)


class Metrics(Collector):
    """Everything under /metrics."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.events: Counter[tuple[str, str]] = Counter()
        self.loop_lag = Histogram(SECONDS)
        self._times: dict[str, _Times] = {}
        self._running = 0
        self.further: list[Callable[[], Iterator[Metric]]] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def request(
        self,
        model: str,
        tenant: str,
        status: int,
        started: float,
        ended: float,
        relay: InFlightRequest | None,
    ) -> None:
        """A request for an engine ended; times in seconds on the monotonic clock."""
        self.requests[model, tenant, status] += 1
        usage = relay.usage if relay is not None else None
        if usage is None:
            return
        times = self._times.get(model)
        if times is None:
            times = self._times[model] = _Times()
        times.seconds.observe(ended - started)
        first = usage.first_token_at
        if first:
            times.ttft.observe(first - started)
            further = usage.output_tokens - 1
            if further > 0:
                times.tpot.observe((ended - first) / further)

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask for values when the collector is added."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics with their values now."""
        requests = CounterMetricFamily(
            "lmetric_requests", "Requests for engines, by answer", labels=("model", "tenant", "code")
        )
        for (model, tenant, status), count in self.requests.items():
            requests.add_metric((model, tenant, str(status)), count)
        yield requests
        for attribute, name, text in (
            ("ttft", "lmetric_time_to_first_token_seconds", "From a stream's request to its first token"),
            ("tpot", "lmetric_time_per_output_token_seconds", "Mean over a stream's tokens after the first"),
            ("seconds", "lmetric_request_seconds", "From the request to the end of its answer"),
        ):
            family = HistogramMetricFamily(name, text, labels=("model",))
            for model, times in self._times.items():
                histogram: Histogram = getattr(times, attribute)
                family.add_metric((model,), histogram.buckets(), histogram.sum)
            yield family
        lag = HistogramMetricFamily(
            "lmetric_event_loop_lag_seconds",
            "How late the server's event loop runs what is due, measured ten times a second",
        )
        lag.add_metric((), self.loop_lag.buckets(), self.loop_lag.sum)
        yield lag
        guard = CounterMetricFamily(
            "lmetric_guard_events", "What the hot-spot guard did", labels=("model", "event")
        )
        for (model, event), count in self.events.items():
            guard.add_metric((model, event), count)
        yield guard
        handovers = CounterMetricFamily(
            "lmetric_handovers",
            "Prompts handed to a decode engine (handed_over), or computed again there, by why",
            labels=("model", "outcome"),
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.handovers.items():
                handovers.add_metric((pool.name, outcome), count)
        yield handovers
        pulls = CounterMetricFamily(
            "lmetric_pulls",
            "Prefixes to be fetched from another engine, by what came of it: pulled, or why not",
            labels=("model", "outcome"),
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.pull_outcomes.items():
                pulls.add_metric((pool.name, outcome), count)
        yield pulls
        moves = CounterMetricFamily(
            "lmetric_moves", "Moves of running requests, by what came of them", labels=("model", "outcome")
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.mover.outcomes.items() if pool.mover else ():
                moves.add_metric((pool.name, outcome), count)
        yield moves
        implausible = CounterMetricFamily(
            "lmetric_implausible_usage",
            "Answers whose usage.prompt_tokens cannot be true of their prompt, and was not learned from",
            labels=("model",),
        )
        for pool in self.fleet.pools:
            implausible.add_metric((pool.name,), pool.ratio.implausible)
        yield implausible
        gamma = GaugeMetricFamily(
            "lmetric_priority_gamma", "Rate of the tail that requests are boosted by, 1/s", labels=("model",)
        )
        for pool in self.fleet.pools:
            if (learned := pool.router.learned()["gamma"]) is not None:
                gamma.add_metric((pool.name,), learned)
        yield gamma
        yield from self._routers()
        for further in self.further:
            yield from further()

    def _routers(self) -> Iterator[Metric]:
        stats = [(pool, cast(dict[str, Any], pool.router.stats())) for pool in self.fleet.pools]
        for name, text in _TOTALS.items():
            counter = CounterMetricFamily(f"lmetric_{name}", text.capitalize(), labels=("model",))
            for pool, values in stats:
                counter.add_metric((pool.name,), values[_NAMED.get(name, name)])
            yield counter
        fallbacks = CounterMetricFamily(
            "lmetric_policy_fallbacks",
            "Decisions that a fallback made for a Python policy, by cause",
            labels=("model", "cause"),
        )
        for pool, _ in stats:
            counts = pool.router.policy_fallbacks()
            for cause in ("errors", "overruns", "paused"):
                fallbacks.add_metric((pool.name, cause), counts[cause])
        yield fallbacks
        failed = CounterMetricFamily("lmetric_failures", "Failures by kind", labels=("model", "kind"))
        for pool, values in stats:
            for kind, count in values["failed"].items():
                failed.add_metric((pool.name, kind), count)
        yield failed
        yield from self._tokenizers()
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"lmetric_{name}", text, labels=("model",))
            for pool, values in stats:
                gauge.add_metric((pool.name,), float(values[name]))
            yield gauge
        yield from self._instances(stats)
        yield self._indicators()
        yield from self._engines()

    def _indicators(self) -> Metric:
        values = GaugeMetricFamily(
            "lmetric_indicator",
            "Value of a declared indicator; none if it is absent",
            labels=("model", "instance", "indicator"),
        )
        for pool in self.fleet.pools:
            columns = pool.router.indicators() if pool.indicators.declared else {}
            for indicator in pool.indicators.declared:
                for name, value in zip(pool.router.instances(), columns[indicator].tolist(), strict=True):
                    if math.isfinite(value):
                        values.add_metric((pool.name, name, indicator), value)
        return values

    def _engines(self) -> Iterator[Metric]:
        mode = GaugeMetricFamily(
            "lmetric_engine_mode",
            "1 for each engine: exact, approximate or load_only, and why",
            labels=("model", "instance", "engine", "version", "mode", "reason"),
        )
        reports = CounterMetricFamily(
            "lmetric_load_reports", "Load reports taken in, by source", labels=("model", "instance", "source")
        )
        events = CounterMetricFamily(
            "lmetric_kv_events", "What the KV event feed counted", labels=("model", "instance", "what")
        )
        for pool in self.fleet.pools:
            for engine in pool.engines.values():
                told, chosen = engine.capabilities, engine.mode
                labels = (pool.name, engine.name, told.engine, told.version or "", chosen.name, chosen.reason)
                mode.add_metric(labels, 1)
                for source, count in engine.load_reports.items():
                    reports.add_metric((pool.name, engine.name, source), count)
                for what, count in pool.kv.counts(engine.name).items():
                    events.add_metric((pool.name, engine.name, what), count)
        yield mode
        yield reports
        yield events

    def _tokenizers(self) -> Iterator[Metric]:
        """Of pools that match prompts by token: their caches, and the prompts that were matched as text."""
        as_text = CounterMetricFamily(
            "lmetric_text_prompts",
            "Prompts matched as text although there is a tokenizer, by why",
            labels=("model", "reason"),
        )
        text = CounterMetricFamily(
            "lmetric_prompt_text_bytes",
            "Bytes of prompts whose tokens were remembered (found) or made (new)",
            labels=("model", "tokens"),
        )
        memory = GaugeMetricFamily(
            "lmetric_token_cache_bytes", "Memory of remembered tokens", labels=("model",)
        )
        for pool in self.fleet.pools:
            for reason, count in pool.text_prompts.items():
                as_text.add_metric((pool.name, reason), count)
            if pool.tokenizer is not None:
                stats = pool.tokenizer.encoder.stats()
                text.add_metric((pool.name, "found"), stats["found_bytes"])
                text.add_metric((pool.name, "new"), stats["new_bytes"])
                memory.add_metric((pool.name,), stats["bytes"])
        yield from (as_text, text, memory)

    def _instances(self, stats: list[tuple[Pool, dict[str, Any]]]) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        placed = CounterMetricFamily(
            "lmetric_instance_decisions", "Requests placed on an instance", labels=("model", "instance")
        )
        source = GaugeMetricFamily(
            "lmetric_instance_predicted_ttft_source",
            "What predicted times to first token rest on; always 1",
            labels=("model", "instance", "source"),
        )
        role = GaugeMetricFamily(
            "lmetric_instance_role",
            "What an instance is asked to do; always 1",
            labels=("model", "instance", "role"),
        )
        for pool, values in stats:
            for name, row in values["instances"].items():
                for key, value in row.items():
                    if key == "decisions":
                        placed.add_metric((pool.name, name), value)
                    elif key == "predicted_ttft_source":
                        source.add_metric((pool.name, name, value), 1)
                    elif key == "role":
                        role.add_metric((pool.name, name, value), 1)
                    elif value is not None:
                        family = families.get(key)
                        if family is None:
                            family = families[key] = GaugeMetricFamily(
                                f"lmetric_instance_{key}",
                                f"{key} of an instance as the router sees it",
                                labels=("model", "instance"),
                            )
                        family.add_metric((pool.name, name), float(value))
        yield placed
        yield source
        yield role
        yield from families.values()
