"""The table of docs/reference/conformance.md, from the newest result of bench/conformance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = "docs/reference/conformance.md"
START, END = "<!-- results -->\n", "<!-- end of results -->\n"
HEAD = (
    "| suite | version | router: passed/failed | vLLM directly | kinds of failures of the router alone |\n"
    + "| --- " * 5
    + "|\n"
)
UNKNOWN = "**No reason is known**"


def result() -> dict[str, Any]:
    """Returns the newest result. Raises ValueError if there is none."""
    newest = max((ROOT / "bench" / "results").glob("*-conformance.json"))
    found: dict[str, Any] = json.loads(newest.read_text())
    return found


def counts(side: dict[str, Any] | None) -> str:
    """Returns a cell with passed and failed checks."""
    return "does not apply" if side is None else f"{side['passed']}/{side['failed']}"


def tables(found: dict[str, Any]) -> str:
    """Returns the table of suites, and the reasons of the differences."""
    reasons: dict[str, list[str]] = {}
    rows = []
    for suite in found["suites"]:
        own = [each["reason"] or UNKNOWN for each in suite["differences"]]
        for each, reason in zip(suite["differences"], own, strict=True):
            reasons.setdefault(reason, []).append(each["failure"])
        numbers = sorted({1 + list(reasons).index(reason) for reason in own})
        notes = f"{len(own)} (reason {', '.join(map(str, numbers))})" if own else "0"
        cells = (suite["name"], suite["version"], counts(suite["router"]), counts(suite.get("engine")), notes)
        rows.append(f"| {' | '.join(cells)} |\n")
    listed = "".join(
        f"{number}. {reason}: {', '.join(f'`{name}`' for name in sorted(set(names)))}.\n"
        for number, (reason, names) in enumerate(reasons.items(), 1)
    )
    day = found["about"]["date"][:10]
    text = (
        f"vLLM {found['vllm']} on CPU, {day}, commit `{found['about']['commit']}`.\n\n{HEAD}{''.join(rows)}"
    )
    return f"{text}\nReasons:\n\n{listed}" if listed else text


def files() -> dict[str, str]:
    """Returns the page with the newest result."""
    before, started, rest = (ROOT / PAGE).read_text().partition(START)
    _, ended, after = rest.partition(END)
    assert started, f"{PAGE}: no {START.strip()}"
    assert ended, f"{PAGE}: no {END.strip()}"
    return {PAGE: f"{before}{START}\n{tables(result())}\n{END}{after}"}
