"""The TLS handshakes of clients that are in progress, and their metrics."""

import asyncio
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric


class Handshakes:
    """The handshakes in progress, and counts of those that are over."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[str] = Counter()

    async def stop(self) -> None:
        """Breaks the connections of all handshakes in progress."""
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of handshakes."""
        handshakes = CounterMetricFamily(
            "lmetric_tls_handshakes", "TLS handshakes of clients, by outcome", labels=("outcome",)
        )
        for outcome in ("done", "failed", "timeout"):
            handshakes.add_metric((outcome,), self.outcomes[outcome])
        yield handshakes
