"""Figures from per-request columns, computed by hand."""

from __future__ import annotations

import math
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmetric import BadValueError
from lmetric_lab.sim import summary
from lmetric_lab.sim.summary import Goodput, Slo, Spread


def run_of(n: int = 4) -> Any:
    """Four requests, a second apart; the columns of `lmetric_lab.sim.run.Run`, written by hand."""
    arrival = np.array([0.0, 1.0, 2.0, 3.0])
    first = arrival + np.array([0.5, 1.0, 0.5, 2.0])
    finished = first + np.array([1.0, 0.0, 4.0, 2.0])
    output = np.array([11, 1, 21, 11])
    return SimpleNamespace(
        policy="lmetric", programs=None, decode_policy="sibyl", roles=None, stalled=0, seed=7,
        handoff_least_loaded=np.array([1, 0, -1, 1])[:n], wall_seconds=0.25, arrival_seconds=arrival[:n],
        first_token_seconds=first[:n], finished_seconds=finished[:n], output_tokens=output[:n],
        input_tokens=np.array([100, 300, 200, 400])[:n], hit_tokens=np.array([0, 150, 50, 300])[:n],
        split="libra", cut_tokens=np.array([-1, 40, 0, 9])[:n],
        fetch_instance=np.array([-1, 1, 0, 1])[:n], fetched_tokens=np.array([0, 60, 0, 40])[:n],
        rebalance="none", moves=np.array([0, 0, 3, 1])[:n],
        oom=6, step_variance=0.5, token_slo_seconds=0.1, slow_tokens=np.array([2, 0, 5, 1])[:n],
        gap_seconds=lambda quantile: 0.05 * quantile,
        local_order="srpt", preemptions=np.array([5, 0, 2, 1])[:n],
        prompt_blocks=np.array([7, 19, 13, 25])[:n], hit_blocks=np.array([0, 9, 3, 18])[:n],
        ttft_seconds=(first - arrival)[:n], e2e_seconds=(finished - arrival)[:n],
        tpot_seconds=summary.tpot_seconds(first, finished, output)[:n],
        timeline=SimpleNamespace(
            bucket_seconds=1.0, prefill_tokens=np.array([[100.0, 0, 300, 0], [100, 200, 0, 200]])
        ),
    )  # fmt: skip


def test_a_runs_figures() -> None:
    figures = summary.figures(run_of(), Slo(ttft_seconds=1.0, tpot_seconds=0.15))
    assert (figures.decode_policy, figures.optimal_assignment_ratio) == ("sibyl", 2 / 3)
    assert (figures.policy, figures.seed, figures.requests, figures.failed) == ("lmetric", 7, 4, 0)
    assert (figures.local_order, figures.preemptions) == ("srpt", 8)
    assert (figures.fetches, figures.fetched_ratio) == (3, 0.1)
    assert (figures.split, figures.splits, figures.rebalance, figures.moves) == ("libra", 3, "none", 4)
    # Of 44 tokens, 8 came later than 0.1 s after the one before, of 40 that could.
    assert figures.step_variance == 0.5
    assert (figures.oom, figures.token_goodput) == (6, pytest.approx(36 / 7))
    assert figures.slow_token_share == pytest.approx(8 / 40)
    assert (figures.tbt_p50_seconds, figures.tbt_p99_seconds) == (0.025, pytest.approx(0.0495))
    assert figures.ttft_seconds is not None
    assert figures.ttft_seconds.mean == pytest.approx(1.0)
    assert figures.ttft_seconds.p50 == pytest.approx(0.75)
    # TPOT: 1 / 10, none, 4 / 20, 2 / 10
    assert figures.tpot_seconds is not None
    assert figures.tpot_seconds.mean == pytest.approx(0.5 / 3)
    assert figures.e2e_seconds is not None
    assert figures.e2e_seconds.max == pytest.approx(4.5)
    assert figures.hit_ratio == pytest.approx(500 / 1000)
    assert figures.block_hit_ratio == pytest.approx(30 / 64)
    # Good: the first (0.5 s, 0.1 s) and the second (1.0 s, one token). The last end is at 7 s.
    assert figures.goodput == Goodput(1.0, 0.15, 2 / 7, 12 / 7, 0.5)
    assert figures.requests_per_second == pytest.approx(4 / 7)
    assert figures.tokens_per_second == pytest.approx(44 / 7)


