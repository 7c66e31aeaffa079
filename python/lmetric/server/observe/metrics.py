"""Metrics of the server and its routers, as Prometheus text."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from lmetric._core import indicator_table
from lmetric.server.execution.exchange import InFlightRequest
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.pool import Pool
from lmetric.server.observe.admission import admission_metrics
from lmetric.server.observe.outliers import outlier_metrics
from lmetric.server.observe.programs import program_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)
_TOTALS = {
    "decisions": "requests placed on an instance",
    "no_instance": "requests for which no instance was left",
    "retries": "retries on the next instance of the ranking",
    "left_out": "instances left out of a decision: an indicator was absent or the score was not a number",
    "unscored": "choices by fewest requests in flight, because the policy scored no engine",
    "filter_waived": "decisions that ignored the policy's filter because it left no instance",
    "split_requests": "requests split at a token, to continue on another engine",
    "migrated_requests": "migrations of running requests to another engine",
    "finished": "requests that ended without an error",
    "dropped": "requests closed without a reported outcome",
    "prompt_tokens": "prompt tokens of the placed requests",
    "predicted_cached_tokens": "prompt tokens expected in the chosen instance's cache",
    "cached_tokens": "prompt tokens the engines found in their caches",
    "prefix_fetched_tokens": "prompt tokens fetched from another engine",
    "output_tokens": "output tokens that engines returned",
    "index_evicted_blocks": "blocks evicted from the index to keep its size limit",
}

# Names in the router's statistics, if they differ.
_NAMED = {
    "split_requests": "split",
    "migrated_requests": "migrated",
    "prefix_fetched_tokens": "fetched_tokens",
}

_GAUGES = {
    "index_bytes": "Memory of the KV index",
    "guard_on": "1 if the hot-spot guard is on, else 0",
    "guard_suspected": "Prefixes that the hot-spot guard suspects",
    "guard_filtering": "Prefixes whose requests the hot-spot guard keeps off the engines that hold them",
}

_INSTANCE_STATE = {
    "healthy": "1 if the instance passes its health checks and is not ejected, else 0",
    "draining": "1 if the instance accepts no new requests, else 0",
    "in_flight": "Requests placed on the instance that have not ended",
}
# Meanings of an instance's gauges: its state, and its indicators as declared in the core.
_INSTANCE_GAUGES = {
    **_INSTANCE_STATE,
    **{row["name"]: row["about"].rstrip(".") for row in indicator_table() if row["owner"] != "declared"},
}


class Histogram:
    """Counts of values in buckets. ``bounds`` are the upper bounds, inclusive and ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Adds a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Returns cumulative counts by upper bound, as Prometheus expects them."""
        total = 0
        rows = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class _Times:
    """The latency histograms of one model, in seconds."""

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
        ProcessCollector(registry=self._registry)

    def request(
        self,
        model: str,
        tenant: str,
        status: int,
        started: float,
        ended: float,
        relay: InFlightRequest | None,
    ) -> None:
        """Records a request for an engine that ended. Times: seconds on the monotonic clock."""
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
        """Returns the text of /metrics."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Yields all metrics of the router and of its process, with their present values."""
        yield from self._registry.collect()

    def describe(self) -> list[Metric]:
        """Returns nothing, so the registry collects no values when the collector is added."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their present values."""
        requests = CounterMetricFamily(
            "lmetric_requests", "Requests for engines, by status", labels=("model", "tenant", "code")
        )
        for (model, tenant, status), count in self.requests.items():
            requests.add_metric((model, tenant, str(status)), count)
        yield requests
        for attribute, name, text in (
            (
                "ttft",
                "lmetric_time_to_first_token_seconds",
                "Time from a streamed request to its first token",
            ),
            (
                "tpot",
                "lmetric_time_per_output_token_seconds",
                "Mean time per output token of a stream after the first",
            ),
            ("seconds", "lmetric_request_seconds", "Time from a request to the end of its answer"),
        ):
            family = HistogramMetricFamily(name, text, labels=("model",))
            for model, times in self._times.items():
                histogram: Histogram = getattr(times, attribute)
                family.add_metric((model,), histogram.buckets(), histogram.sum)
            yield family
        lag = HistogramMetricFamily(
            "lmetric_event_loop_lag_seconds",
            "Delay of the server's event loop, measured ten times a second",
        )
        lag.add_metric((), self.loop_lag.buckets(), self.loop_lag.sum)
        yield lag
        guard = CounterMetricFamily(
            "lmetric_guard_events", "Events of the hot-spot guard", labels=("model", "event")
        )
        for (model, event), count in self.events.items():
            guard.add_metric((model, event), count)
        yield guard
        transfers = CounterMetricFamily(
            "lmetric_kv_transfers",
            "Prompts by KV transfer outcome: transferred, or the reason for computing them again",
            labels=("model", "outcome"),
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.kv_transfers.items():
                transfers.add_metric((pool.name, outcome), count)
        yield transfers
        fetches = CounterMetricFamily(
            "lmetric_prefix_fetches",
            "Prefix fetches from another engine, by outcome: fetched, or the reason for failing",
            labels=("model", "outcome"),
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.fetch_outcomes.items():
                fetches.add_metric((pool.name, outcome), count)
        yield fetches
        changes = CounterMetricFamily(
            "lmetric_fleet_change_fetches",
            "Prefix fetches for engines that join or leave, by outcome: fetched, or the reason for failing",
            labels=("model", "outcome"),
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.changes.outcomes.items() if pool.changes else ():
                changes.add_metric((pool.name, outcome), count)
        yield changes
        migrations = CounterMetricFamily(
            "lmetric_migrations",
            "Migrations of running requests, by outcome: migrated, or the reason for staying",
            labels=("model", "outcome"),
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.mover.outcomes.items() if pool.mover else ():
                migrations.add_metric((pool.name, outcome), count)
        yield migrations
        failovers = CounterMetricFamily(
            "lmetric_stream_failovers",
            "Engine failures after an answer's first token, by outcome: continued, or the reason for the "
            "answer's end",
            labels=("model", "outcome"),
        )
        stays = CounterMetricFamily(
            "lmetric_not_resumable",
            "Streams that no other engine could continue after a failure, by reason: a field of the request, "
            "or a property of the model or the engine",
            labels=("model", "reason"),
        )
        for pool in self.fleet.pools:
            for outcome, count in pool.failovers.items():
                failovers.add_metric((pool.name, outcome), count)
            for reason, count in pool.not_resumable.items():
                stays.add_metric((pool.name, reason), count)
        yield failovers
        yield stays
        implausible = CounterMetricFamily(
            "lmetric_implausible_usage",
            "Answers ignored by the tokens-per-byte estimate: their usage.prompt_tokens is implausible",
            labels=("model",),
        )
        for pool in self.fleet.pools:
            implausible.add_metric((pool.name,), pool.ratio.implausible)
        yield implausible
        gamma = GaugeMetricFamily(
            "lmetric_priority_gamma", "Tail rate gamma of the priority boost, 1/s", labels=("model",)
        )
        for pool in self.fleet.pools:
            if (learned := pool.router.learned()["gamma"]) is not None:
                gamma.add_metric((pool.name,), learned)
        yield gamma
        yield from program_metrics(self.fleet)
        yield from admission_metrics(self.fleet)
        yield from outlier_metrics(self.fleet)
        yield from self._routers()
        for further in self.further:
            yield from further()

    def _routers(self) -> Iterator[Metric]:
        stats = [(pool, cast(dict[str, Any], pool.router.stats())) for pool in self.fleet.pools]
        for name, text in _TOTALS.items():
            counter = CounterMetricFamily(f"lmetric_{name}", text.capitalize(), labels=("model",))
            for pool, values in stats:
                value = values[_NAMED.get(name, name)] - pool.hedging.uncounted.get(name, 0)
                counter.add_metric((pool.name,), value)
            yield counter
        fallbacks = CounterMetricFamily(
            "lmetric_policy_fallbacks",
            "Decisions made by the fallback of a Python policy, by cause",
            labels=("model", "cause"),
        )
        for pool, _ in stats:
            counts = pool.router.policy_fallbacks()
            for cause in ("errors", "overruns", "paused"):
                fallbacks.add_metric((pool.name, cause), counts[cause])
        yield fallbacks
        failed = CounterMetricFamily(
            "lmetric_failures", "Failed tries of requests at an engine, by kind", labels=("model", "kind")
        )
        for pool, values in stats:
            for kind, count in values["failed"].items():
                failed.add_metric((pool.name, kind), count - pool.hedging.uncounted.get(kind, 0))
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
            "Value of a declared indicator; no sample if the value is absent",
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
            "KV index mode of an engine (exact, approximate or load_only) and its reason; always 1",
            labels=("model", "instance", "engine", "version", "mode", "reason"),
        )
        reports = CounterMetricFamily(
            "lmetric_load_reports", "Load reports received, by source", labels=("model", "instance", "source")
        )
        events = CounterMetricFamily(
            "lmetric_kv_events", "Counts of the KV event feed, by kind", labels=("model", "instance", "what")
        )
        blocks = GaugeMetricFamily(
            "lmetric_tier_blocks",
            "Blocks of a tier below the GPU in the KV index",
            labels=("model", "instance", "medium"),
        )
        ratio = GaugeMetricFamily(
            "lmetric_tier_load_ratio",
            "Seconds to load a token from a tier divided by the seconds to compute it; learned once loads "
            "are measured",
            labels=("model", "instance", "medium"),
        )
        hits = CounterMetricFamily(
            "lmetric_tier_hit_tokens",
            "Prompt tokens that engines loaded from a tier below the GPU, as predicted and not "
            "contradicted by cached_tokens",
            labels=("model", "instance", "medium"),
        )
        for pool in self.fleet.pools:
            for engine in pool.engines.values():
                for medium, tier in pool.router.tiers(engine.name).items():
                    tier_labels = (pool.name, engine.name, medium)
                    blocks.add_metric(tier_labels, tier["blocks"])
                    ratio.add_metric(tier_labels, tier["load_ratio"])
                    hits.add_metric(tier_labels, tier["hit_tokens"])
                capabilities, chosen = engine.capabilities, engine.mode
                engine_labels = (capabilities.engine, capabilities.version or "")
                labels = (pool.name, engine.name, *engine_labels, chosen.name, chosen.reason)
                mode.add_metric(labels, 1)
                for source, count in engine.load_reports.items():
                    reports.add_metric((pool.name, engine.name, source), count)
                for what, count in pool.kv.counts(engine.name).items():
                    events.add_metric((pool.name, engine.name, what), count)
        yield mode
        yield reports
        yield events
        yield blocks
        yield ratio
        yield hits

    def _tokenizers(self) -> Iterator[Metric]:
        """Yields metrics of the tokenizer caches, and of the prompts matched as text."""
        as_text = CounterMetricFamily(
            "lmetric_text_prompts",
            "Prompts matched as text although the model has a tokenizer, by reason",
            labels=("model", "reason"),
        )
        text = CounterMetricFamily(
            "lmetric_prompt_text_bytes",
            "Bytes of prompts whose tokens came from the cache (found) or from the tokenizer (new)",
            labels=("model", "tokens"),
        )
        memory = GaugeMetricFamily(
            "lmetric_token_cache_bytes", "Memory of the token cache", labels=("model",)
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
            "Source of an instance's predicted times to first token; always 1",
            labels=("model", "instance", "source"),
        )
        role = GaugeMetricFamily(
            "lmetric_instance_role",
            "Role of an instance; always 1",
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
                    else:
                        family = families.get(key)
                        if family is None:
                            family = families[key] = GaugeMetricFamily(
                                f"lmetric_instance_{key}",
                                _INSTANCE_GAUGES[key],
                                labels=("model", "instance"),
                            )
                        if value is not None:
                            family.add_metric((pool.name, name), float(value))
        yield placed
        yield source
        yield role
        yield from families.values()
