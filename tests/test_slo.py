"""Service-level objectives are read and count requests."""

from __future__ import annotations

import numpy as np
import pytest

from lmetric._core import BadValueError
from lmetric_lab.slo import Goal, Objective


def test_a_goal_is_read_and_written() -> None:
    goal = Goal.of("ttft_p99=2s, tpot=50ms,e2e_p99.9=30")
    assert goal.objectives == (
        Objective("ttft", 2.0, 0.99), Objective("tpot", 0.05, 0.95), Objective("e2e", 30.0, 0.999),
    )  # fmt: skip
    assert Goal.of(str(goal)) == goal


def test_a_goal_counts_requests() -> None:
    times = {
        "ttft": np.array([1.0, 3.0, np.inf, 1.0]),
        "tpot": np.array([0.1, 0.1, np.inf, np.nan]),
        "e2e": np.array([2.0, 4.0, np.inf, 1.0]),
    }
    goal = Goal.of("ttft_p75=2s,tpot_p50=200ms")
    assert goal.kept(times).tolist() == [True, False, False, True]
    assert goal.margin(times) == pytest.approx(-0.25)  # of TTFT: 50% and not 75%


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft<2s", "expected ttft, tpot or e2e with a percentile"),
        ("ttft_p0=2s", "'ttft_p0=2s' is not valid"),
        ("ttft_p99.99999=2s", "'ttft_p99.99999=2s' is not valid; .* at most 4 decimals"),  # rounds to 100
        ("ttft_p100=2s", "'ttft_p100=2s' is not valid"),
        ("ttft=0s", "'ttft=0s' is not valid"),
        ("ttft=2s,ttft_p99=4s", "ttft appears twice"),
        (" , ", "the SLO is empty"),
    ],
)
def test_a_bad_goal_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        Goal.of(text)
