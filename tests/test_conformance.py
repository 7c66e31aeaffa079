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


def test_only_kinds_of_failures_that_the_engine_lacks_need_a_reason(runner: Any) -> None:
    sides = {
        "router": runner.Outcome(
            3, {"both": {"k": "x", "l": "x 2"}, "listed 1": {"m": "y"}, "new": {"n": "z"}}
        ),
        "engine": runner.Outcome(5, {"both": {"k": "x"}, "engine": {"w": "w"}}),
    }
    listed = [{"suites": ["s"], "failures": ["listed *: m"], "reason": "a reason"}]
    found = runner.compared({"name": "s"}, sides, listed)
    assert found["differences"] == [
        {"failure": "both", "kind": "l", "reason": None},
        {"failure": "listed 1", "kind": "m", "reason": "a reason"},
        {"failure": "new", "kind": "n", "reason": None},
    ]
    assert (found["router"]["failed"], found["engine"]["passed"]) == (3, 5)
    assert found["router"]["failures"]["both"] == ["x", "x 2"]
    other = runner.compared({"name": "other"}, sides, listed)
    assert [each["reason"] for each in other["differences"]] == [None, None, None]


def test_a_suite_that_does_not_run_is_no_failure_of_both(runner: Any) -> None:
    broken = runner.Outcome(0, {"the run": {"k": "x"}})
    fine = runner.Outcome(1, {})
    for sides in ((broken, broken), (broken, fine), (fine, broken)):
        found = runner.compared({"name": "s"}, dict(zip(("router", "engine"), sides, strict=True)), [])
        assert found["differences"], sides


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Error code: 400 - id chatcmpl-8a7f33dc9b21", "Error code: 400 - id chatcmpl-11f0e72c81aa", True),
        ("Error code: 400 - no", "Error code: 500 - no", False),
        ("at http://127.0.0.1:8000/v1", "at http://127.0.0.1:8080/v1", True),
        ("took 1.25 s at 2026-11-28T21:00:01Z", "took 31 s at 2026-11-29T01:22:01.5Z", True),
        ("no field usage", "no field choices", False),
        (
            "request 550e8400-e29b-41d4-a716-446655440000",
            "request 550e8400-e29b-41d4-a716-446655440001",
            True,
        ),
    ],
)
def test_kinds_leave_out_what_differs_from_run_to_run(runner: Any, one: str, other: str, same: bool) -> None:
    from parsers import kind  # type: ignore[import-not-found]

    assert (kind(one) == kind(other)) is same


def test_reports_are_read(runner: Any, tmp_path: Path) -> None:
    good, bad = {"check": "a", "ok": True}, {"check": "b", "ok": False, "error": "E"}
    (tmp_path / "log").write_text(f"a warning\n{json.dumps(good)}\n{json.dumps(bad)}\n")
    assert runner.PARSERS["lines"](tmp_path) == (1, {"b": {"E": "E"}})
    failures = [
        {"title": "Violates", "message": '7 is not of type "string"\n\nSchema at /a:\n\n{}'},
        {"title": "Violates", "message": '12 is not of type "string"\n\nSchema at /a:\n\n{}'},
        {"title": "Violates", "message": 'null is not of type "string"\n\nSchema at /a:\n\n{}'},
        {"title": "Accepted", "message": "no\nInvalid component: in body at /n (was 7, became -1)"},
        {"title": "Accepted", "message": "no\nInvalid component: in body at /n (was 9, became -1)"},
    ]
    checks = {
        "0": [{"name": "c", "status": "success"}, {"name": "d", "status": "success"}],
        **{
            str(number): [{"name": "c", "status": "failure", "failure_info": {"failure": failure}}]
            for number, failure in enumerate(failures, 1)
        },
    }
    answers = {str(number): {"response": {"status_code": 400}} for number in range(1, 6)}
    recorder = {"label": "GET /", "checks": checks, "interactions": answers}
    (tmp_path / "report.ndjson").write_text(json.dumps({"ScenarioFinished": {"recorder": recorder}}) + "\n")
    passed, failed = runner.PARSERS["schemathesis"](tmp_path)
    assert (passed, list(failed)) == (1, ["GET /: c"])
    assert list(failed["GET /: c"]) == [
        '400: Violates: int is not of type "string"; Schema at /a:',
        '400: Violates: null is not of type "string"; Schema at /a:',
        "400: Accepted: no; Invalid component: in body at /n",
    ]
    totals = {"metrics": {"request_totals": {"successful": 6, "errored": 1, "incomplete": 0}}}
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": [totals]}))
    assert runner.PARSERS["guidellm"](tmp_path) == (
        6,
        {
            "request 1": {"failed": "failed"},
            "the run": {"N requests, expected at least N": "7 requests, expected at least 8"},
        },
    )


def test_a_suite_without_a_report_fails(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Traceback")
    (tmp_path / "report.ndjson").write_text("{}\n")
    for parser in ("lines", "schemathesis"):
        with pytest.raises(ValueError, match="check"):
            runner.PARSERS[parser](tmp_path)
