"""Requests that reason first: three parts, and an SLO for reasoning tokens (Libra, 4.4)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

import lmetric as lm
from lmetric.cli.app import build
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, TraceError, load_trace
from lmetric_lab.sim.traces.write import write_trace

STEP = {
    "fixed_seconds": 0.01,
    "decode_seconds_per_sequence": 1e-4,
    "decode_seconds_per_context_token": 1e-6,
    "prefill_seconds_per_token": 1e-4,
    "prefill_seconds_per_attention_pair": 1e-8,
    "max_batch_tokens": 512,
}
THREE = "parts=3, lengths_given=1, min_gain=-1"


def trace(n: int = 60, seconds: float = 30.0) -> Trace:
    rng = np.random.default_rng(1)
    thoughts = rng.integers(100, 400, n)
    return Trace(
        name="thinks", arrival_seconds=np.sort(rng.uniform(0, seconds, n)),
        input_tokens=rng.integers(50, 500, n), output_tokens=thoughts + rng.integers(40, 120, n),
        think_tokens=thoughts, hash_offsets=np.zeros(n + 1, np.int64), hash_ids=np.zeros(0, np.uint64),
        block_tokens=16,
    )  # fmt: skip


def play(asks: Trace, **told: object) -> Run:
    settings = {"policy": "least_requests", "admission": "vllm", "instances": 3} | told
    return simulate(asks, **settings)  # type: ignore[arg-type]


def test_the_router_cuts_a_request_that_thinks_in_three_and_says_so() -> None:
    router = lm.Router("least_requests", block_size=16, step_time=STEP)
    for name in "abc":
        router.add_instance(name)
    router.configure(split=lm.LibraSplit(parts=3, lengths_given=True, min_gain=-1))
    told = {"prompt_tokens": 512, "max_tokens": 1536}
    decision, ticket = router.route(lm.Request(**told, reasoning_tokens=1200))
    record = router.explain(decision.id)
    assert record is not None
    first, second = record["cuts"]
    assert 0 < first < second <= 1712
    assert {decision.instance, record["decode_instance"], record["answer_instance"]} == set("abc")
    assert record["balance_third_seconds"] > 0
    assert record["balance_cut_seconds"] is None
    assert ticket.segment_done() == record["decode_instance"]
    assert ticket.segment_done() == record["answer_instance"]
    assert ticket.segment_done() is None
    assert router.in_flight() == 0
    decision, _ = router.route(lm.Request(**told))
    plain = router.explain(decision.id)
    assert plain is not None
    assert (len(plain["cuts"]), plain["balance_third_seconds"]) == (1, None)
    with pytest.raises(lm.BadValueError, match="parts"):
        router.configure(split=lm.LibraSplit(parts=4))


def test_thoughts_are_parts_of_their_own_in_the_simulator() -> None:
    asks = trace()
    three, two = (play(asks, split=f"libra({told})") for told in (THREE, "lengths_given=1"))
    again = three.answer_cut_tokens
    assert (again >= 0).mean() > 0.9
    assert (again <= asks.input_tokens + asks.think_tokens).all()
    assert (again[again >= 0] > three.cut_tokens[again >= 0]).all()
    assert (two.answer_cut_tokens == -1).all()
    assert np.isfinite(three.finished_seconds).all()
    # A looser SLO of reasoning tokens counts fewer of them as slow, and moves nothing.
    tight, loose = (play(asks, token_slo_seconds=0.001, think_slo_seconds=slo) for slo in (0.001, 10.0))
    assert (tight.finished_seconds == loose.finished_seconds).all()
    assert (tight.slow_tokens == asks.output_tokens - 1).all()
    assert (loose.slow_tokens == asks.output_tokens - asks.think_tokens).all()
    # One instance, prompts beside reasoning tokens: steps take longer, so first tokens come sooner.
    slo, busy = {"local_order": "slo", "order_slo_seconds": 0.02, "instances": 1}, trace(40, 2.0)
    plain, staged = play(busy, **slo), play(busy, **slo, order_think_slo_seconds=0.2)
    assert staged.ttft_seconds.mean() < plain.ttft_seconds.mean()


def test_what_cannot_be_is_named() -> None:
    asks = trace(3)
    with pytest.raises(ValueError, match="think_tokens must be at least 0 and at most output_tokens"):
        replace(asks, think_tokens=asks.output_tokens + 1)
    with pytest.raises(lm.BadValueError, match="think_slo_seconds"):
        play(asks, think_slo_seconds=0.0)
    with pytest.raises(lm.BadValueError, match="order_think_slo_seconds: -1"):
        play(asks, local_order="slo", order_think_slo_seconds=-1.0)
    with pytest.raises(lm.BadValueError, match="'parts' is not valid; expected NAME=VALUE"):
        play(asks, split="libra(parts)")


def test_a_trace_file_may_say_them_and_the_command_plays_it(tmp_path: Path) -> None:
    asks, file = trace(), tmp_path / "thinks.jsonl"
    write_trace(asks, file)
    read = load_trace(str(file))
    assert read.think_tokens is not None
    assert asks.think_tokens is not None
    assert (read.think_tokens == asks.think_tokens).all()
    assert (read.take(np.array([5, 2])).think_tokens == asks.think_tokens[[2, 5]]).all()
    command = [
        "simulate", "--trace", str(file), "--instances", "3", "--policy", "least_requests", "--split",
        "none,libra", "--split-settings", THREE, "--local-order", "slo", "--order-think-slo", "0.4",
        "--think-slo", "0.4", "--admission", "vllm", "--json", "-",
    ]  # fmt: skip
    done = CliRunner().invoke(build(["simulate"]), command)
    assert done.exit_code == 0, done.output
    told = orjson.loads(done.stdout)
    bad = CliRunner().invoke(build(["simulate"]), [*command[:5], "--split-settings", THREE])
    assert bad.exit_code == 2
    assert "needs one kind: --split libra" in bad.output
    assert [run["split"] for run in told["runs"]] == ["none", "libra"]
    assert told["runs"][1]["splits"] > 50
    lines = file.read_bytes().replace(b'"think_length":', b'"think_length":9')
    file.write_bytes(lines)
    with pytest.raises(TraceError, match="think_length"):
        load_trace(str(file))
