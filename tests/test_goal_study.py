"""The planner's study against all rivals: what its figures rest on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from lmetric import _core
from lmetric.profiles import load_profile
from lmetric_lab.sim.traces import Trace, load_trace
from studies import ROOT, Study

STUDY = Study("planner")
SLICE = ROOT / "python" / "lmetric_lab" / "data" / "mooncake_conversation_slice.jsonl.gz"


@pytest.fixture(autouse=True)
def study() -> Iterator[None]:
    yield from STUDY.importable()


def outcome(value: float, **changed: float) -> Any:
    """An outcome all of whose figures are one value, but for some."""
    from goal_tables import NINE
    from goal_world import Outcome

    return Outcome(**{**dict.fromkeys(NINE, value), "apart": 0.0, "kept_up": 1.0, **changed})


def test_every_policy_is_a_rival_or_left_out() -> None:
    from goal_rivals import KNOBS, LEFT_OUT, families

    named = [row["name"] for row in _core.policy_table()]
    assert sorted([*KNOBS, *LEFT_OUT]) == sorted(named)
    rivals = [rival for found in families().values() for rival in found]
    assert len({rival.label for rival in rivals}) == len(rivals) == len(set(rivals))


def chatting(gap: float) -> Trace:
    """Turns of two conversations, the second prompt of each going on from its first."""
    blocks = [[1, 2, 3], [9, 8], [1, 2, 3, 4, 5], [9, 8, 7], [6]]
    lengths = np.array([1536, 1000, 2500, 1100, 9 * 512])
    return Trace(
        name="turns", arrival_seconds=np.arange(5) * gap, input_tokens=lengths,
        output_tokens=np.array([30, 1, 200, 2, 64]), block_tokens=512,
        hash_offsets=np.cumsum([0, *map(len, blocks)]), hash_ids=np.concatenate(blocks).astype(np.uint64),
    )  # fmt: skip


def test_alone_is_what_an_idle_engine_takes() -> None:
    from goal_bound import least

    ttft, tpot, e2e = least(trace := chatting(100.0), load_profile("independent-sim"))
    run = lm.simulate(trace, instances=1)
    assert (run.hit_tokens > 0).sum() == 2
    np.testing.assert_allclose(run.ttft_seconds, ttft, rtol=1e-9)
    np.testing.assert_allclose(run.tpot_seconds, tpot, rtol=1e-9)
    np.testing.assert_allclose(run.e2e_seconds, e2e, rtol=1e-9)


@pytest.mark.parametrize("policy", ["lmetric", "planner"])
def test_nobody_is_faster_than_alone(policy: str) -> None:
    from goal_bound import least

    trace = load_trace(SLICE).faster(2)
    ttft, tpot, e2e = least(trace, load_profile("independent-sim"))
    run = lm.simulate(trace, instances=4, policy=policy, output_known=False)
    assert (run.ttft_seconds >= ttft - 1e-9).all()
    assert (run.e2e_seconds >= e2e - 1e-9).all()
    many = run.output_tokens > 1
    assert (run.tpot_seconds[many] >= tpot[many] - 1e-9).all()


def test_others_are_counted_by_hand() -> None:
    from goal_best import counts, tuned
    from goal_world import Rival

    found = {
        Rival("twice all"): outcome(2.0),
        Rival("a hundredth better once"): outcome(2.0, e2e_p50=0.99),
        Rival("a tenth better once"): outcome(1.2, tpot_p99=0.9),
        Rival("falls behind"): outcome(0.1, kept_up=0.9),
    }
    told = counts(outcome(1.0), found)
    assert told == {"others": 4, "kept_up": 3, "worse_in_all": 1, "within_slack": 1}
    picked = tuned(found, outcome(1.0))
    assert picked is not None
    assert picked[0].label == "a tenth better once"
    assert picked[1] == pytest.approx((8 * np.log(1.2) + np.log(0.9)) / 9)
    assert tuned({Rival("falls behind"): outcome(0.1, kept_up=0.9)}, outcome(1.0)) is None


def test_the_best_of_all_is_chosen_figure_by_figure() -> None:
    from goal_best import by_stage
    from goal_best_tables import rendered
    from goal_bound import TWICE

    from rerun import columns

    made = {
        "quick": outcome(3.0, ttft=1.0), "even": outcome(2.0), TWICE.label: outcome(1.0),
        "planner": outcome(2.0, ttft=0.89, tpot_p99=1.5), "alone": outcome(0.5),
    }  # fmt: skip
    load = {
        "stage": "50%",
        "counts": {"others": 2, "kept_up": 2, "worse_in_all": 0, "within_slack": 1},
        "families": {"even": "even"}, "leading": ["quick", "even"],
        "rows": [{"policy": label, **columns([each, each])} for label, each in made.items()],
    }  # fmt: skip
    text = rendered({"most": [{"recording": "an hour", "a": "2.00", "b": "1.23"}], **by_stage([load])})
    assert "| an hour | 2.00 | 1.23 |" in text
    assert (
        "| TTFT mean, s | quick | 1.000 ±0.000 | 0.890 ±0.000 | -11.0% | -10%: yes | +0.0% | -50.0% |" in text
    )
    assert "| TPOT p99, ms | even | 2 ±0 | 2 ±0 | -25.0% | -30%: no | -50.0% | -75.0% |" in text
    assert "| E2E mean, s | even | 2.00 ±0.00 | 2.00 ±0.00 | +0.0% | +2%: yes |" in text
    assert "| even | -55.5% | +0.0% | +0.0% | +0.0% | +0.0% | -25.0% |" in text
    assert "1 more; 1 are better in some." in text


def test_the_planner_without_its_parts_is_lmetric() -> None:
    from goal_parts import PARTS, ablations, without
    from goal_world import LMETRIC

    labels = [rival.label for rival in ablations()]
    assert len(labels) == len(set(labels)) >= 2 + 2 * len(PARTS) - sum(bool(part.of) for part in PARTS)
    trace = load_trace(SLICE)
    bare, base, whole = (
        lm.simulate(
            trace, instances=4, policy=rival.policy, knobs=dict(rival.knobs), guard=False, output_known=False,
            **rival.settings,
        )
        for rival in (without("none", PARTS), LMETRIC, without("all", []))
    )  # fmt: skip
    assert (bare.instance == base.instance).all()
    np.testing.assert_array_equal(bare.finished_seconds, base.finished_seconds)
    assert (whole.finished_seconds != base.finished_seconds).any()


def test_settings_of_cuts_go_with_cuts() -> None:
    from goal_parts import PARTS, Part, without

    late = Part("early", split_settings={"early_first_token": 0}, of="apart")
    assert without("", [late]).settings == {"split": {"kind": "apart", "early_first_token": 0}}
    (apart,) = (part for part in PARTS if part.label == "apart")
    assert without("", [late, apart]).settings == {"split": "none"}


def test_worlds_differ_in_what_they_say() -> None:
    from goal_world import AZURE, Stage, redrawn

    usual = Stage(load=2.0)
    assert usual.believed_profile is None
    half = replace(usual, believed=0.5)
    profile, believed = load_profile("independent-sim"), half.believed_profile
    assert believed is not None
    assert believed.fixed_seconds == profile.fixed_seconds / 2
    assert believed.max_batch_tokens == profile.max_batch_tokens
    assert usual.label == "Mooncake conversation, 2 times as fast"
    assert half.label.endswith("steps believed to last 0.5 times as long")
    assert replace(usual, recording=AZURE, shared=False).label == (
        "Azure conversation, 2 times as fast, nothing shared"
    )
    trace = load_trace(SLICE)
    moved = redrawn(trace, 3.0, seed=1)
    assert (np.floor(moved.arrival_seconds / 3) == np.floor(trace.arrival_seconds / 3)).all()
    assert (np.diff(moved.arrival_seconds) >= 0).all()
    assert (moved.arrival_seconds != trace.arrival_seconds).any()
