"""One page of metrics from those of all workers."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.observe.programs import PROGRAM_COUNTERS
from lmetric.server.observe.requests import MOST_SERIES

# Gauges of what each worker has for itself; the page shows their sum. Other gauges describe the
# fleet as every worker sees it: the page shows the values of the first worker that has them.
SUMMED = frozenset(
    {
        "lmetric_budget_available",
        "lmetric_client_body_bytes",
        "lmetric_client_connections",
        "lmetric_client_connections_limit",
        "lmetric_client_unread_bytes",
        "lmetric_epp_streams",
        "lmetric_index_bytes",
        "lmetric_instance_in_flight",
        "lmetric_level_waiting_requests",
        "lmetric_records_waiting",
        "lmetric_token_cache_bytes",
        "lmetric_waiting_requests",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    }
)
# Counts of what happens once in all workers together: the page shows those of the first worker.
SAME = frozenset({"lmetric_canary_promotions", "lmetric_canary_rollbacks", *PROGRAM_COUNTERS})
COUNTS = ("counter", "histogram", "summary")  # kinds that only grow, and always add up
_EOF = "# EOF"
# Name and labels, value, exemplar. The text of a label may hold what begins an exemplar.
_SAMPLE = re.compile(r'([^\s{]++(?:\{(?:[^"}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+\})?) (\S++)(.*)')
_TOTAL = "_total"
_INSTANCE, _MODEL, _TENANT = (
    re.compile(rf'[{{,]{label}="((?:[^"\\\n]|\\.)*+)"') for label in ("instance", "model", "tenant")
)
_STATE = "lmetric_engine_state{"  # has a sample of each engine of the fleet
_GUARD = "lmetric_guard_on{"  # has a sample of each model of the fleet
_REQUESTS = "lmetric_requests"  # has a sample of each tenant
# Counts by names of the configuration: running workers keep those of models without engines.
_BY_NAME = ("lmetric_alias_requests", "lmetric_model_fallbacks")


class Family:
    """The samples of one metric: by name and labels, the value as text and an exemplar."""

    def __init__(self, name: str) -> None:
        self.name = name  # a counter's without _total
        self.help = ""
        self.kind = "untyped"
        self.samples: dict[str, tuple[str, str]] = {}

    def add(self, other: Family) -> None:
        """Adds the samples of another worker."""
        summed = (self.kind in COUNTS and self.name not in SAME) or self.name in SUMMED
        for key, (value, exemplar) in other.samples.items():
            known = self.samples.get(key)
            if known is None:
                self.samples[key] = value, exemplar
            elif summed and "_created" not in key.partition("{")[0]:
                self.samples[key] = repr(float(known[0]) + float(value)), known[1] or exemplar

    def share_tenants(self, present: Set[str]) -> None:
        """Adds the samples of tenants that are not present to those of other tenants."""
        samples, self.samples = self.samples, {}
        for name, (value, exemplar) in samples.items():
            key, found = name, _TENANT.search(name)
            if found is not None and found[1] not in present:
                key = f"{name[: found.start(1)]}{OTHER_TENANTS}{name[found.end(1) :]}"
            if (known := self.samples.get(key)) is not None:
                value = repr(float(known[0]) + float(value))
            self.samples[key] = value, exemplar

    def lines(self, openmetrics: bool) -> list[str]:
        """Returns the lines of a page. Only OpenMetrics has exemplars."""
        name = self.name if openmetrics or self.kind != "counter" else f"{self.name}{_TOTAL}"
        head = [f"# HELP {name} {self.help}"] if self.help else []
        samples = self.samples.items()
        lines = [f"{key} {value}{exemplar * openmetrics}" for key, (value, exemplar) in samples]
        return [*head, f"# TYPE {name} {self.kind}", *lines]


def read(text: str) -> dict[str, Family]:
    """Reads a page of metrics of this router, in either format. Keys: names without _total.

    The formats differ in the names of counters.
    """
    families: dict[str, Family] = {}
    family = Family("")
    for line in text.split("\n"):
        if not line or line == _EOF:
            continue
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            name = name.removesuffix(_TOTAL)
            family = families.setdefault(name, Family(name))
            if what == "TYPE":
                family.kind = rest
            else:
                family.help = rest
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"no sample of a metric: {line[:200]!r}")
        key, value, exemplar = sample.groups()
        family.samples[key] = value, exemplar
    return families


def without_gone(ended: str, pages: Sequence[str]) -> str:
    """Returns a page of workers that have ended without the engines and models that are gone.

    ``pages``: of workers that run.
    """
    for label, listing, kept in ((_INSTANCE, _STATE, ()), (_MODEL, _GUARD, _BY_NAME)):
        listed = (line for page in pages for line in page.split("\n") if line.startswith(listing))
        present = {found[1] for line in listed if (found := label.search(line)) is not None}
        if not present:
            continue
        present.add("")  # of requests without an engine, or without a model
        named = ((line, label.search(line)) for line in ended.split("\n"))
        ended = "\n".join(
            line for line, found in named if found is None or found[1] in present or line.startswith(kept)
        )
    return ended


def merge(pages: Sequence[str], ended: Sequence[str] = (), *, openmetrics: bool) -> str:
    """Returns one page from those of all workers, in the order of their numbers.

    ``pages``, ``ended``: in either format. ``ended``: the last pages of workers that have ended,
    whose counts still count: a counter that falls would look like a restart of the server.
    """
    return _text(_merged(pages, ended), openmetrics)


def merge_ended(ended: str, page: str, running: Sequence[str]) -> str:
    """Returns the page of all workers that have ended, with the last page of one more worker.

    Each worker bounds its tenants. Here, above that bound, tenants that no worker's page in
    ``running`` has share one series.
    """
    merged = _merged((), (ended, page))
    requests = merged.get(_REQUESTS)
    if requests is not None and len(requests.samples) > MOST_SERIES:
        lines = (line for each in running for line in each.split("\n") if line.startswith(_REQUESTS))
        present = {found[1] for line in lines if (found := _TENANT.search(line)) is not None}
        requests.share_tenants({"", *present})
    return _text(merged, openmetrics=True)


def _merged(pages: Sequence[str], ended: Sequence[str]) -> dict[str, Family]:
    merged: dict[str, Family] = {}
    for number, text in enumerate([*pages, *ended]):
        for name, family in read(text).items():
            if number >= len(pages) and (family.kind not in COUNTS or name in SAME):
                continue
            if name in merged:
                merged[name].add(family)
            else:
                merged[name] = family
    return merged


def _text(merged: dict[str, Family], openmetrics: bool) -> str:
    lines = [line for family in merged.values() for line in family.lines(openmetrics)]
    return "\n".join([*lines, *([_EOF] if openmetrics else []), ""])
