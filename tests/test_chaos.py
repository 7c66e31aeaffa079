"""Faults of engines at random under load: no request is lost, and no count remains.

`python bench/chaos/run.py --storm SECONDS` is the same with other seeds and times.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[1] / "bench" / "chaos"


def storm(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, str(CHAOS / "run.py"), *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


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


@pytest.mark.timeout(300)
def test_a_storm_of_faults_loses_no_request() -> None:
    storm("--storm", 15, "--seed", 1)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_an_hour_of_faults_loses_no_request_and_keeps_memory_flat() -> None:
    storm("--storm", 3600, "--seed", 2)
