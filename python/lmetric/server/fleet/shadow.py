"""The shadow: a second policy that scores requests and places none."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lmetric._core import Decision, Router
from lmetric.config import ShadowConfig
from lmetric.server.fleet.policies import Built, Policies


class Shadow:
    """The shadow of one model, and the differences between its choices and the router's."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._value: object = None  # of the policy in use
        self.built: Built | None = None  # the policy in use
        self.config: ShadowConfig | None = None
        self.outcomes: Counter[str] = Counter()  # agreed, differed or failed
        # Sums over the requests that agreed or differed, first the router's choice.
        self.cached_tokens = [0, 0]
        self.ttft_seconds = [0.0, 0.0]
        self.ttft_requests = 0  # with both predictions

    def configure(self, policies: Policies, config: ShadowConfig | None) -> None:
        """Applies the settings. A new policy begins with counts of 0. Raises LmetricError."""
        built = policies.shadow
        self._router.set_shadow(built and built.policy, knobs=built and built.knobs)
        self.built = built
        value = None if config is None else (config.policy, config.knobs, dict(policies.files))
        if value != self._value:
            self.outcomes.clear()
            self.cached_tokens, self.ttft_seconds, self.ttft_requests = [0, 0], [0.0, 0.0], 0
        self.config, self._value = config, value

    def add(self, decision: Decision) -> None:
        """Counts a decision that the shadow has scored."""
        if (choice := decision.shadow) is None:
            return
        instance, cached, seconds, own_seconds = choice
        if instance is None:
            self.outcomes["failed"] += 1
            return
        self.outcomes["agreed" if instance == decision.instance else "differed"] += 1
        self.cached_tokens[0] += decision.predicted_cached_tokens
        self.cached_tokens[1] += cached
        if seconds == seconds and own_seconds == own_seconds:  # neither is NaN
            self.ttft_requests += 1
            self.ttft_seconds[0] += own_seconds
            self.ttft_seconds[1] += seconds

    def shown(self) -> dict[str, Any] | None:
        """Returns its state for people; None: there is no shadow."""
        if self.config is None:
            return None
        compared = self.outcomes["agreed"] + self.outcomes["differed"]
        requests = self.ttft_requests
        return {
            "policy": self.config.policy,
            "knobs": self.config.knobs,
            **{name: self.outcomes[name] for name in ("agreed", "differed", "failed")},
            "agreement": self.outcomes["agreed"] / compared if compared else None,
            "predicted_cached_tokens": _means(self.cached_tokens, compared),
            "predicted_ttft_seconds": _means(self.ttft_seconds, requests),
        }


def _means(sums: list[int] | list[float], count: int) -> dict[str, float] | None:
    """Returns the mean of the router's and of the shadow's choices."""
    return {"router": sums[0] / count, "shadow": sums[1] / count} if count else None
