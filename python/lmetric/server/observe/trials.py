"""Metrics of policies on trial: shadows and canaries."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model

CHOICES = ("router", "shadow")
OUTCOMES = ("agreed", "differed", "failed")
# Those of `lmetric.server.fleet.canary`, which a model without trials does not load.
STATES = ("off", "running", "promoted", "rolled_back")
CAUSES = ("command", "ttft", "errors")


def trial_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Yields the metrics of all models, with their present values."""
    yield from _shadows(fleet.models)
    yield from _canaries(fleet.models)


def _shadows(models: list[Model]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "lmetric_shadow_requests",
        "Requests that the shadow's policy scored: it chose the same engine, another one, or failed",
        labels=("model", "outcome"),
    )
    cached = CounterMetricFamily(
        "lmetric_shadow_predicted_cached_tokens",
        "Prompt tokens expected in the cache of the router's engine and of the shadow's engine",
        labels=("model", "choice"),
    )
    seconds = CounterMetricFamily(
        "lmetric_shadow_predicted_ttft_seconds",
        "Sum of predicted times to the first token on the router's engine and on the shadow's engine",
        labels=("model", "choice"),
    )
    compared = CounterMetricFamily(
        "lmetric_shadow_predicted_ttft_requests", "Requests with both predictions", labels=("model",)
    )
    for model in models:
        if model.trials is None or model.trials.shadow.config is None:
            continue
        shadow = model.trials.shadow
        for outcome in OUTCOMES:
            requests.add_metric((model.name, outcome), shadow.outcomes[outcome])
        for index, choice in enumerate(CHOICES):
            cached.add_metric((model.name, choice), shadow.cached_tokens[index])
            seconds.add_metric((model.name, choice), shadow.ttft_seconds[index])
        compared.add_metric((model.name,), shadow.ttft_requests)
    yield from (requests, cached, seconds, compared)


def _canaries(models: list[Model]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "lmetric_canary_state", "1 for the present state of the canary, else 0", labels=("model", "state")
    )
    rollbacks = CounterMetricFamily(
        "lmetric_canary_rollbacks",
        "Canaries rolled back, by cause: command, or automatically for ttft or errors",
        labels=("model", "cause"),
    )
    promotions = CounterMetricFamily(
        "lmetric_canary_promotions", "Canaries promoted by command", labels=("model",)
    )
    share = GaugeMetricFamily(
        "lmetric_canary_share", "Share of the sessions in the canary's arm; 0: no canary", labels=("model",)
    )
    requests = GaugeMetricFamily(
        "lmetric_canary_requests", "Compared requests of the last canary, by arm", labels=("model", "arm")
    )
    errors = GaugeMetricFamily(
        "lmetric_canary_errors", "Failed requests among them, by arm", labels=("model", "arm")
    )
    value = GaugeMetricFamily(
        "lmetric_canary_value",
        "Mean or ratio of each compared metric while a canary runs, by arm: seconds, or shares from 0 to 1",
        labels=("model", "metric", "arm"),
    )
    difference = GaugeMetricFamily(
        "lmetric_canary_difference",
        "Value of the canary minus value of the stable arm, with the bounds low and high of its 95% interval",
        labels=("model", "metric", "bound"),
    )
    for model in models:
        canary, model_name = None if model.trials is None else model.trials.canary, model.name
        for each in STATES:
            state.add_metric((model_name, each), float(each == ("off" if canary is None else canary.state)))
        for cause in CAUSES:
            rollbacks.add_metric((model_name, cause), 0 if canary is None else canary.rollbacks[cause])
        promotions.add_metric((model_name,), 0 if canary is None else canary.promotions)
        run = None if canary is None else canary.run
        if canary is None or run is None:
            share.add_metric((model_name,), 0.0)
            continue
        share.add_metric((model_name,), run.config.share if canary.running else 0.0)
        comparison, arms = run.comparison, run.arms
        for index, arm in enumerate(arms):
            requests.add_metric((model_name, arm), comparison.requests[index])
            errors.add_metric((model_name, arm), comparison.errors[index])
        if not canary.running:
            continue  # values of the past would look like present ones
        for metric, values in comparison.values().items():
            for arm, number in zip(arms, values, strict=True):
                if number is not None:
                    value.add_metric((model_name, metric, arm), number)
        for found in comparison.differences():
            low, high = found.interval
            for bound, number in (("low", low), ("mean", found.value), ("high", high)):
                difference.add_metric((model_name, found.metric, bound), number)
    yield from (state, rollbacks, promotions, share, requests, errors, value, difference)
