"""Data-parallel ranks of an emulated engine: each has a queue, a cache and KV events of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from lmetric.engines.errors import EngineStartError
from lmetric_lab.emulated.driver import Driver
from lmetric_lab.emulated.errors import EngineError
from lmetric_lab.emulated.kv_feed import KvFeed
from lmetric_lab.emulated.metrics import EngineMetrics

_TRIES = 100


@dataclass(frozen=True, slots=True)
class Rank:
    """One of them."""

    driver: Driver
    metrics: EngineMetrics
    kv_feed: KvFeed | None


def chosen(ranks: Sequence[Rank], header: str | None, start: int) -> Rank:
    """The rank in `X-data-parallel-rank`, else the least loaded by vLLM's score (0.32.0), from rank
    ``start`` on. Raises EngineError."""
    if header is not None:
        with contextlib.suppress(ValueError):
            if 0 <= int(header) < len(ranks):
                return ranks[int(header)]
            raise EngineError(400, f"data_parallel_rank {header} is out of range [0, {len(ranks)}).")

    def load(rank: Rank) -> float:
        now = rank.driver.engine.load()
        waiting, pressure = now["waiting"], max(0.0, now["kv_usage"] - 0.5)
        return float(waiting + now["running"] + 6 * waiting * pressure)

    start %= len(ranks)
    return ranks[0] if len(ranks) == 1 else min([*ranks[start:], *ranks[:start]], key=load)


def consecutive_ports(endpoint: str, count: int) -> str:
    """An endpoint for ``count`` ranks. Each rank adds its number to the port. Port 0 selects a port
    with free ports after it.

    Raises EngineStartError.
    """
    place, _, port = endpoint.rpartition(":")
    if count == 1 or not endpoint.startswith("tcp://") or port not in ("0", "*"):
        return endpoint
    for _ in range(_TRIES):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.socket())
            first.bind(("", 0))
            number = first.getsockname()[1]
            for more in range(1, count):
                stack.enter_context(socket.socket()).bind(("", number + more))
            return f"{place}:{number}"
    raise EngineStartError(f"{endpoint}: found no {count} consecutive free ports; name a port")


class MetricsPage:
    """/metrics: each metric once, with the samples of all ranks.

    The text is that of `prometheus_client.generate_latest`, in a third of its time: a sample's name
    and labels never change, so each line's start is written once. Routers poll this page.
    """

    def __init__(self, ranks: Sequence[EngineMetrics]) -> None:
        self._ranks = ranks
        self._starts: dict[tuple[str, ...], str] = {}  # by the sample's name and label values

    def render(self) -> bytes:
        """The exposition text."""
        lines: list[str] = []
        starts = self._starts
        for family in self.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
            for sample in family.samples:
                key = (sample.name, *sample.labels.values())
                start = starts.get(key)
                if start is None:
                    start = starts[key] = f"{sample.name}{{{_labels(sample.labels)}}} "
                number = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
                lines.append(f"{start}{number}\n")
        return "".join(lines).encode()

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        for family, *others in zip(*(rank.collect() for rank in self._ranks), strict=True):
            for other in others:
                family.samples += other.samples
            yield family


def _labels(labels: Mapping[str, str]) -> str:
    """Labels in the exposition format, sorted by name."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in sorted(labels.items()))
