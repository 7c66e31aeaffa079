"""Parts of lmetric-vllm that need no engine: settings, the work of steps and their times, and what
the core computes for both schedulers. `tests/real/test_real_schedulers.py` runs the engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import lmetric as lm
from lmetric.profiles import load_profile
from lmetric_vllm.settings import BoostSettings, SettingsError, SloSettings, read_settings
from lmetric_vllm.steps import MOST_PENDING, StepClock, step_of

PROFILE = {
    "fixed_seconds": 0.01,
    "decode_seconds_per_sequence": 1e-4,
    "decode_seconds_per_context_token": 1e-6,
    "prefill_seconds_per_token": 1e-4,
    "prefill_seconds_per_attention_pair": 0.0,
    "max_batch_tokens": 4096,
}


@dataclass
class Output:
    """The part of vLLM's output of a step that is read."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_cached_reqs: Any = None
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class Request:
    """The part of vLLM's request that is read."""

    num_computed_tokens: int


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (SloSettings, None, "lmetric.token_slo_ms: missing"),
        (SloSettings, {"lmetric": {}}, "lmetric.token_slo_ms: missing"),
        (
            SloSettings,
            {"lmetric": {"token_slo_ms": 0}},
            "lmetric.token_slo_ms: expected above 0, got 0",
        ),
        (SloSettings, {"lmetric": {"token_slo_ms": "soon"}}, "expected a number, got 'soon'"),
        (SloSettings, {"lmetric": {"token_slo_ms": math.nan}}, "expected a finite number"),
        (SloSettings, {"lmetric": {"token_slo_ms": 50, "profil": "x"}}, "lmetric.profil: unknown setting"),
        (SloSettings, {"lmetric": [50]}, "expected a mapping"),
        (BoostSettings, {"lmetric": {"gamma": 0}}, "lmetric.gamma"),
        (BoostSettings, {"lmetric": {"token_slo_ms": 50}}, "lmetric.token_slo_ms"),
    ],
)
def test_settings_that_are_wrong_are_named(kind: Any, given: Any, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings(kind, given)
    assert message in str(refused.value)
    assert "the settings are: " + ", ".join(kind.model_fields) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_are_read() -> None:
    assert read_settings(SloSettings, {"lmetric": {"token_slo_ms": 50}, "other": 1}).token_slo_ms == 50
    assert read_settings(BoostSettings, None) == BoostSettings()


def test_the_work_of_a_step() -> None:
    # As after scheduling: the tokens of the step count as computed.
    requests: dict[str, Any] = {"a": Request(101), "b": Request(50), "c": Request(1300)}
    before = SimpleNamespace(num_computed_tokens=[100, 1000])
    new = [SimpleNamespace(num_computed_tokens=49)]  # cached, but for its last token
    step = step_of(Output({"a": 1, "b": 1, "c": 300}, before, new), requests)  # type: ignore[arg-type]
    assert (step.decodes, step.context_tokens) == (2, 151)
    assert (step.prefill_tokens, step.prefill_pairs) == (300, 300 * (1000 + 150))
    before = SimpleNamespace(num_computed_tokens=[100, 49])
    step = step_of(Output({"a": 1, "b": 1}, before), requests)  # type: ignore[arg-type]
    assert (step.decodes, step.context_tokens, step.prefill_tokens) == (2, 151, 0)


def test_steps_that_overlap_are_measured_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    requests: dict[str, Any] = {"a": Request(10)}
    before = SimpleNamespace(num_computed_tokens=[9])
    clock, outputs = StepClock(), [Output({"a": 1}, before) for _ in range(3)]

    def at(time: float) -> None:
        nonlocal now
        now = time

    def begin(output: Output) -> None:
        clock.scheduled(output, step_of(output, requests))  # type: ignore[arg-type]

    def end(output: Output) -> float | None:
        ended = clock.ended(output)  # type: ignore[arg-type]
        return None if ended is None else round(ended[1], 6)

    begin(outputs[0])
    at(100.01)
    begin(outputs[1])  # while the first one runs
    at(100.05)
    assert end(outputs[0]) == 0.05
    at(100.08)
    assert end(outputs[1]) == 0.03  # not from its own scheduling: the engine was busy
    at(101.0)
    begin(outputs[2])  # after a pause
    at(101.02)
    assert end(outputs[2]) == 0.02
    assert end(outputs[2]) is None, "an output counts once"
    # Steps without an output, as after an error, take bounded memory.
    kept = [Output({"a": 1}, before) for _ in range(3 * MOST_PENDING)]
    for output in kept:
        begin(output)
    assert len(clock._pending) <= MOST_PENDING


def test_a_table_allows_what_fits() -> None:
    table = lm.StepTable(PROFILE)
    # 10 + 1 + 10 ms for the decodes; 29 ms are left, of 0.1 ms per token.
    allowed = table.prefill_within(0.05, decodes=10, context_tokens=10_000, before=0, most=4096)
    assert allowed is not None
    assert 285 <= allowed <= 290
    for _ in range(3):  # the engine turns out half as fast
        table.record(0.0933, decodes=10, context_tokens=10_000, prefill_tokens=256, prefill_pairs=0.0)
    slower = table.prefill_within(0.05, decodes=10, context_tokens=10_000, before=0, most=4096)
    assert slower is not None
    assert slower < 0.7 * allowed
    assert table.recorded == 3
    assert table.seconds(decodes=10, context_tokens=10_000, prefill_tokens=256) == pytest.approx(
        0.0933, rel=1e-3
    )
    assert lm.StepTable().seconds(decodes=1, context_tokens=1) is None
    with pytest.raises(lm.BadValueError, match="seconds of a step"):
        table.prefill_within(0.0, decodes=1, context_tokens=1, before=0, most=1)
    with pytest.raises(lm.BadValueError, match="fixed_seconds"):
        lm.StepTable({})
    # The profiles that ship are tables.
    lm.StepTable(load_profile("llama-3.1-8b-h100").constants())


def test_boosts_fall_with_work() -> None:
    boost = lm.EngineBoost({"gamma": 0.1, "adaptive": False, "bin_tokens": 64}, token_seconds=0.001)

    def rank(attained: int, prompt: int = 100, hit: int = 0) -> float:
        return boost.rank(1000.0, prompt_tokens=prompt, hit_tokens=hit, attained_tokens=attained)

    assert rank(0) < rank(200) < rank(5000) < 1000.0
    assert rank(0, prompt=5000, hit=4900) == rank(0)
    assert boost.next_change(prompt_tokens=100, hit_tokens=0, attained_tokens=0) == 128
    assert boost.gamma == 0.1
    for _ in range(16):
        boost.stepped(0.5, 100)
        boost.ended(3.0)
    assert boost.look()
    assert not boost.look()
    assert boost.token_seconds == pytest.approx(0.005)
    with pytest.raises(lm.BadValueError, match="gamma"):
        lm.EngineBoost({"gamma": 0.0})
    with pytest.raises(lm.BadValueError, match="binn"):
        lm.EngineBoost({"binn": 1})
