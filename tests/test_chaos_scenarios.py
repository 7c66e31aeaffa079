"""Faults of routers, of their machine and of clients, under load: see bench/chaos/scenarios.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[1] / "bench" / "chaos"
QUICK = ["log on a full disk"]
LONGER = ["router killed", "no descriptors", "routers apart", "events cut", "no descriptors, asyncio"]
LONGER += ["log at its limit", "clock stepped", "clients that leave", "idle clients"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.nightly) for name in LONGER)]
)
def test_routers_keep_the_rules(name: str) -> None:
    """Each scenario checks its rules, and fails if one is broken."""
    done = subprocess.run(
        [sys.executable, str(CHAOS / "scenarios.py"), name, "--seed", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
