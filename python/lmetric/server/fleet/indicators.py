"""Indicators that the configuration declares, and the sources of their values."""

from collections.abc import Collection, Mapping

from lmetric._core import BadValueError
from lmetric.config.schema import IndicatorConfig
from lmetric.engines.adapter import finite, header_values, samples

METRICS_PAGE = "/metrics"

Values = dict[str, float | None]
"""Values by indicator, for `Router.report_load`. None: no longer known."""


class Indicators:
    """The declared indicators of a model.

    Raises `lmetric.BadValueError` if the core refuses a declaration, such as a name that is in use.
    """

    def __init__(self, declared: Mapping[str, IndicatorConfig]) -> None:
        self.declared = dict(declared)
        self.pushed = [name for name, each in declared.items() if each.source == "push"]
        self._metrics: dict[str, str] = {}
        self.fields: dict[str, str] = {}  # of load headers, by indicator
        for name, each in declared.items():
            from lmetric.expr import indicator

            try:
                indicator(name, default=each.default, max_age_seconds=each.max_age_seconds)
            except BadValueError as error:
                raise BadValueError(f"indicators.{name}: {error}") from None
            if each.metric is not None:
                self._metrics[name] = each.metric
            elif each.source != "push":
                self.fields[name] = each.source.partition(":")[2] or name
        self._searched = tuple(dict.fromkeys(self._metrics.values()))
        # Large pages lose other buckets of histograms.
        self.buckets = tuple(metric for metric in self._searched if metric.endswith("_bucket"))

    @property
    def read_metrics(self) -> bool:
        """Whether values come from the engines' `METRICS_PAGE`."""
        return bool(self._metrics)

    def of_page(self, page: bytes) -> Values:
        """Returns the values on a page of metrics, each summed over its labels."""
        found: dict[str, float] = {}
        for metric, _, number in samples(page, "", self._searched, negative=True) if self._metrics else ():
            found[metric] = found.get(metric, 0.0) + number
        return {name: finite(found.get(metric)) for name, metric in self._metrics.items()}

    def of_header(self, header: str) -> Values:
        """Returns the values in an `endpoint-load-metrics` header."""
        values = header_values(header)
        return {name: finite(values.get(field)) for name, field in self.fields.items()}

    def missing(self, values: Values) -> list[str]:
        """Returns the metrics of the indicators without a value."""
        return [self._metrics[name] for name, value in values.items() if value is None]

    def of_nobody(self) -> Values:
        """Returns the values after the end of an engine's process. Pushed values stay."""
        return dict.fromkeys([*self._metrics, *self.fields])

    def check_push(self, names: Collection[str]) -> None:
        """Raises ValueError for a name that is not an indicator with the source push."""
        for name in names:
            if name not in self.pushed:
                known = ", ".join(self.pushed) or "none"
                raise ValueError(f"{name!r} is not an indicator with source push; expected one of: {known}")
