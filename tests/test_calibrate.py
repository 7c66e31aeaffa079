"""``calibrate``: an engine with known constants, probed over real sockets; the fit by itself."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import yaml

from cli_world import beside
from lmetric.profiles import Profile, load_profile, shipped_profiles
from lmetric.profiles.budget import CONTEXT_TOKENS, budgets
from lmetric_lab.calibrate import Calibration, CalibrationError, Calibrator, Limits, make_plan
from lmetric_lab.calibrate.fit import (
    CONSTANTS,
    Observation,
    batch_tokens,
    disagreement,
    fit_profile,
    pieces,
    settled,
)
from lmetric_lab.calibrate.plan import KINDS, Plan
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions, EngineServer
from lmetric_lab.replay import client as replay_client
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.synthetic import check_synthetic
from test_doctor_client import altered
from virtual_time import VirtualLoop

TRUTH = load_profile("llama-3.1-8b-a100")
SLOW = {
    "fixed_seconds": 0.02,
    "decode_seconds_per_sequence": 2e-3,
    "decode_seconds_per_context_token": 6e-6,
    "prefill_seconds_per_token": 2e-4,
    "prefill_seconds_per_attention_pair": 3e-7,
    "max_batch_tokens": 256,
}
LIMITS = Limits(200_000, 32, 16_000, 400_000, None)


def work(plan: Plan, profile: Profile) -> list[Observation]:
    """The exact observations of an engine with this profile."""
    made = []
    for probe in plan.probes:
        new, cached, batch = probe.prompt_tokens, probe.cached_tokens, float(probe.batch)
        chunk = profile.max_batch_tokens - probe.batch
        steps = None if not probe.batch else 1.0 if not new else float(ceil(new / chunk))
        counted = steps or float(max(1, ceil(new / profile.max_batch_tokens)))
        o = Observation(
            probe.kind,
            probe.label,
            0.0,
            steps=steps,
            sequences=counted * batch,
            context_tokens=counted * batch * (probe.context_tokens + 20),
            prefill_tokens=float(new),
            attention_pairs=new * (cached + new / 2),
            requests=0.0 if batch else 1.0,
            chunk_tokens=(new / counted, new / (counted - 1))
            if probe.kind == "mixed" and counted > 1
            else None,
        )
        made.append(replace(o, seconds=predict(profile, o, counted) + 0.002 * o.requests))
    return made


def predict(profile: Profile, o: Observation, steps: float) -> float:
    terms = (steps, o.sequences, o.context_tokens, o.prefill_tokens, o.attention_pairs)
    return float(sum(getattr(profile, name) * term for name, term in zip(CONSTANTS, terms, strict=True)))


@pytest.mark.parametrize("budget", [20_000, 60_000, 200_000, 2_000_000])
@pytest.mark.parametrize("chunk", [None, 512, 8192])
def test_a_plan_keeps_its_limits_and_has_every_kind(budget: int, chunk: int | None) -> None:
    limits = replace(LIMITS, budget_tokens=budget, chunk_tokens=chunk)
    plan = make_plan(limits)
    assert 0.3 * budget < plan.most_tokens < 0.75 * budget, "some is kept back for repetitions"
    assert plan.largest_batch <= limits.max_batch
    assert plan.longest_prompt < limits.max_prompt_tokens
    assert {probe.kind for probe in plan.probes} == set(KINDS)
    for probe in plan.probes:
        assert (
            probe.batch * (probe.context_tokens + probe.output_tokens) + probe.prompt_tokens <= 0.8 * 400_000
        )


def test_a_plan_that_tells_nothing_is_refused() -> None:
    for small in ({"budget_tokens": 2_000}, {"max_prompt_tokens": 20}, {"cache_tokens": 256}):
        with pytest.raises(CalibrationError, match="too little to calibrate with"):
            make_plan(replace(LIMITS, **small))


@pytest.mark.parametrize("name", ["llama-3.1-8b-a100", "independent-sim", "qwen3-32b-h20"])
def test_exact_figures_give_the_constants_back(name: str) -> None:
    profile = load_profile(name)
    fit = fit_profile(work(make_plan(LIMITS), profile))
    assert fit.max_batch_tokens == profile.max_batch_tokens
    for constant in CONSTANTS:
        assert fit.constants[constant] == pytest.approx(getattr(profile, constant), rel=0.01), constant
    assert fit.request_seconds == pytest.approx(0.002, rel=0.05)
    assert fit.median_error < 1e-3
    assert not fit.unidentified


def test_noise_and_outliers_move_the_fit_little() -> None:
    random = np.random.default_rng(7)
    exact = work(make_plan(LIMITS), TRUTH)
    noisy = [replace(o, seconds=o.seconds * (1 + 0.02 * random.standard_normal())) for o in exact]
    for index in (1, 9, 14):
        noisy[index] = replace(noisy[index], seconds=noisy[index].seconds * 4)
    fit = fit_profile(noisy)
    off = [abs(r.predicted_seconds / o.seconds - 1) for r, o in zip(fit.residuals, exact, strict=True)]
    assert max(off) < 0.1
    assert np.median(off) < 0.02
    worst = sorted(fit.residuals, key=lambda r: abs(r.relative_error))[-3:]
    assert {r.label for r in worst} == {noisy[index].label for index in (1, 9, 14)}


def test_what_the_probes_do_not_tell_is_said_and_bounded() -> None:
    profile = TRUTH.model_copy(update={"decode_seconds_per_context_token": 0.0})
    random = np.random.default_rng(3)
    exact = work(make_plan(LIMITS), profile)
    fit = fit_profile([replace(o, seconds=o.seconds * (1 + 0.01 * random.standard_normal())) for o in exact])
    said = [text for text in fit.unidentified if text.startswith("decode_seconds_per_context_token")]
    assert said
    assert "at most" in said[0]
    assert fit.constants["decode_seconds_per_context_token"] >= 0


def test_too_few_figures_are_an_error() -> None:
    with pytest.raises(CalibrationError, match="at least 8, prefills and decodes"):
        fit_profile(work(make_plan(LIMITS), TRUTH)[:5])


def test_of_several_measurements_the_lower_quartile_counts_and_the_closest_two_tell_the_doubt() -> None:
    blank = work(make_plan(LIMITS), TRUTH)[0]
    times = [0.5, 0.102, 0.1, 0.2, 0.9]
    chosen = settled([replace(blank, seconds=time) for time in times])
    assert chosen.seconds == 0.102
    assert chosen.doubt == pytest.approx(0.02)
    assert chosen.spread == pytest.approx(0.8 / 0.102)
    assert disagreement([blank]) == inf


def test_the_times_between_tokens_show_the_pieces_of_a_prompt() -> None:
    usual, full = 0.01, 0.13
    intervals = np.array([usual, usual, full, full, full, full, 0.03, usual])
    least, most = pieces(intervals, usual, 8500, 4) or (0.0, 0.0)
    assert least <= 2048 <= most
    assert pieces(np.full(8, usual), usual, 8500, 4) is None
    alone = pieces(np.array([usual, full, usual]), usual, 1500, 4)
    assert alone == (1504, inf)
    blank = work(make_plan(LIMITS), TRUTH)[0]
    assert batch_tokens([replace(blank, chunk_tokens=(least, most))])[0] == 2048
    tokens, how = batch_tokens([replace(blank, chunk_tokens=alone)])
    assert tokens == 1504
    assert "from below" in how


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_budget_keeps_its_time_and_a_larger_one_does_not(name: str) -> None:
    profile = load_profile(name)
    if profile.decode_throughput is not None:
        pytest.skip("its decodes have a curve of their own")

    def seconds(decodes: int, tokens: float) -> float:
        context = decodes * CONTEXT_TOKENS
        work = (1, decodes, context, tokens, tokens * (CONTEXT_TOKENS + tokens / 2))
        return float(sum(getattr(profile, c) * x for c, x in zip(CONSTANTS, work, strict=True)))

    found = list(budgets(profile, 0.08))
    assert found[-1].decodes == profile.max_sequences
    for budget in found:
        if budget.batch_tokens is None:
            continue
        prefill = budget.batch_tokens - budget.decodes
        assert seconds(budget.decodes, prefill) <= 0.08 * 1.001
        assert (
            budget.batch_tokens == profile.max_batch_tokens
            or seconds(budget.decodes, 1.05 * prefill + 1) > 0.08
        )
        assert budget.prompt_tokens_per_second <= budget.full_prompt_tokens_per_second * 1.0001


@pytest.mark.parametrize("name", ["llama-3.1-8b-a100", "independent-sim"])
def test_the_recommended_budget_keeps_the_goal_in_the_simulator(name: str) -> None:
    profile, goal = load_profile(name).model_copy(update={"max_sequences": 64}), 0.075
    # More prompts and answers than the engine can serve: all its sequences are in use.
    load = {"rate": 4, "duration_seconds": 30, "input_tokens": CONTEXT_TOKENS, "output_tokens": 400}
    trace = check_synthetic({"synthetic": "requests", "seed": 3, **load}, "here").make()

    def run(batch_tokens: int) -> tuple[float, float]:
        """P99 of the time between tokens, and the time to serve all requests, in seconds."""
        engine = profile.model_copy(update={"max_batch_tokens": batch_tokens})
        result = simulate(trace, instances=1, profile=engine)
        gap = result.gap_seconds(0.99)
        assert gap is not None
        return gap, float(result.finished_seconds.max())

    *_, budget = budgets(profile, goal)
    assert budget.batch_tokens is not None
    (stock_gap, stock_seconds), (gap, seconds) = run(profile.max_batch_tokens), run(budget.batch_tokens)
    # Gaps are counted in bins of 1%.
    assert gap <= goal * 1.01 < 2 * goal < stock_gap
    # The price is for prompts beside a full batch; steps without prompts cost nothing more.
    price = 1 - budget.prompt_tokens_per_second / budget.full_prompt_tokens_per_second
    assert 0.02 < 1 - stock_seconds / seconds < price < 0.35


# -- against an engine


async def calibrate(options: EngineOptions, **settings: Any) -> Calibration:
    async with (
        EmbeddedEngines(1, options) as engines,
        Calibrator(engines.urls[0], **settings) as calibrator,
    ):
        return await calibrator.run()


def calibrate_exactly(
    monkeypatch: pytest.MonkeyPatch, options: EngineOptions, **settings: Any
) -> Calibration:
    """Calibrates an engine over sockets on a clock that does not depend on the machine."""

    async def run() -> Calibration:
        async with (
            EngineServer(options.model_copy(update={"port": 0})) as engine,
            Calibrator(engine.url, **settings) as calibrator,
        ):
            return await calibrator.run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        monkeypatch.setattr(replay_client, "time", SimpleNamespace(monotonic=runner.get_loop().time))
        return runner.run(run())


def off(made: Profile, truth: Profile) -> dict[str, float]:
    """Relative errors of step times that a fleet sees every day."""
    piece = 200 if truth.max_batch_tokens < 1000 else 1000
    steps = {
        "1 decoding": (1, 1, 200, 0, 0),
        "8 decoding": (1, 8, 2_000, 0, 0),
        "a prompt": (1, 0, 0, piece, piece * piece / 2),
        "a prompt beside 8": (1, 8, 2_000, piece, piece * piece / 2),
        "a piece of a long prompt": (1, 4, 1_000, piece, piece * 5 * piece),
    }
    times = {
        name: [sum(getattr(p, c) * x for c, x in zip(CONSTANTS, step, strict=True)) for p in (made, truth)]
        for name, step in steps.items()
    }
    return {name: abs(fitted / true - 1) for name, (fitted, true) in times.items()}


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """An engine with long steps, of which sockets and timers are a small part."""
    profile = TRUTH.model_copy(update=SLOW)
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(profile.model_dump()))
    return path


def test_an_engine_is_probed_over_sockets(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(profile=str(slow), clock_speed=2)
    truth = options.resolved_profile()
    made = calibrate_exactly(monkeypatch, options, budget_tokens=16_000, max_batch=6, clock_speed=2)
    errors = off(made.profile, truth)
    assert max(errors.values()) < 0.15, (errors, made.profile)
    assert 0.5 * truth.fixed_seconds < made.profile.fixed_seconds < 4 * truth.fixed_seconds
    assert made.tokens_used <= 16_000
    assert (made.profile.block_tokens, made.profile.cache_blocks) == (truth.block_tokens, truth.cache_blocks)
    said = "max_sequences: the engine does not say; 256 is assumed (vLLM's default, 256 or 1,024, depends on"
    assert any(text.startswith(said) for text in made.assumed)
    assert {residual.kind for residual in made.fit.residuals} == set(KINDS)
    assert made.facts.engine.startswith("vllm ")
    assert "lmetric" in made.facts.engine


@pytest.mark.nightly
async def test_an_engines_constants_are_found_over_sockets(slow: Path) -> None:
    # Step times are within 15%. The machine does other things as well; if it stalls in a wrong
    # moment, calibrate once more.
    options = EngineOptions(profile=str(slow), clock_speed=2)
    truth = options.resolved_profile()
    for _ in range(3):
        made = await calibrate(options, budget_tokens=16_000, max_batch=6, clock_speed=2)
        errors = off(made.profile, truth)
        if max(errors.values()) < 0.15:
            break
    assert max(errors.values()) < 0.15, (errors, made.profile)
    assert made.fit.max_batch_tokens == truth.max_batch_tokens
    assert made.fit.median_error < 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama-3.1-8b-a100", "independent-sim", "qwen3-30b-a3b-h20"])
async def test_the_whole_budget_finds_constants_and_pieces(name: str) -> None:
    options = EngineOptions(profile=name)
    made = await calibrate(options)
    truth = options.resolved_profile()
    errors = off(made.profile, truth)
    assert max(errors.values()) < 0.05, (errors, made.profile)
    assert made.fit.max_batch_tokens == truth.max_batch_tokens
    assert made.fit.median_error < 0.03


def test_an_engine_that_runs_fewer_at_once_than_asked_is_found_out(
    slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(profile=str(slow), clock_speed=4, max_sequences=3)
    made = calibrate_exactly(monkeypatch, options, budget_tokens=20_000, max_batch=8, clock_speed=4)
    assert made.profile.max_sequences == 3
    assert any("the engine runs 3 at once" in text for text in made.dropped)


async def test_a_busy_engine_is_refused_unless_forced() -> None:
    async with EngineServer(EngineOptions(port=0)) as engine, aiohttp.ClientSession() as http:
        url = engine.url
        body = {"prompt": [200] * 50, "max_tokens": 2_000, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as stream:
            await stream.content.readany()
            with pytest.raises(CalibrationError, match="is busy: 1 requests run"):
                await Calibrator(url).__aenter__()
            async with Calibrator(url, force=True) as calibrator:
                assert calibrator.plan.probes
        # Somebody comes while it runs.
        async with Calibrator(url) as calibrator, http.post(f"{url}/v1/completions", json=body):
            with pytest.raises(CalibrationError, match="is busy"):
                await asyncio.wait_for(calibrator.run(), 30)


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_an_engine_of_several_ranks_is_refused(api: str) -> None:
    """Its queues were taken for one, and its batches for half of what they were."""
    why = r"ranks 0, 1, .* --data-parallel-size 1, .* of a dense model fits"
    async with EngineServer(EngineOptions(port=0, api=api, ranks=2)) as engine:
        with pytest.raises(CalibrationError, match=why):
            await Calibrator(engine.url).__aenter__()


async def test_no_budget_is_recommended_for_assumed_sequences(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    options = EngineOptions(port=0, max_sequences=1024, max_batch_tokens=1024)
    async with EngineServer(options) as engine:
        code, stdout, stderr = await command(engine.url, "--token-slo-ms", "60", "--out", str(out))
        async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/metrics") as told:
            assert b'vllm:prompt_tokens_total{engine="0",model_name="emulated"} 0.0' in await told.read()
    assert (code, stdout, out.exists()) == (1, "", False)
    assert "256 or 1,024, depends on the GPU" in stderr
    assert "--max-sequences" in stderr


async def test_sglangs_sequence_slots_are_on_its_load_page() -> None:
    def without(_: str, body: bytes) -> bytes:
        return body.replace(b"max_running_requests", b"other")

    async with EngineServer(EngineOptions(port=0, api="sglang", max_sequences=48)) as engine:
        async with Calibrator(engine.url) as calibrator:
            assert calibrator.facts.max_sequences == 48
            calibrator.check_sequences()
        async with altered(engine.url, without) as url, Calibrator(url) as calibrator:
            why = "which --token-slo-ms needs: pass its --max-running-requests as --max-sequences"
            with pytest.raises(CalibrationError, match=why):
                calibrator.check_sequences()


async def test_what_cannot_be_asked_is_an_error_of_one_line() -> None:
    with pytest.raises(CalibrationError, match="cannot reach http://127"):
        await Calibrator("http://127.0.0.1:9").__aenter__()
    async with EngineServer(EngineOptions(port=0, token_ids=False, model="m")) as engine:
        with pytest.raises(CalibrationError, match="serves m, not 'other'"):
            await Calibrator(engine.url, model="other").__aenter__()
        async with Calibrator(engine.url) as calibrator:
            with pytest.raises(CalibrationError, match="takes text only"):
                await calibrator.run()


async def test_the_command_writes_a_profile_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    async with EmbeddedEngines(1, EngineOptions(profile="llama-3.1-8b-a100", clock_speed=8)) as engines:
        done = await command(
            engines.urls[0], "--clock-speed", "8", "--tokens-budget", "20000", "--max-batch", "8",
            "--max-sequences", "64", "--out", str(out), "--token-slo-ms", "60", "--json",
        )  # fmt: skip
    code, stdout, stderr = done
    assert code == 0, stderr
    data = json.loads(stdout)
    assert [budget["decodes"] for budget in data["budgets"]] == [16, 32, 64]
    assert data["profile"] == yaml.safe_load(out.read_text())
    assert "at most" in stderr.splitlines()[0]
    assert data["tokens_used"] <= 20_000
    assert data["probes"]
    profile = load_profile(str(out))
    assert profile.max_sequences == 64
    assert profile.source is not None
    assert profile.source.startswith("Calibrated on 20")


async def test_ctrl_c_ends_the_probes_and_the_engines_work(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    async with EngineServer(EngineOptions(port=0)) as engine, aiohttp.ClientSession() as http:
        url = engine.url
        process = await start(url, "--out", str(out))
        await until_running(http, url)
        process.send_signal(signal.SIGINT)
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 130, stderr
        assert b"Traceback" not in stderr
        assert not out.exists()
        for _ in range(50):
            if await running(http, url) == 0:
                break
            await asyncio.sleep(0.1)
        assert await running(http, url) == 0


async def start(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lmetric.cli", "calibrate", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def command(*words: str) -> tuple[int, str, str]:
    """Runs the command on a thread, beside the engines of this process."""
    done = await beside("calibrate", *words)
    return done.returncode, done.stdout, done.stderr


async def running(http: aiohttp.ClientSession, url: str) -> float:
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
    return float(line.rpartition(" ")[2])


async def until_running(http: aiohttp.ClientSession, url: str) -> None:
    for _ in range(100):
        if await running(http, url):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no probe came")
