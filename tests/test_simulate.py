"""The simulator from Python: columns, errors, threads. Its laws are in rust/sim/tests."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from lmetric._core import local_orders
from lmetric.profiles import Profile
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.summary import Slo, figures
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import prepare

# Round constants, so that times can be worked out by hand.
ROUND = Profile(
    fixed_seconds=1.0,
    decode_seconds_per_sequence=0.1,
    decode_seconds_per_context_token=0.0,
    prefill_seconds_per_token=0.01,
    prefill_seconds_per_attention_pair=0.0,
    max_batch_tokens=64,
    max_sequences=8,
    block_tokens=16,
    cache_blocks=32,
)


def trace(requests: list[tuple[float, int, int, list[int]]]) -> Trace:
    """From (arrival, input tokens, output tokens, ids of blocks of 16 tokens)."""
    offsets = np.cumsum([0, *(len(ids) for *_, ids in requests)])
    return Trace(
        name="by hand",
        arrival_seconds=np.array([r[0] for r in requests], np.float64),
        input_tokens=np.array([r[1] for r in requests], np.int64),
        output_tokens=np.array([r[2] for r in requests], np.int64),
        hash_offsets=offsets.astype(np.int64),
        hash_ids=np.array([i for *_, ids in requests for i in ids], np.uint64),
        block_tokens=16,
    )


def some(requests: int, seed: int = 1) -> Trace:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.7, requests))
    lengths = rng.integers(1, 200, requests)
    families = [[int(rng.integers(5)) * 100 + i for i in range(-(-int(n) // 16))] for n in lengths]
    return trace(
        [
            (float(a), int(n), int(rng.integers(1, 30)), f)
            for a, n, f in zip(arrivals, lengths, families, strict=True)
        ]
    )


def test_two_requests_by_hand() -> None:
    # The second comes while the first decodes, finds its one full block, and computes 10 tokens.
    run = simulate(
        trace([(0.0, 20, 3, [1, 2]), (1.5, 26, 1, [1, 3])]), instances=1, profile=ROUND, policy="round_robin"
    )
    # Prefill of 20 tokens: 1 + 0.2. Decode step: 1 + 0.1, to 2.3; then both: 1 + 0.1 + 0.1, to 3.5.
    assert run.scheduled_seconds == pytest.approx([0.0, 2.3])
    assert run.first_token_seconds == pytest.approx([1.2, 3.5])
    assert run.finished_seconds == pytest.approx([3.5, 3.5])
    assert run.hit_tokens.tolist() == [0, 16]
    assert run.hit_blocks.tolist() == [0, 1]
    assert run.prompt_blocks.tolist() == [2, 2]
    assert run.ttft_seconds == pytest.approx([1.2, 2.0])
    assert run.tpot_seconds[0] == pytest.approx(1.15)
    assert np.isnan(run.tpot_seconds[1])
    assert run.e2e_seconds == pytest.approx([3.5, 2.0])
    # 1.2 s of one prefilling, 1.1 s of one decoding, 1.2 s of both.
    assert run.timeline.running == pytest.approx(np.array([[(1.2 + 1.1 + 1.2 * 2) / 10]]))
    assert run.timeline.queued == pytest.approx(np.array([[0.8 / 10]]))
    assert run.timeline.prefill_tokens == pytest.approx(np.array([[30]]))


def test_a_turn_waits_for_the_answer_before() -> None:
    turns = trace([(0.0, 20, 3, [1, 2]), (1.0, 20, 1, [5, 6])])
    turns = replace(turns, previous=np.array([-1, 0]), think_seconds=np.array([0.0, 2.0]))
    run = simulate(turns, instances=2, profile=ROUND)
    assert run.finished_seconds[0] == pytest.approx(1.2 + 2 * 1.1)
    assert run.arrival_seconds[1] == pytest.approx(3.4 + 2.0)
    # At twice the speed, users also think twice as fast, sped up before or after `prepare`.
    before = simulate(turns.faster(2), instances=2, profile=ROUND)
    after = simulate(prepare(turns, ROUND).faster(2), instances=2, profile=ROUND)
    assert before.arrival_seconds[1] == after.arrival_seconds[1] == pytest.approx(3.4 + 1.0)
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises((ValueError, lm.BadValueError), match="speed"):
            prepare(turns, ROUND).faster(speed)


def test_same_seed_same_bytes_in_any_thread() -> None:
    workload = prepare(some(400), ROUND)

    def play(seed: int) -> Run:
        return simulate(workload, instances=5, profile=ROUND, policy="lmetric", seed=seed)

    alone = [play(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(play, range(4)))
    names = [n for n in Run.__dataclass_fields__ if n not in ("wall_seconds", "timeline")]
    for a, b in zip(alone, together, strict=True):
        for name in names:
            assert np.asarray(getattr(a, name)).tobytes() == np.asarray(getattr(b, name)).tobytes(), name
        assert a.timeline.running.tobytes() == b.timeline.running.tobytes()
    assert any((a.instance != alone[0].instance).any() for a in alone[1:])


@pytest.mark.parametrize(
    "settings", [{}, {"signals": "step_end"}, {"signals": "delayed"}, {"admission": "vllm"}]
)
def test_every_kind_of_policy_plays(settings: dict[str, Any]) -> None:
    workload = prepare(some(120), ROUND)
    emptiest = lm.policy_function(lambda columns: columns["bs"], reads=["bs"], name="emptiest")
    for policy in (
        "vllm",
        "p_token * (bs + 1)",
        lm.P_TOKEN * (lm.BS + 1),
        lm.Policy(score="bs + tokens"),
        emptiest,
    ):
        run = simulate(workload, instances=3, profile=ROUND, policy=policy, **settings)
        assert (run.finished_seconds >= run.first_token_seconds).all()
        assert (run.first_token_seconds > run.scheduled_seconds).all()
        assert (run.scheduled_seconds >= run.arrival_seconds).all()
        assert set(run.instance.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("admission", ["reserve", "vllm"])
@pytest.mark.parametrize("pools", [{"instances": 2}, {"roles": "1P2D", "transfer": None}])
def test_every_local_order_serves_all(admission: Any, pools: dict[str, Any]) -> None:
    workload = prepare(some(300).faster(3), ROUND)
    ends = {}
    for order in local_orders():
        for signals in ("exact", "step_end", "delayed"):
            told = {**pools, "local_order": order, "priority": "uniboost" if order == "priority" else "none"}
            run = simulate(workload, profile=ROUND, admission=admission, signals=signals, **told)
            assert run.local_order == order
            assert (run.finished_seconds >= run.first_token_seconds).all()
            assert (run.first_token_seconds > run.scheduled_seconds).all()
        ends[order] = run.finished_seconds
    # In a prefill pool, all requests have equal lengths: only their prompts make orders differ.
    assert len({column.tobytes() for column in ends.values()}) >= 4


def test_local_orders_on_one_engine_by_hand() -> None:
    # A place for one. A request of 20 steps is at its third when one of 3 comes, and one of 2.
    one = ROUND.model_copy(update={"max_sequences": 1, "decode_seconds_per_sequence": 0.0})
    asks = trace([(0.0, 50, 20, []), (3.0, 60, 3, []), (3.1, 64, 2, [])])

    def ends(order: str, put_back: int = 0) -> Any:
        run = simulate(asks, instances=1, profile=one, local_order=order)
        assert run.preemptions.tolist() == [put_back, 0, 0]
        kept = figures(run, Slo())
        assert (kept.local_order, kept.preemptions) == (order, put_back)
        return run.finished_seconds

    assert ends("fcfs") == pytest.approx([20.5, 24.1, 26.74])
    assert ends("sjf") == pytest.approx([20.5, 26.74, 23.14])
    # The first has 50 + 3 tokens when it goes back. It computes them again in 1 + 53 x 0.01 s, and
    # then needs 16 more.
    assert ends("srpt", put_back=1) == pytest.approx(
        [3.5 + 2.64 + 3.6 + 1.53 + 16, 3.5 + 2.64 + 3.6, 3.5 + 2.64]
    )


def test_the_routers_numbers_order_an_engines_queue() -> None:
    # One sequence slot, which is taken; then a long and a short prompt come. Tenants are sessions.
    one = ROUND.model_copy(update={"max_sequences": 1})
    asks = trace([(0.0, 50, 20, []), (1.0, 2000, 3, []), (2.0, 64, 2, [])])

    def order(**told: Any) -> list[int]:
        run = simulate(asks, instances=1, profile=one, **told)
        return np.argsort(run.scheduled_seconds).tolist()

    assert order(local_order="fcfs", priority="uniboost") == [0, 1, 2], "the engine ignores it"
    assert order(local_order="priority", priority="uniboost") == [0, 2, 1]
    steep = {"gamma": 100.0, "adaptive": 0.0}
    assert order(local_order="priority", priority={"kind": "uniboost", **steep}) == [0, 1, 2]
    assert order(local_order="priority", priority="vtc") == [0, 1, 2], "one tenant's come as they came"
    asks = replace(asks, sessions=np.array([1, 1, 2]))
    assert order(local_order="priority", priority="vtc") == [0, 2, 1]
    with pytest.raises(lm.BadValueError, match="gamma"):
        order(priority="uniboost(gamma=-1)")


def test_the_token_slo_of_the_local_order_by_hand() -> None:
    # The first decodes alone in steps of 1.1 s. A prompt of 60 comes at 1.7 s and enters at 2.7 s.
    asks = trace([(0.0, 60, 20, []), (1.7, 60, 2, [])])

    def second(slo: float | None) -> tuple[float, float, int]:
        told: dict[str, Any] = {} if slo is None else {"local_order": "slo", "order_slo_seconds": slo}
        run = simulate(asks, instances=1, profile=ROUND, token_slo_seconds=1.4, **told)
        return run.first_token_seconds[1], run.worst_gap_seconds[0], run.slow_tokens[0]

    whole = (2.7 + 1.7, 1.7, 1)  # 60 tokens beside the decode, in one step
    assert second(None) == pytest.approx(whole)
    assert second(1.7) == pytest.approx(whole)
    # 20 tokens a step, three times; none is later than 1.4 s.
    assert second(1.3) == pytest.approx((2.7 + 3 * 1.3, 1.3, 0))
    # Where no prompt token fits, a block of 16 goes all the same: 16, 16, 16 and 12.
    assert second(0.5) == pytest.approx((2.7 + 3 * 1.26 + 1.22, 1.26, 0))
    for wrong in (0.0, -1.0, float("nan"), 1e7):
        with pytest.raises(lm.BadValueError, match=r"order_slo_seconds: |local order slo: seconds a token"):
            second(wrong)


def test_requests_that_go_back_are_swapped_by_hand() -> None:
    # Order srpt, the first in host memory: 52 tokens of 2 MB at 4 GB/s are 26 ms each way.
    one = ROUND.model_copy(
        update={
            "max_sequences": 1, "decode_seconds_per_sequence": 0.0, "kv_bytes_per_token": 2_000_000,
            "cache_blocks": 5,
        }
    )  # fmt: skip
    asks = trace([(0.0, 50, 20, []), (3.0, 60, 3, []), (3.1, 64, 2, [])])

    def first(preempt: Any, admission: Any = "vllm") -> float:
        run = simulate(
            asks, instances=1, profile=one, admission=admission, local_order="srpt", preempt=preempt
        )
        assert run.preemptions.tolist() == [1, 0, 0]
        return float(run.finished_seconds[0])

    others = 3.5 + 2.64 + 3.6
    assert first("swap:4") == pytest.approx(others + 2 * 0.026 + 17)
    assert first({"gigabytes_per_second": 2}) == pytest.approx(others + 2 * 0.052 + 17)
    # 51 tokens are not enough, and recompute is what it was.
    assert first("swap:4, host=0.102") == first("recompute") == pytest.approx(others + 1.53 + 16)
    with pytest.raises(
        lm.BadValueError, match="swap under admission reserve is not valid; expected recompute"
    ):
        first("swap", admission="reserve")
    with pytest.raises(lm.BadValueError, match="no kv_bytes_per_token"):
        simulate(asks, profile=ROUND, admission="vllm", preempt="swap")


def test_local_orders_have_settings_of_their_own() -> None:
    # One sequence slot: the second is less work, 3.1 s later. A large gamma uses arrival alone.
    one = ROUND.model_copy(update={"max_sequences": 1})
    asks = trace([(0.0, 10, 9, []), (1.0, 60, 9, []), (4.1, 10, 2, [])])

    def first(order: str) -> int:
        run = simulate(asks, instances=1, profile=one, local_order=order)
        assert run.local_order == order
        return int(run.finished_seconds[1:].argmin()) + 1

    assert first("distboost") == 2
    assert first("distboost(gamma=1000)") == first("fcfs") == 1
    # With bins of 256 tokens both are the same work.
    assert first("uniboost_memguard") == 1
    assert first("uniboost_memguard( bin_tokens=8,hysteresis_seconds=0 )") == 2
    for wrong, what in (
        ("fcfs(gamma=1)", "expected none: it has no settings"),
        ("uniboost(gama=1)", "expected gamma, bin_tokens, hysteresis_seconds, window"),
        ("uniboost(gamma=0)", "priority: gamma: 0 is not valid"),
        ("uniboost(gamma)", r"expected uniboost\(setting=number"),
    ):
        with pytest.raises(lm.BadValueError, match=what):
            first(wrong)


def test_predictions_follow_the_seed() -> None:
    workload = prepare(some(200).faster(3), ROUND)

    def ends(order: str, seed: int) -> bytes:
        run = simulate(
            workload, instances=2, profile=ROUND, policy="round_robin", local_order=order, seed=seed
        )
        return run.finished_seconds.tobytes()

    assert ends("srpt_noisy", 1) == ends("srpt_noisy", 1)
    assert ends("srpt_noisy", 1) != ends("srpt_noisy", 2)
    assert ends("srpt", 1) == ends("srpt", 2)


def test_routers_that_tell_each_other_place_requests_as_one_does() -> None:
    arrived = some(400).faster(0.2)
    fleet = {"instances": 4, "profile": ROUND, "policy": "least_requests"}

    def mean(**settings: Any) -> float:
        run = simulate(arrived, **fleet | settings)
        assert np.isfinite(run.finished_seconds).all()
        return float(run.ttft_seconds.mean())

    one, told, alone = mean(), mean(routers=4, sharing_seconds=0.05), mean(routers=4)
    assert told == mean(routers=4, sharing_seconds=0.05)
    assert mean(routers=1, sharing_seconds=0.05) == one
    assert abs(told / one - 1) < 0.02
    assert alone > 1.05 * one
    # Late signals tell of others' requests once a second, whose prompts are not known then.
    late = mean(routers=4, signals="delayed")
    assert late < alone
    # A report of each step, with the prompt tokens.
    often = {"routers": 4, "policy": "lmetric", "report_period_seconds": 0.02}
    assert mean(**often, signals="published") < mean(**often, signals="delayed")


def test_routers_out_of_range_are_named() -> None:
    for settings, message in (
        ({"routers": 0}, r"routers: .*1 to 1024"),
        ({"routers": 2, "sharing_seconds": 0.0}, r"sharing_seconds: .*0\.001 to 1e6"),
        ({"routers": 100, "sharing_seconds": 0.1}, "at most 64"),
    ):
        with pytest.raises(lm.BadValueError, match=message):
            simulate(some(3), instances=2, profile=ROUND, **settings)


def test_errors_say_what_would_have_been_right() -> None:
    two = trace([(0.0, 20, 3, [1, 2]), (1.5, 900, 1, [])])
    with pytest.raises(lm.BadValueError, match=r"request 1: 900 tokens.*at most 512"):
        simulate(two, instances=1, profile=ROUND, admission="vllm")
    with pytest.raises(lm.BadValueError, match="12 of the engine over 16 of the trace"):
        simulate(two, instances=1, profile={**ROUND.constants(), "block_tokens": 12})
    with pytest.raises(lm.BadValueError, match="instances"):
        simulate(two, instances=0, profile=ROUND)
    with pytest.raises(lm.BadValueError, match="exact, step_end, delayed or published"):
        simulate(two, profile=ROUND, signals="late")  # type: ignore[arg-type]
    with pytest.raises(lm.BadValueError, match='"lifo" is not valid; expected one of fcfs'):
        simulate(two, profile=ROUND, local_order="lifo")
    with pytest.raises(lm.BadValueError, match="a trace has no priorities of its own"):
        simulate(two, profile=ROUND, local_order="priority")
    with pytest.raises(lm.UnknownNameError, match="did you mean"):
        simulate(two, profile=ROUND, policy="lmetrik")
    with pytest.raises(lm.PolicyError, match="broken"):
        simulate(
            two, profile=ROUND, policy=lm.policy_function(lambda columns: 1 / 0, reads=["bs"], name="broken")
        )
    other = prepare(two, {**ROUND.constants(), "block_tokens": 8})
    with pytest.raises(lm.BadValueError, match="block_tokens of the profile"):
        simulate(other, profile=ROUND)
