"""The families of /metrics, of the server and its routers. The first scrape loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.server.observe.admission import admission_metrics
from lmetric.server.observe.build import build_metrics
from lmetric.server.observe.instances import engine_metrics, indicator_metrics, instance_metrics
from lmetric.server.observe.metrics import Metrics
from lmetric.server.observe.outliers import outlier_metrics
from lmetric.server.observe.programs import program_metrics
from lmetric.server.observe.request_families import request_metrics
from lmetric.server.observe.trials import trial_metrics

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
    "prompt_tokens": "prompt tokens of requests that ended without an error",
    "predicted_cached_tokens": "prompt tokens of the same requests that the router expected in caches",
    "reported_prompt_tokens": "prompt tokens of the same requests, if the engine reported cached tokens",
    "cached_tokens": "prompt tokens of the same requests that engines reported as cached",
    "prefix_fetched_tokens": "prompt tokens fetched from another engine",
    "output_tokens": "output tokens that engines returned",
    "index_evicted_blocks": "blocks evicted from the index to keep its size limit",
}

# Counts of each model by a second label: name, label, text and counts.
_COUNTS: tuple[tuple[str, str, str, Callable[[Model], Mapping[str, int]]], ...] = (
    (
        "kv_transfers",
        "outcome",
        "Prompts by KV transfer outcome: transferred, or the reason for computing them again",
        lambda model: model.kv_transfers,
    ),
    (
        "prefix_fetches",
        "outcome",
        "Prefix fetches from another engine, by outcome: fetched, or the reason for failing",
        lambda model: model.fetch_outcomes,
    ),
    (
        "media_encodings",
        "outcome",
        "Images, sounds and videos for engines that encode, by outcome: encoded, cached (the request's "
        "engine has their tokens), or the reason why the request's engine encodes them",
        lambda model: model.encodings,
    ),
    (
        "fleet_change_fetches",
        "outcome",
        "Prefix fetches for engines that join or leave, by outcome: fetched, or the reason for failing",
        lambda model: model.changes.outcomes if model.changes else {},
    ),
    (
        "migrations",
        "outcome",
        "Migrations of running requests, by outcome: migrated, or the reason for staying",
        lambda model: model.mover.outcomes if model.mover else {},
    ),
    (
        "stream_failovers",
        "outcome",
        "Engine failures after an answer's first token, by outcome: continued, or the reason for the "
        "answer's end",
        lambda model: model.failovers,
    ),
    (
        "not_resumable",
        "reason",
        "Streams that no other engine could continue after a failure, by reason: a field of the request, "
        "or a property of the model or the engine",
        lambda model: model.not_resumable,
    ),
    (
        "ineligible_requests",
        "plan",
        "Requests that may not have a plan that the model is set up for, by plan; decision records "
        "have the reason",
        lambda model: model.ineligible,
    ),
)

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


def families(metrics: Metrics) -> Iterator[Metric | None]:
    """Yields all metrics of the router and of its process, and None where other tasks may run."""
    fleet = metrics.fleet
    yield from request_metrics(fleet, metrics.requests)
    lag = HistogramMetricFamily(
        "lmetric_event_loop_lag_seconds",
        "Delay of the server's event loop, measured ten times a second",
    )
    lag.add_metric((), metrics.loop_lag.buckets(), metrics.loop_lag.sum)
    yield lag
    guard = CounterMetricFamily(
        "lmetric_guard_events", "Events of the hot-spot guard", labels=("model", "event")
    )
    for (model_name, event), count in metrics.events.items():
        guard.add_metric((model_name, event), count)
    yield guard
    for name, label, text, counts in _COUNTS:
        counter = CounterMetricFamily(f"lmetric_{name}", text, labels=("model", label))
        for model in fleet.models:
            for value, count in counts(model).items():
                counter.add_metric((model.name, value), count)
        yield counter
    spans = CounterMetricFamily(
        "lmetric_trace_spans",
        "Spans by outcome: exported, dropped (the queue was full), failed (the collector did not take them)",
        labels=("outcome",),
    )
    for outcome, count in list(metrics.spans.items()):
        spans.add_metric((outcome,), count)
    yield spans
    implausible = CounterMetricFamily(
        "lmetric_implausible_usage",
        "Answers ignored by the tokens-per-byte estimate: their usage.prompt_tokens is implausible",
        labels=("model",),
    )
    for model in fleet.models:
        implausible.add_metric((model.name,), model.ratio.implausible)
    yield implausible
    gamma = GaugeMetricFamily(
        "lmetric_priority_gamma", "Tail rate gamma of the priority boost, 1/s", labels=("model",)
    )
    for model in fleet.models:
        if (learned := model.router.learned()["gamma"]) is not None:
            gamma.add_metric((model.name,), learned)
    yield gamma
    yield from program_metrics(fleet)
    yield from admission_metrics(fleet)
    yield from outlier_metrics(fleet)
    yield from trial_metrics(fleet)
    yield from _routers(fleet)
    for further in metrics.further:
        yield from further()
    yield from metrics.process.collect()


def _routers(fleet: Fleet) -> Iterator[Metric | None]:
    stats = [(model, _counted_stats(model)) for model in fleet.models]
    for name, text in _TOTALS.items():
        counter = CounterMetricFamily(f"lmetric_{name}", text.capitalize(), labels=("model",))
        for model, values in stats:
            counter.add_metric((model.name,), values[_NAMED.get(name, name)])
        yield counter
    fallbacks = CounterMetricFamily(
        "lmetric_policy_fallbacks",
        "Decisions made by the fallback of a Python policy, by cause",
        labels=("model", "cause"),
    )
    for model, _ in stats:
        counts = model.router.policy_fallbacks()
        for cause in ("errors", "overruns", "paused"):
            fallbacks.add_metric((model.name, cause), counts[cause])
    yield fallbacks
    failed = CounterMetricFamily(
        "lmetric_failures", "Failed tries of requests at an engine, by kind", labels=("model", "kind")
    )
    for model, values in stats:
        for kind, count in values["failed"].items():
            failed.add_metric((model.name, kind), count + model.retried[kind])
    yield failed
    yield from _tokenizers(fleet)
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"lmetric_{name}", text, labels=("model",))
        for model, values in stats:
            gauge.add_metric((model.name,), float(values[name]))
        yield gauge
    yield from build_metrics(stats)
    yield from instance_metrics(stats, list(fleet.unplaced.values()))
    yield from indicator_metrics(fleet)
    yield from engine_metrics(fleet)


def _tokenizers(fleet: Fleet) -> Iterator[Metric]:
    """Yields metrics of the tokenizer caches, and of the prompts matched as text."""
    as_text = CounterMetricFamily(
        "lmetric_text_prompts",
        "Prompts matched as text although the model has a tokenizer, by reason (image: matched up to "
        "an image that is not known)",
        labels=("model", "reason"),
    )
    text = CounterMetricFamily(
        "lmetric_prompt_text_bytes",
        "Bytes of prompts whose tokens came from the cache (found) or from the tokenizer (new)",
        labels=("model", "tokens"),
    )
    memory = GaugeMetricFamily("lmetric_token_cache_bytes", "Memory of the token cache", labels=("model",))
    for model in fleet.models:
        for reason, count in model.tokenizers.text_prompts.items():
            as_text.add_metric((model.name, reason), count)
        if model.tokenizers.current is not None:
            stats = model.tokenizers.current.encoder.stats()
            text.add_metric((model.name, "found"), stats["found_bytes"])
            text.add_metric((model.name, "new"), stats["new_bytes"])
            memory.add_metric((model.name,), stats["bytes"])
    yield from (as_text, text, memory)


def _counted_stats(model: Model) -> dict[str, Any]:
    """Returns the core router's statistics without its tries that no engine got. It reads both at
    once, so that no total falls."""
    values = cast(dict[str, Any], model.router.stats())
    failed = dict(values["failed"])
    for name, count in model.hedging.uncounted.items():
        own = failed if name in failed else values
        own[name] -= count
    return values | {"failed": failed}
