"""Metrics of outlier ejection, of retries and of hedges."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.server.fleet.fleet import Fleet


def outlier_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Yields the metrics, with their present values."""
    panic = GaugeMetricFamily(
        "lmetric_panic",
        "1 if ejected engines get requests because too few engines are in service, else 0",
        labels=("model",),
    )
    ejections = CounterMetricFamily(
        "lmetric_ejections",
        "Ejections of engines, by rule: consecutive, success_rate, probe",
        labels=("model", "rule"),
    )
    prevented = CounterMetricFamily(
        "lmetric_ejections_prevented",
        "Ejections not made, by limit: max_share, panic_threshold",
        labels=("model", "limit"),
    )
    suspects = CounterMetricFamily(
        "lmetric_suspect_requests",
        "Requests that failed in the same way on two engines",
        labels=("model",),
    )
    retries = CounterMetricFamily(
        "lmetric_retry_budget",
        "Retries by outcome: charged to the budget, free (the engine is lost), refused",
        labels=("model", "outcome"),
    )
    hedges = CounterMetricFamily(
        "lmetric_hedges",
        "Hedges by outcome: won (the second engine answered), lost (the first answered), failed (the second "
        "engine failed), ended (the request ended before a token)",
        labels=("model", "outcome"),
    )
    unsent = CounterMetricFamily(
        "lmetric_hedges_not_sent",
        "Hedges that were due and not sent, by reason: budget, no_engine, held (by admission)",
        labels=("model", "reason"),
    )
    left = GaugeMetricFamily(
        "lmetric_budget_available",
        "Further retries and hedges that the budgets of a model allow now",
        labels=("model", "budget"),
    )
    now = time.monotonic()
    for model in fleet.models:
        left.add_metric((model.name, "retries"), model.retry_budget.available(model.requests, now))
        left.add_metric((model.name, "hedges"), model.hedging.budget.available(model.requests))
        outliers = model.outliers
        panic.add_metric((model.name,), float(bool(outliers.panic)))
        for rule, count in outliers.ejected.items():
            ejections.add_metric((model.name, rule), count)
        for limit, count in outliers.prevented.items():
            prevented.add_metric((model.name, limit), count)
        suspects.add_metric((model.name,), outliers.suspects)
        for outcome, count in model.retry_budget.outcomes.items():
            retries.add_metric((model.name, outcome), count)
        for outcome, count in model.hedging.outcomes.items():
            hedges.add_metric((model.name, outcome), count)
        for reason, count in model.hedging.unsent.items():
            unsent.add_metric((model.name, reason), count)
    yield from (panic, ejections, prevented, suspects, retries, hedges, unsent, left)
