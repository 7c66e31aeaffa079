"""The capacity twin: goals, forecasts, the engine to remove, and advice against the truth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lmetric._core import BadValueError
from lmetric.cli.app import build
from lmetric.record_files import convert_records, read_records
from lmetric.record_schema import Records
from lmetric_lab.capacity import Advice, EngineType, Goal, Question, Twin, Wanted, advise, removals
from lmetric_lab.capacity.demand import coarse
from lmetric_lab.capacity.goals import read_types
from lmetric_lab.sim.churn import FleetChange
from lmetric_lab.sim.pools import Roles
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import prepare
from lmetric_lab.whatif import EngineFit, Limits, WhatIfError, recording_of
from lmetric_lab.whatif.check import check_fit
from lmetric_lab.whatif.fit import FIT_SHARE
from lmetric_lab.whatif.recording import changes_of
from record_world import PROFILE, SETTINGS, make_trace, recorded, simulated, write_records

GOAL = Goal.of("ttft_p90=400ms,tpot_p90=12.5ms")
AT = 1e9  # Unix time of the records' clock
NOW = AT + 145.0


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(480, rate=3.6)


@pytest.fixture(scope="module")
def run(trace: Trace) -> Run:
    return simulated(trace, "lmetric")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trace: Trace, run: Run) -> Path:
    made = tmp_path_factory.mktemp("records")
    write_records(made, trace, run)
    return made


def twin(question: Question) -> Twin:
    """A twin with the true engines: the test of the command fits them."""
    fit = EngineFit(PROFILE.in_blocks_of(128), 0.01, False, 100, 0.0, 0.0)
    return Twin(question, Limits(), fit=fit)


@pytest.fixture(scope="module")
def fitted(folder: Path) -> tuple[Twin, Records, Advice]:
    records = read_records(folder).of(None)
    made = twin(Question(GOAL, (EngineType("big", 4.0), EngineType("small", 1.0, None, 0.85))))
    return made, records, made.advise(records, NOW)


# -- the question


def test_engine_types_are_read() -> None:
    own, small, file = read_types(["H100=4.2,L40S=1.1"], ["L40S=x0.4", "A10=a10.yaml"])
    assert own == EngineType("H100", 4.2)
    assert small == EngineType("L40S", 1.1, None, 0.4)
    assert file == EngineType("A10", None, "a10.yaml")
    assert [each.name for each in read_types([], [])] == ["default"]


@pytest.mark.parametrize(
    ("prices", "kinds", "message"),
    [
        (["H100=four"], [], "price H100=four is not valid"),
        (["H100=-1"], [], "price of H100: -1 is not valid"),
        (["H100"], [], "price 'H100' is not valid; expected H100=4.2"),
        (["H100=4,L4=1"], [], "type 'L4' has a price and no profile"),
        (["H100=4,H100=5"], [], "price of 'H100' is given twice"),
        ([], ["L4=x0"], "speed of L4: 0 is not valid"),
        (["a b=4"], [], "engine type 'a b' is not valid"),
    ],
)
def test_bad_engine_types_are_refused(prices: list[str], kinds: list[str], message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        read_types(prices, kinds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"min_engines": 5, "max_engines": 4}, "5 to 4 engines"),
        ({"startup_seconds": -1.0}, "start-up of -1 s"),
        ({"headroom": 0.6}, "headroom 0.6 is not valid; expected 0 to 0.5"),
        ({"types": (EngineType("a"), EngineType("a"))}, "each once"),
        ({"transfer": "fast"}, "transfer 'fast' is not valid"),
    ],
)
def test_a_bad_question_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        Question(GOAL, **words)


def test_requests_after_the_last_settled_one_are_load_alone(folder: Path) -> None:
    recording = recording_of(read_records(folder).of(None))
    fit = EngineFit(PROFILE, 0.01, False, 100, 0.0, 0.0)
    until = float(recording.trace.arrival_seconds[400])
    whole, part_of = (check_fit(recording, fit, seeds=1, until_seconds=each) for each in (np.inf, until))
    assert whole.requests - part_of.requests == len(recording) - 401
    chosen = slice(round(FIT_SHARE * len(recording)), 401)
    assert part_of.figures[0].recorded == pytest.approx(float(recording.ttft_seconds[chosen].mean()))


# -- parts of a recording


def test_a_coarse_recording_has_the_same_shared_prefixes(folder: Path) -> None:
    fine = recording_of(read_records(folder))
    made = coarse(fine)
    assert made.block_tokens == 128
    assert made.trace.block_tokens == 128
    assert made.cache_blocks == PROFILE.cache_blocks // 8
    assert (np.diff(made.trace.hash_offsets) == fine.trace.input_tokens // 128).all()
    assert (made.trace.blocks(5) == fine.trace.blocks(5)[7::8]).all()
    assert coarse(replace(fine, cache_blocks=5)).cache_blocks == 1


def test_joins_and_leaves_come_from_the_states_of_the_fleet() -> None:
    def state(at: float, *names: str) -> dict[str, Any]:
        return {"at": at, "engines": [{"name": name, "usable": True} for name in names]}

    states = [
        state(90, "a", "x"),
        state(95, "a", "b"),
        state(120, "a", "b", "c"),
        state(130),
        state(140, "a"),
    ]
    assert changes_of(states, ["a", "b", "c", "lost"], 100.0) == (
        FleetChange(20.0, "join", 2),
        FleetChange(40.0, "leave", 1),
        FleetChange(40.0, "leave", 2),
    )
    assert changes_of([], ["a"], 100.0) == ()


# -- the engine to remove


def test_the_first_engine_to_remove_has_the_cache_worth_least() -> None:
    """e0 has much in its cache that nobody reuses; e1 and e2 hold the same; e3 alone is reused."""
    lists = [
        [1, 2, 3, 4, 5, 6],
        [10, 11],
        [10, 11],
        [10, 11],
        [10, 11],
        [20, 21],
        [20, 21],
        [20, 21],
        [30],
        [30],
        [30],
    ]
    engines = [0, 1, 2, 1, 2, 3, 3, 3, 0, 0, 0]
    plain = recorded(np.arange(11.0))
    hashes = np.concatenate([np.array(each, np.uint64) for each in lists])
    made = replace(
        plain,
        trace=replace(
            plain.trace,
            hash_ids=hashes,
            hash_offsets=np.concatenate(([0], np.cumsum([len(each) for each in lists]))).astype(np.int64),
            input_tokens=np.full(11, 200),
        ),
        instance=np.array(engines),
        engines=("e0", "e1", "e2", "e3"),
    )
    found = removals(made, 0.001)
    # Blocks 10 and 11 are on two engines when they are reused, so each of these is worth nothing.
    assert [each.engine for each in found] == ["e1", "e2", "e0", "e3"]
    assert [each.only_here_tokens for each in found] == [0, 0, 32, 64]
    assert [each.reused_tokens for each in found] == [32, 32, 32, 64]
    assert found[3].saved_seconds == pytest.approx(0.064)
    assert [each.engine for each in removals(made, engines=("e3",))] == ["e3"]


# -- advice


def test_the_advice_is_the_smallest_fleet_that_meets_the_goal(
    fitted: tuple[Twin, Records, Advice], trace: Trace
) -> None:
    """The truth: the same requests on the true engines, steady at the forecast rate."""
    advice = fitted[2]
    assert advice.reached
    speed = advice.rate_wanted / (len(trace) / trace.arrival_seconds[-1])
    work = prepare(trace, PROFILE).faster(speed)

    def margin(engines: int) -> float:
        real = simulate(work, policy="lmetric", **SETTINGS | {"instances": engines})
        late = slice(len(trace) // 4, None)
        return GOAL.margin(
            {"ttft": real.ttft_seconds[late], "tpot": real.tpot_seconds[late], "e2e": real.e2e_seconds[late]}
        )

    truth = next(number for number in range(1, 20) if margin(number) >= 0)
    wanted, other = advice.wanted
    assert wanted.low <= truth <= wanted.high
    assert abs(wanted.replicas - truth) <= 1
    assert (wanted.role, wanted.type) == ("both", "big")
    assert other == Wanted("both", "small", 0, 0, 0)
    assert wanted.low <= wanted.replicas <= wanted.high


def test_a_smaller_fleet_keeps_an_engine_to_spare_and_headroom_adds_engines(folder: Path) -> None:
    recording = coarse(recording_of(read_records(folder).of(None)))
    fit = EngineFit(PROFILE.in_blocks_of(128), 0.01, False, 100, 0.0, 0.0)
    check = check_fit(recording, fit, seeds=1)

    def engines(previous: int | None, headroom: float | None = None) -> int:
        found = advise(
            recording, fit, check, Question(GOAL), previous=previous, headroom=headroom,
            alternatives=False, interval=False,
        )  # fmt: skip
        return found.wanted[0].replicas

    fewest = engines(None)
    assert [engines(fewest + more) for more in (-1, 0, 1, 3)] == [fewest, fewest, fewest + 1, fewest + 1]
    assert engines(None, headroom=0.5) > fewest


def test_candidates_have_costs_and_predictions(fitted: tuple[Twin, Records, Advice]) -> None:
    advice = fitted[2]
    sizes = {each.engines: each for each in advice.candidates if each.change == "size"}
    number = advice.wanted[0].replicas
    assert sizes[number].enough
    assert not sizes[number - 1].enough
    assert sizes[number].cost_per_hour == pytest.approx(4.0 * number)
    assert sizes[number + 1].within >= sizes[number].within - 0.02
    (small,) = (each for each in advice.candidates if each.change == "type")
    assert small.type == "small"
    assert small.engines >= number
    assert small.cost_per_hour == pytest.approx(1.0 * small.engines)


def test_the_cheapest_fleet_is_recommended_and_the_running_type_is_wanted(
    fitted: tuple[Twin, Records, Advice],
) -> None:
    advice = fitted[2]
    (small,) = (each for each in advice.candidates if each.change == "type")
    number = advice.wanted[0].replicas
    found = advice.cheapest
    assert found is not None
    (engines,) = found.engines
    assert (engines.role, engines.type, engines.replicas) == ("both", "small", small.engines)
    assert engines.low <= engines.replicas <= engines.high
    assert engines.low < engines.high
    assert (found.cost_per_hour, found.running_cost_per_hour) == (1.0 * small.engines, 4.0 * number)
    assert f"{number} engines of type big" in advice.text()
    assert f"Cheapest fleet that meets the SLO: {small.engines} engines of type small" in advice.text()
    assert f"{4 * number - small.engines:.2f} less" in advice.text()


def test_the_running_type_is_recommended_unless_another_is_cheaper(
    fitted: tuple[Twin, Records, Advice],
) -> None:
    made, records, _ = fitted

    def advised(*types: EngineType, **settings: Any) -> Advice:
        return replace(made, question=replace(made.question, types=types, **settings)).advise(records, NOW)

    dear = advised(EngineType("big", 4.0), EngineType("small", 40.0, None, 0.85))
    assert dear.cheapest is not None
    assert dear.cheapest.engines == dear.wanted[:1]
    assert "less than" not in dear.text()
    assert advised(EngineType("big"), EngineType("small", None, None, 0.85)).cheapest is None
    limited = advised(EngineType("big", 4.0), max_engines=1)
    assert limited.cheapest is None  # no fleet meets the SLO


def test_pools_are_recommended_by_role_and_pay_for_transfers(fitted: tuple[Twin, Records, Advice]) -> None:
    made, records, _ = fitted
    number = fitted[2].wanted[0].replicas
    pools = Roles(number - 1, number - 1)

    def advised(goal: Goal, kv_bytes: int | None, transfer: str | None) -> Advice:
        assert made.fit is not None
        profile = made.fit.profile.model_copy(update={"kv_bytes_per_token": kv_bytes})
        question = replace(
            made.question, goal=goal, types=(EngineType("big", 4.0),), roles=(pools,), transfer=transfer
        )
        return replace(made, question=question, fit=replace(made.fit, profile=profile)).advise(records, NOW)

    free = advised(GOAL, None, None)
    assert {(each.role, each.replicas) for each in free.wanted[1:]} == {("decode", 0), ("prefill", 0)}
    assert any("free KV transfers" in note for note in free.notes)
    slow = advised(GOAL, 131_072, "0.5 GB/s")
    assert not any("free KV transfers" in note for note in slow.notes)
    (first,), (second,) = (
        [each for each in advice.candidates if each.change == "roles"] for advice in (free, slow)
    )
    assert second.within < first.within - 0.1


def test_a_good_fit_is_trusted_for_a_while(
    fitted: tuple[Twin, Records, Advice], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, records, advice = fitted
    assert made.fits == 0
    assert advice.notes == ()
    slower = replace(records, requests=[dict(each) for each in records.requests])
    for line in slower.requests:
        line["ttft_seconds"] *= 4
    fits: list[int] = []
    monkeypatch.setattr("lmetric_lab.capacity.twin.fit_engine", lambda *_, **__: fits.append(1) or made.fit)
    poor = replace(made)
    for after in (0.0, 60.0):  # the last good fit is trusted, and not fitted again at once
        (note,) = poor.advise(slower, NOW + after).notes
        assert f"the fit of {after:.0f} s ago is used" in note
        assert "mean TTFT -" in note
    assert fits == [1]
    with pytest.raises(WhatIfError, match="does not fit the records: mean TTFT"):
        replace(made, _good_at=NOW - 2_000.0).advise(slower, NOW)


def test_a_given_cache_has_blocks_of_the_engines(folder: Path) -> None:
    recording = recording_of(read_records(folder).of(None))
    assert recording.block_tokens == 16
    made = Twin(
        Question(GOAL), Limits(9.0, 9.0, 9.0), max_batch_tokens=PROFILE.max_batch_tokens,
        cache_blocks=5_000, check_seeds=1,
    )  # fmt: skip
    made.advise_recording(recording, NOW - AT, alternatives=False, interval=False)
    assert made.fit is not None
    profile = made.fit.profile
    assert (profile.block_tokens, profile.cache_blocks * profile.block_tokens) == (128, 80_000)


def test_a_limit_of_engines_is_reported(fitted: tuple[Twin, Records, Advice]) -> None:
    made, records, _ = fitted
    limited = replace(made, question=replace(made.question, max_engines=1, types=(EngineType("big"),)))
    advice = limited.advise(records, NOW)
    assert not advice.reached
    assert advice.wanted[0].replicas == 1
    assert "does not meet the SLO" in advice.text()


def test_old_records_give_no_advice(fitted: tuple[Twin, Records, Advice]) -> None:
    made, records, _ = fitted
    with pytest.raises(WhatIfError, match="no request arrived in the last 1800 s"):
        made.advise(records, NOW + 5_000.0)


def test_a_failed_first_request_does_not_shift_the_clock(folder: Path) -> None:
    """The recording's clock begins at the first complete request."""
    records = read_records(folder).of(None)
    early = records.requests[0] | {"at": AT - 60.0, "status": 503}
    alone, after = (
        twin(Question(GOAL)).advise(replace(records, requests=[*first, *records.requests[1:]]), NOW)
        for first in ((), (early,))
    )
    assert after.rate_now == pytest.approx(alone.rate_now)
    assert after.seconds == pytest.approx(alone.seconds)


