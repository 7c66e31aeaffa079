"""Differences between two arms, with intervals that respect sessions.

Requests of a session resemble each other, so they do not count as independent. Each metric of an
arm is a ratio of sums, such as seconds over requests. Its variance comes from the sums of each
group of sessions (linearization of a ratio; Cochran, Sampling Techniques, section 6.3).

A 95% interval is right once. If it is read every few seconds, it sooner or later excludes zero by
chance. `Difference.always` is wider: its error is bounded over all looks together (mixture
sequential probability ratio test; Johari et al., "Always Valid Inference", 2022).
"""

from __future__ import annotations

import math
from array import array
from statistics import NormalDist

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lmetric.canary.split import BUCKETS, Arm

ARMS: tuple[Arm, Arm] = ("stable", "canary")
METRICS = {
    "ttft_seconds": "mean time to first token of streams",
    "tpot_seconds": "mean time per further token of streams, over all tokens",
    "e2e_seconds": "mean time to the end of the answer",
    "hit_ratio": "share of the prompt tokens that the engines found in their caches",
    "error_rate": "share of the requests that failed at the router or its engines",
}
"""The compared metrics. Sizes are in seconds, or shares from 0 to 1."""

CONFIDENCE = 0.95
MIN_GROUPS = 20
"""An arm with fewer groups of sessions gives no interval."""

_NAMES = tuple(METRICS)
_MIXTURE = {"error_rate": 0.01, "hit_ratio": 0.05}  # typical difference; others: a tenth of the mean
_SUMS = 2 * len(_NAMES)

Floats = NDArray[np.float64]


class Outcome(Struct, gc=False):
    """The result of one request. None: unknown, or not applicable."""

    error: bool
    e2e_seconds: float | None = None
    ttft_seconds: float | None = None
    further_tokens: int = 0  # output tokens after the first
    prompt_tokens: int = 0  # of requests whose engine reported cached tokens
    cached_tokens: int = 0


class Difference(Struct, frozen=True):
    """The canary's value of a metric minus the stable arm's value.

    Attributes:
        interval: lowest and highest value with 95% confidence, for one look.
        always: the interval for any number of looks.
    """

    metric: str
    stable: float
    canary: float
    interval: tuple[float, float]
    always: tuple[float, float]

    @property
    def value(self) -> float:
        """The difference."""
        return self.canary - self.stable

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval of one look excludes zero."""
        return self.interval[0] > 0.0 or self.interval[1] < 0.0


class Comparison:
    """The results of both arms, summed by group of keys. Its size does not grow."""

    def __init__(self) -> None:
        self.requests = [0, 0]  # by arm, in the order of `ARMS`
        self.errors = [0, 0]
        self._sums = [array("d", bytes(8 * _SUMS * BUCKETS)) for _ in ARMS]
        self._counts = [array("L", bytes(array("L").itemsize * BUCKETS)) for _ in ARMS]

    def add(self, canary: bool, bucket: int, outcome: Outcome) -> None:
        """Adds a request. ``bucket``: the group of its key (`Splitter.place`)."""
        self.requests[canary] += 1
        self._counts[canary][bucket] += 1
        sums, at = self._sums[canary], _SUMS * bucket
        sums[at + 9] += 1.0
        if outcome.error:
            self.errors[canary] += 1
            sums[at + 8] += 1.0
            return
        e2e, first = outcome.e2e_seconds, outcome.ttft_seconds
        if e2e is not None:
            sums[at + 4] += e2e
            sums[at + 5] += 1.0
        if first is not None:
            sums[at] += first
            sums[at + 1] += 1.0
            if e2e is not None and outcome.further_tokens > 0:
                sums[at + 2] += e2e - first
                sums[at + 3] += outcome.further_tokens
        if outcome.prompt_tokens:
            sums[at + 6] += outcome.cached_tokens
            sums[at + 7] += outcome.prompt_tokens

    @property
    def groups(self) -> list[int]:
        """The number of groups of keys with a request, by arm."""
        return [sum(1 for count in counts if count) for counts in self._counts]

    @property
    def largest_group(self) -> float:
        """The share of the largest group of keys among all requests, 0 to 1."""
        counts = np.array(self._counts[0]) + np.array(self._counts[1])
        return float(counts.max() / max(1, counts.sum()))

    def values(self) -> dict[str, list[float | None]]:
        """The value of each metric by arm; None: unknown."""
        tables = [self._table(arm) for arm in range(2)]
        return {name: [_ratio(table, i) for table in tables] for i, name in enumerate(_NAMES)}

    def differences(self, alpha: float = 1.0 - CONFIDENCE) -> list[Difference]:
        """The metrics with enough data in both arms.

        ``alpha``: chance that an interval misses the true difference.
        """
        tables = [self._table(arm) for arm in range(2)]
        found = (_difference(name, i, tables, alpha) for i, name in enumerate(_NAMES))
        return [each for each in found if each is not None]

    def _table(self, arm: int) -> Floats:
        """The sums of an arm, shape (BUCKETS, metrics, 2): numerator and denominator."""
        return np.array(self._sums[arm]).reshape(BUCKETS, len(_NAMES), 2)


def _ratio(table: Floats, metric: int) -> float | None:
    above, below = table[:, metric].sum(axis=0).tolist()
    return above / below if below else None


def _difference(name: str, metric: int, tables: list[Floats], alpha: float) -> Difference | None:
    means, variances, freedoms = [], [], []
    for table in tables:
        above, below = table[:, metric].T
        used = below > 0.0
        groups = int(used.sum())
        if groups < MIN_GROUPS:
            return None
        above, below = above[used], below[used]
        total = float(below.sum())
        mean = float(above.sum()) / total
        rest = above - mean * below
        means.append(mean)
        variances.append(groups / (groups - 1) * float(rest @ rest) / total**2)
        freedoms.append(groups - 1)
    stable, canary = means
    variance = sum(variances)
    error = math.sqrt(variance)
    # Welch's approximation of the degrees of freedom.
    parts = sum(each**2 / freedom for each, freedom in zip(variances, freedoms, strict=True))
    half = student_quantile(1.0 - alpha / 2.0, variance**2 / parts if parts else math.inf) * error
    always = error * _always(variance, _MIXTURE.get(name, 0.1 * stable), alpha)
    value = canary - stable
    return Difference(name, stable, canary, (value - half, value + half), (value - always, value + always))


def _always(variance: float, typical: float, alpha: float) -> float:
    """Returns the half width of the interval for any number of looks, in standard errors.

    ``typical``: the size of a difference for which the interval is narrowest.
    """
    if variance <= 0.0:
        return 0.0
    if typical <= 0.0:
        return math.inf
    ratio = variance / typical**2
    return math.sqrt((1.0 + ratio) * (2.0 * math.log(1.0 / alpha) + math.log1p(1.0 / ratio)))


def student_quantile(probability: float, freedom: float) -> float:
    """Returns a quantile of Student's t distribution, for at least 5 degrees of freedom.

    The error is below 0.1%. Source: Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
