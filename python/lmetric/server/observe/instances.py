"""Metrics of engines: their state, indicators, load reports, KV events and cache tiers.

They are `Table`s: a fleet of 1,000 engines has over 20,000 of these samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from lmetric._core import indicator_table
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.service import MEANINGS
from lmetric.server.observe.exposition import PIECE, Table, labels_text

_OF_INSTANCE = ("model", "instance")
_STATE = {
    "healthy": "1 if the instance passes its health checks and is not ejected, else 0",
    "draining": "1 if the instance accepts no new requests, else 0",
    "in_flight": "Requests placed on the instance that have not ended",
}
# Meanings of an instance's gauges: its state, and its indicators as declared in the core.
_GAUGES = {
    **_STATE,
    **{row["name"]: row["about"].rstrip(".") for row in indicator_table() if row["owner"] != "declared"},
}


def instance_metrics(
    stats: Sequence[tuple[Model, Mapping[str, Any]]], unplaced: Iterable[Engine]
) -> Iterator[Metric | None]:
    """Yields the metrics of the instances, and None where other tasks may run.

    ``stats``: each model with its router's statistics. ``unplaced``: engines whose model is not
    known, as of those that do not answer since the start. Their label ``model`` is empty.
    """
    families = {key: _gauge(key) for key in ("healthy", "draining")}
    placed = Table(
        "lmetric_instance_decisions", "Requests placed on an instance", "counter", labels=_OF_INSTANCE
    )
    source = Table(
        "lmetric_instance_predicted_ttft_source",
        "Source of an instance's predicted times to first token; always 1",
        "gauge",
        labels=(*_OF_INSTANCE, "source"),
    )
    role = Table(
        "lmetric_instance_role", "Role of an instance; always 1", "gauge", labels=(*_OF_INSTANCE, "role")
    )
    for model, values in stats:
        for count, (name, row) in enumerate(values["instances"].items(), 1):
            if count % PIECE == 0:
                yield None
            labels = {"model": model.name, "instance": name}
            text = labels_text(labels)
            for key, value in row.items():
                if key == "decisions":
                    placed.add(text, value)
                elif key == "predicted_ttft_source":
                    source.add(labels_text({**labels, "source": value}), 1)
                elif key == "role":
                    engine = model.engines.get(name)
                    told = value if engine is None else engine.role
                    role.add(labels_text({**labels, "role": told}), 1)
                else:
                    family = families.get(key)
                    if family is None:
                        family = families[key] = _gauge(key)
                    if value is not None:
                        family.add(text, value)
    for engine in unplaced:
        text = labels_text({"model": "", "instance": engine.name})
        families["healthy"].add(text, 0)
        families["draining"].add(text, int(engine.draining))
    yield placed
    yield source
    yield role
    yield from families.values()


def _gauge(key: str) -> Table:
    return Table(f"lmetric_instance_{key}", _GAUGES[key], "gauge", labels=_OF_INSTANCE)


def indicator_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Yields the values of the indicators that the configuration declares."""
    values = Table(
        "lmetric_indicator",
        "Value of a declared indicator; no sample if the value is absent",
        "gauge",
        labels=(*_OF_INSTANCE, "indicator"),
    )
    for model in fleet.models:
        columns = model.router.indicators(names=list(model.indicators.declared))
        for indicator in model.indicators.declared:
            for name, value in zip(model.router.instances(), columns[indicator].tolist(), strict=True):
                if math.isfinite(value):
                    labels = {"model": model.name, "instance": name, "indicator": indicator}
                    values.add(labels_text(labels), value)
    yield values


def engine_metrics(fleet: Fleet) -> Iterator[Metric | None]:
    """Yields the state of the engines, counts of what they sent, and None where others may run."""
    state = Table(
        "lmetric_engine_state",
        f"State of an engine ({', '.join(MEANINGS)}); always 1",
        "gauge",
        labels=(*_OF_INSTANCE, "state"),
    )
    mode = Table(
        "lmetric_engine_mode",
        "KV index mode of an engine (exact, approximate or load_only) and its reason; always 1",
        "gauge",
        labels=(*_OF_INSTANCE, "engine", "version", "mode", "reason"),
    )
    reports = Table(
        "lmetric_load_reports",
        "Load reports received, by source",
        "counter",
        labels=(*_OF_INSTANCE, "source"),
    )
    events = Table(
        "lmetric_kv_events", "Counts of the KV event feed, by kind", "counter", labels=(*_OF_INSTANCE, "what")
    )
    tiers = (*_OF_INSTANCE, "medium")
    blocks = Table(
        "lmetric_tier_blocks", "Blocks of a tier below the GPU in the KV index", "gauge", labels=tiers
    )
    ratio = Table(
        "lmetric_tier_load_ratio",
        "Seconds to load a token from a tier divided by the seconds to compute it; learned once loads "
        "are measured",
        "gauge",
        labels=tiers,
    )
    hits = Table(
        "lmetric_tier_hit_tokens",
        "Prompt tokens that engines loaded from a tier below the GPU, as predicted and not "
        "contradicted by cached_tokens",
        "counter",
        labels=tiers,
    )
    for engine in fleet.unplaced.values():
        labels = {"model": "", "instance": engine.name, "state": engine.service.state}
        state.add(labels_text(labels), 1)
    for model in fleet.models:
        for count, engine in enumerate(list(model.engines.values()), 1):
            if count % PIECE == 0:
                yield None
            if engine.name not in model.engines:
                continue  # it left in the meantime
            labels = {"model": model.name, "instance": engine.name}
            state.add(labels_text({**labels, "state": engine.service.state}), 1)
            for medium, tier in model.router.tiers(engine.name).items():
                text = labels_text({**labels, "medium": medium})
                blocks.add(text, tier["blocks"])
                ratio.add(text, tier["load_ratio"])
                hits.add(text, tier["hit_tokens"])
            capabilities, chosen = engine.capabilities, engine.mode
            more = {"engine": capabilities.engine, "version": capabilities.version or ""}
            text = labels_text({**labels, **more, "mode": chosen.name, "reason": chosen.reason})
            mode.add(text, 1)
            for source, received in engine.load_reports.items():
                reports.add(labels_text({**labels, "source": source}), received)
            for what, received in model.kv.counts(engine.name).items():
                events.add(labels_text({**labels, "what": what}), received)
    yield from (state, mode, reports, events, blocks, ratio, hits)
