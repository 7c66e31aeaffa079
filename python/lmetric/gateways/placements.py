"""Requests that a gateway sends by itself. The core chooses; the gateway reports what happens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from lmetric._core import Decision, NoInstanceError, Request, Router
from lmetric.options import Failure


class Placement:
    """A request from its decision to its end.

    The ledger of the core counts the request meanwhile. Reports after the end do nothing: gateways
    report an end more than once.

    Args:
        router: chooses the instance.
        fields: of `lmetric.Request`.

    Raises:
        NoInstanceError: no instance accepts requests.
    """

    __slots__ = ("_begun", "_fields", "_router", "_sent", "_ticket", "decision")

    decision: Decision

    def __init__(self, router: Router, fields: Mapping[str, Any]) -> None:
        self._router, self._fields = router, fields
        self.decision, self._ticket = router.route(Request(**fields))
        self._sent = self._begun = False

    @property
    def open(self) -> bool:
        """Whether the request has not ended."""
        return self._ticket.open

    def send(self, instance: str | None = None) -> None:
        """Counts the request as sent, to ``instance`` if the gateway did not follow the choice.

        Raises NoInstanceError: that instance accepts no requests. The placement has ended.
        """
        if instance is not None and instance != self.decision.instance:
            self._ticket.failed("cancelled", retry=False)
            again = Request(**{**self._fields, "instances": [instance]})
            self.decision, self._ticket = self._router.route(again)
        self._ticket.sent()
        self._sent = True

    def first_token(self) -> None:
        """Reports the first output token. Further calls do nothing."""
        if self._sent and self._ticket.open and not self._begun:
            self._begun = True
            self._ticket.first_token()

    def add_token(self) -> None:
        """Counts an output token."""
        if not self._begun:
            self.first_token()
        elif self._ticket.open:
            self._ticket.tokens(1)

    def done(
        self,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Ends the request: the answer is complete, or the gateway does not know how it ended.

        The counts are those of the engine; None: not reported.
        """
        if not self._sent:
            self.fail("cancelled")
        elif self._ticket.open:
            self.first_token()
            self._ticket.done(
                prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens
            )

    def fail(self, failure: Failure) -> None:
        """Ends the request without an answer."""
        if self._ticket.open:
            self._ticket.failed(failure, retry=False)


class Placements:
    """The open placements of a router, by a key that the gateway chooses.

    Calls for an unknown key do nothing.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self._open: dict[Hashable, Placement] = {}

    def __len__(self) -> int:
        return len(self._open)

    def place(self, key: Hashable, fields: Mapping[str, Any]) -> list[str]:
        """Places a request, and returns the instances, best first.

        Ends an earlier placement of the key: the gateway tries again. ``fields``: of
        `lmetric.Request`.

        Raises NoInstanceError: no instance accepts requests.
        """
        self.drop(key)
        placement = self._open[key] = Placement(self.router, fields)
        return placement.decision.ranking()

    def instance(self, key: Hashable) -> str | None:
        """Returns the instance that counts the request; None: the key is unknown."""
        placement = self._open.get(key)
        return None if placement is None else placement.decision.instance

    def send(self, key: Hashable, instance: str) -> tuple[int, int]:
        """Counts the request as sent to an instance, which need not be the best one.

        Returns its prompt tokens: those that the core expects in the cache, and all.
        """
        placement = self._open.get(key)
        if placement is None:
            return 0, 0
        try:
            placement.send(instance)
        except NoInstanceError:  # it left in the meantime
            del self._open[key]
            return 0, 0
        return placement.decision.predicted_cached_tokens, placement.decision.prompt_tokens

    def first_token(self, key: Hashable) -> None:
        """Reports the first part of the answer."""
        placement = self._open.get(key)
        if placement is not None:
            placement.first_token()

    def done(self, key: Hashable) -> None:
        """Ends the request: the answer is complete, or the gateway does not know how it ended."""
        placement = self._open.pop(key, None)
        if placement is not None:
            placement.done()

    def drop(self, key: Hashable, failure: Failure = "cancelled") -> None:
        """Ends the request without an answer."""
        placement = self._open.pop(key, None)
        if placement is not None:
            placement.fail(failure)

    def drop_instance(self, instance: str) -> None:
        """Ends all requests of an instance that died."""
        for key in [key for key, each in self._open.items() if each.decision.instance == instance]:
            self.drop(key, "reset")
