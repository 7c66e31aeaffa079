"""`bench/rollouts.py`: the workload has the stated structure, and policies place as their sources
do."""

from __future__ import annotations

import json
import re
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import rollouts
from studies import ROOT

Rows = dict[tuple[str, float, str], dict[str, Any]]
SYNC, ASYNC = "synchronous", "asynchronous"


def test_a_worker_starts_its_next_group_when_all_rollouts_of_its_last_have_ended() -> None:
    made = rollouts.workload(1, 2)
    played = rollouts.run(made, "session hash", 40_000, 1)
    group = np.asarray(made.trace.sessions) // rollouts.SAMPLES
    for worker in range(rollouts.WORKERS):
        first, second = group == worker, group == worker + rollouts.WORKERS
        end = played.finished_seconds[first].max()
        starts = played.arrival_seconds[second & (np.asarray(made.trace.previous) < 0)]
        assert len(starts) == rollouts.SAMPLES
        np.testing.assert_allclose(starts, end)


def test_rollouts_of_a_group_share_their_first_prompt_and_nothing_else() -> None:
    trace = rollouts.workload(3, 1).trace
    sessions = np.asarray(trace.sessions)
    last = {int(session): number for number, session in enumerate(sessions)}
    task = trace.blocks(0)[: trace.input_tokens[0] // rollouts.BLOCK_TOKENS]
    ends = [trace.blocks(last[session]) for session in range(rollouts.SAMPLES)]
    assert all((blocks[: len(task)] == task).all() for blocks in ends)
    own = np.concatenate([blocks[len(task) :] for blocks in ends])
    assert len(own) == len(set(own.tolist())) > 1000
    assert trace.input_tokens.max() <= rollouts.MAX_CONTEXT


def decide(arguments: dict[str, Any], tenant: float, requests: list[float]) -> int:
    """The engine that a sticky policy chooses."""
    score = arguments["policy"].fn
    return int(np.argmin(score({"tenant": tenant, "bs": np.array(requests)})))


def test_new_sessions_go_to_the_engine_with_the_fewest_active_sessions() -> None:
    trace = rollouts.workload(1, 1).trace
    turns = rollouts.turns_of(trace)
    assert sorted(turns.values()) == sorted(np.bincount(np.asarray(trace.sessions)).tolist())
    policy, (one, two, three) = rollouts.sticky(trace), list(turns)[:3]
    homes = [decide(policy, session, [9.0, 0.0]) for session in (one, two)]
    assert sorted(homes) == [0, 1]
    for _ in range(turns[one] - 1):
        assert decide(policy, one, [9.0, 9.0]) == homes[0]
    assert decide(policy, three, [9.0, 0.0]) == homes[0]  # the first session has ended


def test_verls_gate_moves_each_session_and_its_margin_only_those_on_busy_engines() -> None:
    trace = rollouts.workload(1, 1).trace
    session = next(iter(rollouts.turns_of(trace)))
    for name, then in {"verl": 0, "verl, margin 2": 0, "verl, gate": 1}.items():
        policy = rollouts.POLICIES[name](trace)
        assert decide(policy, session, [0.0, 5.0, 5.0]) == 0
        assert decide(policy, session, [2.0, 0.0, 9.0]) == then
        assert decide(policy, session, [9.0, 9.0, 9.0]) == then  # balanced: nobody moves
    policy = rollouts.POLICIES["verl, margin 2"](trace)
    decide(policy, session, [0.0, 5.0, 5.0])
    assert decide(policy, session, [3.0, 0.0, 5.0]) == 1


@pytest.mark.nightly
def test_hashing_thrashes_where_counting_sessions_does_not() -> None:
    made = rollouts.workload(1, 1)
    blocks = round(rollouts.working_set(1) / 0.4 / rollouts.ENGINES / rollouts.BLOCK_TOKENS)
    hashed, counted = (
        rollouts.figures(made.trace, rollouts.run(made, policy, blocks, 1))
        for policy in ("session hash", "sticky_least_loaded")
    )
    assert hashed["worst_hits"] < 0.5 < 0.9 < counted["worst_hits"]
    assert hashed["group_mean"] > 1.1 * counted["group_mean"]


@pytest.fixture(scope="module")
def results() -> Rows:
    """The rows of the shipped results by mode, pressure and policy."""
    told = json.loads(max(ROOT.glob("bench/results/*-rollouts.json")).read_text())
    return {(row["mode"], row["pressure"], row["policy"]): row for row in told["rows"]}


def test_the_page_has_the_figures_of_the_results(results: Rows) -> None:
    seconds = [(ASYNC, 0.7, "group_mean"), (ASYNC, 1.3, "group_mean"), (ASYNC, 0.7, "group_max")]
    seconds += [(ASYNC, 1.3, "group_max"), (SYNC, 1.0, "makespan")]
    shares = [(ASYNC, 1.0, "hits"), (ASYNC, 1.0, "recomputed"), (ASYNC, 1.3, "late_tokens")]
    page = (ROOT / "docs" / "how-to" / "rl_trainers.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d.*) \|$", page.partition("## Choose a policy")[2], re.MULTILINE)
    assert len(rows) == 11
    for policy, cells in rows:
        for column, cell in zip(seconds + shares, cells.split(" | "), strict=True):
            values = np.array(results[column[0], column[1], policy][column[2]])
            values = values * 100 if column in shares else values
            mean, least, most = (f"{each:,.0f}" for each in (values.mean(), values.min(), values.max()))
            assert cell == f"{mean} [{least}, {most}]", (policy, column)


def test_the_published_orders_hold(results: Rows) -> None:
    def mean(pressure: float, policy: str, figure: str = "group_mean") -> float:
        return fmean(results[ASYNC, pressure, policy][figure])

    pressures = 0.4, 0.7, 1.0, 1.3
    changes = [mean(each, "sticky_least_loaded") / mean(each, "session hash") - 1 for each in pressures]
    assert [f"{100 * change:.0f}" for change in changes] == ["-5", "-40", "-32", "-23"]
    for policy, shares, slowdown in (("session hash", [54, 5], 3.2), ("sticky_least_loaded", [81, 3], 1.3)):
        found = [round(100 * mean(0.7, policy, name)) for name in ("engine_hits_min", "worst_hits")]
        assert (found, round(mean(0.7, policy, "slowdown"), 1)) == (shares, slowdown)
    for pressure in pressures:
        assert mean(pressure, "verl, margin 2") < mean(pressure, "verl, gate")


def test_fresh_seeds_confirm_the_orders() -> None:
    told = json.loads((ROOT / "bench/results/2026-11-28-rollouts-fresh.json").read_text())
    assert not set(told["seeds"]) & {1, 2, 3}
    rows = {(row["mode"], row["pressure"], row["policy"]): row for row in told["rows"]}

    def mean(pressure: float, policy: str, figure: str = "group_mean") -> float:
        return fmean(rows[ASYNC, pressure, policy][figure])

    pairs = {
        ("default, both", "cache_aware"): [-5, -34],
        ("sticky_least_loaded", "session hash"): [-41, -21],
        ("verl, margin 2", "verl, gate"): [-26, -3],
    }
    for (one, other), changes in pairs.items():
        assert [round(100 * (mean(each, one) / mean(each, other) - 1)) for each in (0.7, 1.3)] == changes
    slowest = [round(mean(1.3, each, "group_max")) for each in ("default", "cache_aware", "default, both")]
    assert slowest == [3599, 2364, 1762]
    for policy, change in (("default, finish_session", -40), ("default, max_hold_seconds", -19)):
        assert round(100 * (mean(1.3, policy, "group_max") / slowest[0] - 1)) == change