def failing(records: Records, status: int) -> Records:
    """The records with every eleventh request failed at once: 44 of 480."""
    lines = [
        each | {"status": status, "e2e_seconds": 0.001} if index % 11 == 5 else each
        for index, each in enumerate(records.requests)
    ]
    return replace(records, requests=lines)


def test_failed_requests_are_demand_and_misses(folder: Path) -> None:
    records = read_records(folder).of(None)

    def advised(records: Records) -> tuple[Advice, float]:
        """The advice, and the overspent hours since 1,000 s ago."""
        made = twin(Question(Goal.of("ttft_p95=60s")))
        made.budget.count(recording_of(records), NOW - 1000.0 - AT, NOW - 1000.0, spare=False)
        return made.advise(records, NOW), float(made.budget.overspent_hours[0])

    (whole, _), (refused, overspent) = advised(records), advised(failing(records, 503))
    assert whole.within_now == 1.0
    assert refused.within_now == pytest.approx(1 - 44 / 480)
    assert refused.requests == 480
    assert refused.rate_now == pytest.approx(whole.rate_now, rel=0.02)
    assert overspent > 0
    # A wrong request is neither: no engine would have served it.
    wrong, overspent = advised(failing(records, 400))
    assert wrong.within_now == 1.0
    assert wrong.rate_now == pytest.approx(whole.rate_now * 436 / 480, rel=0.02)
    assert overspent < 0


