"""Open requests of a gateway that sends them by itself, each with its ticket."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from lmetric._core import Decision, NoInstanceError, Request, Router, Ticket


@dataclass(slots=True)
class _Placement:
    request: Request
    decision: Decision
    ticket: Ticket
    instance: str
    sent: bool = False
    answered: bool = False  # its first token has come


class Placements:
    """The placements of requests, by a key that the gateway chooses.

    The ledger of the core counts a request from `place` until `done` or `drop`. Calls for an
    unknown key do nothing: gateways report an end more than once.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self._open: dict[Hashable, _Placement] = {}

    def __len__(self) -> int:
        return len(self._open)

    def place(self, key: Hashable, request: Request) -> list[str]:
        """Places a request, and returns the instances, best first.

        An earlier placement of the key ends: the gateway tries again.

        Raises NoInstanceError: no instance accepts requests.
        """
        self.drop(key)
        decision, ticket = self.router.route(request)
        self._open[key] = _Placement(request, decision, ticket, decision.instance)
        return decision.ranking()

    def instance(self, key: Hashable) -> str | None:
        """The instance that counts the request; None: it is not open."""
        placement = self._open.get(key)
        return None if placement is None else placement.instance

    def sent(self, key: Hashable, instance: str) -> tuple[int, int]:
        """The gateway sent the request to an instance, which need not be the best one.

        Returns its prompt tokens: those that the core expects in the cache, and all.
        """
        placement = self._open.get(key)
        if placement is None:
            return 0, 0
        if placement.instance != instance:
            placement.ticket.failed("cancelled", retry=False)
            try:
                decision, ticket = self.router.route(_for(placement.request, instance))
            except NoInstanceError:  # it left in the meantime
                del self._open[key]
                return 0, 0
            placement.decision, placement.ticket, placement.instance = decision, ticket, instance
        placement.ticket.sent()
        placement.sent = True
        return placement.decision.predicted_cached_tokens, placement.decision.prompt_tokens

    def first_token(self, key: Hashable) -> None:
        """The first part of the answer has come."""
        placement = self._open.get(key)
        if placement is not None and placement.sent and not placement.answered:
            placement.answered = True
            placement.ticket.first_token()

    def done(self, key: Hashable) -> None:
        """The answer is complete, or the gateway does not know how it ended."""
        placement = self._open.get(key)
        if placement is None or not placement.sent:
            self.drop(key)
            return
        self.first_token(key)
        del self._open[key]
        if placement.ticket.open:
            placement.ticket.done()

    def drop(self, key: Hashable, failure: str = "cancelled") -> None:
        """The request ends without an answer."""
        placement = self._open.pop(key, None)
        if placement is not None and placement.ticket.open:
            placement.ticket.failed(failure, retry=False)

    def lose(self, instance: str) -> None:
        """An instance died: its requests end."""
        for key in [key for key, each in self._open.items() if each.instance == instance]:
            self.drop(key, "reset")


def _for(request: Request, instance: str) -> Request:
    """The request, for one instance alone."""
    return Request(
        text=request.text,
        token_ids=request.token_ids,
        max_tokens=request.max_tokens,
        session=request.session,
        request_id=request.request_id,
        lora_name=request.lora_name,
        cache_salt=request.cache_salt,
        instances=[instance],
    )
