"""Faults of routers, of their machine and of clients, under load: see bench/chaos/scenarios.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[1] / "bench" / "chaos"
QUICK = ["router killed", "routers apart", "events cut", "no descriptors", "no descriptors, asyncio"]
QUICK += ["log at its limit", "log on a full disk", "clock stepped", "idle clients", "clients that leave"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICK)
def test_routers_keep_the_rules(name: str) -> None:
    """Each scenario checks its rules, and fails if one is broken."""
    done = subprocess.run(
        [sys.executable, str(CHAOS / "scenarios.py"), name, "--seed", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
