"""Live engines against the simulator (trust.md). bench/trust/run.py compares everything."""

import asyncio
import json
import random
import selectors
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from lmetric import _core
from lmetric.profiles import Profile, load_profile
from lmetric_lab.demo import SLICE
from lmetric_lab.emulated.driver import Clock, Driver
from lmetric_lab.emulated.generation import Generation
from lmetric_lab.emulated.metrics import EngineMetrics
from lmetric_lab.emulated.protocol import Shape
from lmetric_lab.emulated.text import shared_text
from lmetric_lab.sim.prompts import PromptWriter
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, load_trace

RUN = Path(__file__).parent.parent / "bench" / "trust" / "run.py"


class LateSelector(selectors.DefaultSelector):
    """Waits by moving a clock, and always a little too far, as on a machine with other work."""

    def __init__(self, most_late_seconds: float) -> None:
        super().__init__()
        self.now = 0.0
        self._random = random.Random(1)
        self._most_late = most_late_seconds

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self.now += timeout + self._random.uniform(0, self._most_late)
        return super().select(0)


class LateLoop(asyncio.SelectorEventLoop):
    """An event loop on a `LateSelector`'s clock. No two looks at it give the same time."""

    def __init__(self, most_late_seconds: float) -> None:
        self._own = LateSelector(most_late_seconds)
        super().__init__(self._own)

    def time(self) -> float:
        self._own.now += 1e-7
        return self._own.now


class Ends(EngineMetrics):
    """An engine's metrics that keep when each request ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ends: dict[int, float] = {}

    def finished(self, generation: Generation, now: float) -> None:
        self.ends[generation.key] = now
        super().finished(generation, now)


async def drive(trace: Trace, profile: Profile) -> dict[str, list[float]]:
    """Plays `trace` on one engine as a server would, in this loop's time; returns its times."""
    text = shared_text()
    engine = _core.Engine(profile.constants(), text.words, text.vocabulary, admission="vllm")
    metrics = Ends("m", {}, engine.load)
    driver = Driver(engine, Clock(1.0), metrics, None)
    writer = PromptWriter([f"{token}," for token in text.words])
    generations = []
    for index, due in enumerate(trace.arrival_seconds.tolist()):
        await asyncio.sleep(due - driver.clock.now())
        prompt = array("I", orjson.loads(f"[{writer.prompt(trace, index)[:-1]}]"))
        shape = Shape(chat=False, request_id="r", model="m", prompt=prompt, pieces=text.pieces)
        generations.append(Generation(shape, int(trace.output_tokens[index])))
        driver.submit(generations[-1])
    await asyncio.gather(*(generation.over for generation in generations))
    return {
        "arrival_seconds": [generation.arrived for generation in generations],
        "hit_tokens": [generation.cached_tokens for generation in generations],
        "scheduled_seconds": [generation.scheduled for generation in generations],
        "first_token_seconds": [generation.first_token for generation in generations],
        "finished_seconds": [metrics.ends[generation.key] for generation in generations],
        "preemptions": [engine.load()["preemptions"]],
    }


def held_against_the_simulator(trace: Trace, profile: Profile, most_late_seconds: float) -> Run:
    """Drives an engine, then simulates requests with equal arrival times: all times are equal."""
    with asyncio.Runner(loop_factory=lambda: LateLoop(most_late_seconds)) as runner:
        driven = runner.run(drive(trace, profile))
    arrivals = np.array(driven.pop("arrival_seconds"))
    assert (arrivals >= trace.arrival_seconds).all()
    came = replace(trace, arrival_seconds=arrivals)
    run = simulate(came, policy="random", instances=1, profile=profile, admission="vllm")
    assert [run.preemptions.sum()] == driven.pop("preemptions")
    for name, values in driven.items():
        np.testing.assert_allclose(values, getattr(run, name), rtol=0, atol=1e-9, err_msg=name)
    return run


@pytest.mark.parametrize("most_late_seconds", [0.0, 0.1])
def test_an_engine_whose_loop_is_late_keeps_the_simulators_time(most_late_seconds: float) -> None:
    """Not a microsecond adds up, however late the loop runs."""
    # Memory for two or three requests: blocks leave the cache, and running requests are preempted.
    profile = load_profile("qwen3-30b-a3b-h20").model_copy(update={"cache_blocks": 1000})
    trace = load_trace(SLICE).at_most(7000).first(120).faster(1.2)
    trace = replace(trace, output_tokens=np.clip(trace.output_tokens, 1, 300))
    run = held_against_the_simulator(trace, profile, most_late_seconds)
    assert run.preemptions.any()
    assert run.hit_tokens.any()


def test_a_request_that_finds_the_engine_idle_begins_at_once() -> None:
    """Also if it is read before the end of the previous step: timers are whole milliseconds."""
    profile = load_profile("qwen3-30b-a3b-h20").model_copy(
        update={
            "fixed_seconds": 0.0103,
            "prefill_seconds_per_token": 0,
            "prefill_seconds_per_attention_pair": 0,
        }
    )
    trace = load_trace(SLICE).first(2)
    trace = replace(
        trace,
        arrival_seconds=np.array([0, 0.0105]),
        input_tokens=np.array([10, 10]),
        output_tokens=np.array([1, 1]),
        hash_offsets=np.zeros(3, np.int64),
        hash_ids=np.empty(0, np.uint64),
    )
    run = held_against_the_simulator(trace, profile, 0.0)
    assert run.scheduled_seconds[1] == pytest.approx(0.0105, abs=1e-4)


async def measure(out: Path, *flags: str) -> tuple[int | None, dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(RUN), *flags, "--out", str(out))
    code = await process.wait()
    return code, json.loads(out.read_text())  # noqa: ASYNC240


@pytest.mark.nightly
async def test_live_engines_take_the_simulated_times(tmp_path: Path) -> None:
    """Real sockets, real time, the simulator's placements. Wide bounds for busy machines."""
    code, result = await measure(tmp_path / "clocks.json", "clocks", "--quick")
    clocks = result["clocks"]
    assert (code, clocks["failures"], clocks["tokens_equal"]) == (0, [], True)
    assert clocks["requests_with_equal_hits"] >= 0.9 * clocks["requests"]
    assert clocks["hit_ratio"]["simulated"] > 0.05
    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        assert clocks[name]["by_figure"]["mean"]["ratio"] == pytest.approx(1, abs=0.15)
        assert clocks[name]["engines_ratio"] == pytest.approx(1, abs=0.1)


@pytest.mark.nightly
async def test_live_engines_and_the_simulator_agree(tmp_path: Path) -> None:
    """On a quiet machine: within 3%, pairs of policies in the same order, and the control loses."""
    code, _ = await measure(tmp_path / "trust.json", "all", "--check")
    assert code == 0
