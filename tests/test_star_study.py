"""The rerun of the STAR paper's experiments: its driver, its page, and what its figures rest on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from studies import Study, result_files

ROOT = Path(__file__).parent.parent
STUDY = Study("star")


@pytest.fixture
def study() -> Iterator[None]:
    yield from STUDY.importable()


def test_a_quick_figure(tmp_path: Path) -> None:
    told = STUDY.made(tmp_path, "--quick", "--figure", "10")["10"]
    assert (told["quick"], told["seeds"], told["base"]) == (True, 1, "no moves")
    by_label = {row["policy"]: row for row in told["rows"]}
    still = by_label.pop("no moves")
    # As on the page: moves make steps ten times as even and memory last; known lengths add little.
    assert still["oom"][0] > 10
    for moving in by_label.values():
        assert moving["variance"][0] < 0.2 * still["variance"][0]
        assert moving["p99"][0] < 0.95 * still["p99"][0]
        assert moving["oom"][0] < 0.2 * still["oom"][0]
    tails = [row["p99"][0] for row in by_label.values()]
    assert max(tails) < 1.1 * min(tails)


@pytest.mark.nightly
def test_a_shipped_row_comes_out_again(tmp_path: Path) -> None:
    made = STUDY.made(tmp_path, "--figure", "3", "--seeds", "1")
    again = made["3"]["rows"]
    shipped = result_files.read_figure(STUDY.results, "3")["rows"]
    for row, before in zip(again, shipped, strict=True):
        for name in ("throughput", "goodput", "p50", "p99", "variance", "oom", "moves"):
            assert row[name][0] == pytest.approx(before[name][0], rel=1e-6), (row["policy"], name)


@pytest.mark.usefixtures("study")
def test_lengths_have_the_figures_of_table_2() -> None:
    from world import LENGTHS

    at = (np.arange(1_000_000) + 0.5) / 1_000_000

    def drawn(lengths: str, column: str) -> np.ndarray:
        known = LENGTHS[lengths][column]
        return np.interp(at, list(known), list(known.values()))

    for lengths, column, mean, deviation, quantiles in (
        ("sharegpt", "input_tokens", 305, 1053, (36, 920, 1609)),
        ("sharegpt", "output_tokens", 7542, 12008, (1536, 32670, 32679)),
        ("alpaca", "input_tokens", 11, 4, (10, 15, 18)),
        ("alpaca", "output_tokens", 8596, 13354, (987, 32690, 32691)),
    ):
        found = drawn(lengths, column)
        assert found.mean() == pytest.approx(mean, rel=0.03)
        if mean > 11:
            assert found.std() == pytest.approx(deviation, rel=0.08)
        assert np.quantile(found, (0.5, 0.9, 0.95)) == pytest.approx(quantiles, rel=1e-3)
    answers = drawn("sharegpt", "output_tokens")
    assert (answers < 1024).mean() == pytest.approx(0.292, abs=1e-3)
    assert (answers > 30 * 1024).mean() == pytest.approx(0.173, abs=1e-3)


@pytest.mark.usefixtures("study")
def test_profiles_have_the_figures_of_the_paper() -> None:
    from world import LARGE, SMALL, profile_of

    for cluster, layers, heads, gigabytes in ((SMALL, 28, 4, 11.4), (LARGE, 40, 8, 40.5)):
        profile = profile_of(cluster)
        assert profile.kv_bytes_per_token == layers * heads * 128 * 2 * 2
        tokens = profile.cache_blocks * profile.block_tokens
        assert tokens * profile.kv_bytes_per_token == pytest.approx(gigabytes * 1e9, rel=0.005)
    small = profile_of(SMALL)
    half = small.cache_blocks * small.block_tokens / 2
    assert small.fixed_seconds + half * small.decode_seconds_per_context_token == pytest.approx(
        0.01823, rel=1e-3
    )


@pytest.mark.usefixtures("study")
def test_only_those_who_may_know_lengths_are_told() -> None:
    from world import BINS, CURRENT, CURVE, LLUMNIX, NATIVE, NONE, ORACLE

    assert [rival.told for rival in (NONE, CURRENT, CURVE, LLUMNIX)] == [False] * 4
    assert all(rival.told for rival in (NATIVE, ORACLE, *BINS))


@pytest.mark.usefixtures("study")
def test_what_counts_by_hand() -> None:
    from world import SMALL, Stage, outcome

    import lmetric as lm
    from lmetric_lab.sim.traces import Trace

    trace = Trace(
        name="by hand", arrival_seconds=np.array([0.0, 20.0, 40.0]), input_tokens=np.full(3, 16),
        output_tokens=np.array([101, 101, 1001]),
        hash_offsets=np.zeros(4, np.int64), hash_ids=np.zeros(0, np.uint64), block_tokens=16,
    )  # fmt: skip
    found = lm.simulate(trace, roles="1P1D", profile=SMALL.profile, decode_policy="least_tokens")
    tpot = found.tpot_seconds * 1e3
    told = outcome(found, Stage("sharegpt", SMALL, 1, seconds=50, warm_up=10))
    # The first ends before 10 s, the last after 50 s (1,000 steps of 11.2 ms from 40 s on).
    assert (told.ended, told.throughput, told.goodput) == (1, 1 / 40, 1 / 40)
    assert told.p50 == told.p99 == pytest.approx(tpot[1])
    assert tpot[1] == pytest.approx(11.15, abs=0.05)
    impatient = Stage("sharegpt", SMALL.__class__("x", "1P1D", SMALL.profile, 0.005, 1), 1, 50, 10)
    assert (outcome(found, impatient).throughput, outcome(found, impatient).goodput) == (1 / 40, 0)
