"""The counts of the server, and the sources of all metrics."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector

from lmetric.server.fleet.fleet import Fleet
from lmetric.server.observe.histograms import SECONDS, Histogram
from lmetric.server.observe.lateness import Lateness
from lmetric.server.observe.requests import RequestMetrics


class Metrics:
    """The counts of the server, and the sources of further ones. `families` writes their text."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.requests = RequestMetrics(fleet)
        self.events: Counter[tuple[str, str]] = Counter()
        self.loop_lag = Histogram(SECONDS)
        self.lateness = Lateness()
        self.spans: Counter[str] = Counter()  # spans for the trace collector, by outcome
        self.further: list[Callable[[], Iterator[Metric]]] = []
        self.process = ProcessCollector(registry=None)
        fleet.on_model_removed.append(self._forget)

    def _forget(self, model: str) -> None:
        """Drops the counts of a model that was removed."""
        for key in [key for key in self.events if key[0] == model]:
            del self.events[key]
