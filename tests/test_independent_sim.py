"""The simulator against its rules in plain Python: bench/plain_simulator.py; see trust.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmetric_lab.demo import SLICE
from lmetric_lab.sim.traces import load_trace
from lmetric_lab.sim.workload import prepare

BENCH = Path(__file__).parent.parent / "bench"
ENGINES = 4
# Fast enough that requests wait, answers share steps with prefills, and the policies differ.
SPEED = 6.0


def test_every_request_is_served_as_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import independent_sim as bench

    workload = prepare(load_trace(SLICE).first(400).faster(SPEED), bench.PROFILE)
    seen = set()
    for name, policy in bench.POLICIES.items():
        ours = bench.simulated(workload, bench.with_their_ties(policy), instances=ENGINES)
        plain = bench.plainly(workload.trace, name, ENGINES)
        np.testing.assert_allclose(bench.columns(ours), plain, rtol=0, atol=bench.SAME_SECONDS, err_msg=name)
        seen.add(plain.tobytes())
    assert len(seen) >= len(bench.POLICIES) - 1, "the policies are to choose differently"
