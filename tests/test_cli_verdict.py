"""The sentence that ends `simulate`, `demo` and `replay`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.cli.verdict import Entry, sentence


def entry(label: str, ttft: float, tpot: float | None = 0.05, **more: int) -> Entry:
    spans = [None if value is None else (value, value, value) for value in (ttft, tpot)]
    return Entry(label, *spans, **{"requests": 100, **more})


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
