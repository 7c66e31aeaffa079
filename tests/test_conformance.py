"""`bench/conformance`: its lists fit together, and a failure of the router alone needs a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent.parent / "bench" / "conformance"
SUITES = yaml.safe_load((FOLDER / "suites.yaml").read_text())
DIFFERENCES = yaml.safe_load((FOLDER / "differences.yaml").read_text())


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import run  # type: ignore[import-not-found]

    return run


def test_the_lists_fit_together(runner: Any) -> None:
    names = [suite["name"] for suite in SUITES]
    assert len(set(names)) == len(names)
    assert {suite["parser"] for suite in SUITES} == runner.PARSERS.keys()
    for each in DIFFERENCES:
        assert set(each["suites"]) <= set(names), each
        assert each["reason"], each


def test_only_failures_that_the_engine_lacks_need_a_reason(runner: Any) -> None:
    sides = {
        "router": runner.Outcome(3, {"both": "x", "listed 1": "y", "new": "z"}),
        "engine": runner.Outcome(5, {"both": "x", "engine": "w"}),
    }
    listed = [{"suites": ["s"], "failures": ["listed *"], "reason": "a reason"}]
    found = runner.compared({"name": "s"}, sides, listed)
    assert found["differences"] == [
        {"failure": "listed 1", "reason": "a reason"},
        {"failure": "new", "reason": None},
    ]
    assert (found["router"]["failed"], found["engine"]["passed"]) == (3, 5)
    other = runner.compared({"name": "other"}, sides, listed)
    assert [each["reason"] for each in other["differences"]] == [None, None]


def test_reports_are_read(runner: Any, tmp_path: Path) -> None:
    good, bad = {"check": "a", "ok": True}, {"check": "b", "ok": False, "error": "E"}
    (tmp_path / "log").write_text(f"a warning\n{json.dumps(good)}\n{json.dumps(bad)}\n")
    assert runner.PARSERS["lines"](tmp_path) == (1, {"b": "E"})
    failure = {"failure": {"title": "Server error", "message": "500"}}
    checks = {
        "1": [{"name": "c", "status": "success"}, {"name": "d", "status": "success"}],
        "2": [{"name": "c", "status": "failure", "failure_info": failure}],
    }
    event = {"ScenarioFinished": {"recorder": {"label": "GET /", "checks": checks}}}
    (tmp_path / "report.ndjson").write_text(json.dumps(event) + "\n")
    assert runner.PARSERS["schemathesis"](tmp_path) == (1, {"GET /: c": "Server error: 500"})
    totals = {"metrics": {"request_totals": {"successful": 6, "errored": 1, "incomplete": 0}}}
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": [totals]}))
    assert runner.PARSERS["guidellm"](tmp_path) == (
        6,
        {"request 1": "failed", "the run": "7 requests, expected at least 8"},
    )


def test_a_suite_without_a_report_fails(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Traceback")
    (tmp_path / "report.ndjson").write_text("{}\n")
    for parser in ("lines", "schemathesis"):
        with pytest.raises(ValueError, match="check"):
            runner.PARSERS[parser](tmp_path)
