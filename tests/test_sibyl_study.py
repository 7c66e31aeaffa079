"""The rerun of the SIBYL paper's simulations: its driver, page, and the basis of its figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from studies import Study

ROOT = Path(__file__).parent.parent
STUDY = Study("sibyl")


@pytest.fixture
def study() -> Iterator[None]:
    yield from STUDY.importable()


def test_quick_figures(tmp_path: Path) -> None:
    made = STUDY.made(tmp_path, "--quick", "--figure", "8,light,curve")
    told = made["8"]
    assert (told["quick"], told["seeds"]) == (True, 1)
    by_label = {(row["stage"], row["policy"]): row for row in told["rows"]}
    (stage,) = {stage for stage, _ in by_label if "step time" in stage}
    sibyl, level = by_label[stage, "SIBYL"], by_label[stage, "least requests, bound ones too (REQLEVEL)"]
    # As on the page: instances slowed by a big batch look light in tokens, so request counts win.
    assert sibyl["p99"][0] > 1.05 * level["p99"][0]
    assert sibyl["least_loaded"][0] > 0.8 > 0.3 > level["least_loaded"][0]
    assert all(row["without_end"] == [0.0] for row in told["rows"])
    light = made["light"]["rows"]
    assert min(row["least_loaded"][0] for row in light) > 0.4  # most are idle, and ties count
    assert max(row["batch"][0] for row in light) < 1
    # Fidelity gap 13: each alpha with each width of the buckets, beside least requests.
    rows = made["curve"]["rows"]
    (stage,) = {row["stage"] for row in rows if "step time" in row["stage"]}
    p99 = {row["policy"]: row["p99"][0] for row in rows if row["stage"] == stage}
    assert len(p99) == 10
    assert len(set(p99.values())) > 5  # the settings reach the router


@pytest.mark.usefixtures("study")
def test_limits_and_lives_by_hand() -> None:
    from world import life, life_tokens, limit, profile_of, sample

    from lmetric.profiles import load_profile

    trace = sample("sharegpt-like")
    mean = trace.output_tokens.mean()
    held, steps = load_profile("sibyl-eq15-held"), load_profile("independent-pd")
    assert limit(held, "sharegpt-like") == pytest.approx(1176.64 / mean, rel=1e-4)
    # The answer that a token belongs to: long ones hold more of them.
    of_a_token = (mean**2 + trace.output_tokens.var()) / mean
    assert life_tokens("sharegpt-like") == pytest.approx(of_a_token)
    # A fifth of the peak, 235.3 tokens/s, is made by 5.741 sequences: 24.4 ms a token.
    assert life(held, "sharegpt-like", 0.2) == pytest.approx(of_a_token * 5.741 / 235.33, rel=2e-3)
    # Half of the time goes into the fixed part of a step: a step takes twice that.
    assert life(steps, "sharegpt-like", 0.5) == pytest.approx(of_a_token * 0.054)
    context = trace.input_tokens.mean() + (trace.output_tokens**2).mean() / (2 * mean)
    assert limit(steps, "sharegpt-like") == pytest.approx(1 / (mean * (7e-5 + 8.2e-8 * context)))
    few = profile_of("256 sequences")
    assert few.max_sequences == 256
    step = 0.027 + 256 * (7e-5 + 8.2e-8 * context)
    assert limit(few, "sharegpt-like", 256) == pytest.approx(256 / step / mean)


@pytest.mark.usefixtures("study")
def test_bounds_of_a_ratio_by_hand() -> None:
    from rerun import bounds

    ratio, low, high = bounds([1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 9.0])
    assert ratio == pytest.approx(2.0)
    # Logarithms 0, 0.693, 1.386: deviation 0.693, over the root of 3, times 4.303.
    assert (low, high) == (pytest.approx(2 / 5.594, rel=1e-3), pytest.approx(2 * 5.594, rel=1e-3))


@pytest.mark.usefixtures("study")
def test_a_figure_is_rerun_with_the_seeds_of_its_results() -> None:
    from run import RERUN

    def groups(**asked: int | bool | None) -> dict[tuple[int, ...], list[str]]:
        told = {"quick": False, "seeds": None, "first_seed": None, "usual_seeds": 3} | asked
        return RERUN._by_seeds(["7", "8", "new"], argparse.Namespace(**told))

    assert groups() == {(10, 100): ["7"], (2, 0): ["8"], (3, 0): ["new"]}
    assert groups(seeds=1) == {(1, 100): ["7"], (1, 0): ["8", "new"]}
    assert groups(first_seed=0) == {(10, 0): ["7"], (2, 0): ["8"], (3, 0): ["new"]}
    assert groups(quick=True) == {(3, 0): ["7", "8", "new"]}


@pytest.mark.usefixtures("study")
def test_a_curve_that_is_right_has_no_error() -> None:
    from survival import STEP, held_against

    answers = np.arange(1, 16385)
    true = 1 - np.minimum(STEP * np.arange(513) / 16384, 1)
    assert held_against(true, answers)["largest"] < 1e-3
    wrong = held_against(np.ones(513), answers)
    assert wrong["largest"] > 0.9
    assert 0.3 < wrong["mean"] < 0.8
