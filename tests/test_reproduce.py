"""The rerun of the LMETRIC study: its driver, its page, and what its figures rest on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies import Study

ROOT = Path(__file__).parent.parent
STUDY = Study("reproduce", threads=True)
SLICE = ROOT / "python" / "lmetric_lab" / "data" / "mooncake_conversation_slice.jsonl.gz"


@pytest.fixture
def reproduce() -> Iterator[None]:
    yield from STUDY.importable()


@pytest.mark.nightly
def test_quick_figures_and_the_policy_that_must_lose(tmp_path: Path) -> None:
    told = STUDY.made(tmp_path, "--quick", "--figure", "21")["21"]
    assert told["quick"]
    assert told["seeds"] == 2
    for stage in ("conversation", "chat"):
        runs = [row for row in told["runs"] if row["stage"] == stage]
        means = {row["policy"]: np.mean(row["ttft_mean_s"]) for row in runs}
        assert max(means, key=lambda name: means[name]) == "always_worst"
        assert means["lmetric"] < means["vllm"] < means["always_worst"]
    against_vllm = told["claims"][0]["text"]
    assert [row["stage"] for row in told["rows"]] == ["conversation", "chat"]
    assert all(value < 0 for row in told["rows"] for value in row[against_vllm])


def test_missing_traces_are_named(tmp_path: Path) -> None:
    missing = STUDY.run("--figure", "10", "--traces", tmp_path, "--results", tmp_path)
    assert missing.returncode == 1
    assert "mooncake_conversation.jsonl.gz" in missing.stderr
    assert "--traces" in missing.stderr


def test_a_trace_file_is_a_scenario(tmp_path: Path) -> None:
    argv = ["--scenario", str(SLICE), "--profile", "qwen2-7b-h20", "--seeds", "1"]
    told = STUDY.made(tmp_path, *argv, "--figure", "stages,7,11,signals")
    assert {row["stage"] for row in told["7"]["rows"]} == {"mooncake_conversation_slice"}
    assert told["7"]["rows"][0]["KV-awareness lowers the mean TTFT (4.2)"][0] < 0
    (shown,) = told["stages"]["traces"]
    assert (shown["stage"], shown["block"]) == ("`mooncake_conversation_slice`", "512")
    assert int(shown["cache, thousand tokens"].replace(",", "")) == 1345  # of qwen2-7b-h20
    assert len(told["signals"]["runs"]) == len({row["signals"] for row in told["signals"]["runs"]})


def test_a_trace_without_prefixes_is_a_scenario(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0,{200 + at % 7},{50 + at % 11}" for at in range(600)]
    (path := tmp_path / "flat.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    told = STUDY.made(tmp_path / "made", "--scenario", str(path), "--seeds", "1", "--figure", "7,19")
    assert told["7"]["rows"] == []
    assert [row["stage"] for row in told["19"]["rows"]] == ["flat"]


@pytest.mark.nightly
def test_a_scenario_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    def error(*argv: str | Path) -> str:
        done = STUDY.run("--figure", "7", *argv)
        assert done.returncode != 0
        return done.stderr.splitlines()[-1]

    missing, bad = tmp_path / "missing.jsonl", tmp_path / "bad.jsonl"
    bad.write_text("no trace\n")
    assert f"{missing}: No such file" in error("--scenario", missing)
    assert "is no request; known formats: mooncake" in error("--scenario", bad)
    bad.write_text('{"timestamp": 0, "input_length": 9, "output_length": 9}\n' * 30)
    assert "30 requests in one half" in error("--scenario", bad)
    assert "is named 'mooncake_conversation_slice' already" in error("--scenario", SLICE, "--scenario", SLICE)
    assert "profile 'h2000'" in error("--scenario", SLICE, "--profile", "h2000")
    assert "guard has scenarios of its own" in error("--scenario", SLICE, "--figure", "guard")


@pytest.mark.usefixtures("reproduce")
@pytest.mark.parametrize(
    ("expected", "values", "verdict"),
    [
        ("less", [-0.3, -0.1], "same"),
        ("less", [0.3, 0.1], "opposite"),
        ("less", [-0.3, 0.1], "not told apart"),
        ("less", [-0.004, -0.003], "not told apart"),
        ("more", [0.3, 0.1], "same"),
        ("about 0", [0.04, -0.01], "same"),
        ("about 0", [0.05, 0.04], "other"),
        ("", [1.0], ""),
    ],
)
def test_verdicts_need_every_seed(expected: Any, values: list[float], verdict: str) -> None:
    from book import Ours

    assert Ours("stage", values).verdict(expected) == verdict


@pytest.mark.usefixtures("reproduce")
def test_equation_2_of_a_class() -> None:
    from hotspots import Seen

    # A fifth of the requests, 2 of 16 instances: (0.2 / 0.8) / (2 / 14).
    assert Seen(20, 0.2, 2).factor == pytest.approx(1.75)
    assert Seen(20, 0.2, 16).factor == 0
    assert Seen(20, 1.0, 16).factor == 0


@pytest.mark.usefixtures("reproduce")
@pytest.mark.parametrize("known", [True, False])
def test_a_made_hot_spot(known: bool) -> None:
    from hot_spot import BEFORE, SURGE, surge

    trace, hot, with_prefix = surge(1, 0.3, 2000, known=known)
    during = (trace.arrival_seconds >= SURGE[0]) & (trace.arrival_seconds < SURGE[1])
    assert hot.sum() / during.sum() == pytest.approx(0.3, abs=0.02)
    first = trace.hash_ids[trace.hash_offsets[:-1]]
    assert len(np.unique(first[hot])) == 1
    outside = int((first[~during] == first[hot][0]).sum())
    assert (outside > 0) == known
    assert (first == first[hot][0]).tolist() == with_prefix.tolist()
    assert outside < 2 * BEFORE * 0.3 * len(trace)
    assert trace.input_tokens[hot].min() >= 2000


@pytest.mark.nightly
@pytest.mark.usefixtures("reproduce")
@pytest.mark.parametrize("tokens", [8000, 16000])
@pytest.mark.parametrize("known", [True, False])
def test_the_guard_mends_a_surge(known: bool, tokens: int) -> None:
    """Fidelity 2.2 (c): better than no guard, and at most 5% worse than vLLM's balancer. Requests
    before the surge count, too, so each policy pays for all its copies of the prefix."""
    from hot_spot import surge
    from lmetric.profiles import load_profile
    from lmetric_lab.sim.run import simulate
    from lmetric_lab.sim.workload import prepare

    trace, hot, with_prefix = surge(300, 0.4, tokens, known=known)
    profile = load_profile("qwen3-30b-a3b-h20").in_blocks_of(64)
    workload = prepare(trace, profile).faster(0.9)

    def played(policy: str, guard: bool) -> np.ndarray:
        """Returns TPOT of the hot requests, TTFT of all with the prefix, TTFT and TPOT of all."""
        run = simulate(
            workload, policy=policy, guard=guard, profile=profile, instances=16, admission="vllm", seed=1
        )
        ttft, tpot = run.ttft_seconds, run.tpot_seconds
        return np.array([np.nanmean(tpot[hot]), ttft[with_prefix].mean(), ttft.mean(), np.nanmean(tpot)])

    on, off, vllm = played("lmetric", True), played("lmetric", False), played("vllm", False)
    assert (on <= 1.05 * vllm).all(), on / vllm
    assert on[0] < off[0]
    if known:
        assert (on < off).all(), on / off


def test_the_study_with_curves_is_valid() -> None:
    from lmetric_lab.sim.study_file import load_study

    study = load_study(STUDY.driver.parent / "curves.yaml")
    assert {setup.trace.label for setup in study.setups} == {"conversation", "agent"}
    assert {"lmetric", "vllm", "linear(lam=0.7)", "simulation"} <= {s.policy.label for s in study.setups}
