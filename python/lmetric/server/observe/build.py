"""The version of the router, and the policies of its models."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import InfoMetricFamily, Metric

from lmetric._core import __version__
from lmetric.server.fleet.model import Model

_LONGEST_POLICY = 80  # characters; expressions may be longer


def build_metrics(stats: Iterable[tuple[Model, Mapping[str, Any]]]) -> Iterator[Metric]:
    """Yields the metrics. ``stats``: each model with its router's statistics."""
    yield InfoMetricFamily(
        "lmetric_build",
        "Versions of the router and of Python; always 1",
        {"version": __version__, "python": platform.python_version()},
    )
    policies = InfoMetricFamily("lmetric_policy", "Policies of a model; always 1", labels=("model",))
    for model, values in stats:
        names = {name: _short(values[name]) for name in ("policy", "decode_policy")}
        policies.add_metric((model.name,), names)
    yield policies


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_POLICY else f"{name[: _LONGEST_POLICY - 3]}..."
