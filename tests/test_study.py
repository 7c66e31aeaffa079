"""Studies: what a file may say, what is kept, what is run again, and the report."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli_world import COMMAND, call, process
from lmetric import LmetricError, UnknownNameError
from lmetric.config import ConfigError
from lmetric.defaults import DEFAULT_POLICY
from lmetric.options import Guard, LibraSplit, Star, UniBoost
from lmetric_lab.sim import max_load
from lmetric_lab.sim.backends import Ray, Threads
from lmetric_lab.sim.max_load import Rule
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.scenario import Scenario
from lmetric_lab.sim.setups import PolicyChoice, Result, Setup, TraceChoice, run, split_policies
from lmetric_lab.sim.store import Store, StoreError, write_csv, write_parquet
from lmetric_lab.sim.study import Library, cells, run_study, summary
from lmetric_lab.sim.study_file import SettingsEntry, load_study

ROOT = Path(__file__).parent.parent
SLICE = ROOT / "python" / "lmetric_lab" / "data" / "mooncake_conversation_slice.jsonl.gz"
STUDY = f"""
name: a small one
traces: {{ path: {SLICE}, label: slice, requests: 80 }}
policies: [lmetric, vllm, {{ policy: linear, knobs: {{ lam: [0.3, 0.9] }} }}]
instances: 4
loads: [1, 2]
seeds: 2
"""


def write(path: Path, text: str = STUDY) -> Path:
    path.write_text(text)
    return path


def study(
    *arguments: str | Path, cwd: Path, run: Callable[..., subprocess.CompletedProcess[str]] = call
) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(cwd):
        return run("study", *map(str, arguments))


# -- the file --------------------------------------------------------------------------------------


def test_a_grid_is_expanded_in_order(tmp_path: Path) -> None:
    made = load_study(write(tmp_path / "s.yaml"))
    assert made.name == "a small one"
    labels = ["lmetric", "vllm", "linear(lam=0.3)", "linear(lam=0.9)"]
    assert [(s.speed, s.policy.label, s.seed) for s in made.setups] == [
        (speed, label, seed) for speed in (1, 2) for label in labels for seed in (0, 1)
    ]
    assert made.setups[4].policy == PolicyChoice("linear", {"lam": 0.3}, "linear(lam=0.3)")
    assert made.setups[0].trace == TraceChoice(path=str(SLICE), label="slice", requests=80)
    assert made.searches == []


def test_the_example_is_a_study_of_all_policies_at_five_loads(tmp_path: Path) -> None:
    made = load_study(ROOT / "examples" / "study.yaml")
    assert len({setup.policy.label for setup in made.setups}) >= 30
    assert len({setup.load for setup in made.setups}) == 5
    assert [search.policy.label for search in made.searches] == ["lmetric"]


def test_settings_are_swept_and_paths_are_seen_from_the_file(tmp_path: Path) -> None:
    text = (
        "traces: t.jsonl\npolicies: lmetric\nsettings: {signals: [exact, step_end], guard: [true, false]}\n"
    )
    made = load_study(write(tmp_path / "s.yaml", text))
    assert [setup.settings for setup in made.setups] == [
        {"signals": signals, "guard": guard} for signals in ("exact", "step_end") for guard in (True, False)
    ]
    assert made.setups[0].trace.path == str(tmp_path / "t.jsonl")


def test_local_orders_are_a_setting(tmp_path: Path) -> None:
    text = """
        traces: {path: slice, requests: 60}
        policies: lmetric
        instances: 1
        settings: {local_order: [fcfs, "uniboost(gamma=0.2)"], admission: vllm, preempt: swap}
    """
    made = load_study(write(tmp_path / "s.yaml", text))
    kept = [run(setup, setup.trace.load()).figures.local_order for setup in made.setups]
    assert kept == ["fcfs", "uniboost(gamma=0.2)"]


PLAIN = "traces: t.jsonl\npolicies: lmetric\nsettings: {%s}\n"


def test_prefix_fetches_are_a_setting(tmp_path: Path) -> None:
    """YAML takes a bare ``on`` for true."""
    given = "none, on, off, 'waits=false, max_fetches=2', {min_tokens: [256, 512], pinned: false}"
    text = PLAIN % f"prefix_fetch: [{given}]"
    made = load_study(write(tmp_path / "s.yaml", text))
    assert [setup.settings["prefix_fetch"] for setup in made.setups] == [
        "none", "on", "none", {"waits": False, "max_fetches": 2}, {"min_tokens": 256, "pinned": False},
        {"min_tokens": 512, "pinned": False},
    ]  # fmt: skip


def test_every_option_is_varied_with_its_settings(tmp_path: Path) -> None:
    """Theta, H, beta and STAR's forecast, and the settings of splits, priorities and the guard."""
    given = """
        split: {kind: libra, probes: [4, 8], lengths_given: true}, local_order: priority,
        rebalance: [none, {kind: star, threshold: 0.2, horizon_steps: 512, half_life_steps: 64,
        forecast: [curve, bins_4]}], priority: {kind: uniboost, gamma: 0.2}, guard: {window_seconds: 30},
        token_slo_seconds: 0.2, think_slo_seconds: 0.3, order_think_slo_seconds: 0.2, silent_segments: true,
        index_bytes: 1000000
    """
    text = PLAIN % " ".join(given.split())
    made = load_study(write(tmp_path / "s.yaml", text.replace("t.jsonl", f"{{path: {SLICE}, requests: 60}}")))
    star = {"kind": "star", "threshold": 0.2, "horizon_steps": 512, "half_life_steps": 64.0}
    ways = [(setup.settings["split"], setup.settings["rebalance"]) for setup in made.setups]
    assert ways == [
        ({"kind": "libra", "probes": probes, "lengths_given": True}, moves)
        for probes in (4, 8)
        for moves in ("none", {**star, "forecast": "curve"}, {**star, "forecast": "bins_4"})
    ]
    assert len({setup.key("") for setup in made.setups}) == len(made.setups)
    setup = made.setups[-1]
    kept = run(setup, setup.trace.load())
    plain = simulate(
        setup.trace.load(), policy="lmetric", local_order="priority",
        split=LibraSplit(probes=8, lengths_given=True), priority=UniBoost(gamma=0.2),
        rebalance=Star(threshold=0.2, horizon_steps=512, half_life_steps=64, forecast="bins_4"),
        guard=Guard(window_seconds=30), token_slo_seconds=0.2, think_slo_seconds=0.3,
        order_think_slo_seconds=0.2,
        silent_segments=True, index_bytes=1_000_000,
    )  # fmt: skip
    assert kept.figures.e2e_seconds is not None
    assert kept.figures.e2e_seconds.mean == pytest.approx(float(plain.e2e_seconds.mean()))
    assert (kept.figures.split, kept.figures.rebalance) == ("libra", "star")


