"""Fleets with pools: roles, transfers, pairs of policies; in Python, the CLI and studies."""

from __future__ import annotations

import csv
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from cli_world import call
from lmetric import BadValueError
from lmetric.config import ConfigError
from lmetric.profiles import Profile, ProfileError, fleet_profiles, load_profile
from lmetric_lab.sim.backends import Threads
from lmetric_lab.sim.pools import Roles, Transfer
from lmetric_lab.sim.setups import PolicyChoice, Setup, TraceChoice, keep, play
from lmetric_lab.sim.store import Store, write_csv
from lmetric_lab.sim.study import run_study, summary
from lmetric_lab.sim.study_file import load_study
from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.traces import Trace

# Round constants, so that times can be worked out by hand.
ROUND = Profile(
    fixed_seconds=1.0,
    decode_seconds_per_sequence=0.1,
    decode_seconds_per_context_token=0.0,
    prefill_seconds_per_token=0.01,
    prefill_seconds_per_attention_pair=0.0,
    max_batch_tokens=64,
    max_sequences=8,
    block_tokens=16,
    cache_blocks=32,
    kv_bytes_per_token=10**6,
)


def some(rate: float = 4.0, seconds: float = 120, **more: Any) -> Trace:
    description = {
        "synthetic": "requests", "rate": rate, "duration_seconds": seconds,
        "input_tokens": {"p50": 60, "p90": 200},
        "output_tokens": {"quantiles": {0: 1, 0.5: 40, 1: 400}}, "block_tokens": 512,
    }  # fmt: skip
    return check_synthetic(description | more, "some").make()


def test_roles_are_read_as_people_write_them() -> None:
    for value in ("16P64D", " 16p64d ", {"prefill": 16, "decode": 64}, Roles(16, 64)):
        assert Roles.of(value) == Roles(16, 64)
    assert Roles.of("1P2D3B").each() == ["prefill", "decode", "decode", "both", "both", "both"]
    assert (str(Roles(1, 2, 3)), Roles(1, 2, 3).instances) == ("1P2D3B", 6)
    wrong: list[Any] = [
        "16P",
        "64D",
        "",
        "16P64",
        "16X64D",
        "1P1P1D",
        {"prefil": 1},
        {"prefill": 1.5},
        {},
        "0P0D",
    ]
    for value in wrong:
        with pytest.raises(BadValueError, match=r"roles.*16"):
            Roles.of(value)


def test_transfers_are_read_as_people_write_them() -> None:
    assert Transfer.of("none") is None
    assert Transfer.of("25") == Transfer(25.0)
    assert Transfer.of("25 GB/s, layers, fixed=0.01") == Transfer(25.0, 0.01, "layers")
    assert Transfer.of({"gigabytes_per_second": 10}) == Transfer(10)
    assert Transfer.of("50,chunks") == Transfer(50.0, 0.001, "chunks", 256)
    assert Transfer.of("50, chunk=512, fixed=0") == Transfer(50.0, 0.0, "chunks", 512)
    wrong = ("fast", "0", "25, fixed=-1", "nan", {"overlap": "middle"}, {"gbps": 4.0})
    for value in (*wrong, "50, chunk=0", "50, chunk=many", "50, chunk=", {"chunk_tokens": 1.5}):
        with pytest.raises(BadValueError, match="transfer"):
            Transfer.of(value)
    assert Transfer(2.0).seconds_per_token(ROUND) == 10**6 / 2e9
    with pytest.raises(BadValueError, match="kv_bytes_per_token"):
        Transfer().seconds_per_token(ROUND.model_copy(update={"kv_bytes_per_token": None}))


def test_a_request_over_two_pools_by_hand() -> None:
    trace = Trace(
        name="by hand", arrival_seconds=np.array([0.0]), input_tokens=np.array([20]),
        output_tokens=np.array([3]),
        hash_offsets=np.array([0, 0]), hash_ids=np.zeros(0, np.uint64), block_tokens=16,
    )  # fmt: skip
    run = lm.simulate(
        trace, roles="1P1D", profile=ROUND, policy="lmetric", decode_policy="sibyl",
        transfer={"gigabytes_per_second": 0.1, "fixed_seconds": 0.3},
    )  # fmt: skip
    # Prefill 1 + 0.2; 20 MB at 0.1 GB/s and 0.3 s; then three steps of one decode, 1.1 s each.
    assert (run.policy, run.decode_policy, run.instances) == ("lmetric", "sibyl", 2)
    assert (run.instance[0], run.decode_instance[0]) == (0, 1)
    assert run.handoff_seconds == pytest.approx([1.2])
    assert run.decode_start_seconds == pytest.approx([1.7])
    assert run.first_token_seconds == pytest.approx([2.8])
    assert run.finished_seconds == pytest.approx([5.0])
    assert run.decode_tpot_seconds == pytest.approx([1.1])
    assert run.optimal_assignment_ratio == 1
    # The whole answer of a request cut in its prompt, but not of a request cut behind it, or moved.
    assert replace(run, cut_tokens=np.array([20])).decode_tpot_seconds == pytest.approx([1.1])
    for column in ("cut_tokens", "answer_cut_tokens", "moves"):
        other: dict[str, Any] = {column: np.array([21])}
        part = replace(run, **other)
        assert np.isnan(part.decode_tpot_seconds).all(), column


