"""The text of /metrics: Prometheus' format, or OpenMetrics for clients that ask for it.

The writer of prometheus_client takes 10 µs per sample and blocks the event loop until the end. A
fleet of 1,000 engines has over 50,000 samples. `Table` keeps the samples of many engines as text,
and `render` gives other tasks a turn every few milliseconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from lmetric.printable import printable
from lmetric.server.observe.histograms import Histogram

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

TURN_SECONDS = 0.002  # work between two turns of other tasks
PIECE = 100  # engines whose samples are written as one piece


class Table(Metric):
    """A family whose samples all have the same name and label names.

    ``add`` takes labels from `labels_text`, which several tables can share. ``samples`` stays
    empty.
    """

    def __init__(self, name: str, documentation: str, kind: str, labels: Sequence[str]) -> None:
        super().__init__(name, documentation, kind)
        self._labelnames = tuple(labels)
        self._rows: list[str] = []
        self._sample = f"{self.name}_total" if kind == "counter" else self.name

    def add(self, labels: str, value: float) -> None:
        """Adds a sample. ``labels``: from `labels_text`."""
        self._rows.append(f"{self._sample}{labels} {number(value)}\n")

    def pieces(self) -> Iterator[str]:
        """Yields the samples as text."""
        yield "".join(self._rows)


class HistogramTable(Metric):
    """Histograms of many engines, of which only some buckets are shown.

    ``shown``: indexes into the bounds of the histograms, ascending.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        shown: Sequence[int],
        rows: Iterable[tuple[Mapping[str, str], Histogram]],
    ) -> None:
        super().__init__(name, documentation, "histogram")
        self._labelnames = tuple(labels)
        self._shown = shown
        self._histograms = list(rows)

    def pieces(self) -> Iterator[str]:
        """Yields the samples as text."""
        for start in range(0, len(self._histograms), PIECE):
            rows = self._histograms[start : start + PIECE]
            yield "".join([self._lines(labels, histogram) for labels, histogram in rows])

    def _lines(self, labels: Mapping[str, str], histogram: Histogram) -> str:
        counts, bounds = histogram.cumulative(), histogram.bounds
        pairs = _pairs(labels)
        name = f"{self.name}_bucket{{{pairs},le=" if pairs else f"{self.name}_bucket{{le="
        lines = [f'{name}"{bounds[index]}"}} {counts[index]}.0\n' for index in self._shown]
        lines.append(
            f'{name}"+Inf"}} {counts[-1]}.0\n'
            f"{self.name}_count{{{pairs}}} {counts[-1]}.0\n"
            f"{self.name}_sum{{{pairs}}} {number(histogram.sum)}\n"
        )
        return "".join(lines)


def number(value: float) -> str:
    """Returns a value as both formats spell it."""
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def labels_text(labels: Mapping[str, str]) -> str:
    """Returns labels in braces; empty without labels."""
    return f"{{{_pairs(labels)}}}" if labels else ""


def _pairs(labels: Mapping[str, str]) -> str:
    return ",".join([f'{name}="{_escaped(labels[name])}"' for name in sorted(labels)])


def _escaped(text: str) -> str:
    text = printable(text)  # names come from engines, too
    if "\\" in text or '"' in text:
        return text.replace("\\", r"\\").replace('"', r"\"")
    return text


def pieces(family: Metric, openmetrics: bool) -> Iterator[str]:
    """Yields the text of a family, in pieces that take about a millisecond each."""
    name, kind, help_text = family.name, family.type, family.documentation.replace("\\", r"\\")
    help_text = help_text.replace("\n", r"\n")
    if openmetrics:
        help_text = help_text.replace('"', r"\"")
    elif kind == "counter":
        name = f"{name}_total"
    elif kind == "info":
        name, kind = f"{name}_info", "gauge"
    elif kind == "unknown":
        kind = "untyped"
    yield f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
    if isinstance(family, Table | HistogramTable):
        yield from family.pieces()
    else:
        yield "".join([_line(sample, openmetrics) for sample in family.samples])


def _line(sample: Sample, openmetrics: bool) -> str:
    line = f"{sample.name}{labels_text(sample.labels)} {number(sample.value)}"
    exemplar = sample.exemplar if openmetrics else None
    if exemplar is not None:
        line += f" # {{{_pairs(exemplar.labels)}}} {number(exemplar.value)}"
        if exemplar.timestamp is not None:
            line += f" {float(exemplar.timestamp)!r}"
    return f"{line}\n"


def wants_openmetrics(accept: str | None) -> bool:
    """Returns whether a client's Accept header asks for OpenMetrics, as Prometheus' does."""
    return accept is not None and "application/openmetrics-text" in accept


async def render(families: Iterable[Metric | None], openmetrics: bool = False) -> bytes:
    """Returns the text of all families. Other tasks run in between, also where an item is None."""
    text: list[bytes] = []
    began = time.perf_counter()
    for family in families:
        for piece in ("",) if family is None else pieces(family, openmetrics):
            text.append(piece.encode())
            if time.perf_counter() - began > TURN_SECONDS:
                await asyncio.sleep(0)
                began = time.perf_counter()
    if openmetrics:
        text.append(b"# EOF\n")
    return b"".join(text)