def test_only_the_measured_share_counts() -> None:
    figures = summary.figures(run_of(), Slo(), (0.25, 0.75))
    assert (figures.requests, figures.preemptions) == (2, 2)
    assert figures.ttft_seconds is not None
    assert figures.ttft_seconds.mean == pytest.approx(0.75)
    assert figures.hit_ratio == pytest.approx(200 / 500)
    assert figures.goodput.share == 1  # without an SLO every finished request is good
    assert figures.requests_per_second == pytest.approx(2 / 5.5)  # from 1 s to 6.5 s


def test_the_share_goes_by_arrival_not_by_place_in_the_trace() -> None:
    arrivals = np.array([5.0, 0.0, 1.0, 9.0])
    assert summary.measured(arrivals, (0.0, 0.5)).tolist() == [1, 2]


def test_what_never_finished_is_counted_as_failed() -> None:
    run = run_of()
    run.finished_seconds[3] = np.nan
    figures = summary.figures(run, Slo())
    assert (figures.requests, figures.failed) == (4, 1)
    assert figures.goodput.share == 0.75


def test_requests_behind_a_stalled_engine_never_arrive() -> None:
    run = run_of()
    run.arrival_seconds[3] = run.finished_seconds[3] = np.nan
    figures = summary.figures(run, Slo())
    assert (figures.requests, figures.failed) == (4, 1)
    # Work until the last known arrival, at 2 s: 100 tokens on each instance, then 0 and 200.
    assert figures.imbalance == summary.imbalance(np.array([[100.0], [300.0]]))
    assert summary.arrival_span(run.arrival_seconds) == (0.0, 2.0)
    run.arrival_seconds[:] = run.finished_seconds[:] = np.nan
    nothing = summary.figures(run, Slo())
    assert (nothing.failed, nothing.requests_per_second) == (4, 0)
    assert summary.arrival_span(run.arrival_seconds) == (0.0, 0.0)


def test_nothing_measured_has_no_figures() -> None:
    figures = summary.figures(run_of(), Slo(), (0.0, 0.1))
    assert (figures.requests, figures.ttft_seconds, figures.hit_ratio) == (0, None, None)


def test_spread_of_a_thousand() -> None:
    spread = Spread.of(np.arange(1001.0))
    assert spread is not None
    assert astuple(spread) == pytest.approx((500, 500, 900, 990, 999, 1000))
    assert Spread.of([math.nan]) is None
    assert Spread.of([]) is None


def test_imbalance_is_the_variation_across_instances_weighted_by_work() -> None:
    assert summary.imbalance(np.array([[3.0, 5.0], [3.0, 5.0]])) == 0
    # Deviations 1 and 3 over means 2 and 3.
    assert summary.imbalance(np.array([[1.0, 6.0], [3.0, 0.0]])) == pytest.approx(4 / 5)
    # One of four does everything: sqrt(3).
    assert summary.imbalance(np.array([[8.0], [0.0], [0.0], [0.0]])) == pytest.approx(3**0.5)
    assert summary.imbalance(np.zeros((4, 3))) is None


def test_windows_are_whole_and_inside_what_is_measured() -> None:
    values = np.arange(20.0).reshape(2, 10)  # ten buckets of 1 s
    assert summary.windows(values, 1.0, 2.0, 0.5, 6.2).tolist() == [[3, 7], [23, 27]]
    assert summary.windows(values, 1.0, 20.0, 0.0, 10.0).tolist() == [[45], [145]]
    assert summary.windows(values, 4.0, 2.0, 0.0, 8.0).tolist() == [[0, 1], [10, 11]]


@pytest.mark.parametrize("text", ["0.9:0.1", "0.5", "a:b", "0:1.1", "-0.1:1", "0:1:2", "nan:1"])
def test_a_share_that_makes_no_sense(text: str) -> None:
    with pytest.raises(BadValueError, match="share of requests"):
        summary.parse_share(text)


def test_a_share() -> None:
    assert summary.parse_share("0.1:0.9") == (0.1, 0.9)
