"""The policies that the hot-spot guard filters, and its settings, wherever a router is made."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import lmetric as lm
from lmetric.config import ConfigError, PoolSettings
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.study_file import load_study
from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.traces import Trace

SETTINGS: dict[str, Any] = {
    "window_seconds": 15.0,
    "period_seconds": 1.0,
    "classes": 64,
    "min_requests": 16,
    "phase2_factor": 2.0,
    "release_factor": 0.05,
}
OUT_OF_RANGE: dict[str, Any] = {
    "window_seconds": 0.0,
    "period_seconds": 0.001,
    "classes": 0,
    "min_requests": -1,
    "phase2_factor": -0.5,
    "release_factor": 1.5,
}


def by_hits(columns: Any) -> np.ndarray:
    return np.asarray(columns["new_tokens"])


@pytest.mark.parametrize(
    ("policy", "on", "why"),
    [
        ("lmetric", False, "the default"),
        ("planner", False, "the default"),
        ("p_token * (bs + 1)", False, "the default"),
        (lm.P_TOKEN * (lm.BS + 1), False, "the default"),
        (lm.Policy("p_token", guard=False), False, "policy expression declares guard: off"),
        (lm.Policy("bs", guard=True), True, "policy expression declares guard: on"),
        (lm.Policy.from_config({"score": "p_token", "guard": False}), False, "declares guard: off"),
        (lm.Policy.from_config({"score": "bs", "guard": "on"}), True, "declares guard: on"),
        (lm.policy_function(by_hits, reads=[lm.NEW_TOKENS]), False, "the default"),
        (lm.policy_function(by_hits, reads=[lm.NEW_TOKENS], guard=True), True, "declares guard: on"),
    ],
    ids=str,
)
def test_the_policy_says_whether_the_guard_applies(policy: Any, on: bool, why: str) -> None:
    """Rust B4: not its name decides."""
    router = lm.Router(policy)
    assert router.stats()["guard_on"] is on
    assert re.search(why, router.guard_reason), router.guard_reason
    for chosen in (True, False):
        router = lm.Router(policy, guard=chosen)
        assert router.stats()["guard_on"] is chosen
        assert router.guard_reason == f"the setting `guard` is {'on' if chosen else 'off'}"


def test_a_guard_that_was_switched_stays_so_under_another_policy() -> None:
    router = lm.Router("lmetric")
    router.configure(guard=False)
    assert router.guard_reason == "the setting `guard` is off"
    router.set_policy(lm.Policy("p_token", guard=True))
    assert not router.stats()["guard_on"]
    router.configure(guard=True)
    router.set_policy(lm.Policy("p_token", guard=False))
    assert router.stats()["guard_on"]
    assert router.guard_reason == "the setting `guard` is on"


def test_a_policy_refuses_another_word_for_its_guard() -> None:
    """Rust B4: the error names the value and what was expected."""
    with pytest.raises(lm.BadValueError, match="guard: 'maybe' is not valid; expected on or off"):
        lm.Policy.from_config({"score": "bs", "guard": "maybe"})


@cache
def hot_spot() -> Trace:
    """For 50 seconds, half of the requests begin with one long prefix."""
    return check_synthetic(
        {
            "synthetic": "requests", "seed": 3, "rate": 20, "duration_seconds": 60,
            "input_tokens": {"p50": 60, "mean": 80, "max": 1000},
            "output_tokens": {"p50": 200, "mean": 250, "max": 1000},
            "hot_spot": {"start_seconds": 10, "seconds": 50, "share": 0.5, "tokens": 8192},
            "block_tokens": 64,
        },
        "hot",
    ).make()  # fmt: skip


def played(policy: Any = "p_token * (bs + 1)", **settings: Any) -> Run:
    return simulate(
        hot_spot(), policy=policy, instances=16, profile="qwen3-30b-a3b-h20", admission="vllm", **settings
    )


def test_an_expression_is_guarded_in_simulations_too() -> None:
    """Rust B4: the same score by name and as an expression does the same."""
    named, written = played("lmetric", guard=True), played(guard=True)
    assert named.guard_alarms == written.guard_alarms > 0
    assert named.guard_filters == written.guard_filters > 0
    assert np.array_equal(named.instance, written.instance)
    assert played().guard_alarms == 0
    assert played(lm.Policy("p_token * (bs + 1)", guard=True)).guard_alarms == named.guard_alarms


def test_every_setting_of_the_guard_is_there_with_one_default() -> None:
    """Fidelity gap 12: servers have the router's defaults."""
    assert dict(lm.Guard()) == {"enabled": True, **SETTINGS}
    assert PoolSettings().guard is None
    assert PoolSettings.model_validate({"guard": "on"}).guard == lm.Guard()
    assert PoolSettings.model_validate({"guard": "off"}).guard == lm.Guard(enabled=False)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_the_guard_is_checked(name: str, tmp_path: Path) -> None:
    """Fidelity gap 12: router, simulator and studies refuse values out of range, servers all."""
    wrong: dict[str, Any] = {name: OUT_OF_RANGE[name]}
    with pytest.raises(lm.BadValueError, match=f"hot-spot guard: {name}"):
        lm.Router("lmetric", guard=lm.Guard(**wrong))
    with pytest.raises(lm.BadValueError, match=f"guard.{name}: {OUT_OF_RANGE[name]} is not valid; expected"):
        simulate(hot_spot(), instances=1, guard=wrong)
    with pytest.raises(ValidationError, match=f"guard.{name}: .* it cannot be set"):
        PoolSettings.model_validate({"guard": wrong})
    study = tmp_path / "study.yaml"
    text = "traces: t.jsonl\npolicies: lmetric\nsettings: {guard: {%s: %s}}\n"
    study.write_text(text % (name, SETTINGS[name]))
    (setup,) = load_study(study).setups
    assert setup.settings == {"guard": {name: SETTINGS[name]}}
    study.write_text(text % (name, OUT_OF_RANGE[name]))
    with pytest.raises(
        ConfigError, match=f"study.yaml:3: settings.guard.{name} = {OUT_OF_RANGE[name]}: expected"
    ):
        load_study(study)


@pytest.mark.parametrize(
    ("quiet", "value"),
    [("min_requests", 10**6), ("window_seconds", 0.01), ("period_seconds", 1e6)],
)
def test_settings_of_the_guard_have_their_effect(quiet: str, value: float) -> None:
    """Fidelity gap 12: these leave no prefix to suspect."""
    assert played(guard={quiet: value}).guard_alarms == 0


def test_the_guard_filters_sooner_with_a_lower_factor() -> None:
    """Fidelity gap 12: `phase2_factor` is what phase 2 counts to."""
    assert played(guard={"phase2_factor": 0.0}).guard_filters > 0
    assert played(guard={"phase2_factor": 1e9}).guard_filters == 0