@pytest.mark.parametrize("parquet", [False, True])
def test_files_before_the_window_have_no_part_in_the_advice(
    folder: Path, tmp_path: Path, trace: Trace, run: Run, parquet: bool
) -> None:
    """The old file is a sample under another key."""

    def old(_: int, line: dict[str, Any]) -> None:
        line["at"] -= 10_000.0

    write_records(tmp_path, trace, run, old, sample=0.1, key_id="old")
    paths: list[Path] = [folder, tmp_path]
    if parquet:
        pytest.importorskip("pyarrow.parquet", reason="needs the extra: lmetric-router[parquet]")
        convert_records(paths, both := tmp_path / "both.parquet")
        paths = [both]
    whole = read_records(paths).of(None)
    made = twin(Question(GOAL))
    advice = made.advise(whole, NOW)
    assert not any("hash keys" in note for note in advice.notes)
    assert advice.requests == 480
    with pytest.raises(WhatIfError, match=r"a sample of 0\.1"):
        replace(made, window_seconds=20_000.0).advise(whole, NOW)


def call(*words: str) -> Any:
    return CliRunner().invoke(build(["advise"]), ["advise", *words], catch_exceptions=True)


def test_the_command_prints_advice(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "advice.json"
    done = call(
        str(folder), "--slo", str(GOAL), "--price", "H100=4", "--max-batch-tokens",
        str(PROFILE.max_batch_tokens), "--roles", "2P2D", "--json", str(out),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(out.read_bytes())
    wanted = told["wanted"][0]
    assert f"get {wanted['replicas']} engines of type H100" in " ".join(done.output.split()).replace(
        "Keep", "get"
    )
    assert "First to remove:" in done.output
    assert {each["change"] for each in told["candidates"]} == {"size", "roles"}
    assert "free KV transfers" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slo", "p99=2s"), "is not valid"),
        (("--slo", "ttft=1s", "--price", "x"), "price 'x' is not valid"),
        (("--slo", "ttft=1s", "--window", "10"), "10 is not 60 to 86400"),
        (("--slo", "ttft=1s", "--min-engines", "0"), "0 to 256 engines"),
    ],
)
def test_bad_options_exit_with_2(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = call(str(folder), *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
