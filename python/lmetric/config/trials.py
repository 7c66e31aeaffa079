"""Settings of policies on trial: the shadow and the canary."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lmetric.config.kinds import Positive, Strict


class ShadowConfig(Strict):
    """A second policy that scores requests and places none."""

    policy: str | dict[str, Any] = Field(description="policy of the shadow; as `policy`")
    knobs: dict[str, float] = Field(default_factory=dict, description="parameters of its policy, by name")
    sample: float = Field(1.0, gt=0, le=1, description="share of the requests that it scores")


class CanaryConfig(Strict):
    """A second policy that places a share of the requests."""

    policy: str | dict[str, Any] = Field(description="policy of the canary; as `policy`")
    knobs: dict[str, float] = Field(default_factory=dict, description="parameters of its policy, by name")
    share: float = Field(0.1, gt=0, lt=1, description="share of the sessions in the canary's arm")
    salt: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="text that decides which sessions are in which arm. Set the same text for all routers of "
        "the engines; null: random at each start of a canary",
    )
    prefix_tokens: Positive = Field(
        256,
        description="requests without a session are split by this many leading prompt tokens, or four times "
        "as many bytes of text",
    )
    warmup_seconds: float = Field(
        60.0, ge=0, le=86_400, description="results of requests that came earlier are not compared, seconds"
    )
    min_requests: Positive = Field(
        100, description="requests in each arm before an automatic rollback is possible"
    )
    rollback_ttft_increase: float | None = Field(
        0.1,
        ge=0,
        le=100,
        description="roll back if the mean TTFT is surely higher by more than this share; null: never",
    )
    rollback_error_increase: float | None = Field(
        0.01,
        ge=0,
        le=1,
        description="roll back if the error rate is surely higher by more than this share of the requests; "
        "null: never",
    )


class CanaryStart(CanaryConfig):
    """The body of POST /admin/canary/start."""

    model: str | None = Field(None, description="model; null: the only one")
