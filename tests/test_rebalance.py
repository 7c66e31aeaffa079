"""Running requests that move between simulated engines, from Python and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from cli_world import call
from lmetric import BadValueError, LmetricError
from lmetric.lengths import ErrorTable, MlpPredictor, save_predictor
from lmetric.options import Star
from lmetric.profiles import Profile
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.traces import Trace
from train_lengths.from_trace import find_turns

ROOT = Path(__file__).parent.parent
SLICE = ROOT / "python" / "lmetric_lab" / "data" / "mooncake_conversation_slice.jsonl.gz"
LONG, SHORT = 3000, 20
# A step takes 10 ms and 1 ms for each 1,000 tokens; each engine holds 16,000.
TOKENS_COST = Profile(
    fixed_seconds=0.01,
    decode_seconds_per_sequence=0.0,
    decode_seconds_per_context_token=1e-6,
    prefill_seconds_per_token=1e-5,
    prefill_seconds_per_attention_pair=0.0,
    max_batch_tokens=4096,
    max_sequences=64,
    block_tokens=16,
    cache_blocks=1000,
    kv_bytes_per_token=100_000,
)


def uneven(requests: int = 16) -> Trace:
    """Long and short answers by turns: placed in turn, one of two engines gets all long answers."""
    return Trace(
        name="uneven", arrival_seconds=np.arange(requests) * 0.5, input_tokens=np.full(requests, 16),
        output_tokens=np.where(np.arange(requests) % 2 == 0, LONG, SHORT),
        hash_offsets=np.zeros(requests + 1, np.int64), hash_ids=np.zeros(0, np.uint64), block_tokens=16,
    )  # fmt: skip


def play(rule: str, settings: dict[str, Any] | None = None, **more: Any) -> Run:
    """The uneven trace over a prefill and two decode engines."""
    told: dict[str, Any] = {
        "roles": "1P2D", "decode_policy": "round_robin", "policy": "round_robin", "profile": TOKENS_COST,
        "admission": "vllm", "transfer": "10",
    }  # fmt: skip
    return lm.simulate(
        uneven(),
        rebalance={"kind": rule, **(settings or {})},
        **{**told, **more},
    )


@pytest.fixture(scope="module")
def unmoved() -> Run:
    return play("none")


def test_the_variance_of_steps_by_hand() -> None:
    alone = uneven(1)
    run = lm.simulate(alone, roles="1P2D", decode_policy="round_robin", profile=TOKENS_COST, transfer=None)
    # One engine reads the answer so far, the other nothing: each is half of that from their mean.
    # 3,000 tokens come in 34.5 s (10 ms a step and 1 us a token), compared each second.
    step = 0.01 + (16 + np.arange(LONG)) * 1e-6
    at = np.searchsorted(np.cumsum(step), np.arange(1, 35))
    assert run.step_variance == pytest.approx(((at * 1e-6 / 2) ** 2).mean(), rel=0.1)


EARLY: dict[str, float | str] = {"source_below_steps": 2500, "target_above_steps": 2500}


@pytest.mark.parametrize(
    ("rule", "settings"),
    [("star", None), ("star_current", None), ("star_oracle", None), ("llumnix", EARLY)],
)
def test_each_rule_makes_an_imbalance_smaller(
    rule: str, settings: dict[str, float | str] | None, unmoved: Run
) -> None:
    run = play(rule, settings)
    assert (run.rebalance, unmoved.rebalance) == (rule, "none")
    assert run.moves.sum() > 0 == unmoved.moves.sum()
    assert run.moves[1::2].sum() == 0  # a short answer is gone before anything is uneven
    assert run.step_variance < 0.5 * unmoved.step_variance
    # All eight long answers on one engine need 24,000 tokens of its 16,000.
    assert unmoved.oom > run.oom
    assert run.e2e_seconds.max() < unmoved.e2e_seconds.max()
    # Nothing is lost or made twice.
    assert np.isfinite(run.finished_seconds).all()
    assert run.gap_counts.sum() == (run.output_tokens - 1).sum() == unmoved.gap_counts.sum()


def test_the_same_settings_move_the_same_requests() -> None:
    one, other = (play("star", {"forecast": "llm_native", "forecast_seed": 7}) for _ in range(2))
    assert (one.moves == other.moves).all()
    assert (one.finished_seconds == other.finished_seconds).all()
    errs_otherwise = play("star", {"forecast": "llm_native", "forecast_seed": 8})
    assert (errs_otherwise.finished_seconds != one.finished_seconds).any()


def test_settings_reach_the_rule(unmoved: Run) -> None:
    plain = play("star")
    never = play("star", {"threshold": 1.0})  # nothing is below 0 times the mean
    assert never.moves.sum() == 0
    assert never.step_variance == unmoved.step_variance
    assert play("star_current", {"period_seconds": 1000.0}).moves.sum() == 0
    # No answer outlasts its move.
    assert play("star_oracle", {"migration_seconds": 1e6}).moves.sum() == 0
    assert play("llumnix", {"source_below_steps": 0}).moves.sum() == 0
    assert play("star", {"threshold": 0.6}).moves.sum() < plain.moves.sum()
    assert play("star", {"max_moves": 4, "period_seconds": 5}).moves.sum() != (
        play("star", {"period_seconds": 5}).moves.sum()
    )
    for forecast in ("given", "bins_2", "bins_4", "bins_6", "llm_native", "pia", "mu_serve", "tetri_infer"):
        assert play("star", {"forecast": forecast}).moves.sum() > 0


def test_a_move_costs_what_its_link_says() -> None:
    slow = play("star_current", transfer="0.1")
    fast = play("star_current", transfer="100")
    moved = slow.moves > 0
    assert moved.any()
    # A moved request waits for its own KV: 100 kB a token at 0.1 GB/s, a second for each 1,000.
    assert slow.worst_gap_seconds[moved].max() > 0.5
    assert fast.worst_gap_seconds.max() < 0.1
    assert slow.slow_tokens[moved].sum() > 0 == slow.slow_tokens[~moved].sum() == fast.slow_tokens.sum()
    assert play("star_current", transfer="0.1", token_slo_seconds=1e4).slow_tokens.sum() == 0


def test_mistakes_are_answered_with_what_would_be_right() -> None:
    with pytest.raises(LmetricError, match=r"star_curent.*star_current"):
        play("star_curent")
    for rule, settings, said in (
        ("star", {"treshold": 0.1}, "rebalance.treshold.*did you mean 'threshold'"),
        (
            "star",
            {"source_below_steps": 5},
            "source_below_steps.*known here.*horizon_steps|source_below_steps.*unknown setting",
        ),
        ("llumnix", {"threshold": 0.1}, "threshold.*unknown setting"),
        ("none", {"threshold": 0.1}, "threshold.*'none' takes no settings"),
        ("star", {"threshold": 2}, "threshold.*2"),
        ("star", {"threshold": -0.1}, "threshold"),
        ("star", {"period_seconds": 0}, "period_seconds.*0.001"),
        ("star", {"horizon_steps": 0}, "horizon_steps"),
        ("star", {"half_life_steps": 0.5}, "half_life_steps"),
        ("star", {"max_moves": 0}, "max_moves.*at least 1"),
        ("llumnix", {"source_below_steps": 9, "target_above_steps": 8}, "target_above_steps"),
        ("star", {"max_moves": 1.5}, "rebalance.max_moves: 1.5 .*an integer"),
        ("llumnix", {"max_moves": 0.5}, "max_moves: 0.5 .*an integer"),
        ("star", {"points": 2.5}, "points: 2.5 .*an integer"),
        ("star", {"repredict_tokens": -1}, "repredict_tokens: -1 .*whole number"),
        ("star", {"horizon_steps": 1e10}, "horizon_steps.*whole number"),
        ("star", {"forecast_seed": 0.5}, "forecast_seed: 0.5 .*an integer"),
        ("star", {"forecast": "bins_3"}, "bins_3.*bins_2"),
        ("star", {"forecast": "guess"}, "guess.*curve"),
    ):
        with pytest.raises(BadValueError, match=said):
            play(rule, settings)
    with pytest.raises((TypeError, LmetricError)):
        play("star", {"threshold": "much"})


def test_a_trained_predictor_decides_from_its_file_as_from_its_object(tmp_path: Path) -> None:
    knows = MlpPredictor(
        feature_names=("log_generated_tokens",),
        feature_mean=np.zeros(1, np.float32),
        feature_scale=np.ones(1, np.float32),
        target_scale=1.0,
        weights=(np.full((1, 1), 100.0, np.float32),),
        biases=(),
        errors=ErrorTable(np.empty(0, np.float32), -1, np.empty(0, np.float32), np.zeros((1, 1), np.float32)),
        source="by hand",
    )
    save_predictor(knows, tmp_path / "predictor.npz")
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def forecast(log_generated_tokens):\n    return 100 * log_generated_tokens.astype(np.float32)\n"
    )
    by_object = play("star", {"forecast": knows})
    assert by_object.moves.sum() > 0
    for other in (str(tmp_path / "predictor.npz"), f"{tmp_path}/mine.py:forecast"):
        run = play("star", {"forecast": other})
        assert (run.finished_seconds == by_object.finished_seconds).all()
    assert (play("star").finished_seconds != by_object.finished_seconds).any()


def test_the_router_finds_the_turns_that_predictors_are_trained_on() -> None:
    trace = lm.load_trace(SLICE).first(400)
    seen: set[tuple[float, ...]] = set()

    def watch(prompt_tokens: Any, new_prompt_tokens: Any, turns: Any, seconds_since_previous: Any) -> Any:
        rows = np.column_stack([prompt_tokens, new_prompt_tokens, turns, seconds_since_previous.round(3)])
        seen.update(map(tuple, rows.tolist()))
        return np.zeros(len(turns))

    lm.simulate(
        trace, instances=64, policy="round_robin", rebalance=Star(forecast=watch, period_seconds=0.05)
    )
    found = find_turns(trace)
    before = np.maximum(found.previous, 0)
    since = np.where(found.previous >= 0, trace.arrival_seconds - trace.arrival_seconds[before], 0.0)
    new = trace.input_tokens - found.shared_tokens
    rows = np.column_stack([trace.input_tokens, new, found.turns, since.round(3)])
    expected = set(map(tuple, rows.tolist()))
    assert found.turns.max() > 1
    assert len(seen) > 0.95 * len(expected)
    # The router counts continuations of a prompt from its first request, without partial blocks.
    assert len(seen - expected) <= 0.04 * len(seen)


def test_the_servers_default_move_is_computed_ahead(unmoved: Run) -> None:
    sent, computed = play("star"), play("star", migration_by="recompute")
    assert computed.moves.sum() > 0
    assert computed.step_variance < 0.6 * unmoved.step_variance
    # Nothing is lost or made twice.
    assert np.isfinite(computed.finished_seconds).all()
    assert computed.gap_counts.sum() == (computed.output_tokens - 1).sum()
    # The pause is the last tokens' prefill, and not the KV transfer of all of them.
    slow = play("star", transfer="0.05")
    moved = slow.moves > 0
    assert slow.worst_gap_seconds[moved].max() > 4 * computed.worst_gap_seconds[computed.moves > 0].max()
    assert (sent.finished_seconds != computed.finished_seconds).any()


def test_a_move_that_would_pause_too_long_is_given_up() -> None:
    never = play("star", migration_by="recompute", migration_max_gap_seconds=0.0)
    # The moves that remain leave nothing to compute: the answer has just filled its last block.
    assert never.moves.sum() < play("star", migration_by="recompute").moves.sum()
    assert np.isfinite(never.finished_seconds).all()
    # After some seconds, several requests must move at once.
    several = {"threshold": 0.0, "max_moves": 8, "period_seconds": 4.0}
    one = play("star", several, migration_by="recompute", migration_max_concurrent=1)
    many = play("star", several, migration_by="recompute", migration_max_concurrent=8)
    assert one.moves.sum() > 0
    assert (one.finished_seconds != many.finished_seconds).any()
    for wrong, said in (
        ({"migration_by": "segments"}, "migration_by.*fetch or recompute"),
        ({"migration_by": "recompute", "migration_max_concurrent": 0}, "migration_max_concurrent: 0"),
        (
            {"migration_by": "recompute", "migration_max_gap_seconds": -1.0},
            "migration_max_gap_seconds: -1",
        ),
    ):
        with pytest.raises(LmetricError, match=said):
            play("star", **wrong)


def test_the_command_compares_rules() -> None:
    done = call(
        "simulate", "--trace", str(SLICE), "--requests", "120", "--speed", "9", "--roles", "2P2D", "--policy",
        "least_requests", "--decode-policy", "round_robin", "--rebalance", "none,star", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    still, moving = answer["runs"]
    assert (still["rebalance"], moving["rebalance"]) == ("none", "star")
    assert still["moves"] == 0 < moving["moves"]
    assert {"oom", "moves", "split", "splits", "tbt_p99_seconds", "token_goodput"} <= moving.keys()
    assert "rebalance" not in answer["setting"]["settings"]
