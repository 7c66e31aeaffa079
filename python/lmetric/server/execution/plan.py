"""The states of a request, the events that change them, and the steps and actions between: plain data.

A request is a chain of segments placed on engines. Planners say which step is next (`planners`), one executor
has the state (`executor`), and a runner carries its actions out (`runner`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from typing import TYPE_CHECKING, Protocol

from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.engine import Engine

if TYPE_CHECKING:
    from lmetric._core import ResponseReader


# Where a request is (`MEANINGS`). Each state but the last has one deadline (`DEADLINES`).
State = IntEnum("State", "ADMITTED FETCHING INTERNAL AWAITING STREAMING BETWEEN RESUMING DONE", start=0)
# What changes the state (`EVENTS`).
Event = IntEnum(
    "Event",
    "PLACED FETCHED READY ANSWERED ENDED RESENT FAILED MOVED HELD CAUGHT_UP ABORTED",
    start=0,
)

MEANINGS: Mapping[State, str] = {
    State.ADMITTED: "no engine is asked yet; the prompt may wait for a tokenizer thread",
    State.FETCHING: "another engine is asked to hold the front of the prompt (prefix fetch)",
    State.INTERNAL: "an engine runs the open segment or a slice of it; its answer is the router's",
    State.AWAITING: "an engine runs the open segment; its answer is the client's, and has not begun",
    State.STREAMING: "the client gets the tokens of the open segment as they come",
    State.BETWEEN: "no engine runs the request: between two slices, it waits for its client or for a hold",
    State.RESUMING: "an engine was lost behind a token; another was asked to go on",
    State.DONE: "the ticket is closed, and the client has one end",
}

DEADLINES: Mapping[State, str] = {
    State.ADMITTED: "`timeouts.request`",
    State.FETCHING: "`pull_seconds`, or the time to compute what is fetched",
    State.INTERNAL: "`timeouts.answer`; of a prefill `timeouts.first_byte`",
    State.AWAITING: "`timeouts.first_byte` of a stream, else `timeouts.answer`",
    State.STREAMING: "`timeouts.between_chunks`",
    State.BETWEEN: "`timeouts.slow_client`, or `timeouts.first_byte` of the engine that is to hold",
    State.RESUMING: "`timeouts.first_byte` of a stream, else `timeouts.answer`",
    State.DONE: "none",
}

EVENTS: Mapping[Event, str] = {
    Event.PLACED: "the router chose an instance",
    Event.FETCHED: "the prefix fetch is over: held, refused, failed or late",
    Event.READY: "an answer for the client is worth committing to",
    Event.ANSWERED: "an answer for the router is whole",
    Event.ENDED: "the answer for the client is whole",
    Event.RESENT: "the step is sent once more, without the KV transfer",
    Event.FAILED: "an attempt failed, or its engine refused",
    Event.MOVED: "the request changes over to the engine that a migration has booked",
    Event.HELD: "between two slices the source holds what is there, or does not",
    Event.CAUGHT_UP: "the client reads again",
    Event.ABORTED: "the client left, the server stops, the longest duration is over, or a bug",
}

_RUNS = (State.INTERNAL, State.AWAITING)
_ANEW = (State.FETCHING, *_RUNS, State.DONE)
_NEXT = (State.FETCHING, *_RUNS, State.BETWEEN, State.DONE)

# For each state and event, the states that may follow.
TRANSITIONS: Mapping[tuple[State, Event], tuple[State, ...]] = {
    (State.ADMITTED, Event.PLACED): _ANEW,
    (State.FETCHING, Event.FETCHED): _ANEW,
    (State.FETCHING, Event.FAILED): _ANEW,
    (State.INTERNAL, Event.ANSWERED): _NEXT,
    (State.INTERNAL, Event.RESENT): _RUNS,
    (State.INTERNAL, Event.FAILED): (*_ANEW, State.RESUMING),
    (State.AWAITING, Event.READY): (State.STREAMING,),
    (State.AWAITING, Event.ANSWERED): _ANEW,
    (State.AWAITING, Event.ENDED): (State.DONE,),
    (State.AWAITING, Event.RESENT): _RUNS,
    (State.AWAITING, Event.FAILED): (*_ANEW, State.RESUMING),
    (State.STREAMING, Event.ENDED): (State.DONE,),
    (State.STREAMING, Event.FAILED): (State.RESUMING, State.DONE),
    (State.STREAMING, Event.MOVED): (*_RUNS, State.DONE),
    (State.BETWEEN, Event.HELD): (*_RUNS, State.BETWEEN),
    (State.BETWEEN, Event.CAUGHT_UP): (*_RUNS, State.BETWEEN, State.DONE),
    (State.BETWEEN, Event.FAILED): (State.RESUMING, State.DONE),
    (State.BETWEEN, Event.MOVED): (*_RUNS, State.DONE),
    (State.RESUMING, Event.READY): (State.STREAMING,),
    (State.RESUMING, Event.ANSWERED): _NEXT,
    (State.RESUMING, Event.ENDED): (State.DONE,),
    (State.RESUMING, Event.RESENT): (State.RESUMING,),
    (State.RESUMING, Event.FAILED): (State.RESUMING, State.DONE),
} | {(state, Event.ABORTED): (State.DONE,) for state in State if state is not State.DONE}


class Reader(Enum):
    """How an attempt reads its engine's answer. A further one (token ids in and out, as of vLLM's
    `/inference/v1/generate`) is a member here and a branch in `EngineAttempt`."""

    PASS = 0  # its bytes go to the client as they come
    WHOLE = 1  # it is kept until it is whole
    EVENTS = 2  # its events are given to the executor, one by one


class Slot(Enum):
    """The two places that a request has for attempts."""

    MAIN = 0  # the open segment
    SIDE = 1  # beside it: a prefix fetch, a migration, or the first of two that run at once


@dataclass(slots=True, eq=False)
class Step:
    """What one engine is asked, and how its answer is read: an action of the executor."""

    engine: Engine
    body: bytes
    reader: Reader
    limit_seconds: float  # until its first token, or until it is whole
    stream: bool = False  # it is asked for a stream
    target: bytes | None = None  # path of the request; None: the client's
    slot: Slot = Slot.MAIN
    for_client: bool = True  # what it says is the client's
    told_to_router: bool = True  # that it was sent is an event of the ticket
    carries_kv: bool = False  # it may fetch a KV transfer, which must not be sent twice
    kv_until: float = inf  # when that must be sent at the latest; seconds on the monotonic clock
    observed: bool = False  # its tokens are noted while they pass (PASS)
    hides_ids: bool = False  # the client did not ask for the token ids that come with them
    checks_prompt: bool = False  # the engine must tell that it has made the very tokens of a chat
    merges: bool = False  # its answer goes on behind what the client has (EVENTS, WHOLE)
    refills: bool = True  # the engine's index may ask for a field of its own
    tokens: int = 0  # asked for, of an answer that is merged
    ends_at: int = 0  # token behind which a segment's KV cache is complete
    keeps_last: bool = False  # the last token counts for the answer, too


class Action(Enum):
    """Actions that carry nothing."""

    COMMIT = 0  # the answer of the main attempt begins to pass to the client
    CANCEL = 1  # all attempts are given up
    CANCEL_MAIN = 2
    CANCEL_SIDE = 3
    PAUSE = 4  # the client does not keep up: no more is read for it
    RESUME = 5
    ABORT_CLIENT = 6  # its connection is closed at once


@dataclass(frozen=True, slots=True)
class Wake:
    """`woken` is to be called in so many seconds; None: no more."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Begin:
    """The client's answer begins, written by the router; `length`: of its body, None: it is a stream."""

    kind: bytes
    length: int | None
    engine: str  # that is named in its head


