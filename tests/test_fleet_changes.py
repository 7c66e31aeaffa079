"""Instances that join and leave in simulations, as Python sees them."""

from __future__ import annotations

import math

import numpy as np
import pytest

import lmetric as lm
from lmetric_lab.sim.churn import listed
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.synthetic import AnySynthetic, read_synthetic
from lmetric_lab.sim.workload import prepare

PROFILE = "qwen2-7b-h20"
CHANGES = "100 leave 0, 160 join 0"
SEEDS = (1, 2, 3, 4)


def talks(seed: int) -> AnySynthetic:
    return read_synthetic(
        f"{{synthetic: sessions, seed: {seed}, rate: 0.5, duration_seconds: 240, input_tokens: 300, "
        "output_tokens: 60, turns: 6, think_seconds: 8, prefixes: {count: 3, tokens: 2000}}"
    )


TALKS = talks(1)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Run]]:
    """One engine of three leaves and comes back: with cold and with warm caches, by seed."""
    workloads = [prepare(talks(seed).make(), PROFILE) for seed in SEEDS]
    common = {"profile": PROFILE, "instances": 3, "admission": "vllm", "cached_answers": True}
    return {
        kind: [simulate(each, changes=CHANGES, fleet_changes=kind, **common) for each in workloads]  # type: ignore[arg-type]
        for kind in ("none", "warm")
    }


def test_results_of_changes(runs: dict[str, list[Run]]) -> None:
    for kind, (run, *_) in runs.items():
        left, came = run.changes
        assert (left.change, came.change.kind) == (lm.FleetChange(100.0, "leave", 0), "join")
        gone = (run.arrival_seconds > 100) & (run.arrival_seconds < came.done_seconds)
        assert gone.any()
        assert not (run.instance[gone] == 0).any()
        assert math.isfinite(left.done_seconds)
        assert not np.isnan(run.finished_seconds).any()
        warm = kind == "warm"
        assert [each.fetches > 0 for each in run.changes] == [warm, warm]
        assert left.moves == run.moves.sum()


def test_a_warm_change_computes_less(runs: dict[str, list[Run]]) -> None:
    """With the guard at its default: a filter copies some prefixes to all engines, so a change has
    less to copy, and a single trace may show no gain."""
    computed = {kind: sum(int(run.computed_tokens.sum()) for run in each) for kind, each in runs.items()}
    assert computed["warm"] < 0.97 * computed["none"]


def test_an_option_has_the_words_of_files() -> None:
    workload = prepare(TALKS.make(), PROFILE)

    def run(option: object) -> int:
        made = simulate(
            workload, profile=PROFILE, instances=3, changes=["100 leave 0"], fleet_changes=option  # type: ignore[arg-type]
        )  # fmt: skip
        return made.changes[0].fetches

    assert run("warm") == run(lm.WarmChanges()) == run({"kind": "warm", "max_seconds": 30}) > 0
    assert run({"kind": "warm", "max_seconds": 0}) == run(None) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("600 joins 1", "'600 joins 1' is not valid; expected seconds, join or leave"),
        ("x join 1", "expected seconds"),
        ([lm.FleetChange(5.0, "leave", 9)], "expected 0 to 2"),
        ("5 leave 0, 6 leave 1, 7 leave 2", "at least one instance at any time"),
        ("5 leave 0, 6 leave 0", "one after the other"),
    ],
)
def test_impossible_changes_are_errors(changes: object, message: str) -> None:
    workload = prepare(TALKS.make(), PROFILE)
    with pytest.raises(lm.BadValueError, match=message):
        simulate(workload, profile=PROFILE, instances=3, changes=changes)  # type: ignore[arg-type]
    with pytest.raises(lm.BadValueError, match="expected join or leave"):
        lm.FleetChange(1.0, "goes", 1)  # type: ignore[arg-type]
    with pytest.raises(lm.BadValueError, match=r"link_share.*above 0"):
        simulate(workload, profile=PROFILE, fleet_changes={"kind": "warm", "link_share": 0})


def test_changes_are_sorted_by_time() -> None:
    assert [each.at_seconds for each in listed("9 join 1, 3 leave 1")] == [3.0, 9.0]
    assert listed([]) == listed("") == []
