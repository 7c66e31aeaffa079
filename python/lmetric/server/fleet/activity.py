"""The latest fetches, handoffs, migrations and failovers of a model, and events of its guard."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, NamedTuple

KEPT_EVENTS = 512  # of each model

Kind = Literal["fetch", "handoff", "migration", "failover", "retry", "guard"]


class ActivityEvent(NamedTuple):
    """One event.

    Attributes:
        sequence: number of the event in its model, from 1.
        at: seconds on the monotonic clock.
        number: the decision of the request; 0: none.
        tenant: the tenant of the request; "": none.
        source, target: engines; None: unknown, or not applicable.
        tokens: prompt tokens fetched, or the tokens of the request at a migration.
        seconds: duration of a fetch.
    """

    sequence: int
    at: float
    kind: Kind
    number: int
    tenant: str
    source: str | None
    target: str | None
    outcome: str
    tokens: int | None = None
    seconds: float | None = None
    details: dict[str, Any] | None = None

    def shown(self, names: bool = True) -> dict[str, Any]:
        """Returns the event for people. ``names``: with the engines' names."""
        hidden = ["sequence", "at", "number", "tenant"]
        if not names:
            hidden += ["source", "target", "details"]
        return {
            name: value for name, value in self._asdict().items() if name not in hidden and value is not None
        }


class Activity:
    """A bounded list of events, the newest last."""

    __slots__ = ("_elsewhere", "events", "noted")

    def __init__(self) -> None:
        self.events: deque[ActivityEvent] = deque(maxlen=KEPT_EVENTS)
        self.noted = 0  # events so far
        self._elsewhere: deque[int] = deque(maxlen=KEPT_EVENTS)  # of them, those of other workers

    def note(self, *values: Any, own: bool = True) -> None:
        """Adds an event; ``values``: the fields of `ActivityEvent` from ``at`` on, in order.

        ``own``: not of another worker.
        """
        self.noted += 1
        self.events.append(ActivityEvent(self.noted, *values))
        if not own:
            self._elsewhere.append(self.noted)

    def since(self, noted: int) -> list[ActivityEvent]:
        """Returns this worker's kept events after the first ``noted`` ones, oldest first."""
        elsewhere = frozenset(self._elsewhere)
        return [each for each in self.events if each.sequence > noted and each.sequence not in elsewhere]

    def of(self, number: int) -> list[ActivityEvent]:
        """Returns the events of a decision, oldest first."""
        return [event for event in self.events if event.number == number]
