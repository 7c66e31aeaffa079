"""`whatif`: the fit to records, its refusals, and its ranking against the truth."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from lmetric.cli import main
from lmetric.cli.app import build
from lmetric.record_files import read_records
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from lmetric_lab.whatif import Recording, WhatIfError, check_fit, fit_engine, recording_of
from lmetric_lab.whatif.check import _score_error
from lmetric_lab.whatif.fit import EngineFit, Engines
from record_world import PROFILE, SETTINGS, make_trace, simulated, write_records
from test_server_process import router

QUICK = ("--max-batch-tokens", "4096")  # one size of steps to fit
POLICIES = ("lmetric", "vllm", "round_robin", "least_requests")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace()


@pytest.fixture(scope="module")
def run(trace: Trace) -> Run:
    return simulated(trace, "round_robin")


def recorded(folder: Path, **model: str) -> Recording:
    return recording_of(read_records(folder).of(None))


def test_the_recording_is_the_trace_that_ran(tmp_path: Path, trace: Trace, run: Run) -> None:
    write_records(tmp_path, trace, run)
    found = recorded(tmp_path)
    assert len(found) == len(trace)
    assert np.allclose(
        found.trace.arrival_seconds, trace.arrival_seconds - trace.arrival_seconds[0], atol=1e-5
    )
    assert (found.trace.input_tokens == trace.input_tokens).all()
    # Whole blocks, with equal hashes where the prompts are equal.
    assert (np.diff(found.trace.hash_offsets) == trace.input_tokens // 16).all()
    assert (found.trace.hash_ids == trace.hash_ids).all()
    assert sorted(found.engines) == ["e0", "e1", "e2", "e3"]
    assert found.policy.label == "round_robin"
    assert found.hit_ratio == pytest.approx(run.hit_tokens.sum() / trace.input_tokens.sum())
    assert not found.sessions


def test_the_fit_finds_the_engines_constants(tmp_path: Path, trace: Trace, run: Run) -> None:
    write_records(tmp_path, trace, run)
    fit = fit_engine(recorded(tmp_path), max_batch_tokens=PROFILE.max_batch_tokens)
    assert fit.ttft_error < 0.1
    assert fit.tpot_error < 0.05
    found = fit.profile
    assert found.fixed_seconds == pytest.approx(PROFILE.fixed_seconds, rel=0.1)

    def prefill(profile: Any, tokens: int) -> float:
        pairs = tokens**2 / 2 * profile.prefill_seconds_per_attention_pair
        return float(profile.prefill_seconds_per_token * tokens + pairs)

    assert prefill(found, 4000) == pytest.approx(prefill(PROFILE, 4000), rel=0.1)
    assert found.cache_blocks == PROFILE.cache_blocks


def test_the_fit_counts_the_load_of_later_requests(tmp_path: Path) -> None:
    """Most requests of the fit end long after it, beside requests that the fit does not compare."""
    trace = make_trace(requests=200, rate=12.0, answer_tokens=500)
    run = simulated(trace, "round_robin")
    assert np.median(run.e2e_seconds) > 0.5 * trace.arrival_seconds[-1]
    write_records(tmp_path, trace, run)
    found = recorded(tmp_path)
    fit = fit_engine(found, max_batch_tokens=PROFILE.max_batch_tokens)
    assert fit.tpot_error < 0.05
    assert fit.profile.fixed_seconds == pytest.approx(PROFILE.fixed_seconds, rel=0.15)
    assert check_fit(found, fit).good


def test_the_fit_keeps_the_columns_of_requests_that_the_router_held(
    tmp_path: Path, trace: Trace, run: Run
) -> None:
    def held(index: int, line: dict[str, Any]) -> None:
        if index == 0:
            line["held_seconds"] = 5.0
            line |= {name: line[name] + 5.0 for name in ("ttft_seconds", "e2e_seconds")}

    write_records(tmp_path, trace, run, held)
    found = recorded(tmp_path)
    engines = Engines(found)._engines
    assert any((np.diff(engine.places) < 0).any() for engine in engines)
    for engine in engines:
        own = engine.work.trace
        assert (own.input_tokens == found.trace.input_tokens[engine.places]).all()
        arrivals = (found.trace.arrival_seconds + found.held_seconds)[engine.places]
        assert own.arrival_seconds == pytest.approx(arrivals)
        for index, place in enumerate(engine.places.tolist()):
            assert (own.blocks(index) == found.trace.blocks(place)).all()
    # A wait beyond the end counts until the end, so that no turn comes before the turn it follows.
    for engine in Engines(replace(found, held_seconds=np.full(len(found), 60.0)))._engines:
        ends = (found.trace.arrival_seconds + found.e2e_seconds)[engine.places]
        assert engine.work.trace.arrival_seconds == pytest.approx(ends)


def test_a_check_needs_streams_of_several_tokens(tmp_path: Path, trace: Trace, run: Run) -> None:
    def short(index: int, line: dict[str, Any]) -> None:
        if index >= 240:
            line["output_tokens"] = 1
            del line["tpot_seconds"]

    write_records(tmp_path, trace, run, short)
    fit = EngineFit(PROFILE, 0.01, False, 100, 0.0, 0.0)
    with pytest.raises(
        WhatIfError, match="160 of the 160 requests that check the fit have a TTFT and 0 a TPOT"
    ):
        check_fit(recorded(tmp_path), fit)


def call(*words: str) -> Any:
    return CliRunner().invoke(build(["whatif"]), ["whatif", *words], catch_exceptions=True)


def test_the_ranking_is_the_true_one(tmp_path: Path, trace: Trace, run: Run) -> None:
    """The records come from round_robin alone; the other policies run with the true engines."""
    write_records(tmp_path, trace, run)
    out = tmp_path / "out.json"
    done = call(str(tmp_path), "--policy", ",".join(POLICIES), "--json", str(out), *QUICK)
    assert done.exit_code == 0, done.output
    assert "mean TTFT" in done.output
    assert "p90   recorded" in done.output.replace("p90 ", "p90 ")
    told = json.loads(out.read_bytes())
    assert told["fit"]["good"]
    truth: dict[str, list[float]] = {}
    for policy in POLICIES:
        for seed in range(3):
            real = simulated(trace, policy, seed)
            score = np.sqrt(np.nanmean(real.ttft_seconds[40:]) * np.nanmean(real.tpot_seconds[40:]))
            truth.setdefault(policy, []).append(float(score))
    order = [place["policy"] for place in told["ranking"]]
    assert order[0] == min(truth, key=lambda name: np.mean(truth[name]))
    spans = {place["policy"]: place["score"] for place in told["ranking"]}
    # An interval: the range over the seeds, widened by the error of the fit. It has the truth.
    error = told["fit"]["score_error"]
    assert 0 < error < 0.3
    ran = sorted(POLICIES, key=lambda name: name != "round_robin")  # the recorded one first
    runs = [run["ttft_seconds"]["mean"] * run["tpot_seconds"]["mean"] for run in told["runs"]]
    scores = {name: np.sqrt(runs[3 * index : 3 * index + 3]) for index, name in enumerate(ran)}
    best, true_best = np.mean(scores[order[0]]), np.mean(truth[order[0]])
    for name, (mean, low, high) in spans.items():
        assert mean == pytest.approx(np.mean(scores[name]) / best)
        assert low == pytest.approx(scores[name].min() / best / (1 + error))
        assert high == pytest.approx(scores[name].max() / best * (1 + error))
        assert low < np.mean(truth[name]) / true_best < high
    for better in POLICIES:
        for worse in POLICIES:
            if max(truth[better]) < min(truth[worse]) and spans[better][1] > spans[worse][2]:
                pytest.fail(f"{better} beats {worse}, and whatif says the opposite: {spans}")


def test_the_error_of_a_score_has_the_difference_and_its_noise() -> None:
    real = np.full(100, 2.0)
    assert _score_error([(real, 1.21 * real), (real, real)]) == pytest.approx(0.1)
    assert _score_error([(real, real / 1.21), (real, real)]) == pytest.approx(0.1)
    burst = np.where(np.arange(100) < 10, 4.0, real)  # of one block, with the same mean of the rest
    found = _score_error([(real, burst), (real, real)])
    assert found > 2 * (np.sqrt(burst.mean() / 2.0) - 1)


def fitted_once() -> Callable[..., EngineFit]:
    """`fit_engine` that keeps the first fit, for commands that fit the same records alike."""
    kept: list[tuple[Any, EngineFit]] = []

    def fit(recording: Recording, **given: Any) -> EngineFit:
        asked = recording.trace.arrival_seconds.tolist(), recording.ttft_seconds.tolist(), given
        if not kept:
            kept.append((asked, fit_engine(recording, **given)))
        assert kept[0][0] == asked
        return kept[0][1]

    return fit


def test_a_poor_fit_is_refused_with_its_numbers(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The engines become slower behind the part that the fit uses."""

    def slower(index: int, line: dict[str, Any]) -> None:
        if index >= 100:
            line["ttft_seconds"] *= 4

    # These records are far from good: few show it. Both commands fit them alike, so once here.
    monkeypatch.setattr("lmetric_lab.whatif.fit_engine", fitted_once())
    trace = make_trace(requests=140, answer_tokens=20)
    write_records(tmp_path, trace, simulated(trace, "round_robin"), slower)
    monkeypatch.setattr(sys, "argv", ["lmetric-router", "whatif", str(tmp_path), *QUICK])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert "poor" in out
    assert "Simulated on" not in out
    assert "does not fit the records: mean TTFT -" in err
    assert "(limit 25%)" in err
    done = call(str(tmp_path), "--policy", "vllm", "--max-error", "0.9", "--seeds", "1", *QUICK)
    assert done.exit_code == 0
    assert "Simulated on 4 engines" in done.output


