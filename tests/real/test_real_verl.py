"""verl's own factory starts our load balancer as an actor of a real Ray. TEST_VERL_VENV names an
environment with Ray and verl; else tests/real/install_verl makes one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    venv = Path(os.environ.get("TEST_VERL_VENV") or ROOT / ".cache" / "verl")
    if not (venv / "bin" / "python").exists():
        if "TEST_VERL_VENV" in os.environ:
            raise FileNotFoundError(f"TEST_VERL_VENV={venv}: no environment there")
        subprocess.run([Path(__file__).parent / "install_verl", venv], check=True)
    config = tmp_path_factory.mktemp("verl") / "router.yaml"
    config.write_text("router_class: lmetric.gateways.verl.LmetricLoadBalancer\npolicy: lmetric\n")
    program = Path(__file__).parent / "verl_checks.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [venv / "bin" / "python", program, config],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_class_has_all_methods_of_verls_protocol(found: dict[str, Any]) -> None:
    assert found["missing"] == []
    assert found["version"] == "0.9.1"


def test_turns_of_a_trajectory_stay_on_a_server_and_trajectories_are_balanced(found: dict[str, Any]) -> None:
    homes = [set(servers) for servers in found["homes"].values()]
    assert all(len(servers) == 1 for servers in homes)
    counts = [sum(server in servers for servers in homes) for server in ("s0", "s1", "s2", "s3")]
    assert counts == [4, 4, 4, 4]


def test_counts_return_to_zero_and_a_removed_server_gets_nothing(found: dict[str, Any]) -> None:
    assert found["in_flight"] == 0
    assert found["without"] == ["s1", "s2", "s3"]
    assert "s0" not in found["later"]
    assert found["empty"] == "No available servers in load balancer"