def test_instances_that_decode_may_have_another_profile() -> None:
    trace = Trace(
        name="by hand", arrival_seconds=np.array([0.0]), input_tokens=np.array([20]),
        output_tokens=np.array([3]),
        hash_offsets=np.array([0, 0]), hash_ids=np.zeros(0, np.uint64), block_tokens=16,
    )  # fmt: skip
    fast = ROUND.model_copy(update={"fixed_seconds": 0.4})
    run = lm.simulate(trace, roles="1P1D", profile=ROUND, decode_profile=fast, transfer=None)
    # Prefill 1 + 0.2 as by hand above; then three steps of 0.4 + 0.1.
    assert run.handoff_seconds == pytest.approx([1.2])
    assert run.finished_seconds == pytest.approx([2.7])
    with pytest.raises(BadValueError, match="set roles"):
        lm.simulate(trace, instances=2, profile=ROUND, decode_profile=fast)
    other = ROUND.model_copy(update={"block_tokens": 32})
    with pytest.raises(BadValueError, match="block_tokens of the profile"):
        lm.simulate(trace, roles="1P1D", profile=ROUND, decode_profile=other, transfer=None)


def test_a_run_without_pools_has_none_of_it() -> None:
    run = lm.simulate(some(seconds=20), instances=2)
    assert (run.roles, run.decode_policy, run.optimal_assignment_ratio) == (None, None, None)
    assert set(run.decode_instance) == {-1}
    assert np.isnan(run.handoff_seconds).all()
    with pytest.raises(BadValueError, match="set roles"):
        lm.simulate(some(seconds=20), decode_policy="sibyl")


@pytest.mark.parametrize("binding", ["early", "late"])
@pytest.mark.parametrize("prefill", ["queues", "unlimited"])
def test_every_pair_serves_all_and_says_the_same_again(binding: Any, prefill: Any) -> None:
    trace = some()
    for decode in ("round_robin", "ils", "least_requests", "least_tokens", "power_of_two", "sibyl"):
        first, again = (
            lm.simulate(
                trace, roles="2P3D", policy="lmetric", decode_policy=decode, binding=binding,
                prefill=prefill, seed=5,
            )
            for _ in range(2)
        )  # fmt: skip
        assert np.isfinite(first.finished_seconds).all()
        assert set(first.instance) <= {0, 1}
        assert set(first.decode_instance) == {2, 3, 4}
        assert (first.decode_start_seconds >= first.handoff_seconds).all()
        assert first.finished_seconds.tobytes() == again.finished_seconds.tobytes()
        assert first.optimal_assignment_ratio is not None
        assert 0 < first.optimal_assignment_ratio <= 1


def test_late_binding_sees_the_load_at_the_hand_over() -> None:
    ratio = {
        binding: lm.simulate(
            some(rate=8), roles="2P6D", decode_policy="ils", binding=binding, transfer=None
        ).optimal_assignment_ratio
        for binding in ("early", "late")
    }  # fmt: skip
    # Late ILS uses the running tokens; requests that transfer in one step do not see each other.
    assert ratio["late"] > 0.9 > ratio["early"]  # type: ignore[operator]


def test_an_engine_past_its_curve_is_told_of() -> None:
    trace = some(rate=6, seconds=60, input_tokens=50, output_tokens=8000)
    run = lm.simulate(
        trace, roles="1P2D", profile="sibyl-eq15-as-printed", prefill="unlimited", transfer=None
    )
    assert run.stalled == 2
    assert np.isnan(run.finished_seconds).all()
    # The last request is the next turn of the first, so it never arrives. The others have figures.
    number = np.arange(len(trace))
    previous = np.where(number == len(trace) - 1, 0, -1)
    turns = replace(
        trace, sessions=np.where(previous == 0, 0, number), previous=previous,
        think_seconds=np.zeros(len(trace)),
    )  # fmt: skip
    setup = Setup(
        trace=TraceChoice(path="", label="some"), policy=PolicyChoice(policy="lmetric"), instances=3,
        profile="sibyl-eq15-as-printed", roles="1P2D",
        settings={"prefill": "unlimited", "transfer": "none"},
    )  # fmt: skip
    stuck = play(setup, turns)
    assert np.isnan(stuck.arrival_seconds).tolist() == [False] * (len(trace) - 1) + [True]
    kept = keep(setup, stuck)
    assert (kept.figures.requests, kept.figures.failed) == (len(trace), len(trace))
    assert kept.unevenness is not None
    assert kept.arrivals_per_second == pytest.approx(
        (len(trace) - 2) / (trace.arrival_seconds[-2] - trace.arrival_seconds[0])
    )
    held = lm.simulate(trace, roles="1P2D", profile="sibyl-eq15-held", prefill="unlimited", transfer=None)
    assert held.stalled == 0
    assert np.isfinite(held.finished_seconds).all()


