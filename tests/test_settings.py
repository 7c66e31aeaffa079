"""One settings type: server, library, simulator and command line take the same options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmetric import BadValueError, Request, Router, _deprecated, options
from lmetric.cli import routing
from lmetric.config import ConfigError, PoolSettings, ServerConfig, load_config, render
from lmetric.defaults import DEFAULT_POLICY
from lmetric.options import (
    DecodePlacement,
    Guard,
    LibraSplit,
    Llumnix,
    PrefixFetch,
    ProgramAuto,
    Routing,
    SimulatedFetch,
    SplitAt,
    Star,
    UniBoost,
    parse,
)
from lmetric_lab.cli import simulate

OLD = """
split: libra
split_settings: {least_gain: 0.2, probes: 8}
pull: on
pull_settings: {least_tokens: 5, most_pulls: 3}
pull_seconds: 3
priority: uniboost
priority_settings: {least_gamma: 0.01, most_boost_seconds: 9}
reschedule: star
reschedule_settings: {most_moves: 2, threshold: 0.2}
reschedule_period_seconds: 0.1
reschedule_by: legs
reschedule_leg_tokens: 7
reschedule_max_gap_seconds: 2
reschedule_at_once: 3
guard: off
guard_window_seconds: 15
guard_classes: 8
"""
NEW = """
split: {kind: libra, min_gain: 0.2, probes: 8}
prefix_fetch: {min_tokens: 5, max_fetches: 3}
prefix_fetch_timeout_seconds: 3
priority: {kind: uniboost, min_gamma: 0.01, max_boost_seconds: 9}
rebalance: {kind: star, max_moves: 2, threshold: 0.2, period_seconds: 0.1}
migration_by: segments
migration_segment_tokens: 7
migration_max_gap_seconds: 2
migration_max_concurrent: 3
guard: {enabled: off, window_seconds: 15, classes: 8}
"""


def load(text: str, folder: Path, flags: dict[str, Any] | None = None, **env: str) -> ServerConfig:
    file = folder / "router.yaml"
    file.write_text(text)
    return load_config(file, flags, env)


def test_the_old_shape_is_the_new_one_and_warns_with_it(tmp_path: Path) -> None:
    old, new = load(OLD, tmp_path), load(NEW, tmp_path)
    assert old.model_dump() == new.model_dump()
    assert not new.deprecated
    assert new.split == LibraSplit(min_gain=0.2, probes=8)
    assert new.rebalance == Star(max_moves=2, threshold=0.2, period_seconds=0.1)
    assert new.guard == Guard(enabled=False, window_seconds=15, classes=8)
    told = [message.partition("use `")[2].removesuffix("`") for message in old.deprecated]
    again = load("\n".join(told), tmp_path)
    assert again == new, "what the warnings say is a configuration"
    mentioned = " ".join(old.deprecated)
    keys = [key for key in _deprecated.SETTINGS if f"{key}:" in OLD]
    assert len(keys) == 14
    assert all(f"`{key}`" in mentioned for key in keys)


def test_old_values_of_settings_are_the_present_ones_and_warn(tmp_path: Path) -> None:
    for old, new in _deprecated.VALUES["migration_by"].items():
        config = load(f"migration_by: {old}", tmp_path)
        assert (config.migration_by, len(config.deprecated)) == (new, 1)
        assert f"`migration_by: {old}` is deprecated" in config.deprecated[0]
        assert config.deprecated[0].endswith(f"use `migration_by: {new}`")
        flagged = load("port: 0", tmp_path, {"migration_by": old})
        assert (flagged.migration_by, len(flagged.deprecated)) == (new, 1)
        assert load("port: 0", tmp_path, LMETRIC__MIGRATION_BY=old).migration_by == new
        model = load(f"models: [{{name: a, migration_by: {old}, migration_leg_tokens: 7}}]", tmp_path)
        assert model.pool_settings(model.models[0]).migration_by == new
        assert model.pool_settings(model.models[0]).migration_segment_tokens == 7
        assert [message.partition("`")[2].partition("`")[0] for message in model.deprecated] == [
            "models[0].migration_leg_tokens",
            f"models[0].migration_by: {old}",
        ]
    assert not load("migration_by: recompute", tmp_path).deprecated
    # Studies and simulations read the same table. They have no such method, under either name.
    assert _deprecated.settings({"migration_by": ["fetch", "legs"]}) == (
        {"migration_by": ["fetch", "segments"]},
        {"migration_by": ["migration_by: legs"]},
    )
    with pytest.raises(
        ConfigError, match=r"migration_leg_tokens: it is an old name of migration_segment_tokens"
    ):
        load("migration_leg_tokens: 7\nmigration_segment_tokens: 8", tmp_path)


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
    old = load(file, tmp_path, {"split_settings.least_gain": "0.2"})
    assert old.split == LibraSplit(probes=8, min_gain=0.2)
    assert load(file, tmp_path, {"split_force_at": 0.5}).split == SplitAt(0.5)


def test_settings_alone_belong_to_what_goes_with_the_policy(tmp_path: Path) -> None:
    planner = load("policy: planner\nsplit: {min_gain_seconds: 1}", tmp_path)
    assert planner.split == DecodePlacement(min_gain_seconds=1)
    with pytest.raises(ConfigError, match=r"yaml:1: split.kind = None: missing .* none, libra, apart$"):
        load("split: {probes: 8}", tmp_path)
    # Under the old keys, settings alone did nothing.
    idle = load("split_settings: {probes: 8}\npull_settings: {most_pulls: 3}", tmp_path)
    assert (idle.routing.split, idle.routing.prefix_fetch) == (None, None)
    assert [message for message in idle.deprecated if "no effect" in message] == [
        "split: {'probes': 8} has no effect without a kind; remove it",
        "prefix_fetch: {'max_fetches': 3} has no effect without a kind; remove it",
    ]


def test_models_inherited_each_of_the_old_keys_and_an_option_as_a_whole(tmp_path: Path) -> None:
    models = "models: [{name: a, policy: lmetric}, {name: b}, {name: c, %s: none}, {name: d, split: libra}]"
    old = load(f"policy: planner\npull_settings: {{most_pulls: 3}}\n{models % 'pull'}", tmp_path)
    fetches = [old.pool_settings(model).routing.prefix_fetch for model in old.models]
    assert fetches == [None, fetch := PrefixFetch(max_fetches=3, max_kv_usage=0.8), None, fetch]
    mixed = load("split: {kind: libra, probes: 8}\nmodels: [{name: a, split: libra}, {name: b}]", tmp_path)
    assert [mixed.pool_settings(model).split for model in mixed.models] == [
        LibraSplit(),
        LibraSplit(probes=8),
    ]
    old = load("split_settings: {probes: 8}\nmodels: [{name: a, split: libra}]", tmp_path)
    assert old.pool_settings(old.models[0]).split == LibraSplit(probes=8)


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
        ("split: force", "split.fraction = None: missing; 'force' needs it"),
        ("split: 3", "split = 3: expected a name, a mapping"),
        ("rebalance: {kind: star, threshold: 2}", "rebalance.threshold = 2.0: expected a number from 0 to 1"),
        ("priority: {kind: vtc, gamma: 1}", "priority.gamma = 1: unknown setting; known here: nothing"),
        ("guard: {window_seconds: 0}", "guard.window_seconds = 0.0: expected seconds above 0"),
        ("guard: maybe", "guard = 'maybe': expected on, off, auto, or settings as NAME=VALUE"),
        (
            "reschedule: star\nrebalance: star",
            "reschedule: it is an old name of rebalance; remove reschedule",
        ),
        ("split_settings: [1]", "split: settings [1] are not valid; expected a mapping"),
    ],
)
def test_errors_have_the_key_the_value_and_what_would_do(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path)
    assert re.search(rf"router.yaml:(1:)? {re.escape(message)}", str(caught.value))


def test_the_configuration_that_is_printed_is_read_again(tmp_path: Path) -> None:
    for text in (NEW, "policy: planner", "rebalance: star_current\nguard: on", "rebalance: llumnix"):
        config = load(text, tmp_path)
        assert load(render(config), tmp_path) == config
    assert yaml.safe_load(render(config))["rebalance"]["source_below_steps"] == 48.0


def test_what_is_for_simulations_is_in_no_schema_of_servers() -> None:
    marked = {
        (cls.__name__, each.name)
        for what in options.OPTIONS
        for cls in options.classes(what).values()
        for each in cls.__dataclass_fields__.values()
        if options.is_study(each)
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
    page = (Path(__file__).parent.parent / "docs" / "reference" / "configuration.md").read_text()
    printed = render(
        ServerConfig.model_validate({"split": "libra", "rebalance": "star", "prefix_fetch": "on"})
    )
    for name in ("given", "llm_native", *(name for _, name in marked)):
        assert f'"{name}"' not in schema
        assert f"| `{name}` |" not in page
        assert f" {name}:" not in printed
    assert '"half_life_steps"' in schema
    assert "| `half_life_steps` |" in page


def test_settings_of_servers_are_those_of_the_library() -> None:
    settings = PoolSettings.model_validate({"policy": "planner", "rebalance": "llumnix"})
    assert settings.routing == Routing(
        policy="planner", knobs={}, decode_knobs={}, binding="late", split=DecodePlacement(),
        prefix_fetch=PrefixFetch(max_kv_usage=0.8), rebalance=Llumnix(),
        programs=ProgramAuto(),
    )  # fmt: skip
    Router(**settings.routing.options)
    assert Routing().resolved("planner").prefix_fetch == PrefixFetch()
    assert Routing().resolved("planner", pools=True).split is None
    assert Routing().resolved("lmetric") == Routing(split=None, prefix_fetch=None)
    assert set(settings.routing.options) == set(options.OPTIONS)


def test_options_are_words_texts_mappings_and_objects() -> None:
    for value in ("libra(probes=8)", {"kind": "libra", "probes": 8.0}, LibraSplit(probes=8)):
        assert parse("split", value) == LibraSplit(probes=8)
    assert parse("split", None) == parse("split", "auto") == "auto"
    assert parse("split", "none") is parse("rebalance", None) is None
    assert parse("priority", "uniboost") == UniBoost()
    for value in ("unpinned", {"pinned": False}, SimulatedFetch(pinned=False)):
        assert parse("prefix_fetch", value) == SimulatedFetch(pinned=False)
    assert (parse("prefix_fetch", True), parse("prefix_fetch", False)) == (PrefixFetch(), None)
    with pytest.raises(BadValueError, match="SimulatedFetch"):
        Router(prefix_fetch=SimulatedFetch(pinned=False))


def test_serve_and_simulate_have_the_same_flags_and_servers_no_study_settings() -> None:
    served, simulated = (
        {each.name: each.annotation.__metadata__[0] for each in routing.parameters(server=server)}
        for server in (True, False)
    )
    assert served.keys() == simulated.keys()
    assert {name: flag.param_decls for name, flag in served.items()} == {
        name: flag.param_decls for name, flag in simulated.items()
    }
    assert "lengths_given" in simulated["split_settings"].help
    assert "lengths_given" not in served["split_settings"].help
    assert "star_oracle" in simulated["rebalance"].help
    assert "star_oracle" not in served["rebalance"].metavar


def test_old_flags_of_simulations_are_the_present_ones(capsys: pytest.CaptureFixture[str]) -> None:
    none = dict.fromkeys([*(each.name for each in routing.parameters(server=False)), *simulate._OLD])
    swept, plain = simulate._options(
        none | {"reschedule": ["none,star"], "pull": "most=2", "guard": True, "guard_classes": 8}
    )
    assert swept == {"split": [], "rebalance": ["none", "star"]}
    assert plain == {"prefix_fetch": "most=2", "guard": {"enabled": True, "classes": 8}}
    told = capsys.readouterr().err
    assert "--reschedule: deprecated" in told
    assert "use --guard, --guard-settings" in told
    swept, plain = simulate._options(
        none | {"split": ["libra, none"], "split_settings": "least_gain=0, probes=3", "rebalance": ["star"]}
    )
    assert swept == {
        "split": [{"kind": "libra", "min_gain": 0.0, "probes": 3}, "none"],
        "rebalance": ["star"],
    }
    assert "--split-settings: least_gain is deprecated" in capsys.readouterr().err


def test_the_core_and_the_library_have_the_same_default_policy() -> None:
    router = Router()
    router.add_instance("engine")
    decision, _ = router.route(Request(token_ids=[1, 2, 3]))
    record = router.explain(decision.id)
    assert record is not None
    assert record["policy"] == DEFAULT_POLICY