@dataclass(frozen=True, slots=True)
class Write:
    """More of that answer."""

    data: bytes
    last: bool = False


@dataclass(frozen=True, slots=True)
class BreakOff:
    """An answer that the client has some of ends with this error."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class Finish:
    """The end. `error`: for a client that has nothing yet."""

    error: ApiError | None = None


Act = Step | Action | Wake | Begin | Write | BreakOff | Finish


class AttemptEvent(Enum):
    """What an attempt tells, with the attempt and the time. Behind ENDED, FAILED and STALE it tells nothing
    more, nor once it is cancelled."""

    SENT = 0  # the request was written
    READY = 1  # the answer is worth committing to; with the flags of the reader
    EVENTS = 2  # events of the answer (reader EVENTS): a list of their data, or of a comment's line
    UNSEEN = 3  # the tokens that pass are no longer noted
    ENDED = 4  # the answer is whole
    FAILED = 5  # there will be no answer, or no more of it; with the kind of failure, and why
    # The step carries a KV transfer that must not be sent on the next connection: the engine may have fetched
    # it already, or (True) its time is over.
    STALE = 6


class Attempt(Protocol):
    """What the executor sees of a step at its engine."""

    step: Step
    started: float  # seconds on the monotonic clock
    error: bool  # the engine reported an error inside its answer
    answer: bytes | bytearray  # of reader WHOLE, or of an engine that refuses

    @property
    def reader(self) -> ResponseReader:
        """Status, usage, tokens and errors, as far as they came."""

    def error_words(self) -> str:
        """What the engine says of a refusal, behind a colon."""

    def finish_ticket(self) -> None:
        """Closes the ticket with the usage that the answer tells of."""


def transition_table() -> str:
    """The states and their transitions, as tables in Markdown."""
    lines = ["| state | meaning | deadline |", "| --- | --- | --- |"]
    lines += [f"| {state.name} | {MEANINGS[state]} | {DEADLINES[state]} |" for state in State]
    lines += ["", "| event | what happened | in | then |", "| --- | --- | --- | --- |"]
    for event in Event:
        by_targets: dict[tuple[State, ...], list[str]] = {}
        for (state, of), targets in TRANSITIONS.items():
            if of is event:
                by_targets.setdefault(tuple(sorted(set(targets))), []).append(state.name)
        for targets, states in by_targets.items():
            names = ", ".join(target.name for target in targets)
            where = "all but DONE" if len(states) == len(State) - 1 else ", ".join(states)
            lines.append(f"| {event.name} | {EVENTS[event]} | {where} | {names} |")
    return "\n".join(lines) + "\n"
