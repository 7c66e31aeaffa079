"""The states of a request, the events that change them, and the executor's actions: plain data.

A request is a chain of segments placed on engines. Planners define the next step (`planners`), one
executor holds the state (`executor`), and a runner carries out its actions (`runner`).
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


# These names are strings: reading members of an `Enum` takes several times as long.
# The states of a request (`MEANINGS`). Each state but the last has one deadline (`DEADLINES`), and
# `timeouts.request` limits the whole request. While the client does not read,
# `timeouts.slow_client` replaces the deadline of a forwarded answer.
State = Literal["ADMITTED", "FETCHING", "INTERNAL", "AWAITING", "STREAMING", "RESUMING", "DONE"]
# The events that change the state (`EVENTS`).
Event = Literal["PLACED", "FETCHED", "READY", "ANSWERED", "ENDED", "RESENT", "FAILED", "MOVED", "ABORTED"]
# How an attempt reads its engine's answer. "pass": its bytes go to the client. "whole": the attempt
# collects it. "events": the executor gets its events one by one. To add a way (token ids in and
# out, as in vLLM's `/inference/v1/generate`), add a name here and a branch in `EngineAttempt`.
Reader = Literal["pass", "whole", "events"]
# The events of an attempt. Nothing follows the last three, or a cancellation. "sent": the request
# was written, with a KV transfer. "comments": lines of comments that came before "ready". "ready":
# the executor may commit to the answer. Its detail is the reader's flags; END without an error
# means that the answer is also whole, and no "ended" follows. "events": a list of event data or
# comment lines. "unseen": the tokens of a forwarded stream are no longer recorded. "ended": the
# answer is whole. "failed": no answer, or no more of it; detail: kind of failure and reason.
# "stale": the step carries a KV transfer that must not be sent on another connection. The engine
# may have fetched it already, or (detail True) it has expired.
AttemptEvent = Literal["sent", "comments", "ready", "events", "unseen", "ended", "failed", "stale"]
# Actions without arguments. "cancel": cancels all attempts. "promote_hedge": the hedge becomes the
# main attempt. "pause", "resume": stop and continue
# reading the client's answer from its engine. "abort_client": closes the client's connection at
# once.
Action = Literal[
    "cancel", "cancel_main", "cancel_side", "cancel_hedge", "promote_hedge", "pause", "resume", "abort_client"
]

MEANINGS: Mapping[State, str] = {
    "ADMITTED": "no engine has the request yet (before: a `WaitingRequest`, for tokens or room in a cache)",
    "FETCHING": "another engine prepares the prompt's prefix for transfer (prefix fetch)",
    "INTERNAL": "an engine runs the open segment and answers the router",
    "AWAITING": "an engine runs the open segment; its part of the client's answer has not begun",
    "STREAMING": "the engine's answer is forwarded to the client, or merged into the client's answer",
    "RESUMING": "an engine failed after a token; another engine continues",
    "DONE": "the ticket is closed, and the client's answer has ended",
}

DEADLINES: Mapping[State, str] = {
    "ADMITTED": "`timeouts.request`",
    "FETCHING": "`prefix_fetch_timeout_seconds`, or the time to compute the prefix",
    "INTERNAL": "`timeouts.answer`; for a prefill `timeouts.first_byte`",
    "AWAITING": "`timeouts.first_byte` for a stream, else `timeouts.answer`",
    "STREAMING": "`timeouts.between_chunks`",
    "RESUMING": "`timeouts.first_byte` for a stream, else `timeouts.answer`",
    "DONE": "none",
}

EVENTS: Mapping[Event, str] = {
    "PLACED": "the router chose an instance",
    "FETCHED": "the prefix fetch is over: prepared, refused, failed or late",
    "READY": "the executor can commit to an answer for the client; a merged answer: its first tokens came",
    "ANSWERED": "an answer for the router is whole; with two engines at once: the second answers",
    "ENDED": "the answer for the client is over",
    "RESENT": "the segment goes to its engine again, without the KV transfer",
    "FAILED": "an attempt failed, or its engine refused",
    "MOVED": "the request switches to the target of its migration",
    "ABORTED": "the client left, the server stops, the longest duration is over, or an internal error",
}

_RUNS: tuple[State, ...] = ("INTERNAL", "AWAITING")
_ANEW: tuple[State, ...] = (*_RUNS, "DONE")

# For each state and event, the states that may follow.
TRANSITIONS: Mapping[tuple[State, Event], tuple[State, ...]] = {
    ("ADMITTED", "PLACED"): ("FETCHING", *_ANEW),
    ("FETCHING", "FETCHED"): _ANEW,
    ("FETCHING", "FAILED"): ("FETCHING", *_ANEW),
    ("INTERNAL", "ANSWERED"): _ANEW,
    ("INTERNAL", "RESENT"): _ANEW,
    ("INTERNAL", "FAILED"): ("FETCHING", *_ANEW, "RESUMING"),
    ("AWAITING", "READY"): ("STREAMING",),
    ("AWAITING", "ANSWERED"): _ANEW,
    ("AWAITING", "ENDED"): ("DONE",),
    ("AWAITING", "RESENT"): _ANEW,
    ("AWAITING", "FAILED"): ("FETCHING", *_ANEW, "RESUMING"),
    ("STREAMING", "ENDED"): ("DONE",),
    ("STREAMING", "FAILED"): ("RESUMING", "DONE"),
    ("STREAMING", "MOVED"): _ANEW,
    ("RESUMING", "READY"): ("STREAMING",),
    ("RESUMING", "ANSWERED"): _ANEW,
    ("RESUMING", "ENDED"): ("DONE",),
    ("RESUMING", "RESENT"): ("RESUMING", "DONE"),
    ("RESUMING", "FAILED"): ("RESUMING", "DONE"),
    **{(state, "ABORTED"): ("DONE",) for state in MEANINGS if state != "DONE"},
}
# `TRANSITIONS` as nested mappings: a look-up needs no tuple.
FOLLOWING: Mapping[State, Mapping[Event, Mapping[State, State]]] = {
    state: {event: {then: then for then in to} for (of, event), to in TRANSITIONS.items() if of == state}
    for state in MEANINGS
}


class Step(Struct, eq=False, gc=False):  # msgspec creates it in C, as each request has one
    """A request to one engine, and the way to read its answer: an action of the executor."""

    engine: Engine
    body: bytes
    reader: Reader
    limit_seconds: float  # until its first token, or until it is whole
    stream: bool = False  # it requests a stream
    target: bytes | None = None  # path of the request; None: the client's path
    method: bytes = b"POST"
    beside: bool = False  # it runs beside the open segment
    for_client: bool = True  # its answer is for the client
    advances_ticket: bool = True  # the attempt marks the ticket as sent
    carries_kv: bool = False  # it may fetch a KV transfer, which must not be sent twice
    kv_until: float = inf  # deadline for sending that; seconds on the monotonic clock
    observed: bool = False  # its tokens are recorded while they pass (reader "pass")
    hides_ids: bool = False  # the client did not request the token ids in the answer
    checks_prompt: bool = False  # the engine must report the same tokens of a chat
    merges: bool = False  # its answer continues the part that the client has
    refills: bool = True  # KV backfill may add the engine's field
    tokens: int = 0  # requested tokens of a merged answer
    ends_at: int = 0  # token at which a segment's KV cache is complete
    keeps_last: bool = False  # the last token belongs to the answer, too


@dataclass(frozen=True, slots=True)
class Wake:
    """Schedules a call of `woken` after this many seconds; None cancels it."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Commit:
    """Commits to the answer of the main attempt: forwards its bytes, or reads its events."""


@dataclass(frozen=True, slots=True)
class Comment:
    """Opens the client's stream, unless that was done, and writes lines of comments."""

    lines: bytes


@dataclass(frozen=True, slots=True)
class Begin:
    """Starts an answer of the router. `length`: bytes of its body; None: it is a stream."""

    kind: bytes
    length: int | None
    engine: str  # the engine named in its head


@dataclass(frozen=True, slots=True)
class Write:
    """Writes a part of the router's answer."""

    data: bytes
    last: bool = False


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Ends a started answer with this error."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class Finish:
    """Ends the request. `error`: for a client without any answer yet."""

    error: ApiError | None = None


Act = Step | Action | Wake | Comment | Commit | Begin | Write | BreakOff | Finish


class Attempt(Protocol):
    """The executor's view of a step at its engine."""

    step: Step
    started: float  # seconds on the monotonic clock
    error: bool  # the engine reported an error inside its answer
    begun: bool  # the executor has committed to the answer
    answer: bytes | bytearray  # for reader "whole", or a refusal

    @property
    def reader(self) -> ResponseReader:
        """Status, usage, tokens and errors received so far."""

    def error_words(self) -> str:
        """Returns the engine's message of a refusal after a colon; empty without a message."""
