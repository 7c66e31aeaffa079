"""Policies and planners by maturity: offered by `serve`, behind a flag, or for studies only."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

import lmetric as lm
from lmetric import options
from lmetric._core import check_policy, planners, policy_table
from lmetric.cli.app import build
from lmetric.config import ConfigError, ServerConfig, load_config
from lmetric.server import check_config
from server_world import world

ROOT = Path(__file__).parents[1]
MATURITY = {row["name"]: row["maturity"] for row in policy_table()}
STUDY_POLICIES = sorted(name for name, maturity in MATURITY.items() if maturity == "study")
STUDY_PLANNERS = sorted(set(planners()) - set(planners("experimental")))
FOR_STUDIES = "is for studies only: use it in simulate or study"
NEEDS_FLAG = "is experimental; set `experimental: true` (`serve --experimental`) to use it"


def loaded(tmp_path: Path, text: str) -> ServerConfig:
    """A configuration that `serve` would start with. Raises LmetricError."""
    file = tmp_path / "router.yaml"
    file.write_text(f"engines: [{{url: 'http://127.0.0.1:1'}}]\nmodel: m\n{text}")
    config = load_config(file, environ={})
    check_config(config)
    return config


def test_every_maturity_is_used() -> None:
    assert set(Counter(MATURITY.values())) == {"stable", "experimental", "study"}
    assert {"lmetric", "vllm", "least_requests", "round_robin"} <= {
        name for name, maturity in MATURITY.items() if maturity == "stable"
    }
    assert {"always_worst", "simulation"} <= set(STUDY_POLICIES)
    assert MATURITY["sibyl_plus"] == "experimental"
    assert STUDY_PLANNERS == ["libra_three"]
    assert planners("stable") == []


@pytest.mark.parametrize("name", STUDY_POLICIES)
@pytest.mark.parametrize("experimental", ["", "experimental: true\n"], ids=["", "experimental"])
def test_serve_refuses_policies_for_studies(tmp_path: Path, name: str, experimental: str) -> None:
    for place in (
        f"policy: {name}",
        f"decode_policy: {name}",
        f"policies: {{mine: {name}}}",
        f"models: [{{name: a, policy: {name}}}]",
    ):
        with pytest.raises(lm.LmetricError, match=f'policy "{name}" {FOR_STUDIES}'):
            loaded(tmp_path, experimental + place)


@pytest.mark.parametrize("name", sorted(name for name in MATURITY if MATURITY[name] == "experimental"))
def test_serve_takes_experimental_policies_with_the_flag(tmp_path: Path, name: str) -> None:
    for place in (f"policy: {name}", f"decode_policy: {name}", f"policies: {{mine: {name}}}"):
        with pytest.raises(lm.LmetricError) as refused:
            loaded(tmp_path, place)
        assert str(refused.value) == f'policy "{name}" {NEEDS_FLAG}'
        assert loaded(tmp_path, f"experimental: true\n{place}").experimental


def test_serve_takes_stable_policies_and_expressions(tmp_path: Path) -> None:
    for policy in (*(name for name in MATURITY if MATURITY[name] == "stable"), "bs + q_bs"):
        assert loaded(tmp_path, f"policy: {policy}").policy == policy


def test_serve_refuses_planners_for_studies_and_wants_the_flag_for_others(tmp_path: Path) -> None:
    for experimental in ("", "experimental: true\n"):
        with pytest.raises(ConfigError, match=f"'libra_three': it {FOR_STUDIES}"):
            loaded(tmp_path, f"{experimental}split: libra_three")
    for name in ("libra", "apart"):
        given = f"split: {name}"
        with pytest.raises(lm.LmetricError) as refused:
            loaded(tmp_path, given)
        assert str(refused.value) == f'split "{name}" {NEEDS_FLAG}'
        loaded(tmp_path, f"experimental: true\n{given}")


def test_models_inherit_the_flag(tmp_path: Path) -> None:
    on = "experimental: true\n"
    loaded(tmp_path, f"{on}models: [{{name: a, policy: dynamo}}, {{name: b, experimental: false}}]")
    with pytest.raises(lm.LmetricError, match="is experimental"):
        loaded(tmp_path, f"{on}models: [{{name: b, policy: dynamo, experimental: false}}]")


def test_help_and_schema_name_no_part_for_studies() -> None:
    shown = CliRunner().invoke(build(["serve"]), ["serve", "--help-all"], env={"COLUMNS": "200"}).stdout
    schema = json.dumps(ServerConfig.model_json_schema())
    pages = [(ROOT / "docs" / "reference" / page).read_text() for page in ("configuration.md", "settings.md")]
    names = [*STUDY_POLICIES, *STUDY_PLANNERS]
    for text in (shown, schema, *pages):
        assert [name for name in names if re.search(rf"\b{name}\b", text)] == []
    assert "--experimental" in shown
    assert "experimental" in ServerConfig.model_fields


@pytest.mark.parametrize("offers", ["stable", "experimental"])
def test_a_router_of_the_product_refuses_parts_for_studies(offers: Any) -> None:
    router = lm.Router(offers=offers)
    for name in STUDY_POLICIES:
        for replace in (router.set_policy, router.set_decode_policy):
            with pytest.raises(lm.BadValueError, match=FOR_STUDIES):
                replace(name)
    with pytest.raises(lm.BadValueError, match=f'split "libra_three" {FOR_STUDIES}'):
        router.configure(split=lm.LibraSplit(parts=3))
    with pytest.raises(lm.BadValueError, match=r"is for studies only|is experimental"):
        router.configure(split=lm.LibraSplit(lengths_given=True))


@pytest.mark.parametrize("offers", ["stable", "experimental"])
def test_a_router_of_the_product_refuses_rules_for_studies(offers: Any) -> None:
    router = lm.Router(offers=offers)
    studied: list[dict[str, Any]] = [
        {"programs": options.ThunderAgent()},
        {"programs": options.ProgramAuto(gap_error=2.0)},
        {"programs": options.ProgramAdmission(free=0.5)},
        {"rebalance": options.Llumnix()},
        {"rebalance": options.Star(prediction=False)},
        {"rebalance": options.Star(forecast="given")},
    ]
    for option in studied:
        with pytest.raises(lm.BadValueError, match=FOR_STUDIES):
            router.configure(**option)
        lm.Router().configure(**option)
    router.configure(programs=options.ProgramAuto(), rebalance=options.Star())


def test_a_router_of_the_product_refuses_ablations() -> None:
    router = lm.Router("sibyl", offers="experimental")
    with pytest.raises(lm.BadValueError, match=f'"sibyl_parts" {FOR_STUDIES}'):
        router.set_policy("sibyl_parts", knobs={"type1": 0})
    with pytest.raises(lm.BadValueError, match="offers"):
        lm.Router(offers="all")  # type: ignore[arg-type]
    with pytest.raises(lm.UnknownNameError, match='did you mean "lmetric"'):
        check_policy("lmetrik", {}, "stable")


def test_routers_and_simulations_take_all() -> None:
    for name in MATURITY:
        assert lm.Router(name).stats()["policy"] == name
    router = lm.Router()
    router.configure(split=lm.LibraSplit(parts=3, lengths_given=True))


async def test_the_admin_api_refuses_what_the_server_does_not_offer() -> None:
    async def put(w: Any, policy: str) -> tuple[int, Any]:
        async with w.client.put(w.url + "/admin/policy", json={"policy": policy}) as response:
            return response.status, orjson.loads(await response.read())

    async with world(1, admin=True, experimental=False) as w:
        status, told = await put(w, "always_worst")
        assert (status, FOR_STUDIES in told["error"]["message"]) == (400, True)
        status, told = await put(w, "dynamo")
        assert (status, NEEDS_FLAG in told["error"]["message"]) == (400, True)
        assert (await put(w, "vllm"))[0] == 200
    async with world(1, admin=True, experimental=True) as w:
        assert (await put(w, "dynamo"))[0] == 200
        assert (await put(w, "sibyl_plus"))[0] == 200
        assert (await put(w, "simulation"))[0] == 400


def test_the_core_depends_on_no_part_for_studies() -> None:
    told = subprocess.run(
        ["cargo", "metadata", "--offline", "--locked", "--format-version", "1"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    metadata = orjson.loads(told.stdout)
    names = {package["id"]: package["name"] for package in metadata["packages"]}
    needs = {
        node["id"]: [dep["pkg"] for dep in node["deps"] if any(k["kind"] is None for k in dep["dep_kinds"])]
        for node in metadata["resolve"]["nodes"]
    }

    def all_of(root: str) -> set[str]:
        found: set[str] = set()
        left = [next(one for one, name in names.items() if name == root)]
        while left:
            if (one := left.pop()) not in found:
                found.add(one)
                left += needs[one]
        return {names[one] for one in found} - {root}

    assert "lmetric-study" not in all_of("lmetric-core")
    assert {"lmetric-study", "lmetric-core"} <= all_of("lmetric-py")
