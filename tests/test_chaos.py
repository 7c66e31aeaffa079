"""Faults of engines at random under load: no request is lost, and no count remains.

`python bench/chaos/run.py --storm SECONDS` is the same with other seeds and times.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CHAOS = Path(__file__).parents[1] / "bench" / "chaos"


def storm(*arguments: object) -> str:
    """Returns the output of a storm that ends well."""
    done = subprocess.run(
        [sys.executable, str(CHAOS / "run.py"), *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_300_000_distinct_prompts_keep_memory_flat_and_leave_no_count() -> None:
    done = subprocess.run(
        [sys.executable, str(CHAOS / "soak.py"), "core", "--prompts", "300000"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "300000 prompts" in done.stdout
    assert "in flight 0" in done.stdout


def test_memory_that_grows_after_the_warm_up_fails_a_long_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHAOS))
    growth = importlib.import_module("growth")
    filled = [*np.linspace(90.0, 118.0, 350), *np.full(650, 120.0)]
    assert growth.growth_of(filled, 54_000) == pytest.approx(0.0)
    assert not growth.leaks(0.0)
    leaking = growth.growth_of([*filled[:400], *np.linspace(120.0, 130.0, 600)], 54_000)
    assert leaking == pytest.approx(10.0)
    assert growth.leaks(leaking)
    assert growth.growth_of(filled, 9_000) is None  # ten minutes do not fill the ring of records


@pytest.mark.timeout(300)
def test_a_storm_of_faults_loses_no_request() -> None:
    storm("--storm", 15, "--seed", 1)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_an_hour_of_faults_loses_no_request_and_keeps_memory_flat() -> None:
    assert "MiB after the warm-up" in storm("--storm", 3600, "--seed", 2)
