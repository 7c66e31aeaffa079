"""Distributions of lengths and times in YAML descriptions.

A constant number, ``{quantiles: {0: 1, 0.5: 200, 1: 2000}}``, or log-normal as ``{p50: 200, mean:
400}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from lmetric._core import BadValueError

_MOST_TOKENS = 2**31 - 1

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SyntheticError(BadValueError):
    """An invalid description, or one without a request. The message names the fields."""


class Described(BaseModel):
    """A part of a description. Unknown keys are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Quantiles(Described):
    """A distribution by its quantiles, with linear interpolation."""

    quantiles: dict[float, float] = Field(description="Share -> value, from 0 to 1; both ends are needed.")

    @model_validator(mode="after")
    def _rises_from_0_to_1(self) -> Quantiles:
        shares, values = list(self.quantiles), list(self.quantiles.values())
        if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1 or sorted(shares) != shares:
            raise ValueError(f"quantiles must rise from 0 to 1, got {shares}")
        if values[0] < 0 or sorted(values) != values:
            raise ValueError(f"the values of quantiles must rise from 0 or more, got {values}")
        return self

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        """`n` values by the inverse of the distribution function."""
        return np.interp(rng.random(n), list(self.quantiles), list(self.quantiles.values()))


class LogNormal(Described):
    """A log-normal distribution, by its median and one more figure. Values are clipped to the
    bounds."""

    p50: float = Field(gt=0)
    mean: float | None = Field(default=None, gt=0, description="Before clipping; above p50.")
    p90: float | None = Field(default=None, gt=0)
    p99: float | None = Field(default=None, gt=0)
    min: float = Field(default=0, ge=0)
    max: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _is_one_distribution(self) -> LogNormal:
        others = [each for each in (self.mean, self.p90, self.p99) if each is not None]
        if len(others) != 1:
            raise ValueError("give exactly one of mean, p90 and p99 beside p50")
        if others[0] < self.p50:
            raise ValueError(f"mean, p90 or p99 must be p50 ({self.p50:g}) or more, got {others[0]:g}")
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max must be min ({self.min:g}) or more, got {self.max:g}")
        return self

    @property
    def sigma(self) -> float:
        """Sigma of the logarithm: ln mean = ln p50 + sigma^2 / 2; ln pq = ln p50 + z(q) sigma."""
        if self.mean is not None:
            return float(np.sqrt(2 * np.log(self.mean / self.p50)))
        share, value = (0.9, self.p90) if self.p90 is not None else (0.99, self.p99)
        assert value is not None, "checked when built"
        return float(np.log(value / self.p50)) / NormalDist().inv_cdf(share)

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        """`n` values."""
        values = self.p50 * np.exp(self.sigma * rng.standard_normal(n))
        return np.clip(values, self.min, self.max)


def _kind(value: Any) -> str:
    if isinstance(value, Quantiles) or (isinstance(value, Mapping) and "quantiles" in value):
        return "quantiles"
    return "log-normal" if isinstance(value, LogNormal | Mapping) else "number"


Distribution = Annotated[
    Annotated[float, Field(ge=0), Tag("number")]
    | Annotated[Quantiles, Tag("quantiles")]
    | Annotated[LogNormal, Tag("log-normal")],
    Discriminator(_kind),
]


def draw(distribution: Distribution, n: int, rng: np.random.Generator) -> Floats:
    """`n` values of `distribution`."""
    if isinstance(distribution, Quantiles | LogNormal):
        return distribution.draw(n, rng)
    return np.full(n, float(distribution))


def draw_whole(distribution: Distribution, n: int, rng: np.random.Generator, *, least: int) -> Ints:
    """`n` values, rounded and at least `least`."""
    return np.clip(np.rint(draw(distribution, n, rng)), least, _MOST_TOKENS).astype(np.int64)


class Kind(Described):
    """A share of the requests with separate lengths."""

    share: float = Field(gt=0, le=1, description="Of all requests, or sessions.")
    input_tokens: Distribution
    output_tokens: Distribution


