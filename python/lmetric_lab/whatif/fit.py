"""Fits an engine's profile to recorded requests.

A regression of the step-time model on TTFT and TPOT gives a start. Then each engine's own requests
are simulated with that engine alone, at their recorded times, and the constants are improved until
simulated and recorded times agree. So the fit does not depend on the policy that ran.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.extras import install
from lmetric.profiles import Profile, load_profile
from lmetric_lab.calibrate.fit import CONSTANTS, Observation, fit_profile
from lmetric_lab.calibrate.plan import CalibrationError
from lmetric_lab.defaults import DEFAULT_PROFILE
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import routing_of, simulate_routed
from lmetric_lab.sim.scenario import Scenario
from lmetric_lab.sim.workload import Workload, prepare
from lmetric_lab.whatif.recording import DEFAULT_CACHE_TOKENS, Recording, WhatIfError

FIT_SHARE = 0.6  # of the requests by arrival; the others check the fit
MAX_FIT_REQUESTS = 2_000
MAX_OBSERVATIONS = 1_500
MAX_BATCH_TOKENS = (2048, 4096, 8192, 16_384)  # tried for engines, which do not report it
MAX_SEQUENCES = 256  # assumed: vLLM's default for many GPUs
MIN_TIMES = 20  # requests with a TTFT and with a TPOT
MIN_START = 0.3  # of a constant, relative to the default profile
MEAN_WEIGHT = 0.5  # of the means, relative to all requests together
USUAL_ERROR = 0.2  # relative errors beyond it count less and less
STEPS: Sequence[float] = (0.7, 0.35, 0.15, 0.07, 0.03)  # of the logarithms of constants
MAX_ROUNDS = 6  # over all directions, for each step
# Of the search: each constant alone, and pairs of constants that replace each other. The second
# constant of a pair is the smaller part of the time.
DIRECTIONS = np.vstack((np.eye(6), [[1, -4, 0, 0, 0, 0], [0, 0, 0, 1, -4, 0]]))
CLEARLY = 0.97  # a longer step must be better, because short ones fit the same data
MIN_SECONDS = 1e-12  # of a constant

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EngineFit:
    """A fitted profile.

    ``request_seconds``: time of a request outside of the engine's steps, part of the TTFT.
    ``cached_answers``: whether a next turn finds the previous answer in the cache. The errors are
    medians of relative errors over the requests of the fit.
    """

    profile: Profile
    request_seconds: float
    cached_answers: bool
    requests: int
    ttft_error: float
    tpot_error: float


def fit_engine(
    recording: Recording,
    *,
    max_batch_tokens: int | None = None,
    max_sequences: int | None = None,
    cache_blocks: int | None = None,
    kv_bytes_per_token: int | None = None,
) -> EngineFit:
    """Fits one profile for all engines. Values that are given replace assumed ones.

    ``kv_bytes_per_token``: for simulations with KV transfers alone.

    Raises:
        WhatIfError: too few streams, which alone show TTFT and TPOT, or scipy is missing.
    """
    streams = int((~np.isnan(recording.ttft_seconds)).sum()), int((~np.isnan(recording.tpot_seconds)).sum())
    if min(streams) < MIN_TIMES:
        raise WhatIfError(
            f"{streams[0]} requests have a TTFT and {streams[1]} a TPOT; at least {MIN_TIMES} of each are "
            "needed, and only streams have them: record streamed requests"
        )
    if find_spec("scipy") is None:
        raise WhatIfError(f"whatif needs scipy; run: {install('calibrate')}")
    tokens = recording.block_tokens * (recording.cache_blocks or 0) or DEFAULT_CACHE_TOKENS
    sequences = max_sequences or MAX_SEQUENCES
    base = load_profile(DEFAULT_PROFILE).model_copy(
        update={
            "block_tokens": recording.block_tokens,
            "cache_blocks": cache_blocks or max(1, tokens // recording.block_tokens),
            "max_sequences": sequences,
            "kv_bytes_per_token": kv_bytes_per_token,
            "max_batch_tokens": max(max_batch_tokens or MAX_BATCH_TOKENS[1], sequences),
        }
    )
    start = _start(recording, base)
    engines = Engines(recording)
    cached = _cached_answers(recording, engines, start)
    best: tuple[float, Profile, Floats] | None = None
    logs, steps = np.zeros(len(CONSTANTS) + 1), STEPS
    for size in (max_batch_tokens,) if max_batch_tokens else MAX_BATCH_TOKENS:
        profile = start.model_copy(update={"max_batch_tokens": max(size, sequences)})
        cost, logs = _searched(engines, profile, cached, logs, steps)
        steps = STEPS[2:]  # the other sizes begin near the solution of the first
        if best is None or cost < CLEARLY * best[0]:
            best = (cost, profile, logs)
    assert best is not None
    profile, request_seconds = _with(best[1], best[2])
    ttft, tpot = (made / real - 1.0 for made, real in engines.times(profile, request_seconds, cached))
    constants = {name: float(f"{getattr(profile, name):.4g}") for name in CONSTANTS}
    profile = profile.model_copy(
        update=constants
        | {
            "source": f"Fitted by lmetric-router whatif to {engines.requests} recorded requests.",
            "note": f"Median errors: TTFT {np.median(abs(ttft)):.0%}, TPOT {np.median(abs(tpot)):.0%}.",
        }
    )
    return EngineFit(
        profile,
        request_seconds,
        cached,
        engines.requests,
        float(np.median(abs(ttft))),
        float(np.median(abs(tpot))),
    )


_REQUEST_SECONDS = 0.005  # start of the last parameter


def _searched(
    engines: Engines, profile: Profile, cached: bool, logs: Floats, steps: Sequence[float]
) -> tuple[float, Floats]:
    """Lowest cost, and the logarithms of the changes, by a search along `DIRECTIONS`.

    Simulated times jump when a constant changes, so that derivatives are of no use.
    """
    best, found = engines.cost(logs, profile, cached), logs
    for step in steps:
        failed = 0  # directions, one after the other, without a better point
        for direction in chain.from_iterable(repeat(DIRECTIONS, MAX_ROUNDS)):
            failed += 1
            for change in (step, -step):
                tried = found + change * direction
                cost = engines.cost(tried, profile, cached)
                if cost < best * 0.999:
                    best, found, failed = cost, tried, 0
                    break  # the other way leads back
            if failed == len(DIRECTIONS):
                break
    return best, found


def _with(profile: Profile, logs: Floats) -> tuple[Profile, float]:
    """The profile with changed constants, and the seconds of a request outside of steps."""
    factors = np.exp(logs)
    constants = {
        name: max(getattr(profile, name), MIN_SECONDS) * float(factor)
        for name, factor in zip(CONSTANTS, factors, strict=False)
    }
    return profile.model_copy(update=constants), _REQUEST_SECONDS * float(factors[-1])


@dataclass(frozen=True, slots=True)
class _Engine:
    """The requests of one engine, by their ``places`` in the recording.

    Times of ``judged`` requests are compared. The others came while those ran: part of the load.
    """

    work: Workload
    places: NDArray[np.int64]
    judged: NDArray[np.bool_]


class Engines:
    """The first requests of each engine, prepared for simulations of that engine alone."""

    def __init__(self, recording: Recording) -> None:
        used = min(round(FIT_SHARE * len(recording)), MAX_FIT_REQUESTS)
        self.requests = used
        self._recording = recording
        self._engines: list[_Engine] = []
        alone = (
            engine_scenario(cached).replace(policy="round_robin", instances=1) for cached in (False, True)
        )
        self._scenarios = [(each, routing_of(each)) for each in alone]
        trace = recording.trace
        # Records of other writers may have a wait that ends after the answer.
        arrivals = trace.arrival_seconds + np.minimum(recording.held_seconds, recording.e2e_seconds)
        ends = trace.arrival_seconds + recording.e2e_seconds
        for engine in range(len(recording.engines)):
            own = np.flatnonzero(recording.instance == engine)
            judged = own[own < used]
            if not len(judged):
                continue
            others = own[(own >= used) & (arrivals[own] < np.nanmax(ends[judged]))]
            places = np.concatenate((judged, others))
            places = places[np.argsort(arrivals[places], kind="stable")]
            part = trace.take(places, arrivals)
            self._engines.append(_Engine(prepare(part, _blocks_of(recording)), places, places < used))

    def runs(self, profile: Profile, cached: bool) -> list[tuple[Run, _Engine]]:
        """The simulation of each engine alone, with its requests."""
        scenario, routing = self._scenarios[cached]
        scenario = scenario.model_copy(update={"profile": profile})

        def run(engine: _Engine) -> tuple[Run, _Engine]:
            return simulate_routed(engine.work, scenario, routing), engine

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(run, self._engines))

    def times(self, profile: Profile, request_seconds: float, cached: bool) -> list[tuple[Floats, Floats]]:
        """Simulated and recorded seconds: of TTFT, and of TPOT, of the requests with each."""
        ttft: list[tuple[Floats, Floats]] = []
        tpot: list[tuple[Floats, Floats]] = []
        for run, engine in self.runs(profile, cached):
            own, places = engine.judged, engine.places[engine.judged]
            simulated = (run.first_token_seconds - run.arrival_seconds)[own] + request_seconds
            ttft.append((simulated, (self._recording.ttft_seconds - self._recording.held_seconds)[places]))
            tpot.append((run.tpot_seconds[own], self._recording.tpot_seconds[places]))
        found = []
        for parts in (ttft, tpot):
            made, real = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
            known = (real > 0) & np.isfinite(made)
            found.append((made[known], real[known]))
        return found

    def cost(self, logs: Floats, profile: Profile, cached: bool) -> float:
        """How far simulated times are from recorded ones; TTFT and TPOT have equal weight.

        Differences of logarithms beyond `USUAL_ERROR` count less and less. The means count, too:
        long times dominate them, and they decide how policies compare.
        """
        changed, request_seconds = _with(profile, logs)
        total = 1e-4 * float((logs**2).mean())  # keeps constants that the data does not show
        for made, real in self.times(changed, request_seconds, cached):
            each = np.log(made / real) / USUAL_ERROR
            mean = float(np.log(made.mean() / real.mean())) / USUAL_ERROR
            total += float((np.sqrt(1 + each**2) - 1).mean()) + MEAN_WEIGHT * (np.sqrt(1 + mean**2) - 1)
        return float(total)


def engine_scenario(cached_answers: bool) -> Scenario:
    """A scenario whose engines are like the recorded ones."""
    return Scenario(
        admission="vllm", cached_answers=cached_answers, prefix_fetch="none", split="none", programs="none"
    )


def _blocks_of(recording: Recording) -> dict[str, Any]:
    """A profile for `prepare`, which reads its block size alone."""
    return load_profile(DEFAULT_PROFILE).in_blocks_of(recording.block_tokens).model_dump()


def _cached_answers(recording: Recording, engines: Engines, profile: Profile) -> bool:
    """Whether the recorded hits are closer to a simulation in which turns find answers."""
    known = ~np.isnan(recording.cached_tokens)
    if not known.any():
        return True
    distances = []
    for cached in (True, False):
        runs = engines.runs(profile, cached)
        real = sum(float(recording.cached_tokens[each.places][known[each.places]].sum()) for _, each in runs)
        hits = sum(float(run.hit_tokens[known[each.places]].sum()) for run, each in runs)
        distances.append(abs(hits - real))
    return distances[0] <= distances[1]


def _start(recording: Recording, base: Profile) -> Profile:
    """Constants by regression on periods of single requests; on failure those of ``base``."""
    observations = _observations(recording)
    try:
        fit = fit_profile(observations, base.max_batch_tokens)
    except CalibrationError:
        return base
    constants = {name: max(value, MIN_START * getattr(base, name)) for name, value in fit.constants.items()}
    return base.model_copy(update=constants)


def _observations(recording: Recording) -> list[Observation]:
    """The work of an engine between two events of a request: its arrival, first and last token.

    Only requests of the fit count. Others' prompts count as computed at their first token.
    """
    trace = recording.trace
    arrival = trace.arrival_seconds + recording.held_seconds
    first = trace.arrival_seconds + recording.ttft_seconds
    end = trace.arrival_seconds + recording.e2e_seconds
    cached = np.nan_to_num(recording.cached_tokens)
    new = np.maximum(trace.input_tokens - cached, 1.0)
    pairs = new * (cached + new / 2)
    steps = np.maximum(trace.output_tokens - 1, 1)
    rate = steps / np.maximum(end - first, 1e-6)  # tokens/s while it decodes
    context = trace.input_tokens + trace.output_tokens / 2
    made: list[Observation] = []
    chosen = np.flatnonzero(~np.isnan(first[: round(FIT_SHARE * len(recording))]))
    if len(chosen) > MAX_OBSERVATIONS:
        chosen = chosen[:: len(chosen) // MAX_OBSERVATIONS + 1]
    for index in chosen.tolist():
        mine = recording.instance == recording.instance[index]
        for kind, begin, until in (("prefill", arrival, first), ("decode", first, end)):
            low, high = float(begin[index]), float(until[index])
            if not high - low > 1e-4 or (kind == "decode" and trace.output_tokens[index] < 2):
                continue
            inside = mine & (first > low) & (first <= high)
            overlap = np.where(mine, np.minimum(end, high) - np.maximum(first, low), 0.0)
            tokens = np.nan_to_num(np.maximum(overlap, 0.0) * rate)
            made.append(
                Observation(
                    kind,  # type: ignore[arg-type]
                    str(index),
                    high - low,
                    steps=float(steps[index]) if kind == "decode" else None,
                    sequences=float(tokens.sum()),
                    context_tokens=float((tokens * context).sum()),
                    prefill_tokens=float(new[inside].sum()),
                    attention_pairs=float(pairs[inside].sum()),
                    requests=float(kind == "prefill"),
                )
            )
    return made
