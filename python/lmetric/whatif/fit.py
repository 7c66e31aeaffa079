"""Fits an engine's profile to recorded requests.

A regression of the step-time model on TTFT and TPOT gives a start. Then each engine's own requests
are simulated with that engine alone, at their recorded times, and the constants are improved until
simulated and recorded times agree. So the fit does not depend on the policy that ran.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.calibrate.fit import CONSTANTS, Observation, fit_profile
from lmetric.calibrate.plan import CalibrationError
from lmetric.defaults import DEFAULT_PROFILE
from lmetric.profiles import Profile, load_profile
from lmetric.sim.run import Run, Workload, prepare, simulate
from lmetric.whatif.recording import DEFAULT_CACHE_TOKENS, Recording, WhatIfError

FIT_SHARE = 0.6  # of the requests by arrival; the others check the fit
MAX_FIT_REQUESTS = 2_000
MAX_OBSERVATIONS = 1_500
MAX_BATCH_TOKENS = (2048, 4096, 8192, 16_384)  # tried for engines, which do not report it
MAX_SEQUENCES = 256  # assumed: vLLM's default for many GPUs
MIN_TIMES = 20  # requests with a TTFT and with a TPOT
USUAL_ERROR = 0.2  # relative errors beyond it count less and less
BOUND = 8.0  # a constant changes at most by this factor
MIN_SECONDS = 1e-12  # of a constant
DIFF_STEP = 0.08  # of the logarithm of a constant, above the noise of the simulation

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
) -> EngineFit:
    """Fits one profile for all engines. Values that are given replace assumed ones.

    Raises:
        WhatIfError: too few streams, which alone show TTFT and TPOT, or scipy is missing.
    """
    streams = int((~np.isnan(recording.ttft_seconds)).sum()), int((~np.isnan(recording.tpot_seconds)).sum())
    if min(streams) < MIN_TIMES:
        raise WhatIfError(
            f"{streams[0]} requests have a TTFT and {streams[1]} a TPOT; at least {MIN_TIMES} of each are "
            "needed, and only streams have them: record streamed requests"
        )
    try:
        from scipy.optimize import least_squares
    except ModuleNotFoundError:
        raise WhatIfError("whatif needs scipy; run: pip install 'lmetric-router[calibrate]'") from None
    tokens = recording.block_tokens * (recording.cache_blocks or 0) or DEFAULT_CACHE_TOKENS
    sequences = max_sequences or MAX_SEQUENCES
    base = load_profile(DEFAULT_PROFILE).model_copy(
        update={
            "block_tokens": recording.block_tokens,
            "cache_blocks": cache_blocks or max(1, tokens // recording.block_tokens),
            "max_sequences": sequences,
            "kv_bytes_per_token": None,
            "max_batch_tokens": max(max_batch_tokens or MAX_BATCH_TOKENS[1], sequences),
        }
    )
    start = _start(recording, base)
    engines = Engines(recording)
    cached = _cached_answers(recording, engines, start)
    best: tuple[float, Profile, float] | None = None
    logs, trials = np.zeros(len(CONSTANTS) + 1), 10
    for size in (max_batch_tokens,) if max_batch_tokens else MAX_BATCH_TOKENS:
        profile = start.model_copy(update={"max_batch_tokens": max(size, sequences)})
        solution: Any = least_squares(
            engines.residuals,
            logs,
            args=(profile, cached),
            bounds=(-np.log(BOUND), np.log(BOUND)),
            diff_step=DIFF_STEP,
            loss="soft_l1",
            f_scale=USUAL_ERROR,
            max_nfev=trials,
        )
        logs, trials = solution.x, 4  # the other sizes begin near their solution
        # A larger step must be clearly better, because small steps fit the same data.
        if best is None or solution.cost < 0.97 * best[0]:
            best = (float(solution.cost), *_with(profile, solution.x))
    assert best is not None
    _, profile, request_seconds = best
    ttft, tpot = engines.errors(profile, request_seconds, cached)
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


def _with(profile: Profile, logs: Floats) -> tuple[Profile, float]:
    """The profile with changed constants, and the seconds of a request outside of steps."""
    factors = np.exp(logs)
    constants = {
        name: max(getattr(profile, name), MIN_SECONDS) * float(factor)
        for name, factor in zip(CONSTANTS, factors, strict=False)
    }
    return profile.model_copy(update=constants), _REQUEST_SECONDS * float(factors[-1])


class Engines:
    """The first requests of each engine, prepared for simulations of that engine alone."""

    def __init__(self, recording: Recording) -> None:
        used = min(round(FIT_SHARE * len(recording)), MAX_FIT_REQUESTS)
        self.requests = used
        self._recording = recording
        self._parts: list[tuple[Workload, NDArray[np.int64]]] = []
        trace = recording.trace
        arrivals = trace.arrival_seconds + recording.held_seconds
        for engine in range(len(recording.engines)):
            own = np.flatnonzero(recording.instance[:used] == engine)
            if not len(own):
                continue
            own = own[np.argsort(arrivals[own], kind="stable")]
            part = replace(trace.take(own), arrival_seconds=np.sort(arrivals[own]))
            self._parts.append((prepare(part, _blocks_of(recording)), own))

    def runs(self, profile: Profile, cached: bool) -> list[tuple[Run, NDArray[np.int64]]]:
        """The simulation of each engine alone, and the requests' places in the recording."""
        return [
            (
                simulate(work, policy="round_robin", instances=1, profile=profile, **engine_settings(cached)),
                own,
            )
            for work, own in self._parts
        ]

    def errors(self, profile: Profile, request_seconds: float, cached: bool) -> tuple[Floats, Floats]:
        """Relative errors of TTFT and of TPOT, of the requests with each."""
        ttft: list[Floats] = []
        tpot: list[Floats] = []
        for run, own in self.runs(profile, cached):
            held = self._recording.held_seconds[own]
            simulated = run.first_token_seconds - run.arrival_seconds + request_seconds
            ttft.append(simulated / (self._recording.ttft_seconds[own] - held) - 1.0)
            tpot.append(run.tpot_seconds / self._recording.tpot_seconds[own] - 1.0)
        found = np.concatenate(ttft), np.concatenate(tpot)
        return found[0][np.isfinite(found[0])], found[1][np.isfinite(found[1])]

    def residuals(self, logs: Floats, profile: Profile, cached: bool) -> Floats:
        """Differences of logarithms, TTFT and TPOT with equal weight in total."""
        changed, request_seconds = _with(profile, logs)
        ttft, tpot = self.errors(changed, request_seconds, cached)
        weighted = [np.log(np.maximum(1.0 + each, 1e-3)) / np.sqrt(len(each)) for each in (ttft, tpot)]
        pull = 0.01 * logs  # keeps constants that the data does not show
        return np.concatenate([*(each * np.sqrt(len(ttft)) for each in weighted), pull])


def engine_settings(cached_answers: bool) -> dict[str, Any]:
    """Settings of `simulate` that make its engines like the recorded ones."""
    return {"admission": "vllm", "cached_answers": cached_answers, "prefix_fetch": "none", "split": "none"}


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
        real = sum(float(recording.cached_tokens[own][known[own]].sum()) for _, own in runs)
        hits = sum(float(run.hit_tokens[known[own]].sum()) for run, own in runs)
        distances.append(abs(hits - real))
    return distances[0] <= distances[1]


def _start(recording: Recording, base: Profile) -> Profile:
    """Constants by regression on periods of single requests; on failure those of ``base``."""
    observations = _observations(recording)
    try:
        fit = fit_profile(observations, base.max_batch_tokens)
    except CalibrationError:
        return base
    constants = {
        name: max(value, 0.05 * getattr(base, name))
        if name != "prefill_seconds_per_attention_pair"
        else value
        for name, value in fit.constants.items()
    }
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