def check_shares(shares: Iterable[float]) -> None:
    """Raises ValueError if the shares of kinds sum to more than 1."""
    if (total := sum(shares)) > 1 + 1e-9:
        raise ValueError(f"the shares of kinds must sum to 1 at most, got {total:g}")


class Lengths(Described):
    """Prompt and answer lengths, with separate lengths for `kinds`."""

    input_tokens: Distribution
    output_tokens: Distribution
    kinds: tuple[Kind, ...] = ()


# SIBYL's three data sets (its sections 2.2 and F.2) are not published. These distributions have the
# paper's figures. Answers are cut at 8,192 tokens. Random: uniform, as in the paper. ShareGPT-like:
# prompts with a mean of 183 tokens, answers with a mean of 5,657 and a deviation of 3,317, which
# requires that three in five reach the cap. Zeta-like: prompts with a mean of 345 tokens and a
# maximum of 1,700, answers with a deviation of 3,492. The paper has no figures for the medians of
# prompts, the spread of short answers, and the mean of Zeta's answers (5,000: half reach the cap);
# these are ours. Azure's conversation service of 2023 (AzurePublicDataset, CC-BY 4.0) by its
# quantiles, separate for prompts and answers.
_AZURE = Lengths(
    input_tokens=Quantiles(
        quantiles={0: 2, 0.1: 207, 0.25: 396, 0.4: 703, 0.5: 1020, 0.75: 1189, 0.9: 2734, 0.95: 4083, 1: 4300}
    ),
    output_tokens=Quantiles(
        quantiles={0: 7, 0.1: 54, 0.25: 85, 0.5: 129, 0.6: 177, 0.75: 395, 0.95: 451, 0.99: 601, 1: 1000}
    ),
)
# Questions of s1k. Reasoning tokens plus answer have a mean of 4,690 tokens, as in its paper; the
# shape is ours.
_S1K: dict[str, Distribution] = {
    "input_tokens": Quantiles(quantiles={0: 20, 0.5: 90, 0.9: 260, 0.99: 700, 1: 1200}),
    "output_tokens": Quantiles(
        quantiles={0: 300, 0.25: 2200, 0.5: 3900, 0.75: 6100, 0.95: 11500, 0.99: 17000, 1: 26000}
    ),
}
LENGTHS: dict[str, Lengths] = {
    "sibyl-random": Lengths(
        input_tokens=Quantiles(quantiles={0: 0.5, 1: 512.5}),
        output_tokens=Quantiles(quantiles={0: 0.5, 1: 8192.5}),
    ),
    "sharegpt-like": Lengths(
        input_tokens=LogNormal(p50=80, p90=515, min=4, max=1024),
        output_tokens=Quantiles(
            quantiles={
                0: 16, 0.04: 180, 0.1: 490, 0.2: 1200, 0.3: 2400, 0.355: 4000, 0.382: 6000, 0.392: 8192,
                1: 8192,
            }
        ),
    ),
    "zeta-like": Lengths(
        input_tokens=LogNormal(p50=262, p90=690, min=16, max=1700),
        output_tokens=Quantiles(
            quantiles={
                0: 16, 0.05: 160, 0.12: 420, 0.24: 1020, 0.36: 2030, 0.43: 3370, 0.465: 5200, 0.478: 8192,
                1: 8192,
            }
        ),
    ),
    # UniBoost's mixtures (its section 4): Azure requests with one fifth, or seven tenths, of
    # reasoning requests.
    "azure-chat": _AZURE,
    "mix-1": _AZURE.model_copy(update={"kinds": (Kind(share=0.2, **_S1K),)}),
    "mix-2": _AZURE.model_copy(update={"kinds": (Kind(share=0.7, **_S1K),)}),
    # Our own: current kinds of workloads, and shapes that are hard to balance. Not from a data set.
    "short-chat": Lengths(
        input_tokens=LogNormal(p50=300, p90=2000, min=8, max=16000),
        output_tokens=LogNormal(p50=180, p90=600, min=2, max=4096),
    ),
    "reasoning": Lengths(
        input_tokens=LogNormal(p50=219, p90=800, min=8, max=8000),
        output_tokens=LogNormal(p50=1200, p90=6000, min=8, max=32000),
    ),
    "summaries": Lengths(
        input_tokens=LogNormal(p50=6000, p90=20000, min=300, max=60000),
        output_tokens=LogNormal(p50=120, p90=300, min=8, max=2000),
    ),
    "two-sizes": Lengths(
        input_tokens=LogNormal(p50=400, p90=1200, min=8, max=8000),
        output_tokens=Quantiles(quantiles={0: 50, 0.5: 150, 0.5001: 3000, 1: 4000}),
    ),
    "agents": Lengths(
        input_tokens=LogNormal(p50=1500, p90=16000, min=50, max=120000),
        output_tokens=LogNormal(p50=150, p90=1200, min=2, max=8192),
    ),
    "heavy-tails": Lengths(
        input_tokens=LogNormal(p50=200, p90=1500, min=4, max=32000),
        output_tokens=Quantiles(quantiles={0: 1, 0.5: 100, 0.9: 900, 0.99: 8000, 1: 32000}),
    ),
    "chat-and-documents": Lengths(
        input_tokens=LogNormal(p50=300, p90=2000, min=8, max=16000),
        output_tokens=LogNormal(p50=180, p90=600, min=2, max=4096),
        kinds=(
            Kind(
                share=0.3,
                input_tokens=LogNormal(p50=6000, p90=20000, min=300, max=60000),
                output_tokens=LogNormal(p50=120, p90=300, min=8, max=2000),
            ),
        ),
    ),
    "ask-or-think": Lengths(
        input_tokens=LogNormal(p50=3000, p90=8000, min=100, max=32000),
        output_tokens=LogNormal(p50=100, p90=250, min=2, max=1000),
        kinds=(
            Kind(
                share=0.4,
                input_tokens=LogNormal(p50=200, p90=600, min=8, max=4000),
                output_tokens=LogNormal(p50=2000, p90=6000, min=50, max=16000),
            ),
        ),
    ),
    "completion": Lengths(
        input_tokens=LogNormal(p50=1200, p90=6000, min=20, max=30000),
        output_tokens=LogNormal(p50=14, p90=90, min=1, max=1000),
    ),
    "long-form": Lengths(
        input_tokens=LogNormal(p50=100, p90=500, min=4, max=4000),
        output_tokens=LogNormal(p50=1500, p90=3200, min=50, max=8000),
    ),
    "extraction": Lengths(
        input_tokens=Quantiles(quantiles={0: 500, 0.3: 2500, 0.7: 3500, 1: 12000}),
        output_tokens=Quantiles(quantiles={0: 180, 1: 220}),
    ),
    "thinking-to-a-cap": Lengths(
        input_tokens=LogNormal(p50=150, p90=1000, min=8, max=8000),
        output_tokens=Quantiles(quantiles={0: 100, 0.4: 1500, 0.8: 12000, 0.85: 16000, 1: 16000}),
    ),
    "three-tenants": Lengths(
        input_tokens=LogNormal(p50=400, p90=1500, min=8, max=8000),
        output_tokens=LogNormal(p50=250, p90=700, min=2, max=4000),
        kinds=(
            Kind(
                share=0.1,
                input_tokens=LogNormal(p50=25000, p90=60000, min=4000, max=110000),
                output_tokens=LogNormal(p50=400, p90=900, min=20, max=4000),
            ),
            Kind(
                share=0.2,
                input_tokens=LogNormal(p50=80, p90=200, min=4, max=1000),
                output_tokens=LogNormal(p50=3000, p90=7000, min=100, max=16000),
            ),
        ),
    ),
}  # fmt: skip