def test_a_study_varies_all_that_simulations_take() -> None:
    elsewhere = {"policy", "knobs", "instances", "profile", "seed", "roles", "decode_policy", "decode_knobs"}
    assert Scenario.model_fields.keys() - elsewhere == SettingsEntry.model_fields.keys()


def test_admission_by_load_is_a_setting(tmp_path: Path) -> None:
    trace = f"{{path: {SLICE}, requests: 300}}"
    text = PLAIN.replace("t.jsonl", trace) % "load_admission: [none, {ttft_seconds: [0.2, 5]}]"
    made = load_study(write(tmp_path / "s.yaml", text + "instances: 1\nloads: 40\n"))
    assert [setup.settings["load_admission"] for setup in made.setups] == [
        None, {"ttft_seconds": 0.2}, {"ttft_seconds": 5.0},
    ]  # fmt: skip
    failed = [run(setup, setup.trace.load()).figures.failed for setup in made.setups]
    assert failed[0] == 0 < failed[2] < failed[1] < 300
    with pytest.raises(ConfigError, match=r"settings\.load_admission.*max_wait.*max_waiting"):
        load_study(write(tmp_path / "s.yaml", PLAIN % "load_admission: {max_wait: 9}"))


def test_decode_instances_have_a_profile_of_their_own(tmp_path: Path) -> None:
    text = PLAIN % "decode_profile: [qwen2-7b-h20, independent-sim]"
    with pytest.raises(ConfigError, match=r"settings.decode_profile needs roles with a decode pool"):
        load_study(write(tmp_path / "s.yaml", text))
    made = load_study(write(tmp_path / "s.yaml", text + "roles: 1P1D\ndecode_policies: sibyl\n"))
    assert [setup.settings["decode_profile"] for setup in made.setups] == ["qwen2-7b-h20", "independent-sim"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds:", "seed:"), "seed = 2: unknown key; did you mean 'seeds'?"),
        (("requests: 80", "request: 80"), "traces[0].request = 80: unknown key; did you mean 'requests'?"),
        (("lam:", "lamm:"), "lamm"),
        (("[lmetric,", "[lmetrik,"), "did you mean the policy 'lmetric'"),
        (("loads: [1, 2]", "loads: {fraction_of_maxx: 1}"), "did you mean 'fraction_of_max'?"),
        (("loads: [1, 2]", "loads: {speed: 1, fraction_of_max: 1}"), "loads[0]"),
        (("loads: [1, 2]", "loads: [0]"), "loads[0].speed = 0: expected above 0"),
        (("instances: 4", "instances: 0"), "instances[0] = 0"),
        (("seeds: 2", "seeds: 0"), "seeds"),
        (("seeds: 2", "measure: 0.9:0.1"), "share of requests '0.9:0.1'"),
        (("seeds: 2", "profiles: nope"), "nope"),
        (("seeds: 2", "settings: {signals: exakt}"), "settings.signals[0] = 'exakt'"),
        (("seeds: 2", "settings: {local_order: [fcfs, lifo]}"), "settings.local_order[1] = 'lifo'"),
        (
            ("seeds: 2", "settings: {prefix_fetch: [fast]}"),
            "settings.prefix_fetch = 'fast': expected on, off",
        ),
        (
            ("seeds: 2", "settings: {rebalance: {kind: star, treshold: 1}}"),
            "settings.rebalance.treshold = 1: unknown setting; did you mean 'threshold'?",
        ),
        (
            ("seeds: 2", "settings: {split: {kind: libra, probes: [4, 99]}}"),
            "settings.split.probes = 99: expected a whole number from 1 to 32",
        ),
        (("policies: [lmetric,", "policies: [{policy: vllm, label: lmetric}, lmetric,"), "two are named"),
        (("traces:", "treces:"), "treces"),
        (("policies: [lmetric, vllm,", "policies: [,"), "s.yaml:4"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = write(tmp_path / "s.yaml", STUDY.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        load_study(path)
    assert "s.yaml" in str(refused.value)


def test_policies_on_one_line() -> None:
    texts = ["lmetric, linear(lam=0.5)", "where(bs > 4, 1, 0), norm(bs)"]
    assert list(split_policies(texts)) == ["lmetric", "linear(lam=0.5)", "where(bs > 4, 1, 0)", "norm(bs)"]
    (choice,) = PolicyChoice.parse("linear( lam = 0.50 )")
    assert (choice.policy, choice.knobs, choice.label) == ("linear", {"lam": 0.5}, "linear(lam=0.5)")
    with pytest.raises(LmetricError, match="expected NAME=NUMBER"):
        PolicyChoice.parse("linear(lam)")
    with pytest.raises(UnknownNameError, match="lmetric"):
        PolicyChoice("lmetrik").build()
    assert len(PolicyChoice.parse("all")) > 20


def test_swept_knobs_go_before_a_policys_own() -> None:
    own = PolicyChoice({"score": "p_token * (bs + c)", "knobs": {"c": 1}, "name": "mine"}, {"c": 0.0})
    assert own.labelled().label == "mine(c=0)"
    built = own.build()
    assert not isinstance(built, str)
    assert built.knobs == {"c": 0}


def test_a_synthetic_trace_stands_in_place_of_a_file(tmp_path: Path) -> None:
    made = (
        "label: flat, synthetic: requests, rate: 5, duration_seconds: 20, input_tokens: 900, output_tokens: 9"
    )
    path = write(tmp_path / "s.yaml", f"traces: [{{{made}}}]\npolicies: [lmetric, vllm]\ninstances: 2\n")
    with Store(tmp_path / "runs.jsonl") as store:
        outcome = run_study(load_study(path), store, Threads())
        assert [result.setup.trace.label for result in outcome.results] == ["flat", "flat"]
        assert 50 < outcome.results[0].figures.requests < 150
        path.write_text(path.read_text().replace("rate: 5", "rate: 6"))
        assert run_study(load_study(path), store, Threads()).reused == 0
    with pytest.raises(ConfigError, match=r"flat.*rat"):
        load_study(write(path, path.read_text().replace("rate:", "rat:")))
    with pytest.raises(ConfigError, match="set either path"):
        load_study(write(path, "traces: [{label: x}]\npolicies: lmetric\n"))


# -- runs ------------------------------------------------------------------------------------------


def setup_of(**more: object) -> Setup:
    (policy,) = PolicyChoice.parse("lmetric")
    base = Setup(trace=TraceChoice(str(SLICE), "slice", requests=80), policy=policy, instances=4)
    return replace(base, **more)  # type: ignore[arg-type]


def test_a_run_is_named_by_what_it_depends_on() -> None:
    key = setup_of().key("digest")
    assert key == setup_of(trace=TraceChoice("elsewhere", "other", requests=80)).key("digest")
    assert key == setup_of(fraction_of_max=0.5).key("digest")
    others = (
        setup_of(seed=1), setup_of(speed=2.0), setup_of(instances=5), setup_of(settings={"guard": False}),
        setup_of(measure=(0.1, 1.0)), setup_of(policy=PolicyChoice("vllm", {}, "lmetric")),
        setup_of(trace=TraceChoice(str(SLICE), "slice", requests=81)), setup_of(profile="qwen2-7b-h20"),
        setup_of(block_tokens=64),
    )  # fmt: skip
    assert len({key, setup_of().key("other bytes"), *(other.key("digest") for other in others)}) == 2 + len(
        others
    )


def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    made = load_study(write(tmp_path / "s.yaml"))
    outcomes = []
    for jobs in (1, 3):
        with Store(tmp_path / f"{jobs}.jsonl") as store:
            outcomes.append(run_study(made, store, Threads(jobs)))
    first, second = (
        [replace(r, figures=replace(r.figures, wall_seconds=0)) for r in outcome.results]
        for outcome in outcomes
    )
    assert first == second


def test_a_run_that_fails_says_which(tmp_path: Path) -> None:
    text = STUDY + "settings: {preempt: swap}\n"  # without admission vllm
    with (
        Store(tmp_path / "runs.jsonl") as store,
        pytest.raises(LmetricError, match=r"lmetric, slice, 4 in.*swap"),
    ):
        run_study(load_study(write(tmp_path / "s.yaml", text)), store, Threads(1))


def test_a_run_whose_policy_scores_nobody_is_counted(tmp_path: Path) -> None:
    """UX scores absent: in a study the fewest requests decide, and the result says how often."""
    text = STUDY.replace("[lmetric,", "[lmetric, log(0 - 1 - bs),")  # no number
    with Store(tmp_path / "runs.jsonl") as store:
        outcome = run_study(load_study(write(tmp_path / "s.yaml", text)), store, Threads(1))
    for result in outcome.results:
        scored = result.setup.policy.label != "log(0 - 1 - bs)"
        assert (result.unscored == 0) is scored


def test_the_summary_is_over_seeds(tmp_path: Path) -> None:
    made = load_study(write(tmp_path / "s.yaml"))
    with Store(tmp_path / "runs.jsonl") as store:
        outcome = run_study(made, store, Threads())
    found = cells(outcome.results)
    assert [(cell.load, cell.policy, len(cell.results)) for cell in found[:2]] == [
        ("speed 1", "lmetric", 2), ("speed 1", "vllm", 2),
    ]  # fmt: skip
    told = summary(outcome)["cells"][1]["ttft_seconds"]["mean"]
    means = [r.figures.ttft_seconds.mean for r in found[1].results if r.figures.ttft_seconds]
    assert told == {"mean": pytest.approx(sum(means) / 2), "least": min(means), "most": max(means)}


def test_a_study_is_taken_up_where_it_was(tmp_path: Path) -> None:
    made = load_study(write(tmp_path / "s.yaml"))
    path = tmp_path / "runs.jsonl"
    with Store(path) as store:
        whole = run_study(made, store, Threads())
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(made.setups) == 16
    path.write_bytes(b"".join(lines[:5]) + lines[5][:300])  # stopped in the middle of a line
    asked: list[int] = []
    with Store(path) as store:
        assert len(store.runs) == 5
        again = run_study(made, store, Threads(), lambda progress: asked.append(progress.done))
    assert again.reused == 5
    assert asked == list(range(5, 17))
    assert [(r.key, r.curves) for r in again.results] == [(r.key, r.curves) for r in whole.results]
    with Store(path) as store:  # what was half-written is gone
        assert len(store.runs) == 16


def test_a_store_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"kind": "run"}\nnot a result\n')
    with pytest.raises(StoreError, match=r"runs\.jsonl, line 2: not a result"), Store(path):
        pass
    path.write_text("")
    with Store(path), pytest.raises(StoreError, match="another study is writing"), Store(path):
        pass


def test_the_maximum_load_is_where_the_fleet_stops_keeping_up() -> None:
    setup = setup_of(trace=TraceChoice(str(SLICE), "slice", requests=200))
    workload = Library().workload(setup)
    rule = Rule(keep_up=0.9, tolerance=0.05)
    found = max_load.find(setup, workload, rule)
    assert found.setup.speed == found.speed
    at = run(found.setup, workload)
    assert at.first_token_share >= 0.9
    failed = min(speed for speed, sustained in found.tried if not sustained)
    assert found.speed < failed <= 1.05 * found.speed
    assert run(replace(setup, speed=failed), workload).first_token_share < 0.9
    assert found.arrivals_per_second == pytest.approx(at.arrivals_per_second)
    assert (found.speed, True) in found.tried
    # Twice the fleet sustains more, but a fleet of any size needs time for a prefill.
    more = max_load.find(replace(setup, instances=8), workload, rule)
    assert more.speed > 1.5 * found.speed


def test_a_load_that_nothing_sustains_is_an_error() -> None:
    setup = setup_of()
    with pytest.raises(LmetricError, match=r"does not sustain even .* check max_load"):
        max_load.find(
            setup, Library().workload(setup), Rule(keep_up=0.999)
        )  # of 80 the last one never has it


def test_a_trace_that_waits_for_answers_has_no_maximum_load() -> None:
    setup = setup_of()
    requests = Library().workload(setup).trace
    waiting = replace(requests, previous=np.arange(len(requests)) - 1, think_seconds=np.zeros(len(requests)))
    with pytest.raises(LmetricError, match=r"wait for answers.*open loop"):
        max_load.find(setup, waiting, Rule())


def test_fractions_are_of_the_references_maximum(tmp_path: Path) -> None:
    text = STUDY.replace("loads: [1, 2]", "loads: {fraction_of_max: 0.5}\nmax_load: {keep_up: 0.9}")
    with Store(tmp_path / "runs.jsonl") as store:
        outcome = run_study(load_study(write(tmp_path / "s.yaml", text)), store, Threads())
        (found,) = outcome.max_loads
        assert {r.setup.speed for r in outcome.results} == {found.speed / 2}
        assert {r.setup.load for r in outcome.results} == {"0.5 of the maximum"}
        again = run_study(load_study(tmp_path / "s.yaml"), store, Threads())
    assert again.reused == len(again.results) == 8
    assert again.max_loads == [found]


def test_ray_gives_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'lmetric-router[ray]'")
    made = load_study(write(tmp_path / "s.yaml", STUDY.replace("loads: [1, 2]", "loads: 1")))
    with Store(tmp_path / "threads.jsonl") as store:
        here = run_study(made, store, Threads())
    backend = Ray(jobs=2)
    try:
        with Store(tmp_path / "ray.jsonl") as store:
            there = run_study(made, store, backend)
    finally:
        backend.close()
    assert [(r.key, r.curves) for r in there.results] == [(r.key, r.curves) for r in here.results]


def results_of(tmp_path: Path) -> Sequence[Result]:
    with Store(tmp_path / "runs.jsonl") as store:
        return run_study(load_study(write(tmp_path / "s.yaml", STUDY)), store, Threads(2)).results


def test_parquet_holds_the_table_of_the_csv(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra: lmetric-router[parquet]")
    results = results_of(tmp_path)
    write_csv(tmp_path / "runs.csv", results)
    write_parquet(tmp_path / "runs.parquet", results)
    rows = parquet.read_table(tmp_path / "runs.parquet").to_pylist()
    with (tmp_path / "runs.csv").open() as file:
        for row, cells in zip(rows, csv.DictReader(file), strict=True):
            numbers = {name: cell for name, cell in row.items() if isinstance(cell, float)}
            assert {name: float(cells.pop(name)) for name in numbers} == numbers
            rest = {name: cell for name, cell in row.items() if name not in numbers}
            assert {name: "" if cell is None else str(cell) for name, cell in rest.items()} == cells
    assert isinstance(rows[0]["ttft_seconds_p99"], float)


def test_parquet_without_pyarrow_fails_before_the_runs(tmp_path: Path) -> None:
    write(tmp_path / "s.yaml", STUDY)
    (tmp_path / "pyarrow.py").write_text("raise ImportError")  # found before an installed one
    done = study("s.yaml", "--parquet", "--no-report", cwd=tmp_path, run=process)
    assert done.returncode == 1
    assert "pip install 'pyarrow>=" in done.stderr
    assert not (tmp_path / "s-results").exists()


# -- the command -----------------------------------------------------------------------------------


def test_the_command_leaves_results_and_a_report(tmp_path: Path) -> None:
    text = STUDY.replace("[lmetric,", f"[{DEFAULT_POLICY},")
    text += f"max_load: {{reference: {DEFAULT_POLICY}, each_policy: true, keep_up: 0.9}}\n"
    text += "slo: {ttft_seconds: 2}\n"
    write(tmp_path / "s.yaml", text)
    done = study("s.yaml", "--figures", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    directory = tmp_path / "s-results"
    assert json.loads((directory / "summary.json").read_text()) == told
    assert len(told["cells"]) == 8
    assert len(told["max_loads"]) == 4
    rows = list(csv.DictReader((directory / "runs.csv").open()))
    assert len(rows) == 16
    assert float(rows[0]["ttft_seconds_p99"]) > 0
    page = (directory / "report.html").read_text()
    for heading in (
        "Best policies", "Best policy per figure", "All figures", "Distributions of TTFT and TPOT",
        "Latency against load",
        "Hit rate", "Load imbalance over time", "Parameter sweeps", "Maximum load", "Setup", "Definitions",
    ):  # fmt: skip
        assert heading in page
    for label in (
        DEFAULT_POLICY,
        "vllm",
        "linear(",
        "TTFT &lt;= 2 s",
        "fixed_seconds",
        "seeds 0, 1",
        "s.yaml --figures",
    ):
        assert label in page
    assert (
        re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:|//)|@import|url\(", page) is None
    )  # nothing from outside
    assert page.count("<img") == page.count("data:image/svg+xml;base64,") >= 13
    names = {path.name for path in (directory / "figures").iterdir()}
    wanted = {
        "cdf_ttft.png",
        "cdf_tpot.png",
        "load_ttft_mean.png",
        "hits.png",
        "imbalance.png",
        "max_load.png",
    }
    assert wanted | {"over_time_vllm.png", "sweep_linear_lam.png"} <= names
    assert (directory / "figures" / "hits.png").read_bytes()[:4] == b"\x89PNG"


def test_the_report_ranks_whole_policies_and_names_equal_ones(tmp_path: Path) -> None:
    """UX 24: the best policies first, ten rows at once, a hint for a policy without its data."""
    text = STUDY.replace("requests: 80", "requests: 150").replace("seeds: 2", "seeds: 1")
    write(tmp_path / "s.yaml", text.replace("loads: [1, 2]", "loads: 2"))
    done = study("s.yaml", "--policy", "all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "s-results" / "report.html").read_text()
    first = page[page.index("<h3>Best policies") : page.index("<h3>Best policy per figure")]
    cells = list(csv.DictReader((tmp_path / "s-results" / "runs.csv").open()))
    latency = {
        row["policy"]: float(row["ttft_seconds_mean"]) * float(row["tpot_seconds_mean"]) for row in cells
    }
    shown = re.findall(r'</i>([^<]*?)(?: <span class="lead">★</span>)?</th>', first)
    shown = [name.replace("\u200b", "").strip() for name in shown]
    best = sorted(latency, key=lambda name: latency[name])[:10]
    assert [latency[name] for name in shown[:10]] == [latency[name] for name in best]
    # The command ends with the same ranking.
    printed = done.stdout[done.stdout.index("ranking by latency") :].splitlines()
    assert max(map(len, printed)) <= 80
    places = [line.split()[:2] for line in printed if re.match(r" +\d+ +\S", line)]
    assert places[:10] == [[str(place), name] for place, name in enumerate(shown[:10], start=1)]
    assert DEFAULT_POLICY in [name for _, name in places]
    assert first.count("★</span>") == 1
    starred = re.search(r'</i>([^<]*?) <span class="lead">★', first)
    assert starred is not None
    assert starred[1].replace("\u200b", "").strip() == DEFAULT_POLICY, "the star marks the router's default"
    assert f"Gap: difference of {DEFAULT_POLICY} to the best policy" in page
    (equal,) = (
        line for line in first.split("<p") if "session_affinity, " in line or ", session_affinity" in line
    )
    assert "least_requests" in equal
    assert f"{len(latency) - 10} more policies" in page


def test_killed_and_run_again_it_goes_on(tmp_path: Path) -> None:
    text = STUDY.replace("requests: 80", "requests: 400").replace("seeds: 2", "seeds: 3")
    write(tmp_path / "s.yaml", text)
    process = subprocess.Popen(
        [*COMMAND, "study", "s.yaml", "--no-report"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    runs = tmp_path / "s-results" / "runs.jsonl"
    deadline = time.monotonic() + 60
    while not (runs.exists() and runs.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = runs.read_bytes().count(b"\n")
    assert 3 <= kept < 24
    done = study("s.yaml", "--no-report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"24 runs \({kept} reused\)", done.stderr)
    assert "mean TTFT, s" in done.stdout


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    write(
        tmp_path / "s.yaml", STUDY.replace("requests: 80", "requests: 1000").replace("seeds: 2", "seeds: 40")
    )
    process = subprocess.Popen(
        [*COMMAND, "study", "s.yaml", "--no-report"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    runs = tmp_path / "s-results" / "runs.jsonl"
    deadline = time.monotonic() + 60
    while not (runs.exists() and runs.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "runs in" in err
    assert "Traceback" not in err


def test_a_wrong_study_ends_in_one_line(tmp_path: Path) -> None:
    write(tmp_path / "s.yaml", STUDY.replace("seeds:", "seed:"))
    done = study("s.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "lmetric-router: s.yaml:7: seed = 2: unknown key; did you mean 'seeds'?\n"
    assert study("none.yaml", cwd=tmp_path).returncode == 2


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path / "s.yaml")
    hidden = tmp_path / "hidden" / "matplotlib"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('hidden for this test')")
    environment = os.environ | {"PYTHONPATH": str(hidden.parent)}
    done = subprocess.run(
        [*COMMAND, "study", "s.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    missing = "reports need matplotlib, which is not installed: pip install 'matplotlib>="
    assert done.stderr.startswith(f"lmetric-router: {missing}")
    assert done.stderr.count("\n") == 1
