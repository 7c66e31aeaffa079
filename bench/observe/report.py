"""Renders the newest results into `bench/figures.md`.

    python bench/observe/report.py [--check]

A table is between `<!-- NAME -->` and `<!-- /NAME -->`. `--check` compares only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import ROOT, median_range

PAGE = ROOT / "bench" / "figures.md"
NAMES = {
    "off": "nothing",
    "metrics": "`/metrics` each second",
    "records": "records of all requests",
    "traces, 1%": "traces of 1%",
    "traces, 100%": "traces of all requests",
    "page": "live page open",
    "capacity twin": "records and capacity twin",
}


def newest(what: str) -> dict[str, Any]:
    """Returns the newest raw file of a kind."""
    found = sorted((ROOT / "bench" / "results").glob(f"*-{what}.json"))
    if not found:
        sys.exit(f"report.py: no bench/results/*-{what}.json: run bench/observe")
    content: dict[str, Any] = json.loads(found[-1].read_text())
    return content | {"name": found[-1].name}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def source(result: dict[str, Any]) -> str:
    """Returns the machine, its load, the commit and the raw file."""
    machine, name = result["machine"], result["name"]
    load = result["load_average"][-1][0]  # of the last minute
    busy = f" Other work ran on it meanwhile (load average {load:.0f}): times are upper bounds."
    file = f"[{name}](results/{name}) (commit {result['commit']})"
    return f"{machine['cpu']}, {machine['cores_total']} cores.{busy if load > 2.5 else ''} Raw file: {file}."


def spread(figure: list[float], sign: str = "") -> str:
    """Returns a median with its range."""
    middle, low, high, _ = figure
    form = f"{sign}.{0 if abs(middle) >= 20 or max(abs(low), abs(high)) >= 20 else 2}f"
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def cost(result: dict[str, Any]) -> str:
    """Returns the table of CPU times."""
    rows = []
    for name, cell in result["cells"].items():
        more = (
            ["", ""]
            if name == "off"
            else [spread(cell[f"{key}_us_more"], "+") for key in ("request", "chunk")]
        )
        rows.append([NAMES[name], spread(cell["request_us"]), more[0], spread(cell["chunk_us"]), more[1]])
    return table(["on", "per request, µs", "more", "per chunk, µs", "more"], rows)


def twin(result: dict[str, Any]) -> str:
    """Returns the sentences about the capacity twin."""
    run = result["runs"][-1]["twin"]
    over = {
        key: median_range([row["capacity twin"][key] - row["records"][key] for row in result["rounds"]])
        for key in ("request_us", "chunk_us")
    }
    return (
        f"A round of the twin took {run['cpu_seconds_per_round']:.1f} s of CPU time in its own process, for "
        f"{run['requests']:,} requests of {run['seconds']:.0f} s and four engines. While it computed, "
        f"a request cost the router {spread(over['request_us'], '+')} µs more than with records "
        f"alone, and a chunk {spread(over['chunk_us'], '+')} µs."
    )


def scrape(result: dict[str, Any]) -> str:
    """Returns the table of /metrics."""
    cells, rows = result["cells"], []
    for name, title in (("text", "Prometheus' text"), ("openmetrics", "OpenMetrics")):
        cell = cells[name]
        size = [f"{cell['samples'][0]:,.0f}", f"{cell['bytes'][0] / 1e6:.1f}"]
        rows.append([title, *size, spread(cell["cpu_ms"]), spread(cell["stop_ms"])])
    rows.append(["no request", "", "", spread(cells["idle"]["cpu_ms"]), spread(cells["idle"]["stop_ms"])])
    return table(["format", "samples", "MB", "CPU, ms", "longest stop of the event loop, ms"], rows)


def memory(result: dict[str, Any]) -> str:
    """Returns the table of the live page's memory."""
    rows = []
    for each in result["samples"][::2]:
        row = [f"{each['seconds'] / 60:.0f}", f"{each['updates']:,}"]
        rows.append([*row, f"{each['heap_mib']:.2f}", f"{each['nodes']:,}", f"{each['listeners']:,}"])
    return table(["minutes", "updates", "heap, MiB", "nodes", "event listeners"], rows)


def frames(result: dict[str, Any]) -> str:
    """Returns the table of frame times."""
    rows = []
    for title, key in (
        ("between two frames", "frame_ms"),
        ("between two frames of an empty document", "idle_ms"),
        ("script of an update", "draw_ms"),
    ):
        figures = result[key]
        rows.append([title, f"{figures['p50']:.1f}", f"{figures['p99']:.1f}", f"{figures['max']:.1f}"])
    share = f"{result['frames_above_50_ms']} of {result['frames']:,} frames took more than 50 ms."
    return f"{table(['time, ms', 'p50', 'p99', 'max'], rows)}\n\n{share}"


def trials(result: dict[str, Any]) -> str:
    """Returns the table of the cost of policies on trial (bench/canary/cost.py)."""
    rows = []
    for engines, cell in result["cells"].items():
        more = [spread(cell[name]["more_us"], "+") for name in ("shadow", "canary")]
        rows.append([engines, spread(cell["off"]["request_us"]), *more])
    return table(["engines", "neither, µs", "with a shadow", "with a canary"], rows)


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "cost": ("observe", cost),
    "twin": ("observe", twin),
    "scrape": ("metrics", scrape),
    "memory": ("live-page-hour", memory),
    "frames": ("live-page-frames", frames),
    "trials": ("canary-cost", trials),
}


def rendered(text: str) -> str:
    """Returns the page with the newest figures."""
    for name, (what, render) in PARTS.items():
        result = newest(what)
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not found or not end:
            sys.exit(f"report.py: bench/figures.md needs one pair of <!-- {name} --> marks")
        text = f"{before}{found}\n{render(result)}\n\n{source(result)}\n\n{end}{after}"
    return text


def main() -> None:
    """Renders the page, or checks it."""
    old = PAGE.read_text()
    text = rendered(old)
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif text != old:
        sys.exit("report.py: bench/figures.md is stale: run report.py")


if __name__ == "__main__":
    main()
