"""Reads the reports of the suites: the passed checks, and the failed ones with their reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

REQUESTS = 8  # of each load tool


class Outcome(NamedTuple):
    """The checks of a suite that passed and failed.

    Attributes:
        passed: how many checks passed.
        failed: the message of each failed check by its name.
    """

    passed: int
    failed: dict[str, str]


def lines(out: Path) -> Outcome:
    """Reads the lines of the scripts in `clients`."""
    text = (out / "log").read_text()
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not found:
        raise ValueError(f"no line of a check: {text[-200:]}")
    failed = {each["check"]: each["error"] for each in found if not each["ok"]}
    return Outcome(len(found) - len(failed), failed)


def compatcanary(out: Path) -> Outcome:
    """Reads the JSON report of compatcanary."""
    results = json.loads((out / "report.json").read_text())["results"]
    failed = {each["id"]: each["summary"] for each in results if each["status"] != "pass"}
    return Outcome(len(results) - len(failed), failed)


def schemathesis(out: Path) -> Outcome:
    """Reads the events of schemathesis: a check is an operation with a kind of check."""
    checked: set[str] = set()
    failed: dict[str, str] = {}
    for line in (out / "report.ndjson").read_text().splitlines():
        event = json.loads(line)
        if fatal := event.get("FatalError"):
            raise ValueError(f"schemathesis: {fatal}"[:300])
        if error := event.get("NonFatalError"):
            failed[f"{error.get('label')}: {error.get('title', 'error')}"] = json.dumps(error)[:300]
        recorder = event.get("ScenarioFinished", {}).get("recorder", {})
        for checks in recorder.get("checks", {}).values():
            for check in checks:
                if check["name"] == "max_response_time":
                    continue  # it measures the machine
                name = f"{recorder['label']}: {check['name']}"
                checked.add(name)
                if check["status"] == "failure":
                    failed.setdefault(name, _message(check))
    if not checked:
        raise ValueError("schemathesis: no check ran")
    return Outcome(len(checked - failed.keys()), failed)


def _message(check: dict[str, Any]) -> str:
    failure = check["failure_info"]["failure"]
    return " ".join(f"{failure['title']}: {failure['message']}".split())[:300]


def _requests(succeeded: int, failed: int) -> Outcome:
    """The outcome of a load tool, which must send at least `REQUESTS` requests."""
    names = {f"request {number}": "failed" for number in range(1, failed + 1)}
    if succeeded + failed < REQUESTS:
        names["the run"] = f"{succeeded + failed} requests, expected at least {REQUESTS}"
    return Outcome(succeeded, names)


def _one(out: Path, pattern: str) -> dict[str, Any]:
    (path,) = out.rglob(pattern)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def guidellm(out: Path) -> Outcome:
    """Reads the report of GuideLLM."""
    totals = _one(out, "report.json")["benchmarks"][0]["metrics"]["request_totals"]
    return _requests(totals["successful"], totals["errored"] + totals["incomplete"])


def inference_perf(out: Path) -> Outcome:
    """Reads the report of inference-perf."""
    summary = _one(out, "summary_lifecycle_metrics.json")
    return _requests(summary["successes"]["count"], summary["failures"]["count"])


def genai_bench(out: Path) -> Outcome:
    """Reads the report of genai-bench."""
    totals = _one(out, "*_text-to-text_*.json")["aggregated_metrics"]
    return _requests(totals["num_completed_requests"], totals["num_error_requests"])


def aiperf(out: Path) -> Outcome:
    """Reads the report of AIPerf."""
    report = _one(out, "profile_export_aiperf.json")
    errors = sum(each["count"] for each in report.get("error_summary") or [])
    return _requests(int(report["request_count"]["avg"]), errors)


PARSERS: dict[str, Callable[[Path], Outcome]] = {
    each.__name__: each
    for each in (
        *(lines, compatcanary, schemathesis),
        *(guidellm, inference_perf, genai_bench, aiperf),
    )
}
