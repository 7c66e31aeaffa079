"""Renders the newest results of this folder into `docs/how-to/monitoring.md`.

    python bench/observe/report.py [--check]

A table is between `<!-- NAME -->` and `<!-- /NAME -->`. `--check` compares only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import ROOT

PAGE = ROOT / "docs" / "how-to" / "monitoring.md"
NAMES = {
    "off": "nothing",
    "metrics": "`/metrics` each second",
    "records": "records of all requests",
    "traces, 1%": "traces of 1%",
    "traces, 100%": "traces of all requests",
    "page": "live page open",
    "capacity twin": "capacity twin",
}
PARTS = {"real": "live", "hour": "an hour of updates, faster"}


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


def source(*results: dict[str, Any]) -> str:
    """Returns the machine, its load, the commits and the raw files."""
    machine = results[0]["machine"]
    worst = max(each[0] for result in results for each in result["load_average"])
    busy = f" Other work ran on it meanwhile (load average {worst:.0f}): times are upper bounds."
    files = ", ".join(
        f"[{each['name']}](../../bench/results/{each['name']}) (commit {each['commit']})" for each in results
    )
    return (
        f"{machine['cpu']}, {machine['cores_total']} cores.{busy if worst > 2.5 else ''} Raw files: {files}."
    )


def cost(result: dict[str, Any]) -> str:
    """Returns the table of CPU times."""

    def spread(figure: list[float], sign: str = "") -> str:
        middle, low, high, _ = figure
        form = f"{sign}.{0 if abs(middle) >= 20 or max(abs(low), abs(high)) >= 20 else 2}f"
        return f"{middle:{form}} ({low:{form}} to {high:{form}})"

    rows = []
    for name, cell in result["cells"].items():
        more = (
            ["", ""]
            if name == "off"
            else [spread(cell[f"{key}_us_more"], "+") for key in ("request", "chunk")]
        )
        rows.append([NAMES[name], spread(cell["request_us"]), more[0], spread(cell["chunk_us"]), more[1]])
    return table(["on", "per request, µs", "more", "per chunk, µs", "more"], rows)


def page(result: dict[str, Any]) -> str:
    """Returns the tables of the live page: memory of its parts, and frames at its real rate."""
    parts = {name: part for name, part in result["parts"].items() if part is not None}
    memory = []
    for name, part in parts.items():
        heap = [f"{each['heap_mib']:.1f}" for each in part["memory"]]
        nodes = [f"{each['nodes']:,}" for each in part["memory"]]
        memory.append([PARTS[name], f"{part['memory'][-1]['seconds'] / 60:.0f}", f"{part['updates']:,}"])
        memory[-1] += [f"{each[0]}, {each[len(each) // 2]}, {each[-1]}" for each in (heap, nodes)]
    times = []
    for title, key in (("between two frames", "frame_ms"), ("script of an update", "draw_ms")):
        figures = parts["real"][key]
        times.append([title, f"{figures['p50']:.1f}", f"{figures['p99']:.1f}", f"{figures['max']:.1f}"])
    head = ["page", "minutes", "updates", "heap at start, middle, end, MiB", "nodes of the document"]
    return f"{table(head, memory)}\n\n{table(['time, ms', 'p50', 'p99', 'max'], times)}"


def main() -> None:
    """Renders the page, or checks it."""
    observe, live = newest("observe"), newest("page")
    parts = {
        "cost": f"{cost(observe)}\n\n{source(observe)}",
        "page": f"{page(live)}\n\n{source(live)}",
    }
    old = text = PAGE.read_text()
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        text, count = pattern.subn(lambda match, part=part: f"{match[1]}\n{part}\n\n{match[2]}", text)
        if count != 1:
            sys.exit(
                f"report.py: {PAGE.relative_to(ROOT)} needs one pair of <!-- {name} --> marks, has {count}"
            )
    if "--check" in sys.argv:
        sys.exit(f"report.py: {PAGE.relative_to(ROOT)} is stale: run report.py" if text != old else 0)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
