"""The policies on trial of a model: its shadow and its canary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lmetric._core import Arrival, Decision, Request, Router, Ticket
from lmetric.server.fleet.canary import Canary
from lmetric.server.fleet.policies import Policies
from lmetric.server.fleet.shadow import Shadow

if TYPE_CHECKING:
    from lmetric.server.fleet.canary_run import CanaryRequest


class Trials:
    """The shadow and the canary of one model.

    ``policies``: returns the policies of the model. ``install``: replaces them.
    """

    def __init__(
        self,
        model: str,
        router: Router,
        policies: Callable[[], Policies],
        install: Callable[[Policies], None],
    ) -> None:
        self._router = router
        self.shadow = Shadow(router)
        self.canary = Canary(model, router, policies, install=install)

    @property
    def on(self) -> bool:
        """Whether a request needs `route`."""
        return self.canary.running or self.shadow.config is not None

    def check(self, policies: Policies) -> None:
        """Raises LmetricError if the router refuses the policies on trial. Changes nothing."""
        for install, new, present in (
            (self._router.set_shadow, policies.shadow, self.shadow.built),
            (self._router.set_canary, policies.canary, self.canary.built if self.canary.running else None),
        ):
            if new is not None:
                install(new.policy, knobs=new.knobs)
                install(present and present.policy, knobs=present and present.knobs)

    def configure(self, policies: Policies, before: Policies | None = None) -> None:
        """Applies the settings of the model. ``before``: its last policies. Raises LmetricError."""
        settings = policies.settings
        self.shadow.configure(policies, settings.shadow)
        self.canary.configure(
            settings.canary,
            policies.canary,
            policy_changed=before is not None and policies.differs(before),
        )

    def route(
        self, request: Request, now: float, arrival: Arrival | None
    ) -> tuple[Decision, Ticket, CanaryRequest | None]:
        """Routes a request under the policy of its arm.

        The shadow scores only requests under the router's own policy. Raises NoInstanceError.
        """
        run = self.canary.run
        placed = run.draw(request) if run is not None and self.canary.running else None
        canary = placed is not None and placed.canary
        shadow = not canary and self.shadow.config is not None
        decision, ticket = self._router.route(request, now=now, arrival=arrival, canary=canary, shadow=shadow)
        if shadow:
            self.shadow.add(decision)
        return decision, ticket, placed

    def shown(self) -> dict[str, Any]:
        """Returns the state of both for people."""
        return {**self.canary.shown(), "shadow": self.shadow.shown()}
