"""Settings of policies on trial: the shadow and the canary."""

from __future__ import annotations

from typing import Any, ClassVar

from lmetric.config.kinds import Strict, setting


class ShadowConfig(Strict):
    """A second policy that scores requests and places none."""

    policy: str | dict[str, Any] = setting(when="you compare a policy without risk")
    """policy of the shadow; as `policy`"""
    knobs: dict[str, float] = setting(default_factory=dict, when="that policy has parameters")
    """parameters of its policy, by name"""


class CanaryConfig(Strict):
    """A second policy that places a share of the requests."""

    policy: str | dict[str, Any] = setting(when="you try a policy on real traffic")
    """policy of the canary; as `policy`"""
    knobs: dict[str, float] = setting(default_factory=dict, when="that policy has parameters")
    """parameters of its policy, by name"""
    share: float = setting(0.1, gt=0, lt=1, when="more or fewer sessions should take the risk")
    """share of the sessions in the canary's arm"""
    salt: str | None = setting(None, min_length=1, max_length=200, when="several routers run the same canary")
    """text that decides which sessions are in which arm. Set the same text for all routers of the
    engines; null: random at each start of a canary"""
    # Requests without a session are split by this many leading prompt tokens, or four times as
    # many bytes of text. Fewer would put all requests with one system prompt into the same arm.
    prefix_tokens: ClassVar[int] = 256
    warmup_seconds: float = setting(60.0, ge=0, le=86_400, when="caches of the arms need longer to fill")
    """results of requests that came earlier are not compared, seconds"""
    # Requests in each arm before an automatic rollback: fewer show no difference reliably.
    min_requests: ClassVar[int] = 100
    rollback_ttft_increase: float | None = setting(
        0.1, ge=0, le=100, when="a slower first token is acceptable"
    )
    """roll back if the mean TTFT is surely higher by more than this share; null: never"""
    rollback_error_increase: float | None = setting(0.01, ge=0, le=1, when="your error rate varies more")
    """roll back if the error rate is surely higher by more than this share of the requests; null:
    never"""


class CanaryStart(CanaryConfig):
    """The body of POST /admin/canary/start."""

    model: str | None = setting(None)
    """model; null: the only one"""
