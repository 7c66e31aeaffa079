"""Requests that a gateway sends by itself. The core chooses; the gateway reports what happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lmetric._core import Decision, NoInstanceError, Request, Router
from lmetric.options import Failure

Key = tuple[str, int]
"""A gateway's request, and one of its calls."""

# A placement that was not sent ends after these seconds: the gateway may report neither its sending
# nor its end. Gateways that wait for an instance place the request again meanwhile.
UNSENT_SECONDS = 600.0
# An end on another instance may be the end of the request, or of a rejected try whose next try is
# on its way. The placement ends unless it is sent, or placed again, within these seconds.
ENDED_SECONDS = 5.0


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

    @property
    def sent(self) -> bool:
        """Whether the request was sent."""
        return self._sent

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
        finish_reason: str | None = None,
    ) -> None:
        """Ends the request: the answer is complete, or the gateway does not know how it ended.

        The counts and the reason are those of the engine; None: not reported.
        """
        if not self._sent:
            self.fail("cancelled")
        elif self._ticket.open:
            self.first_token()
            self._ticket.done(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                output_tokens=output_tokens,
                finish_reason=finish_reason,
            )

    def fail(self, failure: Failure) -> None:
        """Ends the request without an answer."""
        if self._ticket.open:
            self._ticket.failed(failure, retry=False)


class Placements:
    """The open placements of a router, by keys that the gateway chooses.

    Methods do nothing for an unknown key or request. ``clock``: returns seconds.
    """

    def __init__(self, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self.router = router
        self._clock = clock
        # Times of placements that were not sent, the oldest first: when they were placed, and when
        # an end was reported.
        self._unsent: dict[Key, float] = {}
        self._ended: dict[Key, float] = {}
        self._open: dict[Key, Placement] = {}
        self._keys: dict[str, set[Key]] = {}  # of open placements, by request

    def __len__(self) -> int:
        return len(self._open)

    def place(self, key: Key, fields: Mapping[str, Any]) -> list[str]:
        """Places a request, and returns the instances, best first.

        Ends an earlier placement of the key: the gateway tries again. ``fields``: of
        `lmetric.Request`.

        Raises NoInstanceError: no instance accepts requests.
        """
        self.drop(key)
        placement = self._open[key] = Placement(self.router, fields)
        self._unsent[key] = self._clock()
        self._keys.setdefault(key[0], set()).add(key)
        return placement.decision.ranking()

    def send(self, key: Key, instance: str) -> tuple[int, int]:
        """Counts the request as sent to an instance, which need not be the best one.

        Returns its prompt tokens: those that the core expects in the cache, and all.
        """
        placement = self._open.get(key)
        if placement is None:
            return 0, 0
        self._unsent.pop(key, None)
        self._ended.pop(key, None)
        try:
            placement.send(instance)
        except NoInstanceError:  # it left in the meantime
            self._take(key)
            return 0, 0
        return placement.decision.predicted_cached_tokens, placement.decision.prompt_tokens

    def first_token(self, key: Key) -> None:
        """Reports the first part of the answer."""
        placement = self._open.get(key)
        if placement is not None:
            placement.first_token()

    def done(self, request: str, instance: str) -> None:
        """Ends a call of a request on an instance: the answer is complete, or the gateway does not
        know how it ended. If no call was sent there, a call that was not sent ends soon."""
        unsent = []
        for key in self._keys.get(request, ()):
            placement = self._open[key]
            if not placement.sent:
                unsent.append((placement.decision.instance != instance, key))
            elif placement.decision.instance == instance:
                self._take(key).done()
                return
        for _, key in sorted(unsent):
            if key not in self._ended:
                self._ended[key] = self._clock()
                return

    def sweep(self) -> float | None:
        """Ends the placements whose time is over.

        Returns the seconds until the next one ends, unless it is sent; None: there is none.
        """
        now = self._clock()
        limits = (self._unsent, UNSENT_SECONDS), (self._ended, ENDED_SECONDS)
        for times, seconds in limits:
            while times and now - times[key := next(iter(times))] > seconds:
                self.drop(key)
        ends = (times[next(iter(times))] + seconds - now for times, seconds in limits if times)
        return min(ends, default=None)

    def drop(self, key: Key, failure: Failure = "cancelled") -> None:
        """Ends the request without an answer."""
        if key in self._open:
            self._take(key).fail(failure)

    def drop_instance(self, instance: str) -> None:
        """Ends all requests of an instance that died."""
        for key in [key for key, each in self._open.items() if each.decision.instance == instance]:
            self.drop(key, "reset")

    def _take(self, key: Key) -> Placement:
        self._unsent.pop(key, None)
        self._ended.pop(key, None)
        keys = self._keys[key[0]]
        keys.remove(key)
        if not keys:
            del self._keys[key[0]]
        return self._open.pop(key)
