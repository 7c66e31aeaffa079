"""Settings of policies on trial: the shadow and the canary."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from lmetric.config.kinds import Strict


class ShadowConfig(Strict):
    """A second policy that scores requests and places none."""

    policy: str | dict[str, Any] = Field(
        description="policy of the shadow; as `policy`",
        json_schema_extra={"when": "you compare a policy without risk"},
    )
    knobs: dict[str, float] = Field(
        default_factory=dict,
        description="parameters of its policy, by name",
        json_schema_extra={"when": "that policy has parameters"},
    )


class CanaryConfig(Strict):
    """A second policy that places a share of the requests."""

    policy: str | dict[str, Any] = Field(
        description="policy of the canary; as `policy`",
        json_schema_extra={"when": "you try a policy on real traffic"},
    )
    knobs: dict[str, float] = Field(
        default_factory=dict,
        description="parameters of its policy, by name",
        json_schema_extra={"when": "that policy has parameters"},
    )
    share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="share of the sessions in the canary's arm",
        json_schema_extra={"when": "more or fewer sessions should take the risk"},
    )
    salt: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="text that decides which sessions are in which arm. Set the same text for all routers of "
        "the engines; null: random at each start of a canary",
        json_schema_extra={"when": "several routers run the same canary"},
    )
    # Requests without a session are split by this many leading prompt tokens, or four times as
    # many bytes of text. Fewer would put all requests with one system prompt into the same arm.
    prefix_tokens: ClassVar[int] = 256
    warmup_seconds: float = Field(
        60.0,
        ge=0,
        le=86_400,
        description="results of requests that came earlier are not compared, seconds",
        json_schema_extra={"when": "caches of the arms need longer to fill"},
    )
    # Requests in each arm before an automatic rollback: fewer show no difference reliably.
    min_requests: ClassVar[int] = 100
    rollback_ttft_increase: float | None = Field(
        0.1,
        ge=0,
        le=100,
        description="roll back if the mean TTFT is surely higher by more than this share; null: never",
        json_schema_extra={"when": "a slower first token is acceptable"},
    )
    rollback_error_increase: float | None = Field(
        0.01,
        ge=0,
        le=1,
        description="roll back if the error rate is surely higher by more than this share of the requests; "
        "null: never",
        json_schema_extra={"when": "your error rate varies more"},
    )


class CanaryStart(CanaryConfig):
    """The body of POST /admin/canary/start."""

    model: str | None = Field(None, description="model; null: the only one")
