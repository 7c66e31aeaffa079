"""Our strategy in a running LiteLLM proxy, over emulated engines. TEST_LITELLM_VENV names an
environment with litellm[proxy] and the dependencies of this package; else the example makes one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lmetric.defaults import DEFAULT_POLICY

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "litellm"
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    venv = Path(os.environ.get("TEST_LITELLM_VENV") or ROOT / ".cache" / "litellm")
    environment = {**os.environ, "LITELLM_VENV": str(venv)}
    if "TEST_LITELLM_VENV" in os.environ:
        if not (venv / "bin" / "litellm").exists():
            raise FileNotFoundError(f"TEST_LITELLM_VENV={venv}: no LiteLLM there")
    else:
        subprocess.run([EXAMPLE / "run", "--install-only"], env=environment, check=True)
    path = os.pathsep.join([str(ROOT / "python"), str(EXAMPLE)])
    # Without the variable, LiteLLM downloads a list of prices.
    return {**environment, "PYTHONPATH": path, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def found(environment: dict[str, str]) -> dict[str, Any]:
    return result_of("litellm_checks.py", environment)


@pytest.fixture(scope="module")
def library(environment: dict[str, str]) -> dict[str, Any]:
    return result_of("litellm_library.py", environment)


def result_of(name: str, environment: dict[str, str]) -> dict[str, Any]:
    python = Path(environment["LITELLM_VENV"]) / "bin" / "python"
    program = Path(__file__).parent / name
    done = subprocess.run([python, program], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_example_runs_with_one_command(environment: dict[str, str]) -> None:
    done = subprocess.run([EXAMPLE / "run"], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    *turns, last = done.stdout.splitlines()
    assert len(turns) == 9
    assert all(" 0 of " not in line for line in turns[3:]), done.stdout
    assert last.startswith(f"9 decision records, the first by policy {DEFAULT_POLICY}: ")


def test_requests_follow_the_engines_kv_events(found: dict[str, Any]) -> None:
    assert set(found["modes"].values()) == {"exact"}
    assert {each["engine"] for each in found["again"]} == {found["first"]["engine"]}
    assert all(each["cached"] > 0 for each in found["again"])


@pytest.mark.parametrize("after", ["answers", "stream", "failure", "all"])
def test_nothing_stays_in_flight(found: dict[str, Any], after: str) -> None:
    assert found[f"after_{after}"]["in_flight"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_returns_its_counts(found: dict[str, Any], stream: bool) -> None:
    before, state = found[f"left_{stream}"]
    assert before == 1
    assert state["in_flight"] == 0


def test_a_failed_engine_does_not_fail_requests(found: dict[str, Any]) -> None:
    assert [each["status"] for each in found["one_engine"]] == [200] * 4
    assert len({each["engine"] for each in found["one_engine"]}) == 1
    assert found["no_engine"] >= 400


def test_streams_outside_the_proxy_return_their_counts(library: dict[str, Any]) -> None:
    assert library["while_streaming"] == library["abandoned"] == 1
    ended = [library[name] for name in ("after_answers", "after_cancel", "after_drop")]
    assert ended == [True, True, True]
    assert (library["within_limit"], library["after_limit"]) == (False, True)
    assert library["own_limit"] == 9_000
    assert library["callbacks"] == 0


def test_fields_of_a_body_reach_the_core(library: dict[str, Any]) -> None:
    assert library["pepper"] > 100
    assert library["salt"] == 0
    assert library["no_turn"] < library["plain"]
    assert (library["limited"], library["session"]) == (7, "u")


def test_system_prompts_of_coding_agents_are_counted(library: dict[str, Any]) -> None:
    agents = library["agents"]
    assert agents["messages"] == agents["responses"] == agents["chat"]
    assert agents["messages_tools"] == agents["tools"]
    assert len(agents["tools"]) >= len(agents["chat"]) > 100  # the tokens are known


def test_names_that_clients_invent_make_no_pools(library: dict[str, Any]) -> None:
    assert library["pools"] == {"llama": ["llama"], "vllm/0": ["llama", "vllm/*"]}


def test_every_decision_has_a_record(found: dict[str, Any]) -> None:
    records = found["records"]
    assert len(records) == found["after_all"]["decisions"]
    assert {record["policy"] for record in records} == {"lmetric"}
    outcomes = {record["outcome"] for record in records}
    assert {"finished", "cancelled"} <= outcomes, outcomes
    assert found["completion"] == 200
    assert found["stream_events"] > 4
