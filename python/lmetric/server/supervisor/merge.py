"""One page of metrics from those of all workers."""

from __future__ import annotations

from collections.abc import Sequence

# Gauges of what each worker has for itself; the page shows their sum. Other gauges describe the
# fleet as every worker sees it: the page shows the values of the first worker that has them.
SUMMED = frozenset(
    {
        "lmetric_budget_available",
        "lmetric_client_body_bytes",
        "lmetric_client_connections",
        "lmetric_client_connections_limit",
        "lmetric_client_unread_bytes",
        "lmetric_index_bytes",
        "lmetric_instance_in_flight",
        "lmetric_records_waiting",
        "lmetric_token_cache_bytes",
        "lmetric_waiting_requests",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    }
)
_EOF = "# EOF"


class Family:
    """The samples of one metric: by name and labels, the value as text and an exemplar."""

    def __init__(self) -> None:
        self.head: list[str] = []
        self.kind = "untyped"
        self.samples: dict[str, tuple[str, str]] = {}


def read(text: str) -> dict[str, Family]:
    """Reads a page of metrics of this router, in either format."""
    families: dict[str, Family] = {}
    family = Family()
    for line in text.splitlines():
        if line.startswith("# "):
            if line == _EOF:
                continue
            _, what, name, rest = line.split(" ", 3)
            family = families.setdefault(name, Family())
            family.head.append(line)
            if what == "TYPE":
                family.kind = rest
            continue
        sample, exemplar = line, ""
        if " # {" in line:
            sample, _, exemplar = line.partition(" # {")
            exemplar = f" # {{{exemplar}"
        key, _, value = sample.rpartition(" ")
        family.samples[key] = value, exemplar
    return families


def is_summed(name: str, kind: str) -> bool:
    """Returns whether a page shows the sum of a metric over all workers."""
    return kind in ("counter", "histogram", "summary") or name in SUMMED


def merge(pages: Sequence[str], ended: Sequence[str] = ()) -> str:
    """Returns one page from those of all workers, in the order of their numbers.

    ``ended``: the last pages of workers that have ended, whose counts still count: a counter that
    falls would look like a restart of the server.
    """
    merged: dict[str, Family] = {}
    for is_live, text in [*((True, page) for page in pages), *((False, page) for page in ended)]:
        for name, family in read(text).items():
            counts = family.kind in ("counter", "histogram", "summary")
            if not is_live and not counts:
                continue
            into = merged.setdefault(name, Family())
            if not into.head:
                into.head, into.kind = family.head, family.kind
            summed = is_summed(name, family.kind)
            for key, (value, exemplar) in family.samples.items():
                known = into.samples.get(key)
                if known is None:
                    into.samples[key] = value, exemplar
                elif summed and "_created" not in key.partition("{")[0]:
                    into.samples[key] = repr(float(known[0]) + float(value)), known[1] or exemplar
    lines = [
        line
        for family in merged.values()
        for line in [
            *family.head,
            *(f"{key} {value}{exemplar}" for key, (value, exemplar) in family.samples.items()),
        ]
    ]
    if pages and pages[0].rstrip().endswith(_EOF):
        lines.append(_EOF)
    return "\n".join([*lines, ""])
