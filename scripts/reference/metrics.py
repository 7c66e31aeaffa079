"""docs/reference/metrics.md, from the metrics that a server and `advise --watch` declare."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client.core import Metric

from lmetric import indicator_table
from lmetric.config import Auth, EngineConfig, JwtIssuer, RecordsConfig, ServerConfig
from lmetric.config.epp import EppConfig
from lmetric.server.app import Server
from lmetric.server.observe.families import families as each_family
from lmetric_lab.capacity import Goal, Question, Twin
from lmetric_lab.capacity.watch import Watch
from lmetric_lab.whatif import Limits

HEAD = """\
# Metrics

`scripts/make_reference metrics` generates this page. `GET /metrics` returns these metrics in Prometheus' text format, or in
OpenMetrics if the client accepts it.

Each entry has the type and the labels in parentheses. Names state the unit: `_seconds`, `_bytes`, `_tokens`. A counter's name ends in `_total`. A histogram `NAME` has the series
`NAME_bucket`, `NAME_sum` and `NAME_count`. Counters start at 0 when the router starts. A metric without a value has no sample.

| label | value |
| --- | --- |
| `model` | name of the model |
| `instance` | name of the engine in the configuration; its host:port by default. Prometheus stores it as `exported_instance` |
| `role`, `type` | role and type of wanted engines; the type is the first one of `advise --price` |
| `slo_class` | class of the request in `admission.classes`; empty without a class |
| `tenant` | tenant of the API key or token; empty without credentials |
"""

GROUPS = {
    "Requests": (
        "requests",
        "time_",
        "request_seconds",
        "client_",
        "tls_",
        "jw",
        "failures",
        "retries",
        "retry_budget",
        "budget_",
        "router_",
        "decision_seconds",
        "prioritized",
        "suspect",
        "no_instance",
    ),
    "Engines and instances": (
        "engine_",
        "instance_",
        "load_reports",
        "indicator",
        "discovery",
        "kv_events",
        "engines_",
        "ejections",
        "panic",
    ),
    "Policies on trial": ("shadow_", "canary_"),
    "Capacity advice": ("wanted_", "capacity_"),
    "Process": ("process_", "log_", "build", "trace_", "records"),
    "Routing and cache": ("",),
}


NOTES = {
    "Capacity advice": "[`lmetric-router advise --watch`](../how-to/improving.md#how-many-engines) serves these "
    "metrics at its own port, 9400 by default, with its process metrics.\n\n"
}


def families() -> list[Metric]:
    """Returns all metric families of a server with one engine, which is never contacted, and of
    `advise --watch`."""

    async def collect() -> list[Metric]:
        engine = EngineConfig(url="http://127.0.0.1:9")
        issuer = JwtIssuer(issuer="i", audience="a", jwks="http://127.0.0.1:9/keys", tenant_claim="t")
        with TemporaryDirectory() as folder:
            records = RecordsConfig(path=Path(folder))
            config = ServerConfig(
                engines=[engine],
                model="model",
                port=0,
                host="127.0.0.1",
                records=records,
                epp=EppConfig(port=0),
                auth=Auth(jwt=[issuer]),
            )
            server = Server(config, picks=True)
            await server.start()
            try:
                return [family for family in each_family(server.metrics) if family is not None]
            finally:
                await server.stop()

    slo = "ttft=1s"
    watch = Watch([], 60.0, 60.0, lambda: Twin(Question(Goal.of(slo)), Limits()), slo=slo)
    return [*asyncio.run(collect()), *watch.metrics()]


INDICATORS = {f"lmetric_instance_{each['name']}" for each in indicator_table() if each["owner"] != "declared"}


def row(metric: Metric) -> str:
    """Returns the entry of a metric; an indicator's entry has no meaning."""
    name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
    names = list(metric._labelnames)
    if metric.type == "info":
        names = list(
            dict.fromkeys([*names, *(label for sample in metric.samples for label in sample.labels)])
        )
    labels = ", ".join(f"`{label}`" for label in names)
    shown = f"- `{name}` ({metric.type}{f'; {labels}' if labels else ''})"
    meaning = re.split(r"; (?![^(]*\))", metric.documentation)[0]
    return f"{shown}\n" if name in INDICATORS else f"{shown}: {meaning}\n"


def files() -> dict[str, str]:
    """Returns the page."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    indicators: list[str] = []
    for metric in families():
        if metric.name in INDICATORS:
            indicators.append(row(metric))
            continue
        short = metric.name.removeprefix("lmetric_")
        title = next(title for title, starts in GROUPS.items() if short.startswith(starts))
        groups[title].append(row(metric))
    page = HEAD
    for title, rows in groups.items():
        page += f"\n## {title}\n\n{NOTES.get(title, '')}" + "".join(
            sorted(rows, key=lambda row: row.split("`")[1])
        )
    page += "\n## Indicators\n\nEach is the [indicator](policies.md#indicators) of the name after `lmetric_instance_`.\n\n"
    page += "".join(sorted(indicators))
    return {"docs/reference/metrics.md": page}
