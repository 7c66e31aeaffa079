"""The study of prefix fetches: its driver, its page, and the basis of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import lmetric as lm
from studies import Study

STUDY = Study("planner")


@pytest.fixture
def study() -> Iterator[None]:
    yield from STUDY.importable()


@pytest.mark.nightly
def test_a_hot_spot_dissolves(tmp_path: Path) -> None:
    """On the page, fetches leave little of the hot spot, and so does the guard."""
    told = STUDY.made(tmp_path, "--quick", "--figure", "hot")["hot"]
    by_label = {row["policy"]: row for row in told["rows"]}
    alone, guarded, vllm = (by_label[name] for name in ("lmetric", "lmetric, guard", "vllm"))
    beside = by_label["lmetric_pull(by_batch=0) at 25 GB/s"]
    assert alone["tpot"][0] > 2.5 * vllm["tpot"][0]
    assert guarded["tpot"][0] < 1.1 * vllm["tpot"][0]
    assert beside["tpot"][0] < 1.1 * vllm["tpot"][0]
    assert beside["ttft"][0] < min(vllm["ttft"][0], guarded["ttft"][0])


@pytest.mark.usefixtures("study")
def test_links_cost_what_they_say() -> None:
    from world import PREFILL_SECONDS, link

    from lmetric.profiles import load_profile
    from lmetric_lab.sim.pools import Transfer

    profile = load_profile("independent-sim")
    assert profile.prefill_seconds_per_token == PREFILL_SECONDS
    for cost, shared in ((0.05, True), (0.3, False)):
        transfer = Transfer.of(link(cost, shared=shared))
        assert transfer is not None
        assert transfer.seconds_per_token(profile) == pytest.approx(cost * PREFILL_SECONDS, rel=1e-4)
        assert (transfer.fixed_seconds, transfer.unshared) == (0, not shared)


@pytest.mark.usefixtures("study")
def test_what_counts_by_hand() -> None:
    from world import outcome

    from lmetric_lab.sim.traces import Trace

    trace = Trace(
        name="by hand", arrival_seconds=np.array([0.0, 20.0, 20.0]), input_tokens=np.full(3, 2048),
        output_tokens=np.array([11, 11, 11]), hash_offsets=np.array([0, 4, 8, 8]),
        hash_ids=np.array([1, 2, 3, 4, 1, 2, 3, 4], np.uint64), block_tokens=512,
    )  # fmt: skip
    run = lm.simulate(trace, instances=2, policy="round_robin", prefix_fetch="on", transfer="2, fixed=0.01")
    assert run.fetch_instance.tolist() == [-1, 0, -1]
    told = outcome(run, np.array([True, True, False]))
    assert (told.pulls, told.found, told.instances) == (0.5, 0, 2)
    assert told.pulled == 2047 / 4096
    assert told.wait == pytest.approx(0.01 + 2047 * 98304 / 2e9)
    assert told.ttft == pytest.approx(run.ttft_seconds[:2].mean())
    assert told.others == pytest.approx(run.tpot_seconds[2] * 1e3)
