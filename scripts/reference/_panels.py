"""Panels of the Grafana dashboard and the queries in them."""

from __future__ import annotations

from typing import Any

WIDTH = 24  # columns of Grafana's grid
HEIGHT = 8

# Filters by the variables. Prometheus uses `instance` for the router, `exported_instance` for the
# engine.
ROUTER = 'job=~"$job",instance=~"$router"'
MODEL = f'{ROUTER},model=~"$model"'
ADVISED = 'model=~"$model"'  # another job than the routers
ENGINE = f'{MODEL},exported_instance=~"$engine"'


def rate(metric: str, filters: str, *by: str) -> str:
    """Returns the rate of a counter, summed over all labels but ``by``."""
    over = f"sum by ({', '.join(by)})" if by else "sum"
    return f"{over} (rate({metric}{{{filters}}}[$__rate_interval]))"


def quantile(share: float, metric: str, filters: str, *by: str) -> str:
    """Returns a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', filters, *by, 'le')})"


def of_engines(metric: str, function: str = "max") -> str:
    return f"{function} by (exported_instance) ({metric}{{{ENGINE}}})"


def wanted(metric: str) -> str:
    """Returns the query of a metric of wanted engines, which `advise --watch` serves."""
    return f"max by (role, type) ({metric}{{{ADVISED}}})"


TTFT, TPOT, E2E = (
    "lmetric_time_to_first_token_seconds",
    "lmetric_time_per_output_token_seconds",
    "lmetric_request_seconds",
)


def latency(title: str, metric: str) -> dict[str, Any]:
    """Returns a panel with the median and two high quantiles of a latency, by class."""
    return panel(
        title,
        "s",
        {
            f"p{round(share * 100)} {{{{slo_class}}}}": quantile(share, metric, MODEL, "slo_class")
            for share in (0.5, 0.95, 0.99)
        },
        exemplars=metric == TTFT,
    )


def panel(
    title: str,
    unit: str,
    queries: dict[str, str],
    *,
    about: str = "",
    kind: str = "timeseries",
    width: int = 8,
    stacked: bool = False,
    exemplars: bool = False,
    least: float | None = 0,
    most: float | None = None,
) -> dict[str, Any]:
    """Returns a panel.

    ``queries``: expressions by legend. ``least``, ``most``: ends of the axis; None: automatic.
    """
    defaults: dict[str, Any] = {"unit": unit}
    if least is not None:
        defaults["min"] = least
    if most is not None:
        defaults["max"] = most
    if kind == "timeseries":
        fill = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if stacked else {"fillOpacity": 0}
        defaults["custom"] = {"lineWidth": 1, "showPoints": "never", **fill}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": {"type": "prometheus", "uid": "$datasource"},
            "editorMode": "code",
            "expr": expression,
            "legendFormat": legend,
            "range": True,
            **({"exemplar": True} if exemplars else {}),
        }
        for index, (legend, expression) in enumerate(queries.items())
    ]
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if kind == "timeseries":
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
        "gridPos": {"w": width, "h": HEIGHT if kind == "timeseries" else 4},
    }


def stat(title: str, unit: str, query: str, about: str) -> dict[str, Any]:
    return panel(title, unit, {"": query}, about=about, kind="stat", width=4)


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Returns a variable with the values of a label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }
