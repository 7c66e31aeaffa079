"""Recorded calls of agents: the calls that each call waits for, and prompts that grow.

A call waits for the latest calls that ended before it began. A call is among the latest if no other
such call began after its end. A subagent counts as one long call. So a turn waits for the previous
turn, or for all subagents that ran since, and calls that overlap do not wait for each other.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmetric_lab.sim.traces.fields import Row

MOST_NESTED = 50
"""Maximum depth of subagents in subagents."""


@dataclass(slots=True)
class Call:
    """A request, with its recorded start and end."""

    row: Row  # arrival_seconds is the start
    end: float | None  # None: unknown
    waits: list[Call] = field(default_factory=list)
    number: int = -1  # in its program

    @property
    def start(self) -> float:
        return self.row.arrival_seconds

    @property
    def last(self) -> list[Call]:
        return [self]


@dataclass(slots=True)
class Agent:
    """An agent, or one run of a subagent: its calls and subagents."""

    items: list[Call | Agent] = field(default_factory=list)
    start: float = float("inf")  # of the run
    end: float = float("-inf")  # of the last call
    last: list[Call] = field(default_factory=list)  # the calls that end it

    def link(self, before: list[Call]) -> list[Call]:
        """Sets what each call waits for, and returns all calls, each behind those that it waits
        for. The first call waits for `before`."""
        calls: list[Call] = []
        for item in self.items:
            if isinstance(item, Agent):
                item._span()
        items = sorted(
            (item for item in self.items if item.start < float("inf")), key=lambda item: item.start
        )
        running: list[tuple[float, int]] = []  # (end, place in items)
        ended: list[tuple[float, int]] = []
        for place, item in enumerate(items):
            waits = _calls(items, _move(items, running, ended, item.start)) or before
            if isinstance(item, Call):
                item.waits = waits
                calls.append(item)
            else:
                calls += item.link(waits)
            end = item.start if item.end is None else max(item.end, item.start)
            heapq.heappush(running, (end, place))
        self.last = _calls(items, _move(items, running, ended, float("inf"))) or before
        return calls

    def _span(self) -> None:
        """Sets start and end from the calls; no call: the start is infinite."""
        for item in self.items:
            if isinstance(item, Agent):
                item._span()
        starts = [item.start for item in self.items]
        self.start = min(self.start, *starts) if starts and min(starts) < float("inf") else float("inf")
        ends = [item.start if item.end is None else item.end for item in self.items]
        self.end = max(ends, default=float("-inf"))


def _move(
    items: list[Call | Agent], running: list[tuple[float, int]], ended: list[tuple[float, int]], now: float
) -> list[int]:
    """Moves what has ended by `now` from `running` to `ended`, and keeps the latest there."""
    while running and running[0][0] <= now:
        ended.append(heapq.heappop(running))
    if ended:
        latest = max(place for _, place in ended)
        ended[:] = [(end, place) for end, place in ended if place == latest or end > items[latest].start]
    return [place for _, place in ended]


def _calls(items: list[Call | Agent], places: list[int]) -> list[Call]:
    return [call for place in sorted(places) for call in items[place].last]


def program_rows(agent: Agent, session: int) -> Iterator[Row]:
    """The requests of a program, with what each waits for. Gaps count from the last of these
    ends."""
    calls = sorted(agent.link([]), key=lambda call: call.start)
    for number, call in enumerate(calls):
        call.number = number
        ends = [before.end for before in call.waits]
        known = [end for end in ends if end is not None]
        gap_known = bool(ends) and len(known) == len(ends)
        keys = [(session, before.number) for before in call.waits]
        yield call.row._replace(
            key=(session, number),
            parent=keys[0] if keys else None,
            joins=tuple(keys[1:]),
            session=session,
            waits=True,
            gap_known=gap_known,
            think_seconds=max(0.0, call.start - max(known)) if gap_known else 0.0,
        )


class Growing:
    """The prompts of one agent, where hash IDs are not known: a prompt extends the last one."""

    __slots__ = ("_ids", "_next", "_size")

    def __init__(self, block_tokens: int, next_id: Iterator[int], ids: array[int] | None = None) -> None:
        """`next_id`: new IDs, each given once; `ids`: of the last prompt."""
        self._size = block_tokens
        self._next = next_id
        self._ids = array("Q") if ids is None else ids

    def extend(self, input_tokens: int, shared_tokens: int) -> array[int]:
        """The IDs of a prompt's whole blocks. It begins with `shared_tokens` of the last prompt and
        its answer."""
        ids = self._ids[: shared_tokens // self._size]
        ids = ids[: input_tokens // self._size]
        ids.extend(next(self._next) for _ in range(input_tokens // self._size - len(ids)))
        self._ids = ids
        return ids
