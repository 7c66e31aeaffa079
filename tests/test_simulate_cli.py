"""`lmetric-router simulate` as a user meets it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmetric
from cli_world import call, process
from lmetric_lab.sim.traces import load_trace

ROOT = Path(__file__).parent.parent
SLICE = ROOT / "python" / "lmetric_lab" / "data" / "mooncake_conversation_slice.jsonl.gz"
Run = Callable[..., subprocess.CompletedProcess[str]]
BASE = ["--trace", str(SLICE), "--requests", "120", "--instances", "8"]


def simulate(*arguments: str | Path, run: Run = call) -> subprocess.CompletedProcess[str]:
    return run("simulate", *map(str, arguments), COLUMNS="200")


def told(*arguments: str | Path, run: Run = call) -> dict[str, Any]:
    done = simulate(*BASE, *arguments, "--json", "-", run=run)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_json_has_a_run_for_each_policy_and_seed() -> None:
    runs = told("--policy", "vllm,lmetric", "--policy", "linear(lam=0.5)", "--seeds", "2")["runs"]
    assert [(run["policy"], run["seed"]) for run in runs] == [
        (policy, seed) for policy in ("vllm", "lmetric", "linear(lam=0.5)") for seed in (0, 1)
    ]
    for run in runs:
        assert run["requests"] == 120
        assert 0 <= run["block_hit_ratio"] <= 1
        assert 0 <= run["hit_ratio"] <= 1
        assert run["imbalance"] > 0
        assert run["goodput"]["share"] == 1
        assert run["wall_seconds"] > 0
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
            spread = run[name]
            assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["p999"] <= spread["max"]
            assert spread["mean"] > 0


def test_the_command_and_the_function_say_the_same() -> None:
    (run,) = told("--policy", "lmetric", "--speed", "3", "--measure", "0.25:0.75", "--slo-ttft", "1")["runs"]
    trace = load_trace(SLICE).first(120).faster(3)
    columns = lmetric.simulate(trace, policy="lmetric", instances=8)
    kept = slice(30, 90)
    ttft = columns.ttft_seconds[kept]
    assert run["requests"] == 60
    assert run["ttft_seconds"]["mean"] == pytest.approx(ttft.mean(), rel=1e-12)
    assert run["ttft_seconds"]["p99"] == pytest.approx(np.percentile(ttft, 99), rel=1e-12)
    assert run["tpot_seconds"]["p50"] == pytest.approx(np.nanmedian(columns.tpot_seconds[kept]), rel=1e-12)
    hits, prompts = columns.hit_tokens[kept].sum(), columns.input_tokens[kept].sum()
    assert run["hit_ratio"] == pytest.approx(hits / prompts, rel=1e-12)
    assert run["goodput"]["share"] == pytest.approx((ttft <= 1).mean())


def test_the_same_seed_gives_the_same_figures_whatever_runs_beside_it() -> None:
    first, second = (
        told("--policy", "random,lmetric", "--seeds", "3", "--jobs", jobs, run=run)["runs"]
        for jobs, run in (("1", call), ("3", process))
    )
    for run in [*first, *second]:
        del run["wall_seconds"]
    assert first == second
    # Another seed draws other instances.
    assert first[0]["ttft_seconds"] != first[1]["ttft_seconds"]


def test_local_orders_are_runs_of_their_own() -> None:
    busy = ["--instances", "1", "--speed", "9"]
    flags = [*busy, "--policy", "vllm,lmetric", "--local-order", "fcfs,srpt", "--local-order", "las"]
    answer = told(*flags)
    runs = answer["runs"]
    assert [(run["policy"], run["local_order"]) for run in runs] == [
        (policy, order) for policy in ("vllm", "lmetric") for order in ("fcfs", "srpt", "las")
    ]
    assert "local_order" not in answer["setting"]["settings"]
    assert runs[1]["e2e_seconds"]["mean"] < runs[0]["e2e_seconds"]["mean"]
    assert runs[2]["e2e_seconds"] != runs[0]["e2e_seconds"]
    done = simulate(*BASE, *flags)
    assert done.returncode == 0, done.stderr
    for label in ("vllm, fcfs", "vllm, srpt", "lmetric, las"):
        assert label in done.stdout
    few = ["--policy", "vllm", *busy, "--admission", "vllm", "--preempt", "swap:25"]
    own = told(*few, "--local-order", "uniboost(gamma=0.2,bin_tokens=64),uniboost")
    assert [run["local_order"] for run in own["runs"]] == ["uniboost(gamma=0.2,bin_tokens=64)", "uniboost"]
    assert own["setting"]["settings"]["preempt"] == "swap:25"
    (alone,) = told("--policy", "vllm", *busy)["runs"]
    assert alone["local_order"] == "fcfs"
    assert alone["e2e_seconds"] == runs[0]["e2e_seconds"]


def test_splits_are_runs_of_their_own() -> None:
    busy = ["--instances", "2", "--speed", "9", "--policy", "least_requests"]
    # Also splits that gain nothing: of so few requests, none gains.
    splits = ["--split", "none,libra", "--split-settings", "min_gain=-1"]
    answer = told(*busy, *splits, "--rebalance", "none", "--decode-policy", "least_tokens")
    runs = answer["runs"]
    assert [(run["split"], run["decode_policy"]) for run in runs] == [
        ("none", None),
        ("libra", "least_tokens"),
    ]
    assert "split" not in answer["setting"]["settings"]
    assert runs[0]["splits"] == 0 < runs[1]["splits"] <= runs[1]["requests"]
    assert {"rebalance", "moves", "oom", "token_goodput", "tbt_p99_seconds"} <= runs[1].keys()
    done = simulate(*BASE, *busy, "--split", "none,libra")
    assert done.returncode == 0, done.stderr
    assert "least_requests, libra" in done.stdout or "least_requests + least_requests, libra" in done.stdout
    for flag, name in (("--split", "force"), ("--rebalance", "lifo")):
        done = simulate(*BASE, *busy, flag, name)
        assert done.returncode == 2
        assert name in done.stderr


def test_planner_cuts_and_pulls_unless_told_otherwise() -> None:
    busy = ["--instances", "4", "--speed", "9"]
    runs = told(*busy, "--policy", "lmetric,planner", "--transfer", "25")["runs"]
    assert [(run["split"], run["decode_policy"]) for run in runs] == [
        ("none", None),
        ("apart", "least_requests"),
    ]
    assert runs[0]["splits"] == 0 < runs[1]["splits"]
    trace = load_trace(SLICE).first(120).faster(9)
    columns = lmetric.simulate(trace, policy="planner", instances=4, transfer="25")
    assert runs[1]["e2e_seconds"]["mean"] == pytest.approx(float(columns.e2e_seconds.mean()))
    assert (columns.cut_tokens >= 0).sum() == runs[1]["splits"]
    # Always at the prompt's end, and elsewhere.
    cut = columns.cut_tokens >= 0
    # Behind the prompt, or behind the first token where the way there is short.
    assert set(columns.cut_tokens[cut] - columns.input_tokens[cut]) == {0, 1}
    assert (columns.decode_instance[cut] != columns.instance[cut]).all()
    (whole,) = told(*busy, "--policy", "planner", "--split", "none", "--prefix-fetch", "none")["runs"]
    plain = lmetric.simulate(trace, policy="planner", instances=4, split="none", prefix_fetch="none")
    assert whole["splits"] == 0 == (plain.cut_tokens >= 0).sum()
    assert whole["e2e_seconds"]["mean"] == pytest.approx(float(plain.e2e_seconds.mean()))
    # A gain that is never met: nothing goes.
    stays = ["--split-settings", "min_gain_seconds=1e5"]
    (run,) = told(*busy, "--policy", "planner", *stays)["runs"]
    assert (run["split"], run["splits"]) == ("apart", 0)
    runs = told(*busy, "--policy", "lmetric,planner", *stays)["runs"]
    assert [run["splits"] for run in runs] == [0, 0]
    for given in (["--policy", "lmetric", *stays], ["--split", "libra,apart", *stays]):
        done = simulate(*BASE, *given)
        assert (done.returncode, "needs one kind" in done.stderr) == (2, True)
    # Roles say where requests are cut.
    (run,) = told("--roles", "2P2D", "--speed", "9", "--policy", "planner", "--transfer", "25")["runs"]
    assert (run["split"], run["splits"]) == ("none", 0)


def test_settings_reach_the_simulator() -> None:
    def mean(*arguments: str) -> float:
        (run,) = told("--policy", "lmetric", *arguments)["runs"]
        return float(run["ttft_seconds"]["mean"])

    exact = mean()
    assert mean("--signals", "delayed", "--report-period", "30", "--event-delay", "20") != exact
    assert mean("--instances", "2") > exact
    assert mean("--admission", "vllm") != exact
    (run,) = told("--policy", "lmetric", "--no-prefixes")["runs"]
    assert run["hit_ratio"] == 0


def test_the_table_the_report_and_the_figures(tmp_path: Path) -> None:
    page, figures, out = tmp_path / "r.html", tmp_path / "figures", tmp_path / "o.json"
    done = simulate(
        *BASE, "--policy", "vllm,p_token * where(bs > 4, bs + 1, 1)", "--seeds", "2", "--slo-tpot", "0.05",
        "--report", page, "--figures", figures, "--json", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for head in (
        "TTFT, s",
        "TPOT, ms",
        "end to end, s",
        "goodput: TPOT <= 0.05 s",
        "p99.9",
        "load imbalance",
    ):
        assert head in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.strip().startswith("p_token * where(bs > 4"))
    assert re.search(r"\d\.\d{3} ±\d\.\d{3}", row)
    assert f"wrote {page}" in done.stderr
    assert json.loads(out.read_text())["runs"][0]["policy"] == "vllm"
    text = page.read_text()
    assert "Needs a study with several loads" in text
    assert "p_token * where(bs &gt; 4, bs + 1, 1)" in text.replace("\u200b", "")
    assert (figures / "cdf_ttft.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--policy", "lmetrik"], 2, "did you mean the policy 'lmetric'"),
        (["--policy", "linear(lamm=1)"], 2, "lamm"),
        (["--policy", "p_token * (bs"], 2, "^"),
        (["--speed", "0"], 2, "--speed: 0 is not above 0"),
        (["--measure", "1:0"], 2, "share of requests '1:0'"),
        (["--seeds", "0"], 2, "--seeds"),
        (["--measure", "0:0.001"], 1, "of 120 requests leaves none to measure"),
        (["--signals", "exakt"], 2, "exakt"),
        (["--local-order", "fcfs,lifo"], 2, '"lifo" is not valid; expected one of fcfs, priority, sjf'),
        (["--local-order", "priority"], 2, "priority needs --priority uniboost or vtc"),
        (["--local-order", "uniboost(k=1)"], 2, "expected gamma, bin_tokens"),
        (["--preempt", "swop"], 2, "expected recompute, swap"),
        (["--profile", "nope"], 2, "nope"),
        (["--json", "no/such/directory/o.json"], 2, "there is no directory"),
        (["--start", "1e9"], 1, "the filters exclude all 1000 requests"),
        (["--trace", "none.jsonl"], 2, "none.jsonl: No such file"),
        (
            ["--trace", "agents"],
            2,
            "did you mean the trace coding-agents? Names of traces: slice, coding-agents",
        ),
    ],
)
def test_wrong_usage_is_said_in_words(arguments: list[str], code: int, message: str) -> None:
    done = simulate(*BASE, *arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_ctrl_c_ends_it() -> None:
    begun = "import sys; from lmetric.cli import main; print('begun', file=sys.stderr, flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", begun, "simulate", *BASE[:2], "--policy", "all", "--seeds", "99"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    time.sleep(4)  # wherever it is now, it ends in the same way
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    profile = tmp_path / "slow.yaml"
    profile.write_text(
        "fixed_seconds: 0.02\ndecode_seconds_per_sequence: 0.0001\ndecode_seconds_per_context_token: 0\n"
        "prefill_seconds_per_token: 0.001\nprefill_seconds_per_attention_pair: 0\nmax_batch_tokens: 2048\n"
        "max_sequences: 64\nblock_tokens: 64\ncache_blocks: 16384\n"
    )
    (own,) = told("--policy", "lmetric", "--profile", str(profile))["runs"]
    (shipped,) = told("--policy", "lmetric")["runs"]
    assert own["tpot_seconds"]["p50"] >= 0.02
    assert own["ttft_seconds"]["mean"] > shipped["ttft_seconds"]["mean"]


GUARD = {
    "window_seconds": 20.0, "period_seconds": 0.5, "classes": 8, "min_requests": 4, "phase2_factor": 1.0,
    "release_factor": 0.5,
}  # fmt: skip


def test_every_setting_of_the_guard_is_an_option() -> None:
    """Fidelity gap 12: each one reaches the simulator, which checks it."""
    text = ",".join(f"{name}={value}" for name, value in GUARD.items())
    settings = told("--policy", "lmetric", "--guard", "--guard-settings", text)["setting"]["settings"]
    assert settings["guard"] == {"enabled": True, **GUARD}
    for name, wrong in (("window_seconds", 0), ("classes", 0), ("min_requests", -1), ("release_factor", 2)):
        done = simulate(*BASE, "--policy", "lmetric", f"--guard-settings={name}={wrong}")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert f"guard.{name}: {wrong}" in done.stderr


def test_a_policy_that_scores_nobody_is_told() -> None:
    """UX scores absent: the run goes on by the fewest requests, and stderr says how often."""
    done = simulate(*BASE, "--policy", "0 / bs,lmetric", "--json", "-")
    assert done.returncode == 0
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert re.fullmatch(r"warning: 0 / bs scored no instance in [1-9]\d* decisions; .* decided", warning)