def test_pools_are_simulated_in_place_of_the_whole_engines(tmp_path: Path, trace: Trace, run: Run) -> None:
    """The figures of 2P2D are those of the true engines as pools."""
    write_records(tmp_path, trace, run)
    out = tmp_path / "out.json"
    pools = ("--roles", "2P2D", "--kv-bytes-per-token", "98304", "--transfer", "25")
    done = call(str(tmp_path), "--policy", "lmetric", "--seeds", "1", "--json", str(out), *pools, *QUICK)
    assert done.exit_code == 0, done.output
    assert "Simulated on 4 engines (2P2D)" in done.output
    truth = simulate(trace, policy="lmetric", roles="2P2D", transfer="25", **SETTINGS | {"instances": None})
    told = {each["policy"]: each for each in json.loads(out.read_bytes())["runs"]}["lmetric"]
    assert told["tpot_seconds"]["mean"] == pytest.approx(np.nanmean(truth.tpot_seconds[40:]), rel=0.15)
    assert told["ttft_seconds"]["mean"] == pytest.approx(np.nanmean(truth.ttft_seconds[40:]), rel=0.25)
    assert told["tpot_seconds"]["mean"] < 0.9 * np.nanmean(simulated(trace, "lmetric").tpot_seconds[40:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--roles", "2P2D"], "the time of KV transfers needs --kv-bytes-per-token"),
        (["--roles", "2P2D", "--instances", "8"], "the pools are the engines: omit --instances"),
        (["--transfer", "25"], "needs --roles with pools"),
    ],
)
def test_wrong_pools(tmp_path: Path, words: list[str], message: str) -> None:
    done = call(str(tmp_path), *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def sessions(index: int, line: dict[str, Any]) -> None:
    line["session"] = f"s{index // 4}"


def test_turns_of_sessions_follow_the_previous_answer(tmp_path: Path, trace: Trace, run: Run) -> None:
    write_records(tmp_path, trace, run, sessions)
    found = recorded(tmp_path)
    assert found.sessions
    closed, previous = found.closed_loop(), found.trace.previous
    assert previous is not None
    # A turn that came before the previous answer ended does not wait for it.
    waits = previous >= 0
    ends = found.trace.arrival_seconds + found.e2e_seconds
    assert (ends[previous[waits]] <= found.trace.arrival_seconds[waits]).all()
    assert closed.previous is not None
    assert closed.think_seconds is not None
    assert (closed.previous >= 0).sum() == waits.sum() > 10
    assert sorted(closed.input_tokens) == sorted(found.trace.input_tokens)
    index = int(np.flatnonzero(waits)[0])
    before = int(previous[index])
    place = int(np.flatnonzero(closed.input_tokens == found.trace.input_tokens[index])[0])
    assert closed.arrival_seconds[place] == found.trace.arrival_seconds[before]
    assert closed.think_seconds[place] == pytest.approx(found.trace.arrival_seconds[index] - ends[before])


def test_a_session_has_all_requests_with_its_key(tmp_path: Path, trace: Trace, run: Run) -> None:
    def parallel(index: int, line: dict[str, Any]) -> None:
        line["e2e_seconds"] = 1_000.0  # so that all requests overlap
        if index % 4 < 2:
            line["session"] = f"s{index // 4}"

    write_records(tmp_path, trace, run, parallel)
    found = recorded(tmp_path).trace
    assert found.sessions is not None
    assert found.previous is not None
    assert (found.previous == -1).all()
    assert found.sessions.tolist() == [
        number for session in range(len(trace) // 4) for number in (session, session, -1, -1)
    ]


def test_files_with_several_hash_keys_have_a_note(tmp_path: Path, trace: Trace, run: Run) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, key in zip(folders, ("k", "k", "other"), strict=True):
        folder.mkdir()
        write_records(folder, trace, run, key_id=key)

    def notes(*paths: Path) -> list[str]:
        return [note for note in recording_of(read_records(paths).of(None)).notes if "hash keys" in note]

    assert notes(*folders[:2]) == []
    (note,) = notes(*folders)
    assert note.startswith("the files have 2 hash keys")
    assert "records.hash_key_file" in note


def failing(index: int, line: dict[str, Any]) -> None:
    if index % 5 == 0:
        line["status"] = 502


def broken(index: int, line: dict[str, Any]) -> None:
    if index % 5 == 0:
        line |= {"outcome": "reset", "reason": "the connection broke"}


def plain(index: int, line: dict[str, Any]) -> None:
    line["stream"] = False
    del line["ttft_seconds"], line["tpot_seconds"]


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        (None, {"sample": 0.5}, "a sample of 0.5 of the requests"),
        (failing, {}, "80 of 400 requests have no complete answer, more than 10%"),
        (broken, {}, "80 of 400 requests have no complete answer, more than 10%"),
    ],
)
def test_records_that_cannot_answer(
    tmp_path: Path, trace: Trace, run: Run, change: Any, header: Any, message: str
) -> None:
    write_records(tmp_path, trace, run, change or (lambda *_: None), **header)
    with pytest.raises(WhatIfError, match=message):
        recorded(tmp_path)


