"""Reads the reports of the suites: the passed checks, and the failed ones with their reasons."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

REQUESTS = 8  # of each load tool
# Parts of messages that differ from run to run. Statuses of HTTP (three digits) stay.
VARIABLE = (
    (re.compile(r"https?://[^\s'\")]+|\b(localhost|127\.0\.0\.1)(:\d+)?"), "URL"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b[A-Za-z]+[-_][0-9a-f-]*\d[0-9a-f-]{6,}\b|\b(?=[a-f]*\d)[0-9a-f]{8,}\b"), "ID"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*"), "TIME"),
    (re.compile(r"(?<![\w/.])(?![1-5]\d\d(?![\d.]))-?\d+(\.\d+)?(e[-+]?\d+)?(?![\w.])"), "N"),
)
VALUE = re.compile(
    r"^(.+?)(?= (?:is not|is too|is less|is greater|does not|has non-unique|was expected|should)\b)"
)
KIND_CHARACTERS = 160
# The suite itself did not run: that is no check that both sides may fail.
RUN = "the run"


class Outcome(NamedTuple):
    """The checks of a suite that passed and failed.

    Attributes:
        passed: how many checks passed.
        failed: by the name of each failed check: its kinds of failures, each with one message.
    """

    passed: int
    failed: dict[str, dict[str, str]]


def kind(message: str) -> str:
    """Returns a failure's message without its IDs, times, numbers and URLs."""
    text = " ".join(message.split())
    for pattern, name in VARIABLE:
        text = pattern.sub(name, text)
    return text[:KIND_CHARACTERS]


def kinds(messages: Iterable[str]) -> dict[str, str]:
    """Returns messages by their kinds."""
    return {kind(message): message for message in messages}


def lines(out: Path) -> Outcome:
    """Reads the lines of the scripts in `clients`."""
    text = (out / "log").read_text()
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not found:
        raise ValueError(f"no line of a check: {text[-200:]}")
    failed = {each["check"]: kinds([each["error"]]) for each in found if not each["ok"]}
    return Outcome(len(found) - len(failed), failed)


def compatcanary(out: Path) -> Outcome:
    """Reads the JSON report of compatcanary."""
    results = json.loads((out / "report.json").read_text())["results"]
    failed = {each["id"]: kinds([each["summary"]]) for each in results if each["status"] != "pass"}
    return Outcome(len(results) - len(failed), failed)


def schemathesis(out: Path) -> Outcome:
    """Reads the events of schemathesis: a check is an operation with a kind of check."""
    checked: set[str] = set()
    failed: dict[str, dict[str, str]] = defaultdict(dict)
    for line in (out / "report.ndjson").read_text().splitlines():
        event = json.loads(line)
        if fatal := event.get("FatalError"):
            raise ValueError(f"schemathesis: {fatal}"[:300])
        if error := event.get("NonFatalError"):
            message = json.dumps(error)[:300]
            failed[f"{error.get('label')}: {error.get('title', 'error')}"] |= kinds([message])
        recorder = event.get("ScenarioFinished", {}).get("recorder", {})
        answers = recorder.get("interactions", {})
        for case, checks in recorder.get("checks", {}).items():
            answer = (answers.get(case) or {}).get("response") or {}
            for check in checks:
                if check["name"] == "max_response_time":
                    continue  # it measures the machine
                name = f"{recorder['label']}: {check['name']}"
                checked.add(name)
                if check["status"] == "failure":
                    found, message = _failure(check, answer.get("status_code"))
                    failed[name].setdefault(found, message)
    if not checked:
        raise ValueError("schemathesis: no check ran")
    return Outcome(len(checked - failed.keys()), dict(failed))


def _failure(check: dict[str, Any], status: int | None) -> tuple[str, str]:
    """Returns the kind of a failed check of schemathesis, and its message.

    The kind has the answer's status, the first sentence without values of the answer, and the place
    in the schema or in the request.
    """
    failure = check["failure_info"]["failure"]
    lines = [line.strip() for line in failure["message"].splitlines() if line.strip()]
    first = VALUE.sub(lambda found: _type(found[0]), lines[0] if lines else "")
    places = [
        line.partition(" (")[0]
        for line in lines[1:]
        if line.startswith(("Schema at ", "Invalid component", "Documented"))
    ]
    found = f"{status}: " + kind("; ".join([f"{failure['title']}: {first}", *places]))
    return found, " ".join(f"{failure['title']}: {failure['message']}".split())[:300]


def _type(text: str) -> str:
    """Returns the type of a JSON value, or ``value``."""
    try:
        value = json.loads(text.replace("'", '"'))
        return "null" if value is None else type(value).__name__
    except json.JSONDecodeError:
        return "value"


def _requests(succeeded: int, failed: int) -> Outcome:
    """The outcome of a load tool, which must send at least `REQUESTS` requests."""
    names = {f"request {number}": kinds(["failed"]) for number in range(1, failed + 1)}
    if succeeded + failed < REQUESTS:
        names[RUN] = kinds([f"{succeeded + failed} requests, expected at least {REQUESTS}"])
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
