"""The capacity twin's forecast of the demand, and the error budget that steers its headroom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmetric_lab.capacity import ErrorBudget, Goal, forecast
from lmetric_lab.capacity.demand import part, steady
from lmetric_lab.sim.churn import FleetChange
from lmetric_lab.whatif import Recording, WhatIfError
from record_world import recorded

GOAL = Goal.of("ttft_p95=400ms,e2e_p90=2s")


def test_the_forecast_does_not_fall_to_zero_when_arrivals_stop() -> None:
    arrivals = np.arange(0.0, 300.0, 0.5)
    found = forecast(recorded(arrivals), 450.0, 60.0)
    assert found.at(0.0) == pytest.approx(0.1 * 600 / 450, rel=0.05)


def test_a_steady_rate_is_forecast_as_it_is() -> None:
    rng = np.random.default_rng(3)
    arrivals = np.sort(rng.uniform(0, 900, 4500))
    found = forecast(recorded(arrivals), 900.0, 180.0)
    assert found.now_per_second == pytest.approx(5.0, rel=0.1)
    assert found.at(0.5) == pytest.approx(5.0, rel=0.15)
    assert found.at(0.05) < 5.0 < found.at(0.95) < 6.5


def test_a_rising_rate_is_extended_over_the_start_of_an_engine() -> None:
    rate = np.repeat(np.linspace(2, 8, 900), 1)
    rng = np.random.default_rng(3)
    arrivals = np.repeat(np.arange(900.0), rng.poisson(rate)) + 0.5
    found = forecast(recorded(arrivals), 900.0, 180.0)
    assert found.now_per_second == pytest.approx(8.0, rel=0.1)
    assert found.at(0.5) == pytest.approx(9.2, rel=0.15)
    falling = forecast(recorded(900.0 - arrivals[::-1]), 900.0, 180.0)
    # Engines leave at once, so a falling rate counts as it is now.
    assert falling.at(0.5) == pytest.approx(2.0, rel=0.25)


def test_a_jump_of_the_rate_is_bounded() -> None:
    arrivals = np.concatenate((np.arange(0, 870, 1.0), np.linspace(870, 900, 600)))
    found = forecast(recorded(arrivals), 900.0, 3600.0)
    assert found.at(0.999) <= 2.0 * max(found.now_per_second, 2.0)


def test_requests_that_still_run_count_as_arrived() -> None:
    arrivals = np.sort(np.random.default_rng(3).uniform(0, 900, 4500))
    ended = recorded(arrivals[arrivals < 860], duration=40.0)
    for running in (None, 200):
        found = forecast(ended, 900.0, 180.0, running=running)
        assert found.now_per_second == pytest.approx(5.0, rel=0.12), running
        assert found.running == pytest.approx(200, abs=40)


def test_a_short_recording_has_no_forecast() -> None:
    with pytest.raises(WhatIfError, match="cover 30 s; a forecast needs at least 120 s"):
        forecast(recorded(np.linspace(0, 30, 200)), 30.0, 60.0)


def test_the_played_workload_has_no_trend_and_no_long_bursts() -> None:
    rate = np.linspace(2, 8, 900)
    rate[400:550] *= 3
    arrivals = np.repeat(np.arange(900.0), np.random.default_rng(3).poisson(rate)) + 0.5
    played = steady(recorded(arrivals), 900.0)
    parts = np.histogram(played.arrival_seconds, 10, (0, len(arrivals)))[0]
    assert parts == pytest.approx(len(arrivals) / 10, rel=0.2)  # with the burst: 1.9 times
    assert len(played) / played.arrival_seconds[-1] == pytest.approx(1.0, rel=0.02)
    assert (np.diff(played.arrival_seconds) == 0).any()  # requests of one moment stay together


def test_a_part_has_the_changes_on_its_clock() -> None:
    full = recorded(np.arange(0, 400, 1.0))
    full = replace(
        full,
        engines=("e0", "e1", "e2", "e3"),
        changes=(
            FleetChange(50.0, "leave", 1), FleetChange(120.0, "join", 2), FleetChange(200.0, "leave", 2),
            FleetChange(390.0, "join", 3),
        ),
    )  # fmt: skip
    made = part(full, 100.0, 300.0)
    assert made.started_at == full.started_at + 100.0
    assert made.engines == ("e0", "e2", "e3")  # e1 has left before
    assert made.changes == (FleetChange(20.0, "join", 1), FleetChange(100.0, "leave", 1))
    assert len(made) == 201


def arrivals_with(seconds: tuple[float, ...], rates: tuple[float, ...], seed: int = 3) -> np.ndarray:
    """Random arrivals at each rate for a time."""
    rate = np.repeat(rates, np.array(seconds, int))
    return np.repeat(np.arange(len(rate)), np.random.default_rng(seed).poisson(rate)) + 0.5


def test_a_burst_counts_less_than_a_lasting_change() -> None:
    """A burst of 90 s at twice the rate, and the same rate from its start on."""
    burst = forecast(recorded(arrivals_with((1200, 90, 60), (4.0, 8.0, 4.0))), 1350.0, 180.0)
    assert burst.expected == pytest.approx(4.0, rel=0.15)
    lasting = forecast(recorded(arrivals_with((1200, 300), (4.0, 8.0))), 1500.0, 180.0)
    assert lasting.expected == pytest.approx(8.0, rel=0.15)


# -- the error budget


def served(late: int, count: int = 100, until: float = 600.0) -> Recording:
    """Requests of the last ``count`` seconds, one per second; ``late`` of them have a late first
    token."""
    made = recorded(until - count + np.arange(count) - 0.5)
    ttft = made.ttft_seconds.copy()
    ttft[:late] = 1.0
    return replace(made, ttft_seconds=ttft)


def budget() -> ErrorBudget:
    """A budget that has started."""
    made = ErrorBudget(GOAL, 0.1)
    made.count(served(50), 600.0, 1000.0, spare=False)
    assert made.headroom == 0.1  # what was before the start does not count
    return made


def test_misses_beyond_the_allowed_ones_raise_the_headroom() -> None:
    made = budget()
    made.count(served(5), 600.0, 1100.0, spare=False)
    assert made.headroom == pytest.approx(0.1)  # exactly 5% missed
    made.count(served(25), 600.0, 1200.0, spare=False)
    # 20 of 100 requests are beyond the allowed 5: as many as are allowed in 400 s at this rate.
    assert made.overspent_hours[0] == pytest.approx(400 / 3600, rel=0.01)
    assert made.overspent_hours[1] == pytest.approx(-200 / 3600, rel=0.01)  # all durations are short
    assert made.headroom > 0.1


def test_requests_count_once() -> None:
    made = budget()
    made.count(served(25), 600.0, 1100.0, spare=False)
    before = made.overspent_hours.copy()
    made.count(served(25), 600.0, 1100.0, spare=False)
    assert (made.overspent_hours == before).all()
    made.count(served(25), 600.0, 1110.0, spare=False)  # the last ten requests are good
    assert made.overspent_hours[0] < before[0]


def test_good_service_lowers_the_headroom_unless_the_fleet_was_larger_than_advised() -> None:
    earned, spare = budget(), budget()
    for step in range(1, 40):
        earned.count(served(0), 600.0, 1000.0 + 100 * step, spare=False)
        spare.count(served(0), 600.0, 1000.0 + 100 * step, spare=True)
    assert earned.headroom < 0.1
    assert spare.headroom == 0.1


@pytest.mark.nightly
def test_the_headroom_has_ends_and_recovers_at_once() -> None:
    made = budget()
    for step in range(1, 2000):
        made.count(served(100), 600.0, 1000.0 + 100 * step, spare=False)
    assert made.headroom == pytest.approx(0.5)
    made.count(served(0), 600.0, 1000.0 + 100 * 2000, spare=False)
    assert made.headroom < 0.5
    for step in range(2001, 8000):
        made.count(served(0), 600.0, 1000.0 + 100 * step, spare=False)
    assert made.headroom == 0.0
