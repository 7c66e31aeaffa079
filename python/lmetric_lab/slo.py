"""Service-level objectives: bounds of TTFT, TPOT and duration with shares of the requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lmetric._core import BadValueError

Floats = NDArray[np.float64]
Metric = Literal["ttft", "tpot", "e2e"]

DEFAULT_SHARE = 0.95
_OBJECTIVE = re.compile(r"(ttft|tpot|e2e)(?:_p(\d{1,2}(?:\.\d{1,4})?))?=(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?")


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound that a share of the requests must keep: ``ttft_p99=2s`` is a TTFT of at most 2 s for
    99% of the requests."""

    metric: Metric
    seconds: float
    share: float = DEFAULT_SHARE

    def __str__(self) -> str:
        return f"{self.metric}_p{self.share * 100:g}={self.seconds:g}s"


@dataclass(frozen=True, slots=True)
class Goal:
    """All objectives of an SLO."""

    objectives: tuple[Objective, ...]

    @classmethod
    def of(cls, text: str) -> Goal:
        """Reads ``ttft_p99=2s,tpot_p95=50ms``. Without a percentile, 95% of the requests count.

        Raises:
            BadValueError: another text, or a metric twice.
        """
        found: list[Objective] = []
        for part in filter(None, (each.strip() for each in text.split(","))):
            match = _OBJECTIVE.fullmatch(part)
            if match is None or not float(match[3]) > 0 or (match[2] and not float(match[2]) > 0):
                raise BadValueError(
                    f"SLO {part!r} is not valid; expected ttft, tpot or e2e with a percentile (above 0 and "
                    "below 100, at most 4 decimals) and a time above 0, as in ttft_p99=2s,tpot_p95=50ms"
                )
            metric: Metric = match[1]  # type: ignore[assignment]
            if any(each.metric == metric for each in found):
                raise BadValueError(f"SLO {text!r} is not valid: {metric} appears twice; keep one of them")
            seconds = float(match[3]) * (1e-3 if match[4] == "ms" else 1.0)
            share = DEFAULT_SHARE if match[2] is None else round(float(match[2]) / 100, 6)
            found.append(Objective(metric, seconds, share))
        if not found:
            raise BadValueError("the SLO is empty; set at least one bound, as in ttft_p99=2s")
        return cls(tuple(found))

    def __str__(self) -> str:
        return ",".join(map(str, self.objectives))

    def kept(self, times: dict[Metric, Floats]) -> NDArray[np.bool_]:
        """Whether each request keeps all bounds, shape (n,). An unknown time (NaN) keeps its bound;
        a request that never ends must have infinite times."""
        good = np.ones(len(times["e2e"]), np.bool_)
        for each in self.objectives:
            good &= ~(times[each.metric] > each.seconds)
        return good

    def shares(self, times: dict[Metric, Floats]) -> tuple[float, ...]:
        """The share of the requests within the bound of each objective. Unknown times (NaN) are
        within it."""
        return tuple(float((~(times[each.metric] > each.seconds)).mean()) for each in self.objectives)

    def margin(self, times: dict[Metric, Floats]) -> float:
        """The smallest distance of a share to its target, from -1 to 1; 0 or more: all are met."""
        found = zip(self.shares(times), self.objectives, strict=True)
        return min(share - each.share for share, each in found)