def test_the_profile_for_the_independent_simulation_has_its_step_time() -> None:
    # 0.027 + 7e-5 x batch + 8.2e-8 x context: 40 requests of 100 prompt tokens, their first step.
    trace = Trace(
        name="alike", arrival_seconds=np.zeros(40), input_tokens=np.full(40, 100),
        output_tokens=np.full(40, 2),
        hash_offsets=np.zeros(41, np.int64), hash_ids=np.zeros(0, np.uint64), block_tokens=512,
    )  # fmt: skip
    run = lm.simulate(trace, roles="1P1D", profile="independent-pd", prefill="unlimited", transfer=None)
    step = 0.027 + 7e-5 * 40 + 8.2e-8 * 40 * 100
    assert run.first_token_seconds - run.decode_start_seconds == pytest.approx(step)
    alone = load_profile("independent-pd").prefill_seconds_per_token * 100
    assert (run.handoff_seconds > 0.027 + alone).all()


# -- the command line and studies ------------------------------------------------------------------

TRACE = "{synthetic: requests, rate: 4, duration_seconds: 60, input_tokens: 100, output_tokens: 50}"


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pools") / "some.jsonl"
    assert call("trace", "make", TRACE, "--out", str(path)).returncode == 0
    return path


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return call("simulate", *map(str, arguments))


def test_the_command_runs_the_pairs(trace_file: Path) -> None:
    base = ("--trace", trace_file, "--roles", "2P4D", "--policy", "lmetric,round_robin")
    done = simulate(
        *base, "--decode-policy", "sibyl_parts(type1=0),ils", "--prefill", "unlimited", "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(run["policy"], run["decode_policy"]) for run in told["runs"]] == [
        (first, second) for first in ("lmetric", "round_robin") for second in ("sibyl_parts(type1=0)", "ils")
    ]
    assert all(0 < run["optimal_assignment_ratio"] <= 1 and run["failed"] == 0 for run in told["runs"])
    assert (told["setting"]["roles"], told["setting"]["instances"]) == ("2P4D", 6)
    profiles = ("--profile", "qwen3-32b-h20", "--decode-profile", "qwen3-32b-2xh20")
    larger = simulate(*base, *profiles, "--json", "-")
    assert larger.returncode == 0, larger.stderr
    assert json.loads(larger.stdout)["setting"]["settings"]["decode_profile"] == "qwen3-32b-2xh20"
    table = simulate(*base, "--transfer", "25,layers")
    assert table.returncode == 0, table.stderr
    assert "lmetric / least_requests" in table.stdout
    assert "2P4D instances" in table.stdout
    plain = simulate("--trace", trace_file, "--policy", "lmetric", "--json", "-")
    (run,) = json.loads(plain.stdout)["runs"]
    assert (run["decode_policy"], run["optimal_assignment_ratio"]) == (None, None)


def test_wrong_pools_are_named(trace_file: Path) -> None:
    for arguments, told in (
        (("--decode-policy", "sibyl"), "--roles"),
        (("--roles", "2P4D", "--decode-policy", "sybil"), "sibyl"),
        (("--decode-profile", "qwen2.5-32b-2xa100"), "--roles"),
        (("--roles", "2P4D", "--decode-profile", "qwen2.5-32b-9xa100"), "qwen2.5-32b-2xa100"),
    ):
        done = simulate("--trace", trace_file, *arguments)
        assert done.returncode != 0
        assert told in done.stderr.replace("\n", " "), done.stderr
        assert "Traceback" not in done.stderr


STUDY = """
traces:
  {label: some, synthetic: requests, rate: 4, duration_seconds: 60, input_tokens: 100, output_tokens: 50}
policies: [lmetric, round_robin]
decode_policies: [ils, {policy: sibyl_parts, knobs: {type3: [0, 1]}}]
roles: [2P4D, 1P2D]
settings: {transfer: [none, 25], prefill: unlimited}
seeds: 2
"""


