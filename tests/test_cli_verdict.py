"""The sentence that ends `simulate`, `demo` and `replay`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric_lab.cli.demo import _verdict as demo_sentence
from lmetric_lab.cli.simulated import verdict as simulate_sentence
from lmetric_lab.cli.verdict import Entry, of_programs, sentence
from lmetric_lab.defaults import SLICE
from lmetric_lab.replay import ProgramReport, Record, Slo, summarize
from lmetric_lab.sim.ranking import ranking
from lmetric_lab.sim.report import build as build_report
from lmetric_lab.sim.setups import PolicyChoice, Result, Setup, TraceChoice, run
from lmetric_lab.sim.study import cells


def entry(label: str, ttft: float, tpot: float | None = 0.05, **more: Any) -> Entry:
    spans = [None if value is None else (value, value, value) for value in (ttft, tpot)]
    return Entry(label, *spans, **{"requests": 100, **more})


def test_demo_takes_commas_as_simulate_does() -> None:
    """UX papercut 14: `demo --policy lmetric,vllm` was one expression with a comma."""
    for given, wrong in (
        ("lmetric,vllmm", "'vllmm' is neither"),
        ("maximum(bs, q_bs),linea", "'linea' is neither"),
    ):
        done = CliRunner().invoke(build(["demo"]), ["demo", "--policy", given])
        assert done.exit_code == 2
        assert wrong in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            [entry("round_robin", 8.6, 0.17), entry("lmetric", 2.18, 0.05), entry("vllm", 4.57, 0.04)],
            "lmetric: mean TTFT 2.18 s, 52% below vllm; mean TPOT 50 ms, 25% above vllm.",
        ),
        ([entry("lmetric", 0.25)], "lmetric: mean TTFT 250 ms; mean TPOT 50 ms."),
        (
            [entry("a", 1.0, None), entry("b", 1.0, None)],
            "a: mean TTFT 1.00 s, the same as b.",
        ),
        (
            [entry("a", 1.0, None), entry("b", 1.001, None)],
            "a: mean TTFT 1.00 s, less than 1% below b.",
        ),
        # Requests that fail make a mean look good.
        (
            [entry("a", 1.0, None, unfinished=3), entry("b", 2.0, None)],
            "b: mean TTFT 2.00 s, 100% above a; a: 3 of 100 requests did not finish.",
        ),
        ([entry("u", 1.0, None, unfinished=3)], "u: mean TTFT 1.00 s; 3 of 100 requests did not finish."),
        ([Entry("u", None, None, 5, 5)], "u: 5 of 5 requests did not finish."),
        ([], "No request got a token."),
    ],
)
def test_the_sentence(entries: list[Entry], expected: str) -> None:
    assert sentence(entries) == expected


def test_seeds_show_whether_a_difference_is_more_than_chance() -> None:
    def over(label: str, ttft: tuple[float, float, float]) -> Entry:
        return Entry(label, ttft, None, 200, seeds=2)

    close = sentence([over("a", (1.0, 0.8, 1.2)), over("b", (1.1, 1.0, 1.2))])
    assert close == "a: mean TTFT 1.00 s, 9% below b (within the spread over seeds)."
    apart = sentence([over("a", (1.0, 0.9, 1.05)), over("b", (1.1, 1.08, 1.2))])
    assert apart == "a: mean TTFT 1.00 s, 9% below b."
    alone = sentence([over("a", (1.0, 0.9, 1.1))])
    assert alone == "a: mean TTFT 1.00 s (900 ms to 1.10 s over 2 seeds)."


@pytest.mark.parametrize(
    ("ttft", "added", "compared"),
    [
        ((1.0, 2.0), (0.1, 0.2), True),
        ((20.6, 30.91), (12.0, 18.0), False),  # a machine with other jobs: the order was wrong
        ((1.0, 2.0), (None, None), True),  # unknown
        ((1.0,), (5.0,), True),  # nothing to compare
    ],
)
def test_the_demo_gives_no_verdict_if_the_machine_decides(
    ttft: tuple[float, ...], added: tuple[float | None, ...], compared: bool
) -> None:
    """UX 1: on busy machines, the first command once ended with a false order of the policies."""
    record = Record(0, 0.0, sent=0.0, first_token=1.0, last_token=2.0, output_tokens=2, ended=True)
    reports = {
        f"p{index}": replace(
            summarize([record], 2.0, slo=Slo(), clock_speed=seconds), added_ttft_seconds=more
        )
        for index, (seconds, more) in enumerate(zip(ttft, added, strict=True))
    }
    verdict = demo_sentence(reports)
    assert verdict.startswith("p0: mean TTFT" if compared else "No verdict: this machine added up to 18.00 s")


def test_simulate_ends_with_the_sentence() -> None:
    words = ["simulate", "--policy", "round_robin,vllm,lmetric", "--instances", "4", "--speed", "0.65"]
    done = CliRunner().invoke(build(["simulate"]), words, env={"COLUMNS": "80"})
    assert done.exit_code == 0, (done.stderr, done.exception)
    last = done.stdout.splitlines()[-1]
    assert last == "lmetric: mean TTFT 2.18 s, 52% below vllm; mean TPOT 50.7 ms, 39% below vllm."
    assert "goodput" not in done.stdout
    done = CliRunner().invoke(build(["simulate"]), [*words, "--json", "-"])
    runs = json.loads(done.stdout)["runs"]
    assert runs[2]["ttft_seconds"]["mean"] == pytest.approx(2.18, abs=0.005)
    assert done.stderr.splitlines()[-1] == last


def test_policies_that_cannot_keep_up_come_last() -> None:
    entries = [
        entry("late", 1.0, 0.05, first_token_share=0.9),
        entry("slow", 3.0, 0.05),
        entry("broken", 0.5, 0.05, unfinished=1),
        entry("good", 2.0, 0.05),
    ]
    assert sentence(entries) == (
        "good: mean TTFT 2.00 s, 33% below slow; mean TPOT 50 ms, the same as slow; "
        "broken: 1 of 100 requests did not finish; late cannot keep up."
    )
    # Of a few requests, most have no token when the last one arrives.
    short = [entry("a", 2.0, first_token_share=0.5), entry("b", 1.0, first_token_share=0.6)]
    assert sentence(short) == "b: mean TTFT 1.00 s, 50% below a; mean TPOT 50 ms, the same as a."


def test_reports_and_the_sentence_have_one_order() -> None:
    """The lowest TTFT is not first if its TPOT is far higher, in a report and in the sentence."""
    trace = TraceChoice(str(SLICE), "slice", requests=60)
    runs = [
        run(Setup(trace=trace, policy=PolicyChoice.parse(name)[0], instances=4), trace.load(), name)
        for name in ("vllm", "round_robin", "lmetric", "least_requests")
    ]

    def changed(result: Result, ttft: float, tpot: float, *, failed: int = 0, share: float = 1.0) -> Result:
        figures = result.figures
        assert figures.ttft_seconds is not None
        assert figures.tpot_seconds is not None
        spreads = {
            "ttft_seconds": replace(figures.ttft_seconds, mean=ttft),
            "tpot_seconds": replace(figures.tpot_seconds, mean=tpot),
        }
        return replace(result, figures=replace(figures, failed=failed, **spreads), first_token_share=share)

    results = [
        changed(runs[0], 1.0, 0.2),
        changed(runs[1], 0.5, 0.01, failed=1),
        changed(runs[2], 1.5, 0.1),
        changed(runs[3], 0.4, 0.01, share=0.94),
    ]
    standings = ranking(cells(results))
    order = [standing.policy.policy for standing in standings]
    assert order == ["lmetric", "vllm", "least_requests", "round_robin"]
    assert simulate_sentence(results) == (
        "lmetric: mean TTFT 1.50 s, 50% above vllm; mean TPOT 100 ms, 50% below vllm; "
        "round_robin: 1 of 60 requests did not finish; least_requests cannot keep up."
    )
    page = build_report(results, title="t", command="c").html
    first = page[page.index("<h3>Best policies") : page.index("<h3>Best policy per figure")]
    rows = first.replace("\u200b", "")
    places = [rows.index(f"</i>{name}") for name in order]
    assert places == sorted(places)
    assert "<small>cannot keep up</small>" in first
    assert "<small>1 unfinished</small>" in first


def of(jct: float | None, share: float | None, failed: int = 0) -> ProgramReport:
    return ProgramReport(37 - failed, failed, jct, jct, share, 0.0)


def test_agent_programs_are_compared_by_job_completion_time() -> None:
    reports = {"lmetric": of(120.0, 0.4), "sticky sessions": of(150.0, 0.3), "admission": of(90.0, 0.05)}
    assert of_programs(reports) == (
        "admission: mean job completion time 90.00 s, 25% below lmetric, 5.0% of the prompt tokens "
        "recomputed (lmetric: 40.0%)."
    )


def test_programs_that_fail_are_named_and_not_compared() -> None:
    reports = {"lmetric": of(120.0, None), "admission": of(10.0, 0.0, failed=3)}
    assert of_programs(reports) == (
        "lmetric: mean job completion time 120.00 s; admission: 3 of 37 programs did not finish."
    )
    assert of_programs({"lmetric": of(None, None, failed=37)}) == (
        "lmetric: 37 of 37 programs did not finish."
    )