def test_records_without_streams_or_with_few_requests_or_pools(
    tmp_path: Path, trace: Trace, run: Run
) -> None:
    path = write_records(tmp_path, trace, run, plain)
    with pytest.raises(WhatIfError, match="0 requests have a TTFT"):
        fit_engine(recorded(tmp_path))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:50]))
    with pytest.raises(WhatIfError, match="48 of 48 requests have a complete answer; at least 100"):
        recorded(tmp_path)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(WhatIfError, match="no state of the fleet"):
        recorded(tmp_path)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b'"role":"both"', b'"role":"decode"'), *lines[2:]]))
    with pytest.raises(WhatIfError, match="prefill or decode engines"):
        recorded(tmp_path)


async def test_real_traffic_is_recorded_and_explained(tmp_path: Path, trace: Trace) -> None:
    """Embedded engines, a replayed trace, and a what-if over the records that the router wrote."""
    import asyncio

    short = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": int(index * 90), "input_length": 1024 + 512 * (index % 3), "output_length": 12,
            "hash_ids": [index % 4, index % 4 + 10, 1000 + index, 2000 + index][: 2 + index % 3],
        }
        for index in range(110)
    ]  # fmt: skip
    short.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    folder = tmp_path / "records"
    async with router(
        "--embedded", "2", "--policy", "round_robin", "--experimental", "--records", str(folder)
    ) as r:
        await r.listening()
        replay = (
            "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"
        )
        words = ["replay", "--trace", str(short), "--target", r.url]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            replay,
            *words,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert await process.wait() == 0
        r.process.terminate()
        assert await r.ended() == 0
    records = read_records(folder)
    assert len(records.requests) == 110
    out = tmp_path / "out.json"
    # The errors depend on the load of this machine.
    words = [str(folder), "--policy", "lmetric", "--max-error", "20", "--json", str(out), *QUICK]
    done = await asyncio.to_thread(call, *words)
    assert done.exit_code == 0, done.output
    told = json.loads(out.read_bytes())
    assert told["records"]["policy"] == "round_robin"
    assert {place["policy"] for place in told["ranking"]} == {"round_robin", "lmetric"}
    hits = next(each for each in told["fit"]["figures"] if each["name"] == "hit rate")
    assert abs(hits["error"]) < 0.05
    assert hits["recorded"] > 0.2