def test_a_study_spans_the_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(STUDY)
    study = load_study(path)
    assert len(study.setups) == 2 * 3 * 2 * 2 * 2
    first = study.setups[0]
    assert (first.roles, first.instances, first.choice.label) == ("2P4D", 6, "lmetric / ils")
    assert len({setup.key("") for setup in study.setups}) == len(study.setups)
    with Store(tmp_path / "runs.jsonl") as store:
        outcome = run_study(study, store, Threads(2))
        again = run_study(study, store, Threads(2))
    assert again.reused == len(study.setups)
    cells = summary(outcome)["cells"]
    assert {(cell["policy"], cell["decode_policy"], cell["roles"]) for cell in cells} == {
        (policy, decode, roles)
        for policy in ("lmetric", "round_robin")
        for decode in ("ils", "sibyl_parts(type3=0)", "sibyl_parts(type3=1)")
        for roles in ("2P4D", "1P2D")
    }
    assert all(cell["optimal_assignment_ratio"]["mean"] > 0 for cell in cells)
    write_csv(tmp_path / "runs.csv", outcome.results)
    with (tmp_path / "runs.csv").open() as file:
        assert {row["decode_policy"] for row in csv.DictReader(file)} == {
            "ils",
            "sibyl_parts(type3=0)",
            "sibyl_parts(type3=1)",
        }


def test_a_study_of_half_a_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.yaml"
    for text in (
        STUDY.replace("roles: [2P4D, 1P2D]\n", ""),
        STUDY.replace("decode_policies: [ils", "x: [ils"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match="decode_policies"):
            load_study(path)


def test_unequal_engines_by_hand() -> None:
    two = Trace(
        name="by hand", arrival_seconds=np.zeros(2), input_tokens=np.array([20, 20]),
        output_tokens=np.array([3, 3]),
        hash_offsets=np.zeros(3, np.int64), hash_ids=np.zeros(0, np.uint64), block_tokens=16,
    )  # fmt: skip
    fleet = [ROUND, ROUND.slower(2)]
    run = lm.simulate(two, policy="round_robin", profile=fleet)
    # 1 + 0.2 to the first token, two steps of 1.1; and twice as long.
    assert run.instances == 2
    assert sorted(run.first_token_seconds) == pytest.approx([1.2, 2.4])
    assert sorted(run.finished_seconds) == pytest.approx([3.4, 6.8])
    assert fleet[1].cache_blocks == ROUND.cache_blocks
    equal = lm.simulate(two, policy="round_robin", profile=[ROUND, ROUND])
    assert (
        equal.finished_seconds
        == lm.simulate(two, policy="round_robin", profile=ROUND, instances=2).finished_seconds
    ).all()
    with pytest.raises(BadValueError, match="instances: 3 is not valid; expected 2, as many as"):
        lm.simulate(two, profile=fleet, instances=3)
    other = ROUND.model_copy(update={"kv_bytes_per_token": 7})
    with pytest.raises(BadValueError, match="kv_bytes_per_token of the profiles: 1000000, 7 is not valid"):
        lm.simulate(two, profile=[ROUND, other])
    with pytest.raises(ProfileError, match="factor 0 is not valid"):
        ROUND.slower(0)
    curve = load_profile("sibyl-eq15-held")
    with pytest.raises(ProfileError, match="a decode_throughput is not valid"):
        curve.slower(2)


def test_unequal_engines_in_studies_and_commands(trace_file: Path, tmp_path: Path) -> None:
    mixed = "2 qwen3-30b-a3b-h20 + 1 qwen3-30b-a3b-h200"
    assert fleet_profiles(mixed) == [(2, "qwen3-30b-a3b-h20"), (1, "qwen3-30b-a3b-h200")]
    assert fleet_profiles("qwen3-30b-a3b-h20") == []
    for wrong in ("2 qwen3-30b-a3b-h20 + qwen3-30b-a3b-h200", "0 qwen3-30b-a3b-h20"):
        with pytest.raises(ProfileError, match="expected a number of instances before each profile"):
            fleet_profiles(wrong)
    path = tmp_path / "study.yaml"
    path.write_text(
        f"traces: {trace_file}\npolicies: [lmetric_seconds]\ninstances: 4\n"
        f"profiles: [qwen3-30b-a3b-h20, {mixed}]\n"
    )
    equal, unequal = load_study(path).setups
    assert (equal.instances, unequal.instances, unequal.profile) == (4, 3, mixed)
    assert equal.key("") != unequal.key("")
    with Store(tmp_path / "results") as store:
        outcome = run_study(load_study(path), store, Threads(2))
    assert [result.setup.profile for result in outcome.results] == ["qwen3-30b-a3b-h20", mixed]
    done = simulate("--trace", trace_file, "--profile", mixed, "--policy", "lmetric_seconds", "--json", "-")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["setting"]["instances"], told["setting"]["profile"]) == (3, mixed)
    bad = simulate("--trace", trace_file, "--profile", mixed, "--instances", "16", "--policy", "lmetric")
    assert bad.returncode != 0
    assert "instances: 16 is not valid; expected 3" in bad.stderr
