"""`report`: missed SLOs by engine, tenant and prompt, their causes, and simulated changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmetric.cli import FAILED, describe, exit_code
from lmetric.cli.app import build
from lmetric.record_files import read_records
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.setups import PolicyChoice
from lmetric_lab.sim.summary import Slo
from lmetric_lab.sim.traces import Trace
from lmetric_lab.slo import Goal
from lmetric_lab.whatif import EngineFit, FitCheck, WhatIfError, compare, recording_of
from lmetric_lab.whatif.report_page import page
from lmetric_lab.whatif.slo_report import SloReport, simulate_options, slo_report
from record_world import PROFILE, make_trace, simulated, write_records


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace()


@pytest.fixture(scope="module")
def run(trace: Trace) -> Run:
    return simulated(trace, "round_robin")


def change(index: int, line: dict[str, Any]) -> None:
    """Known times: engine e1 and the tenant bob are slow, and some requests fail."""
    slow = line["instance"] == "e1"
    line["tenant"] = "bob" if index // 4 % 4 == 0 else "alice"
    line |= {"ttft_seconds": 2.0 if slow else 0.1, "tpot_seconds": 0.2 if line["tenant"] == "bob" else 0.01}
    own = line["prompt_tokens"] - line["cached_tokens"]
    line["load"] = {"queued_prefill_tokens": own * (5 if index // 4 % 2 else 1)}
    if index % 50 == 0:
        line["status"] = 503
    elif index % 50 == 1:
        line["held_seconds"] = 1.5


def call(*words: str) -> Any:
    return CliRunner().invoke(build(["report"]), ["report", *words])


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_full_disk_does_not_cost_the_results(tmp_path: Path, trace: Trace, run: Run, flag: str) -> None:
    """The tables are printed before the files are written, and the error names the file."""
    path = write_records(tmp_path, trace, run)
    ended = call(str(path), "--slo", "ttft=99s", flag, "/dev/full")
    assert "within SLO" in ended.stdout
    assert isinstance(ended.exception, OSError)
    assert describe(ended.exception) == "/dev/full: No space left on device"
    assert exit_code(ended.exception) == FAILED


def test_rows_and_causes(tmp_path: Path, trace: Trace, run: Run) -> None:
    write_records(tmp_path, trace, run, change)
    records = read_records(tmp_path).of(None)
    goal = Goal.of("ttft=1s,tpot_p90=50ms")
    report = slo_report(records, goal)
    assert sum(row.requests for row in report.engines) == sum(row.requests for row in report.prompts) == 400
    first, *others = report.engines
    assert first.name == "e1"
    assert first.ttft_missed == 1.0
    assert first.met == 0.0
    assert all(row.ttft_missed == 0.0 for row in others)
    rows = {row.name: row for row in report.tenants}
    assert rows["bob"].tpot_missed == 1.0
    assert rows["alice"].tpot_missed == 0.0
    assert report.whole.failed == 8
    lines = records.requests
    late = [line for line in lines if line["status"] == 200 and line["instance"] == "e1"]
    held = sum(line.get("held_seconds", 0) >= 0.5 for line in late)
    causes = report.whole.causes
    assert causes["failed"] == 8
    assert causes.get("held", 0) == held
    assert causes["queue"] + causes["prompt"] + held == len(late)
    assert causes["queue"] > 20
    assert causes["prompt"] > 20
    assert sum(causes.values()) == round(400 * (1 - report.whole.met))
    assert not report.reached
    shares = {"ttft_p95=1s": 1 - (len(late) + 8) / 400, "tpot_p90=0.05s": report.objectives["tpot_p90=0.05s"]}
    assert report.objectives == pytest.approx(shares)
    assert f"The records miss the SLO: {shares['ttft_p95=1s']:.1%} within ttft_p95=1s, " in report.advice()
    # Each objective has its own percentile, and lines of all kinds may miss it.
    assert slo_report(records, Goal.of("ttft_p50=1s,tpot_p50=50ms")).reached


def test_a_stream_that_broke_failed_unless_its_client_left(tmp_path: Path, trace: Trace, run: Run) -> None:
    def broken(index: int, line: dict[str, Any]) -> None:
        if index < 20:
            line |= {"outcome": "reset", "reason": "the connection broke"}
        elif index < 60:
            line |= {"outcome": "cancelled", "reason": "the client left"}

    write_records(tmp_path, trace, run, broken)
    report = slo_report(read_records(tmp_path).of(None), Goal.of("ttft_p50=1000s"))
    assert report.whole.failed == 20
    assert report.whole.causes == {"failed": 20}
    assert report.objectives == {"ttft_p50=1000s": 1 - 20 / 400}


def test_the_first_tenth_by_arrival_fills_the_caches(tmp_path: Path, trace: Trace, run: Run) -> None:
    """In the closed loop, all turns of a session have the place of its first one. `compare` has the
    same requests in its figures."""

    def turns(index: int, line: dict[str, Any]) -> None:
        line["session"] = f"s{index % 40}"

    write_records(tmp_path, trace, run, turns)
    recording = recording_of(read_records(tmp_path).of(None))
    fit = EngineFit(PROFILE, 0.01, False, 100, 0.0, 0.0)
    option = simulated_report(tmp_path, "ttft_p1=250ms").options[0]
    (result,) = compare(recording, fit, [recording.policy], seeds=1, slo=Slo(0.25))
    assert 0.1 < option.met[0] < 0.9
    assert option.met[0] == pytest.approx(result.figures.goodput.share)


def test_a_bound_of_the_whole_duration(tmp_path: Path, trace: Trace, run: Run) -> None:
    def times(index: int, line: dict[str, Any]) -> None:
        first, whole = ((9.0, 10.0), (1.0, 10.0), (1.0, 2.0), (1.0, 2.0))[index % 4]
        line |= {"ttft_seconds": first, "e2e_seconds": whole, "load": {"queued_prefill_tokens": 10**9}}

    write_records(tmp_path, trace, run, times)
    report = slo_report(read_records(tmp_path).of(None), Goal.of("e2e_p50=5s"))
    assert report.reached
    assert report.whole.e2e_missed == 1 - report.whole.met == 0.5
    assert report.whole.causes == {"queue": 100, "decode": 100}


def test_engines_with_new_names_count_once(tmp_path: Path, trace: Trace, run: Run) -> None:
    """Four engines that a rolling update replaces at once are a fleet of four."""

    def updated(index: int, line: dict[str, Any]) -> None:
        line["instance"] = ("n" if index >= 200 else "") + line["instance"]

    path = write_records(tmp_path, trace, run, updated)
    fleet = json.loads(path.read_bytes().splitlines()[1])
    fleet["at"] += (trace.arrival_seconds[199] + trace.arrival_seconds[200]) / 2
    for engine in fleet["engines"]:
        engine["name"] = "n" + engine["name"]
    with path.open("a") as file:
        file.write(json.dumps(fleet) + "\n")
    recording = recording_of(read_records(tmp_path).of(None))
    assert (len(recording.engines), len(recording.changes), recording.most_engines) == (8, 8, 4)
    report = simulated_report(tmp_path, "ttft_p99=1ms")
    assert [each.fleet for each in report.options] == [
        "at most 4 engines (as recorded)",
        *(f"{number} engines" for number in (4, 5, 6, 7, 8)),
    ]


def simulated_report(folder: Path, slo: str, *policies: str) -> SloReport:
    """A report with simulations of the true engines."""
    records, goal = read_records(folder).of(None), Goal.of(slo)
    recording = recording_of(records)
    choices = [recording.policy, *(choice for each in policies for choice in PolicyChoice.parse(each))]
    fit, check = EngineFit(PROFILE, 0.01, False, 100, 0.0, 0.0), FitCheck("round_robin", 100, (), 0.0, {})
    return simulate_options(slo_report(records, goal), goal, recording, fit, check, choices, seeds=1)


def failing(every: int, status: int = 503) -> Callable[[int, dict[str, Any]], None]:
    """One request of ``every`` fails at once."""

    def change(index: int, line: dict[str, Any]) -> None:
        if index % every == 5:
            line |= {"status": status, "e2e_seconds": 0.001}

    return change


def test_no_change_is_recommended_against_failures(tmp_path: Path, trace: Trace, run: Run) -> None:
    """The simulation has no failures, so each change would seem to help."""
    write_records(tmp_path, trace, run, failing(11))
    report = simulated_report(tmp_path, "ttft_p95=60s", "lmetric")
    assert not report.reached
    assert report.options == []
    assert "No change was simulated: 36 of 400 requests failed, more than the SLO allows" in report.advice()


def test_failures_that_the_slo_just_allows_do_not_end_the_simulation(
    tmp_path: Path, trace: Trace, run: Run
) -> None:
    write_records(tmp_path, trace, run, failing(10))
    report = simulated_report(tmp_path, "ttft_p90=60s,tpot_p50=0.001ms")
    assert (report.whole.failed, report.whole.requests) == (40, 400)
    assert not report.reached
    assert report.why_none is None
    assert report.options


def test_invalid_requests_are_no_misses(tmp_path: Path, trace: Trace, run: Run) -> None:
    """No engine would have served them. `advise` does not count them, either."""
    write_records(tmp_path, trace, run, failing(11, 400))
    report = slo_report(read_records(tmp_path).of(None), Goal.of("ttft_p95=60s"))
    assert report.reached
    assert (report.whole.failed, report.whole.requests) == (0, 364)
    assert report.objectives == {"ttft_p95=60s": 1.0}
    write_records(tmp_path, trace, run, failing(11, 429))  # refused, but valid
    refused = slo_report(read_records(tmp_path).of(None), Goal.of("ttft_p95=60s"))
    assert (refused.reached, refused.whole.failed, refused.whole.requests) == (False, 36, 400)

    def wrong(_: int, line: dict[str, Any]) -> None:
        line["status"] = 404

    write_records(tmp_path, trace, run, wrong)
    with pytest.raises(WhatIfError, match="all 400 requests are invalid"):
        slo_report(read_records(tmp_path).of(None), Goal.of("ttft_p95=60s"))


def test_a_simulation_that_does_not_explain_the_misses_is_no_evidence(
    tmp_path: Path, trace: Trace, run: Run
) -> None:
    """The cause of the late requests is not simulated, so each change would seem to help."""

    def change(index: int, line: dict[str, Any]) -> None:
        failing(40)(index, line)
        if index % 20 == 6:
            line["ttft_seconds"] = 61.0

    write_records(tmp_path, trace, run, change)
    report = simulated_report(tmp_path, "ttft_p95=60s", "lmetric")
    assert not report.reached  # 2.5% failed, and 5% were late
    kept, other = report.options
    assert (kept.change, kept.enough, kept.label) == (False, True, "round_robin (as recorded)")
    assert (other.change, other.enough, other.label) == (True, True, "lmetric")
    assert kept.fleet == other.fleet == "4 engines"
    assert kept.met == other.met == pytest.approx((0.975,) * 3)
    assert report.advice().endswith(
        "The simulation of the recorded fleet meets it (97.5%), so it does not explain the misses, and is no "
        "evidence for a change."
    )
    assert "round_robin (as recorded)" in page(report, None, "t")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("href", "src", "action")]


def test_the_smallest_change_that_meets_the_target(tmp_path: Path, trace: Trace, run: Run) -> None:
    def tenant(_: int, line: dict[str, Any]) -> None:
        line["tenant"] = "<script>alert(1)</script>"

    write_records(tmp_path, trace, run, tenant)
    html, data = tmp_path / "report.html", tmp_path / "report.json"
    words = [
        "--slo",
        "ttft_p90=200ms",
        "--policy",
        "lmetric",
        "--seeds",
        "2",
        "--max-batch-tokens",
        "4096",
        "--roles",
        "2P2D",
        "--transfer",
        "none",
    ]
    done = call(str(tmp_path), *words, "--html", str(html), "--json", str(data))
    assert done.exit_code == 0, done.output
    told = json.loads(data.read_bytes())
    assert told["slo"] == "ttft_p90=0.2s"
    assert told["objectives"]["ttft_p90=0.2s"] == pytest.approx(told["whole"]["met"])
    assert told["whole"]["met"] < 0.9
    assert all(option["enough"] == (option["met"][1] >= 0.9) for option in told["options"])
    sizes = [option["instances"] for option in told["options"]]
    assert sizes[:4] == [4] * 4
    assert [option["fleet"] for option in told["options"][:4]] == ["4 engines"] * 2 + ["4 engines (2P2D)"] * 2
    # It stops at the first size with an option that is good enough.
    enough = [option for option in told["options"] if option["enough"]]
    assert enough
    assert {option["instances"] for option in enough} == {max(sizes)}
    assert "would have met it" in " ".join(done.output.split())
    text = html.read_text()
    found = Page(text)
    assert found.addresses == []
    assert "script" not in found.tags
    assert "&lt;script&gt;" in text
    assert "Simulated changes" in text
    assert "(as recorded)" in text
    assert "(as recorded)" in done.output
    assert "Fit of the simulation" in text


def test_a_report_without_a_simulation_says_why(tmp_path: Path, trace: Trace, run: Run) -> None:
    write_records(tmp_path, trace, run, sample=0.5)
    done = call(str(tmp_path), "--slo", "ttft=0.2s")
    assert done.exit_code == 0, done.output
    assert "No change was simulated: the records are a sample" in " ".join(done.output.split())
    met = call(str(tmp_path), "--slo", "ttft=100s")
    assert "The records meet the SLO: 100.0% within ttft_p95=100s." in " ".join(met.output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing option '--slo'"),
        (["--slo", "ttft<1"], "SLO 'ttft<1' is not valid"),
        (["--slo", "ttft=1s", "--html", "/none/report.html"], "there is no directory /none"),
    ],
)
def test_wrong_usage(tmp_path: Path, words: list[str], message: str) -> None:
    done = call(str(tmp_path), *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
