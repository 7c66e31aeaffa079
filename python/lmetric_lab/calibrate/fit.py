"""Robust regression of the step-time model's constants (all at least 0) on the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.extras import install
from lmetric_lab.calibrate.plan import CalibrationError, Kind

CONSTANTS = (
    "fixed_seconds",
    "decode_seconds_per_sequence",
    "decode_seconds_per_context_token",
    "prefill_seconds_per_token",
    "prefill_seconds_per_attention_pair",
)
_USUAL_ERROR = 0.03  # relative residuals beyond it count less and less
_LEAST_ERROR = 0.002  # resolution of the clocks
_LEAST_OBSERVATIONS = 8
_HALF_A_PIECE = 0.5
_ONE_PIECE = 1.2  # a pause of the machine looks like a small second one
_LEAST_FIXED_SECONDS = 1e-6  # a step takes time
_USUAL_BATCH_TOKENS = [2**power for power in range(8, 18)]


@dataclass(frozen=True, slots=True)
class Observation:
    """The work of an engine in a period, summed over its steps."""

    kind: Kind
    label: str
    seconds: float
    steps: float | None  # None: as many as the prompt's pieces
    sequences: float  # decoding ones
    context_tokens: float  # of them
    prefill_tokens: float
    attention_pairs: float
    requests: float = 0.0  # whose way to the engine and back is part of the time
    chunk_tokens: tuple[float, float] | None = None  # bounds on a step's tokens that it showed
    spread: float = 0.0  # of its measurements: greatest less least, over this one
    doubt: float = 0.0  # how far the two of them that lie closest are apart, relatively


def settled(measured: Sequence[Observation]) -> Observation:
    """Combines measurements of a probe: the lower quartile, because disturbances only add time."""
    times = sorted(measured, key=lambda observation: observation.seconds)
    chosen = times[(len(times) - 1) // 4]
    spread = (times[-1].seconds - times[0].seconds) / chosen.seconds
    return replace(chosen, spread=spread, doubt=min(disagreement(measured), 1.0))


def disagreement(measured: Sequence[Observation]) -> float:
    """The relative difference of the two closest measurements."""
    times = sorted(observation.seconds for observation in measured)
    return min((b / a - 1.0 for a, b in pairwise(times)), default=inf)


@dataclass(frozen=True, slots=True)
class Residual:
    """An observation and its prediction by the fitted constants."""

    kind: Kind
    label: str
    measured_seconds: float
    predicted_seconds: float
    spread: float  # between its measurements, relative

    @property
    def relative_error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants with their standard errors, and the errors of their predictions."""

    constants: dict[str, float]
    standard_errors: dict[str, float]
    request_seconds: float  # time per request outside its steps (HTTP, tokens); not in the profile
    max_batch_tokens: int
    batch_tokens_from: str
    residuals: tuple[Residual, ...]
    unidentified: tuple[str, ...] = field(default=())

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median([abs(residual.relative_error) for residual in self.residuals]))


def pieces(
    intervals: NDArray[np.float64], usual: float, prompt_tokens: int, batch: int
) -> tuple[float, float] | None:
    """Bounds on the tokens per step, from the token gaps of decoding requests during a prompt.

    The prompt has `prompt_tokens` and runs with a `batch`. `usual` is a token gap without it. None:
    no effect.
    """
    more = np.maximum(intervals - usual, 0.0)
    if more.max() < 0.5 * usual:
        return None
    # The number of equal pieces with this sum and sum of squares; a short last piece counts in
    # part.
    count = float(more.sum() ** 2 / (more**2).sum())
    if count < _ONE_PIECE:
        return prompt_tokens + batch, inf
    least, most = prompt_tokens / (count + _HALF_A_PIECE), prompt_tokens / (count - _HALF_A_PIECE)
    return least + batch, most + batch


def batch_tokens(observations: Sequence[Observation]) -> tuple[int, str]:
    """Tokens per step according to long prompts, and the kind of evidence."""
    shown = [observation.chunk_tokens for observation in observations if observation.chunk_tokens]
    longest = int(max(observation.prefill_tokens for observation in observations))
    bounded = [bounds for bounds in shown if bounds[1] < inf]
    if not bounded:
        seen = max((int(least) for least, _ in shown), default=longest)
        return seen, "the longest prompt computed in one step, so a bound from below"
    least = float(np.median([low for low, _ in bounded]))
    most = float(np.median([high for _, high in bounded]))
    middle = sqrt(least * most)
    usual = [tokens for tokens in _USUAL_BATCH_TOKENS if least <= tokens <= most]
    nearest = min(usual, key=lambda tokens: abs(np.log(tokens / middle)), default=round(middle))
    return int(nearest), f"by the pieces that long prompts came in, {least:,.0f} to {most:,.0f} tokens"


