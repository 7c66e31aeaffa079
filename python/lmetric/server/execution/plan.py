"""The states of a request, the events that change them, and the steps and actions between: plain data.

A request is a chain of segments placed on engines. Planners say which step is next (`planners`), one executor
has the state (`executor`), and a runner carries its actions out (`runner`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.engine import Engine

if TYPE_CHECKING:
    from lmetric._core import ResponseReader


# Names are strings of these types: members of an `Enum` take several times as long to read.
# Where a request is (`MEANINGS`). Each state but the last has one deadline of its own (`DEADLINES`); besides,
# `timeouts.request` holds in all. While the client does not read, `timeouts.slow_client` replaces the
# deadline of an answer that passes to it.
State = Literal["ADMITTED", "FETCHING", "INTERNAL", "AWAITING", "STREAMING", "BETWEEN", "RESUMING", "DONE"]
# What changes the state (`EVENTS`).
Event = Literal[
    "PLACED", "FETCHED", "READY", "ANSWERED", "ENDED", "RESENT", "FAILED",
    "MOVED", "HELD", "CAUGHT_UP", "ABORTED",
]  # fmt: skip
# How an attempt reads its engine's answer: its bytes pass to the client, it is kept until it is whole, or its
# events are given to the executor one by one. A further way (token ids in and out, as of vLLM's
# `/inference/v1/generate`) is a name here and a branch in `EngineAttempt`.
Reader = Literal["pass", "whole", "events"]
# What an attempt reports; behind the last three nothing more, nor once it is cancelled. "sent": the request
# was written, with a KV transfer. "ready": the answer is worth committing to; with the reader's flags: by
# END alone it is whole, too, and no "ended" follows. "events": a list of their data or of comment lines.
# "unseen": tokens that pass are no longer noted. "ended": the answer is whole. "failed": there is none, or
# no more of it; with the kind of failure, and why. "stale": the step carries a KV transfer that must not be
# sent on the next connection: the engine may have fetched it already, or (True) its time is over.
AttemptEvent = Literal["sent", "ready", "events", "unseen", "ended", "failed", "stale"]
# Actions that carry nothing. "cancel": all attempts are given up. "pause", "resume": for the client, no more
# is read, or again. "abort_client": its connection is closed at once.
Action = Literal["cancel", "cancel_main", "cancel_side", "pause", "resume", "abort_client"]

MEANINGS: Mapping[State, str] = {
    "ADMITTED": "no engine is asked yet (before: `PendingTokenization`, for a tokenizer thread)",
    "FETCHING": "another engine is asked to hold the front of the prompt (prefix fetch)",
    "INTERNAL": "an engine runs the open segment or a slice of it, and answers the router",
    "AWAITING": "an engine runs the open segment; its part of the client's answer has not begun",
    "STREAMING": "the engine's answer passes to the client, or is merged into its answer",
    "BETWEEN": "between two slices, the request waits for its client, or for an engine to hold its KV cache",
    "RESUMING": "an engine was lost behind a token; another was asked to go on",
    "DONE": "the ticket is closed, and the client has one end",
}

DEADLINES: Mapping[State, str] = {
    "ADMITTED": "`timeouts.request`",
    "FETCHING": "`prefix_fetch_timeout_seconds`, or the time to compute what is fetched",
    "INTERNAL": "`timeouts.answer`; of a prefill `timeouts.first_byte`",
    "AWAITING": "`timeouts.first_byte` of a stream, else `timeouts.answer`",
    "STREAMING": "`timeouts.between_chunks`",
    "BETWEEN": "`timeouts.slow_client`, or `timeouts.first_byte` of the engine that is to hold",
    "RESUMING": "`timeouts.first_byte` of a stream, else (and of a slice) `timeouts.answer`",
    "DONE": "none",
}

EVENTS: Mapping[Event, str] = {
    "PLACED": "the router chose an instance",
    "FETCHED": "the prefix fetch is over: held, refused, failed or late",
    "READY": "an answer for the client is worth committing to; of a merged one, its first tokens came",
    "ANSWERED": "an answer for the router is whole; of two engines at once, the second answers",
    "ENDED": "the answer for the client is over",
    "RESENT": "the segment is sent to its engine once more: without the KV transfer, or not in slices",
    "FAILED": "an attempt failed, or its engine refused",
    "MOVED": "the request changes over to the target of its migration",
    "HELD": "between two slices the source holds what is there, or does not",
    "CAUGHT_UP": "the client reads again",
    "ABORTED": "the client left, the server stops, the longest duration is over, or a bug",
}

_RUNS: tuple[State, ...] = ("INTERNAL", "AWAITING")
_ANEW: tuple[State, ...] = (*_RUNS, "DONE")
_NEXT: tuple[State, ...] = (*_RUNS, "BETWEEN", "DONE")

# For each state and event, the states that may follow.
TRANSITIONS: Mapping[tuple[State, Event], tuple[State, ...]] = {
    ("ADMITTED", "PLACED"): ("FETCHING", *_ANEW),
    ("FETCHING", "FETCHED"): _ANEW,
    ("FETCHING", "FAILED"): ("FETCHING", *_ANEW),
    ("INTERNAL", "ANSWERED"): _NEXT,
    ("INTERNAL", "RESENT"): (*_RUNS, "DONE"),
    ("INTERNAL", "FAILED"): ("FETCHING", *_ANEW, "RESUMING"),
    ("AWAITING", "READY"): ("STREAMING",),
    ("AWAITING", "ANSWERED"): _ANEW,
    ("AWAITING", "ENDED"): ("DONE",),
    ("AWAITING", "RESENT"): (*_RUNS, "DONE"),
    ("AWAITING", "FAILED"): ("FETCHING", *_ANEW, "RESUMING"),
    ("STREAMING", "ENDED"): ("DONE",),
    ("STREAMING", "FAILED"): ("RESUMING", "DONE"),
    ("STREAMING", "MOVED"): (*_RUNS, "DONE"),
    ("BETWEEN", "HELD"): (*_RUNS, "BETWEEN", "DONE"),
    ("BETWEEN", "CAUGHT_UP"): (*_RUNS, "BETWEEN", "DONE"),
    ("BETWEEN", "FAILED"): ("RESUMING", "DONE"),
    ("BETWEEN", "MOVED"): (*_RUNS, "DONE"),
    ("RESUMING", "READY"): ("STREAMING",),
    ("RESUMING", "ANSWERED"): _NEXT,
    ("RESUMING", "ENDED"): ("DONE",),
    ("RESUMING", "RESENT"): ("RESUMING", "DONE"),
    ("RESUMING", "FAILED"): ("RESUMING", "DONE"),
    **{(state, "ABORTED"): ("DONE",) for state in MEANINGS if state != "DONE"},
}
# The same, by state and event and again by state: found without making a tuple.
FOLLOWING: Mapping[State, Mapping[Event, Mapping[State, State]]] = {
    state: {event: {then: then for then in to} for (of, event), to in TRANSITIONS.items() if of == state}
    for state in MEANINGS
}


class Step(Struct, eq=False, gc=False):  # of msgspec: made in C, as each request has one
    """What one engine is asked, and how its answer is read: an action of the executor."""

    engine: Engine
    body: bytes
    reader: Reader
    limit_seconds: float  # until its first token, or until it is whole
    stream: bool = False  # it is asked for a stream
    target: bytes | None = None  # path of the request; None: the client's
    beside: bool = False  # it runs beside the open segment
    for_client: bool = True  # what it says is the client's
    advances_ticket: bool = True  # the attempt tells the ticket that it was sent
    carries_kv: bool = False  # it may fetch a KV transfer, which must not be sent twice
    kv_until: float = inf  # when that must be sent at the latest; seconds on the monotonic clock
    observed: bool = False  # its tokens are noted while they pass (reader "pass")
    hides_ids: bool = False  # the client did not ask for the token ids that come with them
    checks_prompt: bool = False  # the engine must tell that it has made the very tokens of a chat
    merges: bool = False  # its answer goes on behind what the client has
    refills: bool = True  # the engine's index may ask for a field of its own
    tokens: int = 0  # asked for, of an answer that is merged
    ends_at: int = 0  # token behind which a segment's KV cache is complete
    keeps_last: bool = False  # the last token counts for the answer, too


@dataclass(frozen=True, slots=True)
class Wake:
    """`woken` is to be called in so many seconds; None: no more."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Commit:
    """The answer of the main attempt is committed to: its bytes pass, or its events are read from now on."""


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


Act = Step | Action | Wake | Commit | Begin | Write | BreakOff | Finish


class Attempt(Protocol):
    """What the executor sees of a step at its engine."""

    step: Step
    started: float  # seconds on the monotonic clock
    error: bool  # the engine reported an error inside its answer
    answer: bytes | bytearray  # of reader "whole", or of an engine that refuses

    @property
    def reader(self) -> ResponseReader:
        """Status, usage, tokens and errors, as far as they came."""

    def error_words(self) -> str:
        """What the engine says of a refusal, behind a colon."""
