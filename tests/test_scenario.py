"""The declaration of simulations: fields, flags and study settings are one list."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import typer

import lmetric as lm
from lmetric import _core, options
from lmetric.cli.app import build
from lmetric.config import ConfigError
from lmetric_lab.cli import scenario as flags
from lmetric_lab.sim.pools import Transfer
from lmetric_lab.sim.scenario import Scenario
from lmetric_lab.sim.setting import option_of, setting_of
from lmetric_lab.sim.study_file import SettingsEntry, load_study

# Compared on command lines and in studies, with keys and flags of their own.
COMPARED = {"policy", "knobs", "decode_policy", "decode_knobs", "seed"}
FLEET = {"instances", "profile", "roles"}
SETTINGS = {name: each for name, field in Scenario.model_fields.items() if (each := setting_of(field))}


def test_each_field_is_a_flag_and_a_setting_of_studies() -> None:
    assert Scenario.model_fields.keys() - COMPARED == SETTINGS.keys()
    assert SettingsEntry.model_fields.keys() == SETTINGS.keys() - FLEET
    command: Any = typer.main.get_command(build(["simulate"]))
    known = {opt for parameter in command.commands["simulate"].params for opt in parameter.opts}
    assert {each.flag_of(name) for name, each in SETTINGS.items()} <= known


def test_each_field_has_its_help_and_its_documentation() -> None:
    for name, field in Scenario.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
    for name, setting in SETTINGS.items():
        assert setting.about.endswith("."), name


def test_unchanged_settings_are_keywords_of_the_core() -> None:
    stub = (Path(_core.__file__).parent / "_core.pyi").read_text()
    declared = stub.partition("def simulate(")[2].partition(") ->")[0]
    for name, setting in SETTINGS.items():
        if not setting.convert and option_of(Scenario.model_fields[name]) is None:
            assert f"    {name}: " in declared


def test_fields_are_checked_and_kept_in_their_shortest_form() -> None:
    given = Scenario(
        split="libra(probes=4)", guard={"window_seconds": 5}, transfer=25, tiers=False, order_slo_seconds=1
    )
    assert given.given == {
        "transfer": "25", "split": {"kind": "libra", "probes": 4}, "order_slo_seconds": 1.0, "tiers": "off",
        "guard": {"window_seconds": 5.0},
    }  # fmt: skip
    kept = lm.LibraSplit(probes=4)
    assert Scenario(split=kept, transfer=Transfer(25)).split is kept
    assert Scenario(policy="planner", split={"min_gain_seconds": 1}).split["kind"] == "apart"
    other = given.replace(guard=None, seed=3)
    assert (other.guard, other.seed, other.split) == (None, 3, given.split)
    assert given.guard is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"signals": "late"}, "signals: 'late' is not valid; expected exact, step_end, delayed or published"),
        ({"instances": 0}, "instances: 0 is not valid; expected at least 1"),
        ({"order_slo_seconds": 0}, "order_slo_seconds: 0 is not valid; expected more than 0"),
        ({"routers": 0}, "routers: 0 is not valid; expected 1 to 1024"),
        ({"token_stride": 1.5}, "token_stride: 1.5 is not valid; expected an integer"),
        ({"knobs": {"lam": "much"}}, "knobs.lam: 'much' is not valid; expected a number"),
        ({"transfer": "fast"}, "transfer 'fast' is not valid; expected none, or GB/s"),
        ({"host_tier": "2,x"}, "host_tier '2,x' is not valid"),
        ({"roles": "2P"}, "roles: 2 prefill, 0 decode"),
        ({"changes": "600 come 8"}, "fleet change '600 come 8' is not valid"),
        ({"split": {"kind": "libra", "probe": 4}}, "split.probe: 4 is not valid; unknown setting"),
        ({"local_order": "lifo"}, '"lifo" is not valid; expected one of fcfs'),
    ],
)
def test_an_error_has_the_field_the_value_and_what_was_expected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(lm.BadValueError) as refused:
        Scenario(**fields)
    assert message in str(refused.value)


def test_an_unknown_field_has_its_nearest_name() -> None:
    for call in (Scenario, lambda **fields: lm.simulate("slice", **fields)):
        with pytest.raises(
            TypeError, match=r"unexpected keyword argument 'router'; did you mean 'routers'\?"
        ):
            cast(Any, call)(router=2)
    with pytest.raises(
        TypeError, match=r"compare\(\) .* 'seeds'; a run has one seed: \[compare\(..., seed=each"
    ):
        lm.compare(["vllm"], seeds=3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        Scenario(zzz=1)


def test_a_run_takes_a_scenario_and_fields() -> None:
    trace = lm.load_trace("slice").first(50)
    base = Scenario(policy="least_requests", instances=3, routers=2)
    assert lm.simulate(trace, base).policy == "least_requests"
    by_fields = lm.simulate(trace, policy="least_requests", instances=3, routers=2, seed=1)
    again = lm.simulate(trace, base, seed=1)
    assert (again.finished_seconds == by_fields.finished_seconds).all()
    assert base.seed == 0


def parsed(**given: Any) -> dict[str, Any]:
    names = [parameter.name for parameter in flags.parameters()]
    return flags.values({name: given.get(name) for name in names})


def test_flags_have_the_values_of_files(tmp_path: Path) -> None:
    assert {parameter.default for parameter in flags.parameters()} == {None}
    found = parsed(
        transfer="25", order_slo_seconds=0.5, session_final=True, reported_cache_ratio=0.5,
        load_admission="ttft_seconds=5,max_waiting=9", local_order=["fcfs,las", "fcfs"],
    )  # fmt: skip
    assert found == {
        "transfer": "25", "order_slo_seconds": 0.5, "session_final": True, "reported_cache_ratio": 0.5,
        "load_admission": {"ttft_seconds": 5.0, "max_waiting": 9}, "local_order": ["fcfs", "las"],
    }  # fmt: skip
    for given, message in (
        ({"order_slo_seconds": 0.0}, "above 0"),
        ({"preempt": "swop"}, "expected recompute, swap"),
        ({"load_admission": "max_waitin=9"}, "max_waitin"),
        ({"local_order": ["lifo"]}, "expected one of fcfs"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            parsed(**given)
    path = tmp_path / "s.yaml"
    path.write_text("traces: slice\npolicies: lmetric\nsettings: {transfer: fast}\n")
    with pytest.raises(
        ConfigError, match=r"s\.yaml:3: settings\.transfer\[0\] = 'fast': .*expected none, or GB/s"
    ):
        load_study(path)


def test_options_have_flags_of_their_own() -> None:
    assert {option_of(field) for field in Scenario.model_fields.values()} - {None} == set(options.OPTIONS)