def fit_profile(observations: Sequence[Observation], max_batch_tokens: int | None = None) -> Fit:
    """Fits the constants. `max_batch_tokens`: maximum tokens per step; None: unknown.

    Raises:
        CalibrationError: scipy is missing, or there are too few observations.
    """
    try:
        from scipy.optimize import least_squares, nnls
    except ModuleNotFoundError as error:
        raise CalibrationError(f"calibrate needs scipy; run: {install('calibrate')}") from error
    kinds = {observation.kind for observation in observations}
    if len(observations) < _LEAST_OBSERVATIONS or not {"prefill", "decode"} <= kinds:
        raise CalibrationError(
            f"{len(observations)} probes gave a figure ({', '.join(sorted(kinds)) or 'none'}): at least "
            f"{_LEAST_OBSERVATIONS}, prefills and decodes, are needed"
        )
    tokens, known_from = (
        (max_batch_tokens, "as the engine says") if max_batch_tokens else batch_tokens(observations)
    )
    rows = np.array([_row(observation, tokens) for observation in observations])
    seconds = np.array([observation.seconds for observation in observations])
    # Relative errors, scaled so that all columns have equal weight; uncertain measurements weigh
    # less.
    relative = rows / seconds[:, None]
    weights = _USUAL_ERROR / (_USUAL_ERROR + np.array([observation.doubt for observation in observations]))
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = relative / scale
    weighted = scaled * weights[:, None]
    start, _ = nnls(weighted, weights)
    solution: Any = least_squares(
        lambda values: weighted @ values - weights,
        np.maximum(start, 1e-9),
        jac=lambda _: weighted,
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=_USUAL_ERROR,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    values = np.where(solution.x < 1e-7, 0.0, solution.x)
    errors = weighted @ values - weights
    spread = max(1.4826 * float(np.median(np.abs(errors - np.median(errors)))), _LEAST_ERROR)
    covariance = np.linalg.pinv(weighted.T @ weighted) * spread**2
    costs, deviations = values / scale, np.sqrt(np.diag(covariance)) / scale
    constants = dict(zip(CONSTANTS, costs[:-1], strict=True))
    constants["fixed_seconds"] = max(constants["fixed_seconds"], _LEAST_FIXED_SECONDS)
    predicted = rows @ costs
    return Fit(
        constants={name: float(f"{value:.4g}") for name, value in constants.items()},
        standard_errors={
            name: float(f"{value:.2g}") for name, value in zip(CONSTANTS, deviations, strict=False)
        },
        request_seconds=float(costs[-1]),
        max_batch_tokens=tokens,
        batch_tokens_from=known_from,
        residuals=tuple(
            Residual(
                observation.kind, observation.label, observation.seconds, float(time), observation.spread
            )
            for observation, time in zip(observations, predicted, strict=True)
        ),
        unidentified=tuple(_unidentified(costs, deviations, relative)),
    )


def _row(observation: Observation, max_batch_tokens: int) -> list[float]:
    steps = observation.steps
    if steps is None:
        steps = float(max(1, ceil(observation.prefill_tokens / max_batch_tokens)))
    return [
        steps,
        observation.sequences,
        observation.context_tokens,
        observation.prefill_tokens,
        observation.attention_pairs,
        observation.requests,
    ]


def _unidentified(
    costs: NDArray[np.float64], deviations: NDArray[np.float64], relative: NDArray[np.float64]
) -> list[str]:
    """Constants that the probes cannot identify (standard error at least half the value), with a
    bound."""
    said = []
    for index, name in enumerate(CONSTANTS):
        if deviations[index] > 0.5 * costs[index]:
            most = costs[index] + 2 * deviations[index]
            share = float((relative[:, index] * most).max())
            said.append(f"{name} cannot be separated: at most {most:.2g}, {share:.0%} of any probe's time")
    return said
