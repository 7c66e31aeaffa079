"""Fidelity 2.2 (b), 4.6: settings that do harm or nothing on engines without what they need.

Moves by recomputation made P99 TPOT 1.0 to 11 times the value without moves. SIBYL's look-ahead is
inert if the decode engine is chosen after the prefill.
"""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lmetric as lm
from lmetric.cli.app import build
from lmetric.config import ConfigError, PoolSettings, load_config
from lmetric.server import check_config
from lmetric.server.fleet.summary import summary
from moves_world import LONG, mover, moving, plain
from pd_world import nixl, pd
from split_world import COMPLETIONS, asked, body_of


def check(tmp_path: Path, text: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"engines: [{{url: 'http://127.0.0.1:1'}}]\nmodel: m\n{text}")
    check_config(load_config(file, environ={}))


@pytest.mark.parametrize("rule", ["star", "{kind: star, forecast: curve}"])
def test_serve_refuses_rules_that_move_by_recomputation(tmp_path: Path, rule: str) -> None:
    for text in (
        f"rebalance: {rule}\nmigration_by: recompute",
        f"models: [{{name: a, rebalance: {rule}, migration_by: recompute}}]",
    ):
        with pytest.raises(ConfigError, match=r"migration_by = 'recompute': .*expected fetch, .*Nixl"):
            check(tmp_path, text)
    check(tmp_path, f"rebalance: {rule}")
    check(tmp_path, "migration_by: recompute")


async def test_rounds_move_nothing_without_transfer_and_ready_warns() -> None:
    star = {"kind": "star", "period_seconds": 0.05}
    kinds = [plain(clock_speed=1.0) for _ in range(2)]
    async with moving(*kinds, rebalance=star, migration_by="fetch") as w:
        engines = w.server.fleet.models[0].engines
        last = list(engines.values())[1]
        last.draining = True
        last.hold()
        body = body_of(COMPLETIONS, LONG, stream=True, max_tokens=200)
        tasks = [asyncio.create_task(asked(w, COMPLETIONS, body)) for _ in range(6)]
        await w.until(lambda: len(mover(w).running) == 6)
        last.draining = False
        last.hold()
        for said in await asyncio.gather(*tasks):
            assert said["record"]["migrations"] == []
        assert set(mover(w).outcomes) <= {"no_transfer"}
        (warning,) = [
            each for each in summary(w.server.fleet, names=True)["warnings"] if each["what"] == "rebalance"
        ]
        assert sorted(warning["names"]) == sorted(engines)
        assert "NixlConnector" in warning["fix"]


@pytest.mark.parametrize(("policy", "warns"), [("sibyl", True), ("least_requests", False)])
async def test_sibyl_without_its_look_ahead_warns(policy: str, warns: bool) -> None:
    async with pd(nixl("prefill"), nixl("decode"), decode_policy=policy, experimental=True) as w:
        engines = w.server.fleet.models[0].engines.values()
        await w.until(lambda: all(engine.unusable is None for engine in engines))
        found = [
            each
            for each in summary(w.server.fleet, names=False)["warnings"]
            if each["what"] == "decode_policy"
        ]
        assert len(found) == warns
        assert all("sibyl_plus" in each["fix"] for each in found)


def test_simulations_move_as_serve_does_by_default(tmp_path: Path) -> None:
    """Simulations always sent the KV cache, and the command had no way to do otherwise."""
    assert PoolSettings().migration_by == "fetch"
    assert lm.Scenario().migration_by == "fetch"
    done = CliRunner().invoke(
        build(["simulate"]), ["simulate", "--trace", "slice", "--migration-by", "fetch"]
    )
    assert (done.exit_code, "needs --rebalance" in done.output) == (2, True)
