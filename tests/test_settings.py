"""One settings type: server, library, simulator and command line take the same options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from constants import constant_options
from lmetric import BadValueError, Request, Router, option_values, options
from lmetric.cli import routing
from lmetric.config import ConfigError, PoolSettings, ServerConfig, load_config
from lmetric.config.written import render
from lmetric.defaults import DEFAULT_POLICY
from lmetric.option_errors import instances_of
from lmetric.option_values import parse
from lmetric.options import (
    DecodePlacement,
    Guard,
    LibraSplit,
    PrefixFetch,
    ProgramAuto,
    Routing,
    SimulatedFetch,
    SplitAt,
    SplitBy,
    Star,
    UniBoost,
)
from lmetric_lab.cli import simulate

SETTINGS = """
split: {kind: libra, min_gain: 0.2, probes: 8}
prefix_fetch: {min_tokens: 5, max_fetches: 3}
priority: {kind: uniboost, min_gamma: 0.01, max_boost_seconds: 9}
rebalance: {kind: star, max_moves: 2, threshold: 0.2, period_seconds: 0.1}
migration_by: fetch
tuning: {migration_max_gap_seconds: 2}
guard: {enabled: off, window_seconds: 15, classes: 8}
"""


def load(text: str, folder: Path, flags: dict[str, Any] | None = None, **env: str) -> ServerConfig:
    file = folder / "router.yaml"
    file.write_text(text)
    with constant_options():
        return load_config(file, flags, env)


def test_sources_add_to_an_option_and_another_kind_replaces_it(tmp_path: Path) -> None:
    file = "split: {kind: libra, probes: 8}"
    assert load(file, tmp_path, {"split.min_gain": "0.2"}).split == LibraSplit(probes=8, min_gain=0.2)
    assert load(file, tmp_path, {"split": "apart"}).split == DecodePlacement()
    assert load(file, tmp_path, {"split": "none"}).split is None
    assert load("split: libra", tmp_path, LMETRIC__SPLIT__PROBES="9").split == LibraSplit(probes=9)
    assert load("split: apart", tmp_path, LMETRIC__SPLIT="libra(probes=9)").split == LibraSplit(probes=9)
    assert load("guard: {classes: 8}", tmp_path, LMETRIC__GUARD="false").guard == Guard(
        enabled=False, classes=8
    )


def test_settings_alone_belong_to_what_goes_with_the_policy(tmp_path: Path) -> None:
    planner = load("policy: planner\nsplit: {min_gain_seconds: 1}", tmp_path)
    assert planner.split == DecodePlacement(min_gain_seconds=1)
    with pytest.raises(ConfigError, match=r"yaml:1: split.kind = null: missing .* none, libra, apart$"):
        load("split: {probes: 8}", tmp_path)


def test_a_model_inherits_an_option_as_a_whole(tmp_path: Path) -> None:
    mixed = load("split: {kind: libra, probes: 8}\nmodels: [{name: a, split: libra}, {name: b}]", tmp_path)
    assert [mixed.pool_settings(model).split for model in mixed.models] == [
        LibraSplit(),
        LibraSplit(probes=8),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("split: lbra", "split = 'lbra': expected one of none, libra, apart; did you mean 'libra'?"),
        ("split: {kind: libra, probs: 8}", "split.probs = 8: unknown setting; did you mean 'probes'?"),
        (
            "split: {kind: libra, least_gain: 0}",
            "split.least_gain = 0: unknown setting; did you mean 'min_gain'?",
        ),
        ("split: {kind: libra, probes: 99}", "split.probes = 99: expected a whole number from 1 to 32"),
        ("split: {kind: libra, probes: some}", "split.probes = 'some': expected an integer"),
        ("split: {kind: none, probes: 8}", "split.probes = 8: 'none' takes no settings; remove it"),
        (
            "split: force",
            "split = 'force': it is for simulations only (it splits without a gain); expected one",
        ),
        ("split: 3", "split = 3: expected a name, a mapping"),
        ("rebalance: {kind: star, threshold: 2}", "rebalance.threshold = 2.0: expected a number from 0 to 1"),
        ("priority: {kind: vtc, gamma: 1}", "priority.gamma = 1: unknown setting; known here: nothing"),
        ("guard: {window_seconds: 0}", "guard.window_seconds = 0.0: expected seconds above 0"),
        ("guard: maybe", "guard = 'maybe': expected on, off, auto, or settings as NAME=VALUE"),
    ],
)
def test_errors_have_the_key_the_value_and_what_would_do(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path)
    assert re.search(rf"router.yaml:(1:)? {re.escape(message)}", str(caught.value))


def test_a_server_refuses_an_option_of_simulations_as_an_object() -> None:
    with pytest.raises(ValidationError, match="it is for simulations only"):
        ServerConfig(split=SplitAt(fraction=0.5))


def test_the_configuration_that_is_printed_is_read_again(tmp_path: Path) -> None:
    for text in (SETTINGS, "policy: planner", "rebalance: star\nguard: on"):
        config = load(text, tmp_path)
        with constant_options():
            printed = render(config)
        assert load(printed, tmp_path) == config
    assert yaml.safe_load(printed)["rebalance"]["half_life_steps"] == 512.0


def test_the_tables_of_options_agree() -> None:
    assert tuple(option_values._KINDS) == options.OPTIONS
    for what, kinds in option_values._KINDS.items():
        found = [*dict.fromkeys(cls for cls, _ in kinds.values()), *([SplitBy] if what == "split" else [])]
        assert {cls.what for cls in found} == {what}
        assert instances_of(what) == ", ".join(f"lmetric.{cls.__name__}(...)" for cls in found)


def test_what_is_for_simulations_is_in_no_schema_of_servers() -> None:
    marked = {
        (cls.__name__, name)
        for what in options.OPTIONS
        for cls in option_values.classes(what).values()
        for name, each in cls.model_fields.items()
        if option_values.is_study(each) and not option_values.is_constant(each)
    }
    assert marked == {
        ("LibraSplit", "parts"), ("LibraSplit", "lengths_given"), ("DecodePlacement", "lengths_given"),
        ("SimulatedFetch", "holder_seconds"), ("SimulatedFetch", "waits"), ("SimulatedFetch", "pinned"),
        ("Star", "forecast_seed"), ("Llumnix", "forecast_seed"),
        ("ProgramObservation", "gap_error"), ("ProgramAdmission", "gap_error"),
        ("ProgramObservation", "free"), ("ProgramAdmission", "free"),
        ("ProgramAuto", "gap_error"), ("ProgramAuto", "free"),
    }  # fmt: skip
    schema = json.dumps(PoolSettings.model_json_schema())
    page = (Path(__file__).parent.parent / "docs" / "reference" / "settings.md").read_text()
    printed = render(
        ServerConfig.model_validate({"split": "libra", "rebalance": "star", "prefix_fetch": "on"})
    )
    for name in ("given", "llm_native", *(name for _, name in marked)):
        assert f'"{name}"' not in schema
        assert f".{name}` |" not in page
        assert f" {name}:" not in printed
    assert '"forecast"' in schema
    assert "| `rebalance.forecast` |" in page


def test_settings_of_servers_are_those_of_the_library() -> None:
    settings = PoolSettings.model_validate({"policy": "planner", "rebalance": "star"})
    assert settings.routing == Routing(
        policy="planner", knobs={}, decode_knobs={}, binding="late", split=DecodePlacement(),
        prefix_fetch=PrefixFetch(max_kv_usage=0.8), rebalance=Star(),
        programs=ProgramAuto(),
    )  # fmt: skip
    Router(**settings.routing.options)
    assert Routing().resolved("planner").prefix_fetch == PrefixFetch()
    assert Routing().resolved("planner", pools=True).split is None
    assert Routing().resolved("lmetric") == Routing(split=None, prefix_fetch=None)
    assert set(settings.routing.options) == set(options.OPTIONS)


def test_servers_refuse_constants(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("policy: planner\nsplit: libra\nprefix_fetch: true")
    config = load_config(file, None, {})
    assert (config.split, config.prefix_fetch) == (LibraSplit(), PrefixFetch(max_kv_usage=0.8))
    assert "probes" not in render(config)
    file.write_text(render(config))
    assert load_config(file, None, {}) == config
    file.write_text("split: {kind: libra, probes: 8}")
    with pytest.raises(ConfigError, match=r"split.probes = 8: it cannot be set .* remove it"):
        load_config(file, None, {})
    assert parse("split", "libra(probes=8)") == LibraSplit(probes=8), "simulations accept it"


def test_tuning_settings_are_under_their_path(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    text = "admission: {}\nmodels: [{name: a, admission: {ttft_seconds: 2}}, {name: b}]\n"
    file.write_text(text + "tuning: {migration_max_gap_seconds: 3, admission: {room_seconds: 1}}")
    config = load_config(file, {"tuning.policy_time_limit_seconds": "0.5"}, {})
    assert (config.migration_max_gap_seconds, config.policy_time_limit_seconds) == (3.0, 0.5)
    rooms = [pool.admission.room_seconds for pool in (config, config.models[0]) if pool.admission]
    assert rooms == [1.0, 1.0]
    file.write_text(render(config))
    assert load_config(file, None, {}) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "migration_max_gap_seconds: 3",
            "1: migration_max_gap_seconds: it is a tuning setting; set tuning.mig",
        ),
        ("tuning: {admission: {room_seconds: 1}}", "1: tuning.admission.room_seconds = 1: it has no effect"),
        ("tuning: {migration_max_gap: 1}", "unknown key; did you mean 'migration_max_gap_seconds'?"),
        ("tuning: {migration_max_gap_seconds: -1}", "1: tuning.migration_max_gap_seconds = -1: expected "),
        ("tuning: {admission: 1}", "tuning.admission = 1: expected a mapping"),
        ("tuning: 1", "tuning = 1: expected a mapping"),
    ],
)
def test_errors_of_tuning_settings(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(file, None, {})


def test_options_are_words_texts_mappings_and_objects() -> None:
    for value in ("libra(probes=8)", {"kind": "libra", "probes": 8.0}, LibraSplit(probes=8)):
        assert parse("split", value) == LibraSplit(probes=8)
    assert parse("split", None) == parse("split", "auto") == "auto"
    assert parse("split", "none") is parse("rebalance", None) is None
    assert parse("priority", "uniboost") == UniBoost()
    for value in ("pinned=false", {"pinned": False}, SimulatedFetch(pinned=False)):
        assert parse("prefix_fetch", value) == SimulatedFetch(pinned=False)
    assert (parse("prefix_fetch", True), parse("prefix_fetch", False)) == (PrefixFetch(), None)
    with pytest.raises(BadValueError, match="SimulatedFetch"):
        Router(prefix_fetch=SimulatedFetch(pinned=False))


def test_serve_and_simulate_have_the_same_flags_and_servers_no_study_settings() -> None:
    served, simulated = (
        {each.name: each.annotation.__metadata__[0] for each in routing.parameters(server=server)}
        for server in (True, False)
    )
    own = {"rebalance_settings", "programs_settings"}  # the other options have no settings in servers
    assert served.keys() == {name for name in simulated if name in own or not name.endswith("_settings")}
    assert {name: flag.param_decls for name, flag in served.items()} == {
        name: flag.param_decls for name, flag in simulated.items() if name in served
    }
    assert "forecast_seed" in simulated["rebalance_settings"].help
    assert "forecast_seed" not in served["rebalance_settings"].help
    assert "half_life_steps" not in served["rebalance_settings"].help
    assert "star_oracle" in simulated["rebalance"].help
    assert served["rebalance"].metavar == "none|star"


def test_flags_of_simulations_are_options() -> None:
    none = dict.fromkeys(each.name for each in routing.parameters(server=False))
    swept, plain = simulate._options(
        none | {"rebalance": ["none,star"], "prefix_fetch": "max_fetches=2", "guard": True}
        | {"guard_settings": "classes=8"}
    )  # fmt: skip
    assert swept == {"split": [], "rebalance": ["none", "star"]}
    assert plain == {"prefix_fetch": {"max_fetches": 2}, "guard": {"enabled": True, "classes": 8}}
    swept, plain = simulate._options(
        none | {"split": ["libra, none"], "split_settings": "min_gain=0, probes=3", "rebalance": ["star"]}
    )
    assert swept == {
        "split": [{"kind": "libra", "min_gain": 0.0, "probes": 3}, "none"],
        "rebalance": ["star"],
    }


def test_the_core_and_the_library_have_the_same_default_policy() -> None:
    router = Router()
    router.add_instance("engine")
    decision, _ = router.route(Request(token_ids=[1, 2, 3]))
    record = router.explain(decision.id)
    assert record is not None
    assert record["policy"] == DEFAULT_POLICY
