"""Settings of the capacity twin."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from lmetric.config.kinds import Positive, Seconds, Strict


def _slo(text: str) -> str:
    from lmetric_lab.slo import Goal

    try:
        Goal.of(text)
    except Exception as error:
        raise ValueError(str(error)) from None
    return text


class CapacityConfig(Strict):
    """The capacity twin: a process that reads the records of the last minutes and advises how many
    engines to run."""

    slo: Annotated[str, AfterValidator(_slo)] | None = Field(
        None,
        description="bounds of ttft, tpot and e2e with percentiles, such as `ttft_p99=2s,tpot_p95=50ms`; "
        "null: no capacity twin",
    )
    interval: Seconds = Field(60.0, ge=5, le=3600, description="time between two rounds of advice, seconds")
    window: Seconds = Field(1800.0, ge=120, le=86_400, description="time of records to read, seconds")
    startup: float = Field(
        120.0, ge=0, le=86_400, description="time from the order of an engine to its first request, seconds"
    )
    stale_after: Seconds = Field(
        300.0, description="withdraw advice older than this, seconds; at least two intervals"
    )
    timeout: Seconds = Field(
        600.0, description="restart the process if a round takes longer than this, seconds"
    )
    headroom: float = Field(
        0.1,
        ge=0,
        le=0.5,
        description="share of the forecast demand that the fleet serves on top of it. The twin starts with "
        "this value and steers it by the error budget",
    )
    min_engines: Positive = Field(1, description="fewest engines to advise")
    max_engines: Positive = Field(256, le=4096, description="most engines to advise")
    prices: dict[str, Annotated[float, Field(gt=0, lt=1e9)]] = Field(
        default_factory=dict,
        max_length=16,
        description="price of an engine per hour by type. The first type is that of the running engines",
    )
    types: dict[str, str] = Field(
        default_factory=dict,
        max_length=15,
        description="other engine types to play: an engine profile, or a relative speed such as `x0.4`",
    )
    policies: list[str] = Field(default_factory=list, max_length=8, description="further policies to play")
    roles: list[str] = Field(
        default_factory=list,
        max_length=8,
        description="pools to play, such as `2P6D`",
    )
    transfer: str | None = Field(
        None, description="with `roles`: bandwidth of KV transfers, such as `25 GB/s, layers`; null: 50 GB/s"
    )
    kv_bytes_per_token: Positive | None = Field(
        None, description="with `roles`: bytes of a token's KV; null: KV transfers take no time"
    )
    max_error: float | None = Field(
        None,
        gt=0,
        description="largest error of the fit; null: 0.25 of the mean TTFT, 0.15 of the mean TPOT, 0.05 of "
        "the hit rate",
    )
    max_batch_tokens: Positive | None = Field(
        None, description="the engines' maximum tokens per step; null: fitted"
    )
    max_sequences: Positive | None = Field(
        None, description="the engines' maximum running sequences; null: 256"
    )
    cache_blocks: Positive | None = Field(
        None, description="the engines' KV blocks; null: as the engines report"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stale_after < 2 * self.interval:
            raise ValueError(
                f"stale_after ({self.stale_after:g} s) must be at least two intervals "
                f"({2 * self.interval:g} s)"
            )
        if self.slo is not None:
            from lmetric._core import LmetricError
            from lmetric_lab.capacity.worker import question_of

            try:
                question_of(self.model_dump())
            except LmetricError as error:
                raise ValueError(str(error)) from None
        return self
